"""assert_bitwise_equal, availability, and the import without triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flowmill_kernels import GUARANTEES, assert_bitwise_equal, relative_frobenius_error, unavailable_reason

SOURCE = Path(__file__).resolve().parents[2] / "kernels" / "src"


def test_equal_bits_pass_for_any_dtype_and_layout() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64,
                  torch.bool, torch.complex64):
        x = torch.randn(5, 7).to(dtype)
        assert_bitwise_equal(x, x.clone())
        assert_bitwise_equal(x.T, x.T.contiguous())
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_bitwise_equal(torch.tensor(2.0), torch.tensor(2.0))


def test_first_difference_values_ulps_and_count_are_named() -> None:
    a = torch.ones(3, 4)
    b = a.clone()
    b[1, 2] = torch.nextafter(torch.nextafter(b[1, 2], torch.tensor(2.0)), torch.tensor(2.0))
    b[2, 0] = 5
    with pytest.raises(AssertionError, match=r"2 of 12 .*\(1, 2\): 1\.0 against 1\.000000238.*, 2 ulp"):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize(("a", "b", "message"), [
    (torch.tensor([0.0]), torch.tensor([-0.0]), "0 ulp"),
    (torch.tensor([float("nan")]), torch.tensor([1.0]), "nan against"),
    (torch.tensor([-1e-45]), torch.tensor([1e-45]), "2 ulp"),
    (torch.tensor([3]), torch.tensor([5]), "2 apart"),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "1 of 2"),
    (torch.zeros(2), torch.zeros(3), "shapes differ"),
    (torch.zeros(2), torch.zeros(2).half(), "dtypes differ"),
])
def test_differences_are_told_apart(a: torch.Tensor, b: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(a, b)


def test_the_same_nan_is_equal() -> None:
    x = torch.tensor([float("nan"), 1.0])
    assert_bitwise_equal(x, x.clone())


def test_frobenius_error_of_a_nan_passes_no_bound() -> None:
    assert relative_frobenius_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == pytest.approx(1 / 34**0.5)
    assert not relative_frobenius_error(torch.tensor([float("nan")]), torch.ones(1)) < 1e9


def test_unavailable_reason_knows_every_kernel_and_lists_them() -> None:
    for name in (*GUARANTEES, "partition"):
        reason = unavailable_reason(name)
        assert reason is None or len(reason) > 10
    assert unavailable_reason("leaf_sum") is None
    with pytest.raises(KeyError, match="gemm_nt"):
        unavailable_reason("gemm_tn")


def test_import_needs_no_triton_and_the_reason_says_so() -> None:
    script = ("import sys; sys.modules['triton'] = None\n"
              "import importlib.util, torch\n"
              "find = importlib.util.find_spec\n"
              "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
              "import flowmill_kernels as fk\n"
              "assert 'triton is not installed' in fk.unavailable_reason('gemm_nt')\n"
              "print(fk.gemm_nt(torch.ones(2, 16), torch.ones(3, 16), num_sms=1).sum().item())")
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "96.0"
