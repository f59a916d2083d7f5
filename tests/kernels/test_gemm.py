"""The GEMMs: what each declares is what is tested, over one shape list, on the CPU back end and on a GPU (`gpu`)."""

import dataclasses
import importlib.util
import os

import pytest
import torch
from flowmill_kernels import (
    GUARANTEES,
    NUM_SEGMENTS,
    Schedule,
    assert_bitwise_equal,
    combine_partials,
    gemm_nn,
    gemm_nn_partial,
    gemm_nt,
    gemm_nt_partial,
    gemm_nt_schedule,
    head_range,
    relative_frobenius_error,
    segment_range,
    wgrad,
)
from flowmill_kernels.elementwise import gelu_tanh
from flowmill_kernels.gemm import _rows
from flowmill_kernels.heuristics import CATALOGUE, FEW_NARROW, LARGE_SPLIT, MEDIUM_SPLIT, tile_for, tree_tile_for
from flowmill_kernels.schemes import Scheme, combine, consistent_scheme, tp_scheme, tree_sum
from flowmill_kernels.shapes import NARROW_SHAPES, ROWS, SHAPES, SM_COUNTS, TINY_SHAPES, Shape

from tests.kernels.devices import PLACES, ROUNDING

CPU = torch.device("cpu")
MODES = ("consistent", "tp_invariant")
TP = GUARANTEES["gemm_nt_tp"].tensor_parallel
# One rounding is at most 2**-p relative and in the norm below half of that; the fp32 sum is far below (GUARANTEES).
ERROR_BOUND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 3e-5}
GPU_SHAPES = tuple(dict.fromkeys(Shape(577, s.n, s.k) for s in (*SHAPES, *NARROW_SHAPES)))
interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1 in the environment")


def operands(shape: Shape, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16
             ) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape.m, shape.k, device=device).to(dtype)
    return x, (torch.randn(shape.n, shape.k, device=device) / shape.k**0.5).to(dtype)


def check_rows(x: torch.Tensor, w: torch.Tensor, mode: str, row_counts: tuple[int, ...]) -> None:
    """Batch, position, run and SM count: bits of rows against those of one large call."""
    promised = GUARANTEES["gemm_nt" if mode == "consistent" else "gemm_nt_tp"]
    assert promised.run
    assert promised.batch
    assert promised.position
    assert promised.sm_count
    bias = torch.randn(w.shape[0], device=x.device).to(x.dtype)

    def call(rows: torch.Tensor, sms: int = SM_COUNTS[0]) -> torch.Tensor:
        return gemm_nt(rows, w, bias, activation="gelu_tanh", mode=mode, num_sms=sms)

    base = call(x)
    assert_bitwise_equal(call(x), base)
    for sms in SM_COUNTS:
        for m in row_counts:
            assert_bitwise_equal(call(x[:m], sms), base[:m])
        assert_bitwise_equal(call(x.flip(0), sms).flip(0), base)
    assert_bitwise_equal(call(torch.cat((x.new_full((3, x.shape[1]), 1e4), x)))[3:], base)


def check_dgrad(shape: Shape, device: torch.device, mode: str) -> None:
    promised = GUARANTEES["gemm_nn"]
    assert promised.run
    assert promised.batch
    _, w = operands(shape, device)
    dy = torch.randn(shape.m, shape.n, device=device).to(w.dtype)
    base = gemm_nn(dy, w, mode=mode, num_sms=SM_COUNTS[0])
    exact = dy.double() @ w.double()
    assert relative_frobenius_error(base, exact) < ERROR_BOUND[w.dtype]
    for sms in SM_COUNTS:
        for m in (1, 7, shape.m):
            assert_bitwise_equal(gemm_nn(dy[:m], w, mode=mode, num_sms=sms), base[:m])


def check_tensor_parallel(x: torch.Tensor, w: torch.Tensor, sms: int) -> None:
    """Row- and column-parallel forward and column-parallel dgrad, ranks one after the other on one device."""
    (m, k), n = x.shape, w.shape[0]
    bias, residual = torch.randn(n).to(x), torch.randn(m, n).to(x)
    gate = torch.randn(1, n).to(x)
    end = {"activation": "gelu_tanh", "gate": gate, "residual": residual}
    whole = gemm_nt(x, w, bias, mode="tp_invariant", num_sms=sms, **end)
    dy = torch.randn(m, n).to(x)
    whole_dx = gemm_nn(dy, w, mode="tp_invariant", num_sms=sms) if n % 128 == 0 else None
    for ranks in TP:
        shares = [segment_range(k, rank=rank, num_ranks=ranks) for rank in range(ranks)]
        parts = [gemm_nt_partial(x[:, s.start : s.stop].contiguous(), w[:, s.start : s.stop].contiguous(),
                                 num_ranks=ranks, num_sms=sms) for s in shares]
        assert_bitwise_equal(combine_partials(parts, bias, dtype=x.dtype, num_sms=sms, **end), whole)
        columns = torch.arange(n).chunk(ranks)
        column_parallel = [
            gemm_nt(x, w[c].contiguous(), bias[c], mode="tp_invariant", num_sms=sms, activation="gelu_tanh",
                    gate=gate[:, c].contiguous(), residual=residual[:, c].contiguous()) for c in columns]
        assert_bitwise_equal(torch.cat(column_parallel, 1), whole)
        if whole_dx is not None:
            shares = [segment_range(n, rank=rank, num_ranks=ranks) for rank in range(ranks)]
            parts = [gemm_nn_partial(dy[:, s.start : s.stop].contiguous(), w[s.start : s.stop].contiguous(),
                                     num_ranks=ranks, num_sms=sms) for s in shares]
            assert_bitwise_equal(combine_partials(parts, dtype=x.dtype, num_sms=sms), whole_dx)


def check_epilogues(x: torch.Tensor, w: torch.Tensor) -> None:
    """Each part of the epilogue against fp64."""
    m, n = x.shape[0], w.shape[0]
    bias, gate, residual = (torch.randn(s, device=x.device).to(x.dtype) for s in ((n,), (2, n), (m, n)))
    z = x.double() @ w.double().T
    g = gate.double().repeat_interleave(m // 2, 0)
    gelu = torch.nn.functional.gelu
    cases = (
        ({}, z),
        ({"bias": bias}, z + bias.double()),
        ({"bias": bias.float()}, z + bias.double()),
        ({"activation": "gelu_tanh"}, gelu(z, approximate="tanh")),
        ({"gate": gate}, z * g),
        ({"residual": residual}, residual.double() + z),
        ({"bias": bias, "activation": "gelu_tanh", "gate": gate, "residual": residual},
         residual.double() + g * gelu(z + bias.double(), approximate="tanh")),
    )
    for options, exact in cases:
        for mode in MODES:
            y = gemm_nt(x, w, mode=mode, num_sms=4, **options)
            assert relative_frobenius_error(y, exact) < ERROR_BOUND[x.dtype], (options.keys(), mode)


def check_special_values(device: torch.device, dtype: torch.dtype) -> None:
    """NaN and infinities end up where torch puts them."""
    x, w = operands(Shape(9, 24, 128), device, dtype)
    x[1, 5], x[2, 7], x[3, 9] = float("nan"), float("inf"), float("-inf")
    x[4, 1], x[4, 2] = float("inf"), float("-inf")
    x[5] = 0
    expected = x.float() @ w.float().T
    for mode in MODES:
        for y in (gemm_nt(x, w, mode=mode, num_sms=2), gemm_nt(x, w, torch.zeros(24).to(x), mode=mode, num_sms=2)):
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y.isinf(), expected.isinf())
            assert torch.equal(y[y.isinf()].sign(), expected[expected.isinf()].to(dtype).sign())
            assert not y[5].any()
    gelu = gemm_nt(x, w, activation="gelu_tanh", num_sms=2)
    assert torch.equal(gelu.isnan(), torch.nn.functional.gelu(expected, approximate="tanh").isnan())


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", TINY_SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_row_bits_depend_on_the_row_only(shape: Shape, mode: str) -> None:
    check_rows(*operands(shape), mode, (1, 7, shape.m))


@pytest.mark.parametrize("mode", MODES)
def test_dgrad_row_bits_depend_on_the_row_only(mode: str) -> None:
    check_dgrad(Shape(19, 128, 24), CPU, mode)


def test_tensor_parallel_ranks_give_the_same_bits() -> None:
    check_tensor_parallel(*operands(Shape(5, 128, 256)), sms=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_epilogues_match_fp64(dtype: torch.dtype) -> None:
    check_epilogues(*operands(Shape(6, 40, 128), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_and_infinities_propagate_as_in_torch(dtype: torch.dtype) -> None:
    check_special_values(CPU, dtype)


def test_a_hand_made_sum_shows_the_order_of_each_scheme() -> None:
    # Segments of 16 that sum to 2**24, 1, 1, 1, ...: serially every 1 is lost, in pairs 1 + 1 is not.
    x = torch.zeros(1, 128)
    x[0, ::16] = 1.0
    x[0, 0] = 2.0**24
    w = torch.ones(1, 128)
    serial = Schedule(Scheme(16, "serial"), FEW_NARROW, False)
    assert gemm_nt(x, w, num_sms=1, schedule=serial).item() == 2.0**24
    assert gemm_nt(x, w, num_sms=1, mode="tp_invariant").item() == 2.0**24 + 6.0


def test_schemes_are_a_property_of_n_and_k_alone() -> None:
    for n, k in {(s.n, s.k) for s in (*SHAPES, *NARROW_SHAPES)}:
        schemes = {gemm_nt_schedule(m, n, k).scheme for m in ROWS}
        assert schemes == {consistent_scheme(n, k)}
    assert {gemm_nt_schedule(m, 3072, 3072, mode="tp_invariant").scheme for m in ROWS} == {Scheme(384, "tree")}
    assert tp_scheme(1536).num_segments(1536) == NUM_SEGMENTS


def test_every_tile_that_a_rule_returns_is_in_the_catalogue() -> None:
    for m in ROWS:
        for n in (32, 64, 512, 1536, 3072, 12288):
            for k in (128, 1536, 12288):
                tiles = {tile_for(n, k, m=m, num_sms=sms, gated=gated) for sms in (7, 132) for gated in (False, True)}
                assert tiles | {tree_tile_for(n, k, m=m)} <= set(CATALOGUE.values())


def test_narrow_tiles_where_wide_ones_leave_the_last_round_idle() -> None:
    # 52 x 6 wide tiles are 2.4 rounds of 132 SMs, 52 x 12 narrow ones 4.7; on 104 SMs 3 and 6.
    assert tile_for(1536, 1536, m=6560, num_sms=132) == MEDIUM_SPLIT
    assert tile_for(1536, 1536, m=6560, num_sms=104) == LARGE_SPLIT
    assert tile_for(12288, 3072, m=16384, num_sms=132) == LARGE_SPLIT


def test_combine_and_tree_sum_orders() -> None:
    parts = [torch.tensor(v) for v in (2.0**24, 1.0, 1.0, 1.0)]
    assert combine(parts, "serial").item() == 2.0**24
    assert combine(parts, "tree").item() == 2.0**24 + 2.0
    with pytest.raises(ValueError, match="power of two"):
        tree_sum(parts[:3], lambda a, b: a + b)


# Bad input ----------------------------------------------------------------------------------------------------------


def test_wrong_dtypes_are_refused() -> None:
    x, w = operands(Shape(4, 8, 128))
    with pytest.raises(TypeError, match=r"torch\.bfloat16 and torch\.float16"):
        gemm_nt(x, w.half(), num_sms=1)
    with pytest.raises(TypeError, match=r"torch\.float64.*Cast"):
        gemm_nt(x.double(), w.double(), num_sms=1)
    with pytest.raises(TypeError, match=r"bias is torch\.float64"):
        gemm_nt(x, w, torch.zeros(8, dtype=torch.float64), num_sms=1)
    with pytest.raises(TypeError, match=r"out must be torch\.bfloat16, contiguous or a column slice"):
        gemm_nt(x, w, num_sms=1, out=torch.empty(4, 8))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w = operands(Shape(4, 8, 128))
    for call, message in (
        (lambda: gemm_nt(x[:, :64], w, num_sms=1), "inner sizes 64 and 128 differ"),
        (lambda: gemm_nn(x, w, num_sms=1), "dy"),
        (lambda: gemm_nt(x[0], w, num_sms=1), "at least two dimensions"),
        (lambda: gemm_nt(x, w, torch.zeros(7).to(x), num_sms=1), r"bias must be \[8\]"),
        (lambda: gemm_nt(x, w, gate=torch.zeros(3, 8).to(x), num_sms=1), "G a divisor of the 4 rows"),
        (lambda: gemm_nt(x, w, residual=torch.zeros(3, 8).to(x), num_sms=1), "residual must be"),
        (lambda: gemm_nt(x, w, num_sms=0), "num_sms"),
        (lambda: gemm_nt(x, w, num_sms=True), "num_sms"),
        (lambda: gemm_nt(x, w, activation="relu", num_sms=1), "activation must be one of"),
        (lambda: gemm_nt(x, w, mode="fast", num_sms=1), "mode must be"),
        (lambda: gemm_nt(x, w, backend="gpu", num_sms=1), "backend must be"),
        (lambda: gemm_nt(x[:, :0], w[:, :0], num_sms=1), "no elements"),
        (lambda: gemm_nt_partial(x, w, num_ranks=3, num_sms=1), "1, 2, 4 or 8"),
        (lambda: segment_range(128, rank=2, num_ranks=2), r"rank must be in 0\.\.1"),
        (lambda: combine_partials([torch.zeros(2, 2), torch.zeros(2, 3)], dtype=x.dtype, num_sms=1), "rank 1 gave"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_k_that_is_no_multiple() -> None:
    for k in (1, 7, 100, 1025):
        x, w = operands(Shape(3, 5, k))
        assert relative_frobenius_error(gemm_nt(x, w, num_sms=1), x.double() @ w.double().T) < ERROR_BOUND[x.dtype]
    with pytest.raises(ValueError, match=r"multiple of 128.*K=100"):
        gemm_nt(*operands(Shape(3, 5, 100)), mode="tp_invariant", num_sms=1)


def test_layouts_that_are_not_contiguous_give_the_same_bits() -> None:
    x, w = operands(Shape(12, 24, 128))
    base = gemm_nt(x, w, num_sms=1)
    wide = torch.zeros(12, 131, dtype=x.dtype)
    wide[:, 1:129] = x
    assert_bitwise_equal(gemm_nt(wide[:, 1:129], w, num_sms=1), base)
    assert_bitwise_equal(gemm_nt(x.T.contiguous().T, w.T.contiguous().T, num_sms=1), base)
    assert_bitwise_equal(gemm_nt(x.view(3, 4, 128), w, num_sms=1), base.view(3, 4, 24))
    assert_bitwise_equal(gemm_nt(x[:1].expand(4, -1), w, num_sms=1), base[:1].expand(4, -1))


def check_column_slices(device: torch.device, dtype: torch.dtype, backend: str, shape: Shape, **options: object
                        ) -> None:
    """x, dy, residual and out may be columns of a wider tensor: the same bits, no copy, and the rest is left alone."""
    batch, (rows, n, k) = 3, shape
    x, w = operands(Shape(batch * rows, n, k), device, dtype)
    x = x.view(batch, rows, k)
    residual = torch.randn(batch, rows, n, device=device).to(dtype)
    common = {"num_sms": 2, "backend": backend, **options}
    base = gemm_nt(x, w, residual=residual, **common)
    for width, start in ((3, 1), (3, 2), (2, 0)):
        wide_x = x.repeat(1, 1, width)
        piece = wide_x[..., start * k : (start + 1) * k]
        assert _rows(piece, k).data_ptr() == piece.data_ptr()
        wide_residual = residual.repeat(1, 1, width)
        columns = slice(start * n, (start + 1) * n)
        out = torch.full((batch, rows, width * n), 7.0, device=device, dtype=dtype)
        returned = gemm_nt(piece, w, residual=wide_residual[..., columns], out=out[..., columns], **common)
        assert returned.data_ptr() == out[..., columns].data_ptr()
        assert_bitwise_equal(out[..., columns], base)
        out[..., columns] = 7.0
        assert torch.equal(out, torch.full_like(out, 7.0))
    dx = gemm_nn(base, w, **common)
    wide = torch.full((batch, rows, n + 8), 7.0, device=device, dtype=dtype)
    wide[..., :n] = base
    assert_bitwise_equal(gemm_nn(wide[..., :n], w, **common), dx)


def test_column_slices_on_the_cpu() -> None:
    check_column_slices(CPU, torch.bfloat16, "auto", Shape(4, 24, 48))
    check_column_slices(CPU, torch.bfloat16, "auto", Shape(1, 128, 128), mode="tp_invariant")


@interpreter
@pytest.mark.parametrize("n", [24, 36])  # 36: rows of out that TMA cannot take
def test_column_slices_in_the_interpreter(n: int) -> None:
    check_column_slices(CPU, torch.float16, "triton", Shape(5, n, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [Shape(700, 1536, 1536), Shape(20, 1536, 1536), Shape(700, 64, 1536),
                                   Shape(300, 36, 128), Shape(700, 1540, 512)], ids=str)  # 36, 1540: not whole 16 bytes
def test_column_slices_on_a_gpu(shape: Shape, gpu: torch.device) -> None:
    check_column_slices(gpu, torch.bfloat16, "auto", shape)


def test_outputs_that_are_no_rows_are_refused() -> None:
    x, w = operands(Shape(6, 8, 128))
    x = x.view(2, 3, 128)
    for out in (x.new_empty(2, 3, 16)[..., ::2], x.new_empty(3, 2, 8).transpose(0, 1), x.new_empty(2, 8, 3).mT,
                x.new_empty(2, 1, 8).expand(2, 3, 8)):
        with pytest.raises(TypeError, match="contiguous or a column slice"):
            gemm_nt(x, w, num_sms=1, out=out)


def check_activation(device: torch.device, dtype: torch.dtype, backend: str, shape: Shape) -> None:
    """The fused activation has the bits of a pass of its own over the stored sum."""
    x, w = operands(shape, device, dtype)
    bias = torch.randn(shape.n, device=device).to(dtype)
    for mode in MODES:
        common = {"mode": mode, "num_sms": 4, "backend": backend}
        fused = gemm_nt(x, w, bias, activation="gelu_tanh", **common)
        assert_bitwise_equal(fused, gelu_tanh(gemm_nt(x, w, bias, **common), backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_activation_has_the_bits_of_a_separate_one_on_the_cpu(dtype: torch.dtype) -> None:
    check_activation(CPU, dtype, "auto", Shape(19, 40, 128))


@interpreter
def test_a_fused_activation_has_the_bits_of_a_separate_one_in_the_interpreter() -> None:
    check_activation(CPU, torch.float16, "triton", Shape(19, 40, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [19, 300, 1000, 3000])
def test_a_fused_activation_has_the_bits_of_a_separate_one_on_a_gpu(m: int, gpu: torch.device) -> None:
    check_activation(gpu, torch.bfloat16, "auto", Shape(m, 1536, 768))


def test_zero_rows_give_zero_rows() -> None:
    _, w = operands(Shape(1, 24, 128))
    for mode in MODES:
        assert gemm_nt(torch.empty(0, 128, dtype=w.dtype), w, mode=mode, num_sms=1).shape == (0, 24)
        assert gemm_nt(torch.empty(2, 0, 128, dtype=w.dtype), w, mode=mode, num_sms=1).shape == (2, 0, 24)
    assert gemm_nn(torch.empty(0, 24, dtype=w.dtype), w, num_sms=1).shape == (0, 128)


def test_results_carry_no_autograd_graph() -> None:
    x, w = operands(Shape(3, 5, 128))
    assert not gemm_nt(x.requires_grad_(), w.requires_grad_(), num_sms=1).requires_grad


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_cpu_tensors_on_the_triton_back_end_are_a_clear_error() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"unavailable: |needs CUDA tensors"):
        gemm_nt(*operands(Shape(3, 5, 128)), num_sms=1, backend="triton")


# In Triton's interpreter (fp16: its bf16 product is wrong) -----------------------------------------------------------


@interpreter
@pytest.mark.parametrize("shape", TINY_SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_interpreted_kernels_are_right_and_spread_equals_one_pass(shape: Shape, mode: str) -> None:
    x, w = operands(shape, dtype=torch.float16)
    bias, gate, residual = torch.randn(shape.n).half(), torch.randn(1, shape.n).half(), torch.randn(shape.m, shape.n)
    options = {"activation": "gelu_tanh", "gate": gate, "residual": residual.half(), "num_sms": 3, "backend": "triton"}
    gelu = torch.nn.functional.gelu
    exact = residual.half().double() + gate.double() * gelu(x.double() @ w.double().T + bias.double(),
                                                            approximate="tanh")
    plan = gemm_nt_schedule(shape.m, shape.n, shape.k, mode=mode)
    tile = dataclasses.replace(FEW_NARROW, block_k=64)
    results = [gemm_nt(x, w, bias, **options, schedule=dataclasses.replace(plan, tile=tile, spread=spread, loads=loads))
               for spread in (False, True) for loads in ("tma", "pointer") if shape.k % 8 == 0]
    for y in results:
        assert relative_frobenius_error(y, exact) < ERROR_BOUND[torch.float16]
        assert_bitwise_equal(y, results[0])
    dx = gemm_nn(results[0], w, num_sms=2, backend="triton")
    assert relative_frobenius_error(dx, results[0].double() @ w.double()) < ERROR_BOUND[torch.float16]


@interpreter
def test_interpreted_trees_and_wgrad() -> None:
    x, w = operands(Shape(20, 24, 256), dtype=torch.float16)
    exact = x.double() @ w.double().T
    plan = gemm_nt_schedule(20, 24, 256, mode="tp_invariant")
    for levels in (0, 1, 2, 3):
        for flatten in (False, True):
            tile = dataclasses.replace(FEW_NARROW, register_levels=levels, flatten=flatten, epilogue_parts=2)
            y = gemm_nt(x, w, num_sms=1, backend="triton", schedule=Schedule(plan.scheme, tile, False))
            assert relative_frobenius_error(y, exact) < ERROR_BOUND[torch.float16]
    dy, x = torch.randn(3, 37, 32).half(), torch.randn(3, 37, 48).half()
    dw = wgrad(dy, x, num_sms=2, backend="triton")
    assert relative_frobenius_error(dw, dy.double().transpose(1, 2) @ x.double()) < 3e-5


# On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_gpu_row_bits_depend_on_the_row_only(gpu: torch.device, shape: Shape, mode: str) -> None:
    if mode == "tp_invariant" and shape.k % 128:
        pytest.skip("tp_invariant needs K to be a multiple of 128")
    check_rows(*operands(shape._replace(m=max(ROWS)), gpu), mode, ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_gpu_every_tile_spread_and_load_gives_the_same_bits(gpu: torch.device, shape: Shape) -> None:
    x, w = operands(shape, gpu)
    bias, gate, residual = (torch.randn(s, device=gpu).to(x) for s in ((shape.n,), (1, shape.n), (shape.m, shape.n)))
    end = {"bias": bias, "activation": "gelu_tanh", "gate": gate, "residual": residual}
    for mode in MODES if shape.k % 128 == 0 else MODES[:1]:
        plan = gemm_nt_schedule(*shape, mode=mode)
        base = gemm_nt(x, w, num_sms=132, schedule=plan, **end)
        plans = [dataclasses.replace(plan, tile=tile, spread=False) for tile in CATALOGUE.values()
                 if plan.scheme.num_segments(shape.k) == 1 or tile.block_m * tile.block_n <= 128 * 128]
        plans += [dataclasses.replace(plan, spread=spread) for spread in (False, True)]
        plans += [dataclasses.replace(plan, loads="pointer", tile=CATALOGUE["narrow"], spread=False)]
        for other in plans:
            assert_bitwise_equal(gemm_nt(x, w, num_sms=96, schedule=other, **end), base)


@pytest.mark.gpu
def test_gpu_a_threads_first_call_may_be_a_replayed_launch(gpu: torch.device) -> None:
    import threading

    x, w = operands(Shape(3000, 1536, 512), gpu)
    outs = [torch.empty(3000, 1536, device=gpu, dtype=x.dtype) for _ in range(3)]
    for out in outs[:2]:  # the second one is replayed
        gemm_nt(x, w, num_sms=132, out=out)
    thread = threading.Thread(target=lambda: gemm_nt(x, w, num_sms=132, out=outs[2]))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_bitwise_equal(outs[2], outs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("parts", "dtype"), [("b", "bfloat16"), ("ba", "bfloat16"), ("r", "bfloat16"),
                                              ("bgr", "bfloat16"), ("bgr", "float32"), ("bag", "float32")])
def test_gpu_epilogues_of_every_tile_give_the_same_bits(gpu: torch.device, parts: str, dtype: str, mode: str) -> None:
    """Bias and gate rows wait beside the tiles, a residual in the output's memory; samples meet inside tiles, and
    programs have several."""
    tiles = ["tree_split"] if mode == "tp_invariant" else ["large_split", "medium_split"]
    for shape in (Shape(3000, 1536, 1536), Shape(578, 264, 3072), Shape(130, 3072, 1024), Shape(6560, 1536, 512)):
        x, w = operands(shape, gpu)
        sizes = {"b": (shape.n,), "g": (2, shape.n), "r": (shape.m, shape.n)}
        bias, gate, residual = (torch.randn(sizes[p], device=gpu).to(getattr(torch, dtype)) if p in parts else None
                                for p in "bgr")
        end = {"bias": bias, "gate": gate, "residual": residual, "activation": "gelu_tanh" if "a" in parts else "none"}
        plan = dataclasses.replace(gemm_nt_schedule(*shape, mode=mode), spread=False)
        one = dataclasses.replace(plan, tile=CATALOGUE["tree" if mode == "tp_invariant" else "medium"])
        base = gemm_nt(x, w, num_sms=132, schedule=one, **end)
        for tile in tiles:
            for sms in (132, 7):
                y = torch.full_like(base, torch.nan)
                gemm_nt(x, w, num_sms=sms, schedule=dataclasses.replace(plan, tile=CATALOGUE[tile]), out=y, **end)
                assert_bitwise_equal(y, base)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_gpu_tensor_parallel_ranks_give_the_same_bits(gpu: torch.device, shape: Shape) -> None:
    if shape.k % 128:
        pytest.skip("tp_invariant needs K to be a multiple of 128")
    check_tensor_parallel(*operands(shape, gpu), sms=132)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [s for s in GPU_SHAPES if s.n % 128 == 0], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_gpu_dgrad_row_bits_depend_on_the_row_only(gpu: torch.device, shape: Shape, mode: str) -> None:
    check_dgrad(shape, gpu, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [Shape(6, 40, 128), Shape(1600, 1536, 1536), Shape(578, 200, 1536)], ids=str)
def test_gpu_epilogues_match_fp64(gpu: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    check_epilogues(*operands(shape, gpu, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_nan_and_infinities_propagate_as_in_torch(gpu: torch.device, dtype: torch.dtype) -> None:
    check_special_values(gpu, dtype)


@pytest.mark.gpu
def test_gpu_layouts_and_odd_sizes_take_a_correct_path(gpu: torch.device) -> None:
    for shape in (Shape(70, 33, 100), Shape(300, 1537, 1001), Shape(5, 8, 7)):
        x, w = operands(shape, gpu)
        y = gemm_nt(x, w, num_sms=132)
        assert relative_frobenius_error(y, x.double() @ w.double().T) < ERROR_BOUND[x.dtype]
        assert_bitwise_equal(gemm_nt(x.T.contiguous().T, w, num_sms=32), y)
        assert_bitwise_equal(gemm_nt(x[1:2], w, num_sms=32), y[1:2])
    with pytest.raises(TypeError, match="triton back end"):
        gemm_nt(x.float(), w.float(), num_sms=1)
    with pytest.raises(ValueError, match="one device"):
        gemm_nt(x, w.cpu(), num_sms=1)
    assert gemm_nt(x[:0], w, num_sms=1).shape == (0, 8)


@pytest.mark.gpu
def test_gpu_wgrad_is_right_and_depends_on_its_sample_only(gpu: torch.device) -> None:
    promised = GUARANTEES["wgrad"]
    assert promised.run
    assert promised.batch
    for n, k in ((32, 1536), (1536, 32), (200, 136)):
        dy, x = (torch.randn(9, 301, size, device=gpu, dtype=torch.bfloat16) for size in (n, k))
        dw = wgrad(dy, x, num_sms=132)
        assert relative_frobenius_error(dw, dy.double().transpose(1, 2) @ x.double()) < 3e-5
        for i in (0, 4, 8):
            assert_bitwise_equal(wgrad(dy[i : i + 1], x[i : i + 1], num_sms=32)[0], dw[i])


# A second product in the same accumulator ---------------------------------------------------------------------------

def check_extra(m: int, n: int, k: int, rank: int, layout: str, device: torch.device, dtype: torch.dtype,
                backend: str = "auto") -> None:
    """Right against fp64; the bits of a row for every row count, SM count and, where K is cut, split and one-pass."""
    x = torch.randn(m, k, device=device).to(dtype)
    h = torch.randn(m, 2 * rank, device=device).to(dtype)[:, rank:]
    shapes = ((n, k), (n, rank)) if layout == "nt" else ((k, n), (rank, n))
    w, b = ((torch.randn(s, device=device) / k**0.5).to(dtype) for s in shapes)
    operator = gemm_nt if layout == "nt" else gemm_nn
    bias = {"bias": torch.randn(n, device=device).to(dtype)} if layout == "nt" else {}

    def call(rows: slice, sms: int = 132, **more: object) -> torch.Tensor:
        return operator(x[rows], w, num_sms=sms, extra=(h[rows], b), backend=backend, **bias, **more)  # type: ignore[arg-type]

    base = call(slice(None))
    exact = x.double() @ (w.T if layout == "nt" else w).double() + h.double() @ (b.T if layout == "nt" else b).double()
    exact = exact + bias["bias"].double() if bias else exact
    assert relative_frobenius_error(base, exact) < ERROR_BOUND[dtype]
    for rows in (slice(0, 1), slice(m // 2, m), slice(3, 5)):
        for sms in (96, 32):
            assert_bitwise_equal(call(rows, sms), base[rows])
    schedule = gemm_nt_schedule(m, n, k)
    if schedule.scheme.num_segments(k) > 1:
        for spread in (False, True):
            assert_bitwise_equal(call(slice(None), schedule=dataclasses.replace(schedule, spread=spread)), base)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("n", "k"), [(40, 48), (24, 1280)])
def test_an_extra_product_on_the_cpu(n: int, k: int, layout: str) -> None:
    check_extra(9, n, k, 16, layout, CPU, torch.float32)


@interpreter
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("n", "k", "rank"), [(48, 64, 32), (24, 1280, 80)])
def test_an_extra_product_in_the_interpreter(n: int, k: int, rank: int, layout: str) -> None:
    check_extra(9, n, k, rank, layout, CPU, torch.float16, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("m", "n", "k"), [(1500, 1536, 1536), (2000, 6144, 320), (700, 64, 1536), (5, 1536, 6144)])
@pytest.mark.parametrize("rank", [32, 128])
def test_an_extra_product_on_a_gpu(m: int, n: int, k: int, rank: int, layout: str, gpu: torch.device) -> None:
    check_extra(m, n, k, rank, layout, gpu, torch.bfloat16)


def check_extras(m: int, n: int, k: int, ranks: tuple[int, ...], layout: str, device: torch.device, dtype: torch.dtype,
                 backend: str = "auto") -> None:
    """Several extra products, with a residual: right, and a row's bits for every row count."""
    operator, transposed = (gemm_nt, True) if layout == "nt" else (gemm_nn, False)
    xs = [torch.randn(m, r, device=device).to(dtype) for r in (k, *ranks)]
    ws = [(torch.randn((n, r) if transposed else (r, n), device=device) / r**0.5).to(dtype) for r in (k, *ranks)]
    residual = torch.randn(m, n, device=device).to(dtype)
    gate = {"gate": torch.randn(1, n, device=device).to(dtype)} if transposed else {}

    def call(rows: slice, sms: int = 132) -> torch.Tensor:
        pairs = [(x[rows], w) for x, w in zip(xs[1:], ws[1:], strict=True)]
        return operator(xs[0][rows], ws[0], num_sms=sms, extra=pairs, residual=residual[rows], backend=backend, **gate)

    base = call(slice(None))
    total = sum(x.double() @ (w.T if transposed else w).double() for x, w in zip(xs, ws, strict=True))
    exact = total * (gate["gate"].double() if gate else 1.0) + residual.double()
    assert relative_frobenius_error(base, exact) < ERROR_BOUND[dtype]
    for rows in (slice(0, 1), slice(m // 2, m), slice(0, max(1, m - 3))):
        assert_bitwise_equal(call(rows, 96), base[rows])


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_three_extra_products_on_the_cpu(layout: str) -> None:
    check_extras(9, 40, 48, (16, 32, 64), layout, CPU, torch.float32)


@interpreter
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_three_extra_products_in_the_interpreter(layout: str) -> None:
    check_extras(9, 48, 64, (16, 32, 80), layout, CPU, torch.float16, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("m", "n"), [(3000, 1536), (1100, 6144), (1500, 320)])
@pytest.mark.parametrize("ranks", [(1536, 1536, 96), (64,), (1536, 32)])
def test_three_extra_products_on_a_gpu(m: int, n: int, ranks: tuple[int, ...], layout: str, gpu: torch.device) -> None:
    check_extras(m, n, 1536, ranks, layout, gpu, torch.bfloat16)


@PLACES
@pytest.mark.parametrize("extra", [False, True], ids=["alone", "extra"])
def test_a_factor_for_every_element(place: tuple, extra: bool) -> None:
    """What a dgrad through an activation is: the product times the slope."""
    device, backend, dtype = place
    m, n, k = 150, 80, 544
    dy, w, factor, h, b = (torch.randn(s, device=device).to(dtype) for s in ((m, n), (n, k), (m, k), (m, 16), (16, k)))
    options = {"num_sms": 5, "backend": backend, "extra": (h, b) if extra else None}
    out = gemm_nn(dy, w, gate=factor, **options)
    total = dy.double() @ w.double() + (h.double() @ b.double() if extra else 0)
    assert relative_frobenius_error(out, total * factor.double()) < max(ROUNDING[dtype], 3e-6)
    if backend == "triton":
        return  # numpy's products, which the interpreter takes, do not promise the same bits at another place
    rows = slice(70, 77)
    options["extra"] = (h[rows], b) if extra else None
    assert_bitwise_equal(gemm_nn(dy[rows], w, gate=factor[rows], **options), out[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1000, 2048])
def test_gpu_a_factor_for_every_element_has_the_same_bits_in_every_kernel(m: int, gpu: torch.device) -> None:
    """By TMA into the output's memory on Hopper; by pointers elsewhere."""
    dy, w, factor = (torch.randn(s, device=gpu).bfloat16() for s in ((m, 768), (768, 3072), (m, 3072)))
    plan = gemm_nt_schedule(m, 3072, 768)
    want = gemm_nn(dy, w, gate=factor, num_sms=132)
    for tile in CATALOGUE.values():
        for loads in ("auto", "pointer"):
            schedule = dataclasses.replace(plan, tile=tile, loads=loads, spread=False)
            assert_bitwise_equal(gemm_nn(dy, w, gate=factor, num_sms=96, schedule=schedule), want)


@pytest.mark.gpu
@pytest.mark.parametrize("rows_per_gate", [1, 50, 64, 77, 576])
def test_gates_of_every_length_scale_their_own_rows(rows_per_gate: int, gpu: torch.device) -> None:
    """The Hopper kernel takes two gate rows a half tile where that is enough."""
    samples = 2000 // rows_per_gate
    m = samples * rows_per_gate
    x, w = operands(Shape(m, 1536, 320), gpu)
    gate, residual = torch.randn(samples, 1536, device=gpu).bfloat16(), torch.randn(m, 1536, device=gpu).bfloat16()
    out = gemm_nt(x, w, num_sms=132, gate=gate, residual=residual)
    without = gemm_nt(x, w, num_sms=132, gate=gate)
    assert relative_frobenius_error(
        without, gate.double().repeat_interleave(rows_per_gate, 0) * (x.double() @ w.double().T)) < 2**-8
    exact = residual.double() + gate.double().repeat_interleave(rows_per_gate, 0) * (x.double() @ w.double().T)
    assert relative_frobenius_error(out, exact) < ERROR_BOUND[torch.bfloat16]
    one = slice(rows_per_gate, 2 * rows_per_gate)
    assert_bitwise_equal(gemm_nt(x[one], w, num_sms=132, gate=gate[1:2]), without[one])
    assert_bitwise_equal(gemm_nt(x[one], w, num_sms=132, gate=gate[1:2], residual=residual[one]), out[one])


def test_an_extra_product_that_does_not_fit_is_refused() -> None:
    x, w = torch.randn(4, 128), torch.randn(8, 128)
    h, b = torch.randn(4, 16), torch.randn(8, 16)
    for extra in ((h[:3], b), (h, b[:7]), (h[:, :8], b[:, :8]), (h, b[0])):
        with pytest.raises(ValueError, match="R a multiple of 16"):
            gemm_nt(x, w, num_sms=1, extra=extra)
    with pytest.raises(TypeError, match=r"must be torch\.float32 like x"):
        gemm_nt(x, w, num_sms=1, extra=(h.bfloat16(), b))
    with pytest.raises(ValueError, match="tree is over K alone"):
        gemm_nt(x, w, num_sms=1, extra=(h, b), mode="tp_invariant")


def test_ranks_take_whole_heads() -> None:
    for ranks in TP:
        heads = [h for rank in range(ranks) for h in head_range(24, rank=rank, num_ranks=ranks)]
        assert heads == list(range(24))
    with pytest.raises(ValueError, match="20 heads cannot be shared by 8 ranks"):
        head_range(20, rank=0, num_ranks=8)
    with pytest.raises(ValueError, match="rank must be in"):
        head_range(24, rank=2, num_ranks=2)
    with pytest.raises(ValueError, match="got 3"):
        head_range(24, rank=0, num_ranks=3)
