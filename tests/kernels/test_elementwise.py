"""Row and elementwise operators: right against fp64 in both directions, and a sample's bits depend on the sample alone.

One table of operators; every claim walks it, on the CPU back end, in Triton's interpreter and on a GPU (`gpu`).
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from flowmill_kernels import GUARANTEES, assert_bitwise_equal, relative_frobenius_error
from flowmill_kernels import elementwise as ew
from flowmill_kernels.collector import GradientLeaves
from flowmill_kernels.cpu_backend import finish
from flowmill_kernels.gradients import LeafPlan, leaf_sum
from flowmill_kernels.schemes import Epilogue
from torch import Tensor
from torch.nn import functional

from tests.kernels.devices import PLACES, interpreter

# One rounding is at most 2**-p relative; fp32: sums of at most 16384 terms and Triton's exp, some 2**-20 together.
ERROR_BOUND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2e-6}
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """An operator with the inputs it takes; those in `shared` (weights, tables) have no sample dimension."""

    run: Callable[..., Tensor | Outputs]
    """run(inputs, **backend) of the package"""
    exact: Callable[[Inputs], Tensor | Outputs]
    """The same in torch, for fp64 tensors."""
    rows: dict[str, str]
    """name -> shape in letters: B, T, C, H, D and P = D / 2"""
    shared: dict[str, str]
    by_token: bool = True
    """A token's output depends on no other token."""
    fixed: tuple[str, ...] = ()
    """fp32 inputs without gradient."""
    scale: float = 1.0
    """Of the outputs' gradients."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool = False) -> Tensor:
    cos, sin = (t[None, :, None] if t.dim() == 2 else t[:, :, None] for t in (cos.double(), sin.double()))
    if half:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def normed(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def modulated(i: Inputs, scale: str = "scale", shift: str = "shift") -> Tensor:
    x = i["x"]
    y = functional.layer_norm(x, x.shape[-1:], i.get("weight"), i.get("bias"), 1e-6)
    return y * (1 + i[scale][:, None]) + i[shift][:, None] if scale in i else y


def per_head(i: Inputs, name: str, weight: str, half: bool = False) -> Tensor:
    x = normed(i[name], i[weight]) if weight in i else i[name]
    return rotate(x, i["cos"], i["sin"], half) if "cos" in i else x


ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "gelu_tanh": (ew.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    "gelu": (ew.gelu, functional.gelu), "silu": (ew.silu, functional.silu),
}
ROPE = {"cos": "TP", "sin": "TP"}
OPERATORS: dict[str, Operator] = {
    "layer_norm_modulate": Operator(
        lambda i, **b: ew.layer_norm_modulate(i["x"], i["scale"], i["shift"], **b), modulated,
        {"x": "BTC", "scale": "BC", "shift": "BC"}, {}),
    "layer_norm_modulate twice": Operator(
        lambda i, **b: ew.layer_norm_modulate(i["x"], i["scale"], i["shift"], scale2=i["scale2"], shift2=i["shift2"],
                                              **b),
        lambda i: (modulated(i), modulated(i, "scale2", "shift2")),
        {"x": "BTC", "scale": "BC", "shift": "BC", "scale2": "BC", "shift2": "BC"}, {}),
    "layer_norm_modulate affine": Operator(
        lambda i, **b: ew.layer_norm_modulate(i["x"], i["scale"], i["shift"], weight=i["weight"], bias=i["bias"], **b),
        modulated, {"x": "BTC", "scale": "BC", "shift": "BC"}, {"weight": "C", "bias": "C"}),
    "layer_norm_modulate plain": Operator(
        lambda i, **b: ew.layer_norm_modulate(i["x"], None, None, weight=i["weight"], bias=i["bias"], **b),
        modulated, {"x": "BTC"}, {"weight": "C", "bias": "C"}),
    "layer_norm_modulate keep": Operator(
        lambda i, **b: ew.layer_norm_modulate(i["x"], i["scale"], i["shift"], keep=True, **b),
        lambda i: (modulated(i), i["x"]), {"x": "BTC", "scale": "BC", "shift": "BC"}, {}),
    "rms_norm": Operator(lambda i, **b: ew.rms_norm(i["x"], i["weight"], eps=1e-6, **b),
                         lambda i: normed(i["x"], i["weight"]), {"x": "BTC"}, {"weight": "C"}),
    "rms_norm plain": Operator(lambda i, **b: ew.rms_norm(i["x"], None, eps=1e-6, **b),
                               lambda i: normed(i["x"], None), {"x": "BTHD"}, {}),
    "qk_norm_rope": Operator(
        lambda i, **b: ew.qk_norm_rope(i["x"], i["weight"], eps=1e-6, rope=(i["cos"], i["sin"]), **b),
        lambda i: per_head(i, "x", "weight"), {"x": "BTHD"}, {"weight": "D", **ROPE}, False, ("cos", "sin")),
    "qk_norm_rope no norm": Operator(
        lambda i, **b: ew.qk_norm_rope(i["x"], None, eps=1e-6, rope=(i["cos"], i["sin"]), **b),
        lambda i: per_head(i, "x", ""), {"x": "BTHD", "cos": "BTP", "sin": "BTP"}, {}, False, ("cos", "sin")),
    "qk_norm_rope half": Operator(
        lambda i, **b: ew.qk_norm_rope(i["x"], i["weight"], eps=1e-6, rope=(i["cos"], i["sin"]), rope_layout="half",
                                       **b),
        lambda i: per_head(i, "x", "weight", True), {"x": "BTHD"}, {"weight": "D", **ROPE}, False, ("cos", "sin")),
    "qk_norm_rope all": Operator(
        lambda i, **b: ew.qk_norm_rope(i["x"], i["weight"], eps=1e-6, rope=(i["cos"], i["sin"]), norm="all", **b),
        lambda i: rotate(normed(i["x"].flatten(2), i["weight"]).view(i["x"].shape), i["cos"], i["sin"]),
        {"x": "BTHD"}, {"weight": "N", **ROPE}, False, ("cos", "sin")),
    "qk_norm_rope all half": Operator(
        lambda i, **b: ew.qk_norm_rope(i["x"], i["weight"], eps=1e-6, rope=(i["cos"], i["sin"]), norm="all",
                                       rope_layout="half", **b),
        lambda i: rotate(normed(i["x"].flatten(2), i["weight"]).view(i["x"].shape), i["cos"], i["sin"], True),
        {"x": "BTHD"}, {"weight": "N", **ROPE}, False, ("cos", "sin")),
    "qk_norm_rope_pair": Operator(
        lambda i, **b: ew.qk_norm_rope_pair(i["q"], i["k"], i["weight_q"], i["weight_k"], eps=1e-6,
                                            rope=(i["cos"], i["sin"]), **b),
        lambda i: (per_head(i, "q", "weight_q"), per_head(i, "k", "weight_k")),
        {"q": "BTHD", "k": "BTHD"}, {"weight_q": "D", "weight_k": "D", **ROPE}, False, ("cos", "sin")),
    "qk_norm_rope_pair no rope": Operator(
        lambda i, **b: ew.qk_norm_rope_pair(i["q"], i["k"], i["weight_q"], i["weight_k"], eps=1e-6, **b),
        lambda i: (per_head(i, "q", "weight_q"), per_head(i, "k", "weight_k")),
        {"q": "BTHD", "k": "BTHD"}, {"weight_q": "D", "weight_k": "D"}),
    "gated_residual": Operator(
        lambda i, **b: ew.gated_residual(i["residual"], i["gate"], i["y"], **b),
        lambda i: i["residual"] + i["gate"][:, None] * i["y"], {"residual": "BTC", "gate": "BC", "y": "BTC"}, {}),
    "swiglu": Operator(lambda i, **b: ew.swiglu(i["gate"], i["up"], **b),
                       lambda i: functional.silu(i["gate"]) * i["up"], {"gate": "BTC", "up": "BTC"}, {}),
    "add": Operator(lambda i, **_: ew.add(i["a"], i["b"]), lambda i: i["a"] + i["b"], {"a": "BTC", "b": "BTC"}, {}),
    "mean": Operator(lambda i, **b: ew.mean(i["x"], 2, **b), lambda i: i["x"].mean((1, 2)), {"x": "BTC"}, {}, False,
                     scale=4096.0),  # its gradient is divided by the count, and fp16 ends at 2**-24
    "log_softmax": Operator(lambda i, **b: ew.log_softmax(i["x"], **b), lambda i: i["x"].log_softmax(-1),
                            {"x": "BTC"}, {}),
    **{name: Operator(lambda i, f=ours, **b: f(i["x"], **b), lambda i, f=theirs: f(i["x"]), {"x": "BTC"}, {})
       for name, (ours, theirs) in ACTIVATIONS.items()},
}
operators = pytest.mark.parametrize("name", OPERATORS)


def make(op: Operator, sizes: dict[str, int], dtype: torch.dtype, device: torch.device = CPU) -> Inputs:
    sizes = {**sizes, "P": sizes["D"] // 2, "N": sizes["H"] * sizes["D"]}
    inputs = {}
    for name, letters in {**op.rows, **op.shared}.items():
        t = torch.randn([sizes[s] for s in letters], dtype=torch.float32, device=device)
        if name in ("cos", "sin"):
            t = torch.cos(t)
        elif "weight" in name:
            t = 1 + 0.2 * t
        elif name == "x":
            t = 2 * t + 0.5
        inputs[name] = t if name in op.fixed else t.to(dtype)
    return inputs


def outputs(result: Tensor | Outputs) -> Outputs:
    return result if isinstance(result, tuple) else (result,)


def both_ways(op: Operator, inputs: Inputs, dys: Outputs | None = None, exact: bool = False, **options
              ) -> tuple[Outputs, dict[str, Tensor], Outputs]:
    """(outputs, gradient of every input by name, the outputs' gradients)."""
    leaves = {k: v.detach().clone(memory_format=torch.preserve_format).requires_grad_(k not in op.fixed)
              for k, v in inputs.items()}
    ys = outputs((op.exact if exact else op.run)(leaves, **options))
    if dys is None:
        dys = tuple((op.scale * torch.randn(y.shape, dtype=torch.float32, device=y.device)).to(y.dtype) for y in ys)
    torch.autograd.backward(ys, [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)])
    return tuple(y.detach() for y in ys), {k: v.grad for k, v in leaves.items() if v.grad is not None}, dys


def check_against_fp64(name: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device = CPU, **options
                       ) -> None:
    op = OPERATORS[name]
    inputs = make(op, sizes, dtype, device)
    ys, grads, dys = both_ways(op, inputs, **options)
    wide = {k: v.double() for k, v in inputs.items()}
    exact_ys, exact_grads, _ = both_ways(op, wide, tuple(dy.double() for dy in dys), exact=True)
    for y, exact in zip(ys, exact_ys, strict=True):
        assert y.dtype == (torch.float32 if name == "mean" else dtype)
        assert relative_frobenius_error(y, exact) < ERROR_BOUND[dtype]
    assert grads.keys() == exact_grads.keys()
    for key, grad in grads.items():
        assert grad.dtype == inputs[key].dtype
        assert relative_frobenius_error(grad, exact_grads[key]) < ERROR_BOUND[dtype], key


def one(op: Operator, inputs: Inputs, samples: slice | list[int]) -> Inputs:
    return {k: v[samples] if k in op.rows else v for k, v in inputs.items()}


def check_samples(name: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device = CPU, **options) -> None:
    """Run, batch and position: bits of a sample's outputs and gradients, alone and among others."""
    promised = GUARANTEES["elementwise"]
    assert promised.run
    assert promised.batch
    assert promised.position
    op = OPERATORS[name]
    inputs = make(op, sizes, dtype, device)
    ys, grads, dys = both_ways(op, inputs, **options)

    def check(samples: list[int]) -> None:
        again, again_grads, _ = both_ways(op, one(op, inputs, samples), tuple(dy[samples] for dy in dys), **options)
        for y, other in zip(ys, again, strict=True):
            assert_bitwise_equal(other, y[samples])
        for key in op.rows:
            if key in grads:
                assert_bitwise_equal(again_grads[key], grads[key][samples])

    batch = sizes["B"]
    check(list(range(batch)))
    check(list(range(batch))[::-1])
    for sample in {0, batch // 2, batch - 1}:
        check([sample])
    check([*range(1, batch), 0, 0])
    with torch.no_grad():  # the rollout
        for y, other in zip(ys, outputs(op.run(inputs, **options)), strict=True):
            assert_bitwise_equal(other, y)


def check_tokens(name: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device = CPU, **options) -> None:
    """Position of a token, and the number of tokens beside it."""
    op = OPERATORS[name]
    inputs = make(op, sizes, dtype, device)
    ys = outputs(op.run(inputs, **options))
    for tokens in (slice(1, None), slice(2, 3), slice(0, sizes["T"] - 1)):
        part = {k: v[:, tokens] if op.rows.get(k, "")[:2] == "BT" else v for k, v in inputs.items()}
        for layout in (part, {k: v.contiguous() for k, v in part.items()}):
            for y, other in zip(ys, outputs(op.run(layout, **options)), strict=True):
                assert_bitwise_equal(other, y[:, tokens])


def widened(t: Tensor, pad: int) -> Tensor:
    """The same values as a slice of a wider buffer, `pad` columns in and `pad` behind."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 2 * pad), 7.0)
    wide[..., pad:pad + t.shape[-1]] = t
    return wide[..., pad:pad + t.shape[-1]]


def check_strides(name: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device = CPU, **options) -> None:
    op = OPERATORS[name]
    inputs = make(op, sizes, dtype, device)
    ys, grads, dys = both_ways(op, inputs, **options)
    for pad in (16, 3):
        strided = {k: widened(v, pad) for k, v in inputs.items()}
        with torch.no_grad():
            for y, other in zip(ys, outputs(op.run(strided, **options)), strict=True):
                assert_bitwise_equal(other, y)
        # Leaves that are slices, with gradients that are slices.
        leaves = {k: v.requires_grad_() if k not in op.fixed else v for k, v in strided.items()}
        again = outputs(op.run(leaves, **options))
        keys = [k for k in leaves if k not in op.fixed]
        found = torch.autograd.grad(again, [leaves[k] for k in keys], [widened(dy, pad) for dy in dys])
        for key, grad in zip(keys, found, strict=True):
            assert_bitwise_equal(grad, grads[key])


SMALL = {"B": 3, "T": 5, "C": 24, "H": 3, "D": 8}
ALIGNED = {"B": 3, "T": 5, "C": 48, "H": 2, "D": 16}


@operators
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_outputs_and_gradients_match_fp64(name: str, dtype: torch.dtype) -> None:
    check_against_fp64(name, SMALL, dtype)


@operators
def test_a_samples_bits_do_not_depend_on_the_batch(name: str) -> None:
    for columns in (24, 33):
        check_samples(name, {**SMALL, "C": columns, "B": 5}, torch.bfloat16)
    check_samples(name, {**SMALL, "C": 40, "T": 9}, torch.float32)


@pytest.mark.parametrize("name", [name for name, op in OPERATORS.items() if op.by_token])
def test_a_tokens_bits_do_not_depend_on_other_tokens(name: str) -> None:
    check_tokens(name, {**SMALL, "C": 35, "T": 6}, torch.float32)


@operators
def test_slices_of_wider_buffers_give_the_same_bits(name: str) -> None:
    check_strides(name, SMALL, torch.bfloat16)


@interpreter
@operators
def test_the_triton_kernels_match_fp64_in_the_interpreter(name: str) -> None:
    check_against_fp64(name, SMALL, torch.float16, backend="triton")
    check_against_fp64(name, {**ALIGNED, "T": 3}, torch.float32, backend="triton")


@interpreter
@operators
def test_the_triton_kernels_keep_samples_apart_in_the_interpreter(name: str) -> None:
    check_samples(name, {**ALIGNED, "B": 2, "T": 3}, torch.float16, backend="triton")
    check_strides(name, {**SMALL, "B": 2, "T": 3}, torch.float16, backend="triton")


@interpreter
def test_long_rows_and_many_tokens_take_chunks_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowmill_kernels import triton_elementwise as te

    monkeypatch.setattr(te, "TOKEN_CHUNK", 32)
    monkeypatch.setattr(te, "WHOLE_ROW", 32)
    monkeypatch.setattr(te, "CHUNK", 32)
    monkeypatch.setattr(te, "MEAN_CHUNK", 64)
    for name in ("log_softmax", "mean", "gated_residual", "layer_norm_modulate"):
        check_against_fp64(name, {**SMALL, "B": 2, "T": 70, "C": 50}, torch.float32, backend="triton")
    x = torch.full((1, 3, 50), -math.inf)
    x[0, 0, 40], x[0, 1, 7] = 1.0, math.nan
    y = ew.log_softmax(x, backend="triton")
    assert y[0, 0, 40] == 0
    assert (y[0, 0, :40] == -math.inf).all()
    assert y[0, 1:].isnan().all()


# Plain functions ---------------------------------------------------------------------------------------------------

def check_sums(device: torch.device, sizes: dict[str, int], dtype: torch.dtype, **options) -> None:
    shape = (sizes["B"], sizes["T"], sizes["C"])
    a, b = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    gate = torch.randn(shape[0], shape[2], device=device).to(dtype)
    for ours, exact in ((ew.column_sum(a, **options), a.double().sum(1)),
                        (ew.gate_gradient(a, b, **options), (a.double() * b.double()).sum(1))):
        assert ours.dtype == torch.float32
        assert relative_frobenius_error(ours, exact) < 2e-6
    for pad in (16, 3):
        assert_bitwise_equal(ew.column_sum(widened(a, pad), **options), ew.column_sum(a, **options))
    assert_bitwise_equal(ew.gate_gradient(a[1:], b[1:], **options), ew.gate_gradient(a, b, **options)[1:])
    assert_bitwise_equal(ew.column_sum(a[1:], **options), ew.column_sum(a, **options)[1:])
    scaled = ew.scale_by_gate(a, gate, **options)
    assert relative_frobenius_error(scaled, a.double() * gate.double()[:, None]) < ERROR_BOUND[dtype]
    # The same product as inside the residual, and as gated_residual's backward.
    assert_bitwise_equal(scaled, ew.gated_residual(torch.zeros_like(a), gate, a, **options) + 0.0)
    leaf = b.clone().requires_grad_()
    ew.gelu_tanh(leaf, **options).backward(a)
    assert_bitwise_equal(ew.gelu_tanh_backward(a, b, **options), leaf.grad)
    for op in ("gelu_tanh", "gelu", "silu"):
        leaf, wide = b.clone().requires_grad_(), b.double().requires_grad_()
        y = getattr(ew, op)(leaf, **options)
        y.backward(torch.ones_like(y))
        value, slope = ew.activation_slope(op, b, **options)
        assert_bitwise_equal(value, y.detach())
        assert_bitwise_equal(slope, leaf.grad)
        exact = functional.silu(wide) if op == "silu" else functional.gelu(
            wide, approximate="tanh" if op == "gelu_tanh" else "none")
        assert relative_frobenius_error(slope, torch.autograd.grad(exact.sum(), wide)[0]) < ERROR_BOUND[dtype]
    stepped, packed = (ew.activation_slope("gelu", t, **options) for t in (widened(b, 3), b))
    for one, other in zip(stepped, packed, strict=True):
        assert_bitwise_equal(one, other)


def test_plain_sums_and_products_match_fp64() -> None:
    check_sums(CPU, SMALL, torch.bfloat16)
    check_sums(CPU, {**SMALL, "T": 1}, torch.float32)


@interpreter
def test_plain_sums_and_products_match_fp64_in_the_interpreter() -> None:
    check_sums(CPU, SMALL, torch.float16, backend="triton")


def test_gelu_has_the_bits_of_the_gemms_epilogue() -> None:
    x = (4 * torch.randn(3, 5, 24)).bfloat16()
    epilogue = finish(x.float(), Epilogue(activation="gelu_tanh"), None, None, None, x.dtype)
    assert_bitwise_equal(ew.gelu_tanh(x), epilogue)


def test_parameter_gradients_are_leaf_sums_of_samples() -> None:
    for name in ("layer_norm_modulate affine", "rms_norm", "qk_norm_rope", "qk_norm_rope all", "qk_norm_rope_pair"):
        op = OPERATORS[name]
        inputs = make(op, {**SMALL, "B": 6}, torch.float32)
        _, grads, dys = both_ways(op, inputs)
        singles = [both_ways(op, one(op, inputs, [s]), tuple(dy[[s]] for dy in dys))[1] for s in range(6)]
        for key in op.shared:
            if key not in op.fixed:
                assert_bitwise_equal(grads[key], leaf_sum(torch.stack([g[key] for g in singles])))


def test_a_collector_takes_parameter_gradients_in_any_micro_batch() -> None:
    op = OPERATORS["layer_norm_modulate affine"]
    inputs = make(op, {**SMALL, "B": 6}, torch.float32)
    _, grads, dys = both_ways(op, inputs)
    weights = [inputs["weight"].clone().requires_grad_(), inputs["bias"].clone().requires_grad_()]
    for size in (1, 2, 6):
        with GradientLeaves(weights, LeafPlan(6)) as leaves:
            for first in range(0, 6, size):
                part = one(op, inputs, slice(first, first + size))
                with leaves.micro_batch(first, size):
                    y = op.run({**part, "weight": weights[0], "bias": weights[1]})
                    y.backward(dys[0][first:first + size])  # type: ignore[union-attr]
                    assert weights[0].grad is None or size < 6
            leaves.finish()
        assert_bitwise_equal(weights[0].grad, grads["weight"])
        assert_bitwise_equal(weights[1].grad, grads["bias"])
        weights[0].grad = weights[1].grad = None


def test_only_what_needs_a_gradient_gets_one() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    scale, shift = torch.randn(2, 2, 8).unbind()
    ew.layer_norm_modulate(x, scale, shift).sum().backward()
    assert x.grad is not None
    gate = torch.randn(2, 8, requires_grad=True)
    ew.gated_residual(x.detach(), gate, x.detach()).sum().backward()
    assert gate.grad is not None
    assert not ew.layer_norm_modulate(x.detach(), scale, shift).requires_grad
    assert not ew.scale_by_gate(x, gate).requires_grad
    assert not ew.column_sum(x).requires_grad


def test_one_of_two_outputs_may_go_unused() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    rows = torch.randn(4, 2, 8).unbind()
    for used in (0, 1):
        y = ew.layer_norm_modulate(x, *rows[:2], scale2=rows[2], shift2=rows[3])
        (grad,) = torch.autograd.grad(y[used].square().sum(), x)
        (exact,) = torch.autograd.grad(
            modulated({"x": x.double(), "scale": rows[2 * used], "shift": rows[2 * used + 1]}).square().sum(), x)
        assert relative_frobenius_error(grad, exact) < ERROR_BOUND[torch.float32]
    q, k = torch.randn(2, 2, 3, 2, 8, requires_grad=True).unbind()
    ew.qk_norm_rope_pair(q, k, None, None, eps=1e-6)[1].sum().backward()


def check_mixed_strides(device: torch.device, columns: int, **options) -> None:
    x, wide = torch.randn(3, 2, columns, device=device), torch.randn(3, 5 * columns, device=device)
    rows = [wide[:, columns:2 * columns], *torch.randn(3, 3, columns, device=device).unbind()]
    for a, b, c, d in ((0, 1, 2, 3), (1, 0, 3, 2), (1, 2, 0, 3), (1, 2, 3, 0)):
        given = [rows[i] for i in (a, b, c, d)]
        same = [t.contiguous() for t in given]
        for y, other in zip(ew.layer_norm_modulate(x, *given[:2], scale2=given[2], shift2=given[3], **options),
                            ew.layer_norm_modulate(x, *same[:2], scale2=same[2], shift2=same[3], **options),
                            strict=True):
            assert_bitwise_equal(y, other)


def test_scales_and_shifts_may_have_their_own_strides() -> None:
    check_mixed_strides(CPU, 8)


@interpreter
def test_scales_and_shifts_may_have_their_own_strides_in_the_interpreter() -> None:
    check_mixed_strides(CPU, 16, backend="triton")


def test_fp32_modulation_of_bf16_rows_is_not_rounded() -> None:
    x, (scale, shift) = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 2, 8).unbind()
    y = ew.layer_norm_modulate(x, scale, shift)
    assert y.dtype == torch.bfloat16
    assert relative_frobenius_error(y, modulated({"x": x.double(), "scale": scale.double(), "shift": shift.double()})
                                    ) < 2.0**-8


def check_out(device: torch.device, sizes: dict[str, int], **options) -> None:
    """The hot path's layout: q and k as columns of a packed buffer, written back into one."""
    batch, tokens, heads, dims = (sizes[s] for s in "BTHD")
    packed = torch.randn(batch, tokens, 3, heads, dims, device=device).half()
    weight = torch.rand(dims, device=device).half()
    every = torch.rand(heads * dims, device=device).half()
    table = torch.randn(tokens, dims // 2, device=device), torch.randn(tokens, dims // 2, device=device)
    for norm, w in (("head", weight), ("all", every), ("head", None)):
        fresh = [ew.qk_norm_rope(packed[:, :, i], w, eps=1e-6, rope=table, norm=norm, **options) for i in (0, 1)]
        target = torch.full_like(packed, 7.0)
        odd = torch.full((batch, tokens, heads, dims + 3), 7.0, device=device, dtype=packed.dtype)
        for i in (0, 1):
            out = target[:, :, i]
            assert ew.qk_norm_rope(packed[:, :, i], w, eps=1e-6, rope=table, norm=norm, out=out, **options) is out
            assert_bitwise_equal(target[:, :, i], fresh[i])
            ew.qk_norm_rope(packed[:, :, i], w, eps=1e-6, rope=table, norm=norm, out=odd[..., 1:1 + dims], **options)
            assert_bitwise_equal(odd[..., 1:1 + dims], fresh[i])
        assert (target[:, :, 2] == 7).all()
        assert (odd[..., [0, -1]] == 7).all()
    pair = ew.qk_norm_rope_pair(packed[:, :, 0], packed[:, :, 1], weight, weight, eps=1e-6, rope=table, **options)
    for i in (0, 1):
        assert_bitwise_equal(pair[i], ew.qk_norm_rope(packed[:, :, i], weight, eps=1e-6, rope=table, **options))


def test_a_packed_buffer_is_read_and_written_in_place() -> None:
    check_out(CPU, SMALL)


@interpreter
def test_a_packed_buffer_is_read_and_written_in_place_in_the_interpreter() -> None:
    check_out(CPU, SMALL, backend="triton")
    check_out(CPU, ALIGNED, backend="triton")


def test_dimensions_between_sample_and_channel_are_tokens() -> None:
    x, gate = torch.randn(2, 3, 4, 8), torch.randn(2, 8)
    assert_bitwise_equal(ew.gated_residual(x, gate, x), ew.gated_residual(
        x.flatten(1, 2), gate, x.flatten(1, 2)).view(x.shape))
    assert_bitwise_equal(ew.scale_by_gate(x, gate), (x * gate[:, None, None]))
    assert_bitwise_equal(ew.rms_norm(x, None, eps=0.0)[1, 2], ew.rms_norm(x[1, 2], None, eps=0.0))
    assert_bitwise_equal(ew.rms_norm(x[1, 2, 3], None, eps=0.0), ew.rms_norm(x, None, eps=0.0)[1, 2, 3])
    assert_bitwise_equal(ew.mean(x, 3), ew.mean(x.flatten(1), 1))
    assert_bitwise_equal(ew.log_softmax(x[0, 0, 0]), ew.log_softmax(x)[0, 0, 0])
    assert_bitwise_equal(ew.scale_by_gate(x[:, 0, 0], gate), x[:, 0, 0] * gate)


# NaN, infinity, nothing --------------------------------------------------------------------------------------------

def check_not_finite(device: torch.device, **options) -> None:
    for name in OPERATORS:
        op = OPERATORS[name]
        inputs = make(op, {**SMALL, "T": 4}, torch.float32, device)
        clean = outputs(op.run(inputs, **options))
        first = next(iter(op.rows))
        for bad in (math.nan, math.inf, -math.inf):
            dirty = {k: v.clone() for k, v in inputs.items()}
            dirty[first][1, 2].flatten()[3] = bad
            dirty[first] = dirty[first].clone()
            ys = outputs(op.run(dirty, **options))
            exact = outputs(op.exact({k: v.cpu().double() for k, v in dirty.items()}))
            for y, e, c in zip(ys, exact, clean, strict=True):
                assert torch.equal(y.cpu().isnan(), e.isnan()), (name, bad)
                assert torch.equal(y.cpu().isinf(), e.isinf()), (name, bad)
                assert_bitwise_equal(y[0], c[0])  # other samples do not notice


def test_nan_and_infinity_propagate_as_in_torch() -> None:
    check_not_finite(CPU)


@interpreter
def test_nan_and_infinity_propagate_as_in_torch_in_the_interpreter() -> None:
    check_not_finite(CPU, backend="triton")


def test_activations_do_not_overflow() -> None:
    x = torch.tensor([-3e38, -1e10, -100.0, -0.0, 100.0, 1e10, 3e38])
    for ours, theirs in ACTIVATIONS.values():
        torch.testing.assert_close(ours(x), theirs(x.double()).float())


@operators
def test_no_samples_and_no_tokens_work(name: str) -> None:
    for empty in ("B", "T"):
        if name == "mean" and empty == "T":
            continue  # the mean of nothing is refused
        op = OPERATORS[name]
        inputs = make(op, {**SMALL, empty: 0}, torch.float32)
        ys, grads, _ = both_ways(op, inputs)
        assert all(y.numel() == 0 for y in ys)
        for key, grad in grads.items():
            assert grad.shape == inputs[key].shape
            assert not grad.any()


def test_second_derivatives_are_refused() -> None:
    for name, op in OPERATORS.items():
        inputs = {k: v.requires_grad_(k not in op.fixed) for k, v in make(op, SMALL, torch.float32).items()}
        first = next(iter(op.rows))
        y = outputs(op.run(inputs))[0]
        (grad,) = torch.autograd.grad(y.square().sum(), inputs[first], create_graph=True)
        if name in ("add", "mean"):
            continue  # linear: torch's own graph, or a constant
        with pytest.raises(RuntimeError, match=r"once_differentiable"):
            grad.square().sum().backward()


# Timesteps ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"flip_sin_to_cos": False, "downscale_freq_shift": 1.0},
                                     {"scale": 1000.0, "max_period": 500.0}])
@pytest.mark.parametrize("dim", [6, 9, 256])
def test_timestep_embedding_is_sine_and_cosine(dim: int, options: dict) -> None:
    t = torch.tensor([0.0, 0.25, 3.0, 999.0])
    period, shift = options.get("max_period", 10000.0), options.get("downscale_freq_shift", 0.0)
    half = dim // 2
    y = ew.timestep_embedding(t, dim, **options)
    assert y.dtype == torch.float32
    frequencies = torch.tensor([period ** (-j / (half - shift)) for j in range(half)], dtype=torch.float64)
    angles = options.get("scale", 1.0) * t[:, None].double() * frequencies
    exact = [angles.cos(), angles.sin()] if options.get("flip_sin_to_cos", True) else [angles.sin(), angles.cos()]
    # An angle of up to 1e6 radians in fp32 is right to 2**-24 of itself, and its frequency to a few of those.
    bound = 8 * 2.0**-24 * float(angles.max()) + 1e-6
    assert float((y[:, :2 * half].double() - torch.cat(exact, 1)).abs().max()) < bound
    assert not y[:, 2 * half:].any()


def test_timestep_embedding_is_diffusers_own_bit_for_bit() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings", reason="needs diffusers")
    t = torch.rand(7) * 1000
    for options in ({"flip_sin_to_cos": True, "downscale_freq_shift": 0.0}, {"flip_sin_to_cos": False,
                    "downscale_freq_shift": 1.0, "scale": 1000.0}):
        assert_bitwise_equal(ew.timestep_embedding(t, 256, **options),
                             embeddings.get_timestep_embedding(t, 256, **options))


def check_timesteps(device: torch.device) -> None:
    for dim in (256, 18):
        t = torch.rand(67, device=device) * 1000
        y = ew.timestep_embedding(t, dim)
        for rows in (slice(0, 1), slice(3, 10), slice(1, None)):
            assert_bitwise_equal(ew.timestep_embedding(t[rows], dim), y[rows])
        assert_bitwise_equal(ew.timestep_embedding(t.flip(0), dim).flip(0), y)


def test_timestep_embedding_of_a_sample_does_not_depend_on_the_batch() -> None:
    check_timesteps(CPU)


# Bad input ---------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 8)
Q = torch.zeros(2, 3, 2, 4)
S = torch.zeros(2, 8)
W = torch.zeros(8)
TABLE = (torch.zeros(3, 2), torch.zeros(3, 2))
BAD: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "layer_norm x rank": (ValueError, r"x must be \[B, T, C\]", lambda: ew.layer_norm_modulate(X[0], S, S)),
    "layer_norm scale shape": (ValueError, "scale must be", lambda: ew.layer_norm_modulate(X, S[:1], S)),
    "layer_norm shift shape": (ValueError, "shift must be", lambda: ew.layer_norm_modulate(X, S, S[:, :4])),
    "layer_norm weight shape": (ValueError, "weight must be", lambda: ew.layer_norm_modulate(X, S, S, weight=W[:4])),
    "layer_norm scale alone": (ValueError, "come together", lambda: ew.layer_norm_modulate(X, S, None)),
    "layer_norm second alone": (ValueError, "come together", lambda: ew.layer_norm_modulate(X, S, S, scale2=S)),
    "layer_norm second first": (ValueError, "needs the first",
                                lambda: ew.layer_norm_modulate(X, None, None, scale2=S, shift2=S)),
    "layer_norm bias alone": (ValueError, "without a weight", lambda: ew.layer_norm_modulate(X, S, S, bias=W)),
    "layer_norm eps": (ValueError, "eps must be", lambda: ew.layer_norm_modulate(X, S, S, eps=-1.0)),
    "layer_norm dtype": (TypeError, "bf16, fp16 or fp32", lambda: ew.layer_norm_modulate(X.double(), S, S)),
    "layer_norm device": (ValueError, "one device", lambda: ew.layer_norm_modulate(X, S.to("meta"), S)),
    "layer_norm back end": (ValueError, "backend must be",
                            lambda: ew.layer_norm_modulate(X, S, S, backend="cuda")),  # type: ignore[arg-type]
    "rms_norm weight": (ValueError, "weight must be", lambda: ew.rms_norm(X, W[:4], eps=1e-6)),
    "rms_norm empty": (ValueError, "non-empty", lambda: ew.rms_norm(X[..., :0], None, eps=1e-6)),
    "rms_norm dtype": (TypeError, "bf16, fp16 or fp32", lambda: ew.rms_norm(X.long(), None, eps=1e-6)),
    "rms_norm eps": (ValueError, "eps must be", lambda: ew.rms_norm(X, None, eps=math.nan)),
    "qk rank": (ValueError, r"\[B, T, H, D\]", lambda: ew.qk_norm_rope(X, None, eps=1e-6)),
    "qk weight": (ValueError, "weight must be", lambda: ew.qk_norm_rope(Q, W, eps=1e-6)),
    "qk weight all": (ValueError, "weight must be", lambda: ew.qk_norm_rope(Q, W[:4], eps=1e-6, norm="all")),
    "qk norm": (ValueError, "norm must be", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, norm="heads")),
    "qk layout": (ValueError, "rope_layout", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, rope_layout="split")),
    "qk rope shape": (ValueError, "rope must be", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, rope=(S, S))),
    "qk rope dtype": (TypeError, "fp32", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, rope=(TABLE[0].half(), TABLE[1]))),
    "qk rope gradient": (TypeError, "without gradient", lambda: ew.qk_norm_rope(
        Q, None, eps=1e-6, rope=(TABLE[0].clone().requires_grad_(), TABLE[1]))),
    "qk rope of two kinds": (ValueError, "one shape", lambda: ew.qk_norm_rope(
        Q, None, eps=1e-6, rope=(TABLE[0], torch.zeros(2, 3, 2)))),
    "qk half of 12": (ValueError, "power of two", lambda: ew.qk_norm_rope(
        torch.zeros(2, 3, 2, 12), None, eps=1e-6, rope=(torch.zeros(3, 6),) * 2, rope_layout="half")),
    "qk out shape": (ValueError, "out must be", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, out=Q[:1])),
    "qk out dtype": (ValueError, "out must be", lambda: ew.qk_norm_rope(Q, None, eps=1e-6, out=Q.half())),
    "qk out with a graph": (ValueError, "no autograd graph", lambda: ew.qk_norm_rope(
        Q.clone().requires_grad_(), None, eps=1e-6, out=Q.clone())),
    "pair shapes": (ValueError, "one shape", lambda: ew.qk_norm_rope_pair(Q, Q[:, :2], None, None, eps=1e-6)),
    "pair dtypes": (ValueError, "one shape and dtype", lambda: ew.qk_norm_rope_pair(Q, Q.half(), None, None, eps=1e-6)),
    "pair one weight": (ValueError, "to each tensor or to none",
                        lambda: ew.qk_norm_rope_pair(Q, Q, W[:4], None, eps=1e-6)),
    "swiglu shapes": (ValueError, "one shape", lambda: ew.swiglu(X, X[:1])),
    "swiglu dtypes": (ValueError, "one shape and dtype", lambda: ew.swiglu(X, X.half())),
    "gelu dtype": (TypeError, "bf16, fp16 or fp32", lambda: ew.gelu(X.double())),
    "gelu scalar": (ValueError, "at least one dimension", lambda: ew.gelu(torch.tensor(1.0))),
    "gelu backward": (ValueError, "one shape", lambda: ew.gelu_tanh_backward(X, X[:1])),
    "gate shape": (ValueError, "gate", lambda: ew.gated_residual(X, S[:1], X)),
    "gate residual": (ValueError, "residual and y", lambda: ew.gated_residual(X[:1], S, X)),
    "gate residual dtype": (ValueError, "residual and y", lambda: ew.gated_residual(X.half(), S, X)),
    "scale gate": (ValueError, "gate", lambda: ew.scale_by_gate(X, W)),
    "column_sum rank": (ValueError, r"\[B, T, C\]", lambda: ew.column_sum(S)),
    "gate_gradient shapes": (ValueError, "two", lambda: ew.gate_gradient(X, X[:1])),
    "mean dims": (ValueError, "needs 1 to 2", lambda: ew.mean(X, 3)),
    "mean empty": (ValueError, "non-empty", lambda: ew.mean(X[:, :0], 2)),
    "log_softmax empty": (ValueError, "non-empty", lambda: ew.log_softmax(X[..., :0])),
    "timesteps rank": (ValueError, r"timesteps \[B\]", lambda: ew.timestep_embedding(S, 8)),
    "timesteps dim": (ValueError, "dim >= 2", lambda: ew.timestep_embedding(W, 1)),
    "timesteps shift": (ValueError, "downscale_freq_shift", lambda: ew.timestep_embedding(
        W, 2, downscale_freq_shift=1.0)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    kind, message, call = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_importing_needs_no_triton() -> None:
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch, flowmill_kernels.elementwise as ew\n"
            "print(ew.rms_norm(torch.ones(2, 4), None, eps=0.0).sum().item())")
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.strip() == "8.0"


# On a GPU ----------------------------------------------------------------------------------------------------------

GPU_SIZES = [{"B": 3, "T": 37, "C": 1536, "H": 24, "D": 64}, {"B": 2, "T": 9, "C": 5120, "H": 40, "D": 128},
             {"B": 3, "T": 21, "C": 100, "H": 3, "D": 40}, {"B": 2, "T": 5, "C": 16384, "H": 5, "D": 256},
             {"B": 3, "T": 16, "C": 64, "H": 1, "D": 48}, {"B": 2, "T": 1, "C": 1000, "H": 2, "D": 96}]
GPU_DTYPES = [DTYPES, (torch.bfloat16,), (torch.bfloat16, torch.float32), *[(torch.bfloat16,)] * 3]
"""Not every dtype at every size: most of the time goes to compiling."""
gpu_sizes = pytest.mark.parametrize("sizes", GPU_SIZES, ids=[f"C{s['C']}D{s['D']}" for s in GPU_SIZES])


def fits(name: str, sizes: dict[str, int]) -> None:
    if "half" in name and sizes["D"] & (sizes["D"] - 1):
        pytest.skip("rope_layout 'half' takes powers of two")


@pytest.mark.gpu
@operators
@gpu_sizes
def test_outputs_and_gradients_match_fp64_on_a_gpu(gpu: torch.device, name: str, sizes: dict[str, int]) -> None:
    fits(name, sizes)
    for dtype in GPU_DTYPES[GPU_SIZES.index(sizes)]:
        check_against_fp64(name, sizes, dtype, gpu)


@pytest.mark.gpu
@operators
@gpu_sizes
def test_bits_depend_on_the_sample_alone_on_a_gpu(gpu: torch.device, name: str, sizes: dict[str, int]) -> None:
    fits(name, sizes)
    for dtype in GPU_DTYPES[GPU_SIZES.index(sizes)]:
        check_samples(name, {**sizes, "B": 5}, dtype, gpu)
        check_strides(name, sizes, dtype, gpu)
        if OPERATORS[name].by_token:
            check_tokens(name, {**sizes, "T": max(4, sizes["T"])}, dtype, gpu)


@pytest.mark.gpu
def test_many_runs_give_the_same_bits_on_a_gpu(gpu: torch.device) -> None:
    for op in OPERATORS.values():
        inputs = make(op, {**GPU_SIZES[0], "B": 8, "T": 205}, torch.bfloat16, gpu)
        ys, grads, dys = both_ways(op, inputs)
        for _ in range(10):
            again, again_grads, _ = both_ways(op, inputs, dys)
            for a, b in zip((*ys, *grads.values()), (*again, *again_grads.values()), strict=True):
                assert_bitwise_equal(a, b)


@pytest.mark.gpu
def test_long_rows_and_many_tokens_on_a_gpu(gpu: torch.device) -> None:
    check_sums(gpu, {"B": 3, "T": 2500, "C": 200}, torch.bfloat16)
    check_sums(gpu, {"B": 3, "T": 1025, "C": 64}, torch.float32)
    for columns in (128256, 50257):
        for dtype in (torch.bfloat16, torch.float32):
            sizes = {**SMALL, "B": 3, "T": 2, "C": columns}
            check_against_fp64("log_softmax", sizes, dtype, gpu)
            check_samples("log_softmax", sizes, dtype, gpu)
            check_against_fp64("mean", sizes, dtype, gpu)
            check_samples("mean", sizes, dtype, gpu)
    x = torch.full((1, 3, 50257), -math.inf, device=gpu)
    x[0, 0, 40000], x[0, 1, 7] = 1.0, math.nan
    y = ew.log_softmax(x)
    assert y[0, 0, 40000] == 0
    assert (y[0, 0, :40000] == -math.inf).all()
    assert y[0, 1:].isnan().all()


@pytest.mark.gpu
def test_layouts_and_odd_values_on_a_gpu(gpu: torch.device) -> None:
    for sizes in GPU_SIZES:
        check_out(gpu, sizes)
    check_mixed_strides(gpu, 1536)
    check_not_finite(gpu)
    check_timesteps(gpu)
    x = torch.randn(70000, 64, device=gpu)  # more samples than a grid's second axis has room for
    assert relative_frobenius_error(ew.rms_norm(x, None, eps=1e-6), normed(x.double(), None)) < 2e-6


@PLACES
@pytest.mark.parametrize("length", [1000, 20000])
def test_log_softmax_keeps_its_accuracy_at_large_values(length: int, place: tuple[str, str, torch.dtype]) -> None:
    """What is common to a row must not reach the result's rounding: log-probs are clipped at 1e-5."""
    device, backend, _ = place
    x = (torch.randn(3, length) + 1e4).to(device).requires_grad_()
    out = ew.log_softmax(x, backend=backend)
    wide = x.detach().double().requires_grad_()
    want = wide.log_softmax(-1)
    assert (out.double() - want).abs().max() < 5e-6
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight.double())
    assert relative_frobenius_error(x.grad, wide.grad) < 1e-5  # type: ignore[arg-type]
