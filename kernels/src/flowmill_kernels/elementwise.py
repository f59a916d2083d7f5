"""The operators of a transformer block that are no product: norms, modulation, rotary embedding, activations, gates.

In: activations [B, ..., C] whose first dimension counts samples. Out: the same, with an autograd graph where one is
asked for. Rollout and training call the same functions, so both are the same arithmetic: fp32 between one load and one
rounding. A row's bits depend on that row (and its sample's modulation); a per-sample gradient's on that sample's
tokens. Parameters' gradients are per-sample sums that gradients.py adds in fixed leaves.
"""

import math
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cpu_backend
from .collector import deliver
from .gemm import Backend, _choose_backend

Rope = tuple[Tensor, Tensor]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


_TRITON: ModuleType | None = None  # the Triton back end once it was found to be available


def _module(name: str, backend: Backend, *tensors: Tensor | None) -> ModuleType:
    """The back end for these tensors; see `_choose_backend` for what it raises."""
    global _TRITON
    device, mixed = None, False
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in _DTYPES:
            raise TypeError(f"{name}: tensors must be bf16, fp16 or fp32, got {t.dtype}. Cast first")
        if device is None:
            device = t.device
        mixed = mixed or t.device != device
    # A thousand launches a forward: once is enough to ask what the machine has.
    if _TRITON is not None and backend == "auto" and not mixed and device is not None and device.type == "cuda":
        return _TRITON
    if _choose_backend(name, backend, tuple(t for t in tensors if t is not None)) == "cpu":
        return cpu_backend
    from . import triton_elementwise

    if device is not None and device.type == "cuda":
        _TRITON = triton_elementwise
    return triton_elementwise


def _check_eps(name: str, eps: float) -> None:
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{name}: eps must be finite and not negative, got {eps}")


def _unit(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension; most callers' views already have it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _wants_graph(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


# LayerNorm and modulation ------------------------------------------------------------------------------------------

class _NormModulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, backend, eps, x, scale, shift, scale2, shift2, weight, bias):  # type: ignore[override]
        ctx.module = _module(name, backend, x, scale, shift, scale2, shift2, weight, bias)
        ctx.eps = eps
        ctx.save_for_backward(x, scale, scale2, weight, bias)
        ctx.two = scale2 is not None
        ctx.set_materialize_grads(False)
        y, y2 = ctx.module.norm_modulate(x, scale, shift, scale2, shift2, weight, bias, eps)
        # x comes out as well: what its other readers send back is then added in the same kernel.
        return (y, y2, x.view_as(x)) if ctx.two else (y, x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        x, scale, scale2, weight, bias = ctx.saved_tensors
        dy, dy2, add = (_gradient(g) for g in (grads if ctx.two else (grads[0], None, grads[1])))
        _, _, _, _, need_scale, need_shift, need_scale2, need_shift2, need_weight, need_bias = ctx.needs_input_grad
        if dy is None and dy2 is None:
            return None, None, None, add, None, None, None, None, None, None
        wanted = need_scale or need_scale2 or need_weight or need_bias
        module = ctx.module
        dx, mean, rstd = module.norm_modulate_backward(dy, dy2, x, scale, scale2, weight, ctx.eps, add, wanted)
        out: dict[str, Tensor | None] = {}
        per_sample_weight: list[Tensor] = []
        per_sample_bias: list[Tensor] = []
        for g, s, need_s, need_t, label in ((dy, scale, need_scale, need_shift, ""),
                                            (dy2, scale2, need_scale2, need_shift2, "2")):
            if g is None:
                continue
            plain = module.column_sums(g, None, None, None) if need_s or need_t or need_bias else None
            times = module.column_sums(g, x, mean, rstd) if wanted else None
            if need_t:
                out["shift" + label] = plain.to(s.dtype)  # type: ignore[union-attr]
            if need_s:  # what the modulation scales is the normalised row after weight and bias
                d = times if weight is None else times * weight.float()  # type: ignore[operator]
                d = d if bias is None else d + plain * bias.float()  # type: ignore[operator]
                out["scale" + label] = d.to(s.dtype)  # type: ignore[union-attr]
            factor = 1.0 if s is None or not (need_weight or need_bias) else 1.0 + s.float()
            if need_weight:
                per_sample_weight.append(times * factor)  # type: ignore[operator]
            if need_bias:
                per_sample_bias.append(plain * factor)  # type: ignore[operator]
        d_weight = d_bias = None
        if weight is not None and need_weight:
            d_weight = deliver(weight, sum(per_sample_weight[1:], per_sample_weight[0]))
        if bias is not None and need_bias:
            d_bias = deliver(bias, sum(per_sample_bias[1:], per_sample_bias[0]))
        return (None, None, None, dx, out.get("scale"), out.get("shift"), out.get("scale2"), out.get("shift2"),
                d_weight, d_bias)


def _gradient(g: Tensor | None) -> Tensor | None:
    return None if g is None else g.contiguous()


def layer_norm_modulate(x: Tensor, scale: Tensor | None, shift: Tensor | None, *, weight: Tensor | None = None,
                        bias: Tensor | None = None, eps: float = 1e-6, scale2: Tensor | None = None,
                        shift2: Tensor | None = None, keep: bool = False, backend: Backend = "auto"):
    """``LayerNorm(x) * (1 + scale) + shift``, adaLN's modulation, in one pass over x.

    Args:
        x: ``[B, T, C]``, unit stride in C. scale, shift: ``[B, C]`` (slices of a wider tensor are fine), or both None.
        weight, bias: ``[C]``, the norm's own, or None.
        scale2, shift2: A second modulation of the same normalised rows (SD3.5's dual attention).
        keep: Also return x, for its other readers: their gradient is then added inside this operator's backward.

    Returns:
        y ``[B, T, C]`` of x's dtype; with scale2 ``(y, y2)``; with keep one more, x.

    Guarantees: run, batch, position. Error: one rounding plus fp32 sums of C terms.
    """
    name = "layer_norm_modulate"
    _check_eps(name, eps)
    if x.dim() != 3:
        raise ValueError(f"{name}: x must be [B, T, C], got {tuple(x.shape)}")
    batch, _, columns = x.shape
    for label, t, shape in (("scale", scale, (batch, columns)), ("shift", shift, (batch, columns)),
                            ("scale2", scale2, (batch, columns)), ("shift2", shift2, (batch, columns)),
                            ("weight", weight, (columns,)), ("bias", bias, (columns,))):
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{name}: {label} must be {list(shape)}, got {tuple(t.shape)}")
    alone = (scale is None) != (shift is None) or (scale2 is None) != (shift2 is None)
    if alone or (scale is None and scale2 is not None):
        raise ValueError(f"{name}: scale and shift come together, and a second pair needs the first")
    if bias is not None and weight is None:
        raise ValueError(f"{name}: a bias without a weight is no LayerNorm of torch's")
    x = _unit(x)
    scale, shift, scale2, shift2 = [t if t is None else _unit(t) for t in (scale, shift, scale2, shift2)]
    if _wants_graph(x, scale, shift, scale2, shift2, weight, bias):
        results = _NormModulate.apply(name, backend, eps, x, scale, shift, scale2, shift2, weight, bias)
    else:
        module = _module(name, backend, x, scale, shift, scale2, shift2, weight, bias)
        y, y2 = module.norm_modulate(x, scale, shift, scale2, shift2, weight, bias, eps)  # type: ignore[arg-type]
        results = (y, x) if y2 is None else (y, y2, x)
    results = results if keep else results[:-1]
    return results[0] if len(results) == 1 else results


# RMS norm and rotary embedding -------------------------------------------------------------------------------------

class _RmsRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, backend, eps, rope, half, over_all, norm, count, *tensors):  # type: ignore[override]
        xs, weights = tensors[:count], tensors[count:]
        ctx.module = _module(name, backend, *tensors, *(rope or ()))
        ctx.settings = eps, rope, half, over_all, norm
        ctx.count = count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)
        ctx.module.rms_rope(xs, weights, eps, rope, half, over_all, norm, outs)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        eps, rope, half, over_all, norm = ctx.settings
        saved = ctx.saved_tensors
        xs, weights = saved[:ctx.count], saved[ctx.count:]
        dys = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) if g is None else g.contiguous()
                    for g, x in zip(grads, xs, strict=True))
        dxs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)
        need = ctx.needs_input_grad[8 + ctx.count:]
        rstds = tuple(torch.empty(x.shape[:2] if over_all else x.shape[:3], dtype=torch.float32, device=x.device)
                      if any(need) else None for x in xs)
        ctx.module.rms_rope(xs, weights, eps, rope, half, over_all, norm, dxs, dys, rstds)
        d_weights: list[Tensor | None] = [None] * len(weights)
        if any(need):
            # The gradient that reaches the normalised rows: rotate back, no norm; fp32, it is summed.
            back = dys
            if rope is not None:
                back = tuple(torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in xs)
                ctx.module.rms_rope(xs, (None,) * ctx.count, eps, rope, half, over_all, False, back, dys)
            for i, (g, x, r) in enumerate(zip(back, xs, rstds, strict=True)):
                if need[i]:
                    rows = (lambda t: t.flatten(2)) if over_all else (lambda t: t.flatten(1, 2))
                    d = ctx.module.column_sums(rows(g), rows(x), None, r.flatten(1))  # type: ignore[union-attr]
                    d_weights[i] = deliver(weights[i], d)
        return (None,) * 8 + tuple(dxs) + tuple(d_weights)


def _rms_rope(name: str, xs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], eps: float, rope: Rope | None,
              over_all: bool, rope_layout: str, backend: Backend, *, norm: bool | None = None,
              out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Checks and dispatch; `norm`: whether there is a norm, None: where there is a weight."""
    _check_eps(name, eps)
    first = xs[0]
    if first.dim() != 4 or xs[-1].shape != first.shape or xs[-1].dtype != first.dtype:
        raise ValueError(f"{name}: needs [B, T, H, D] tensors of one shape and dtype, got "
                         f"{[(tuple(x.shape), x.dtype) for x in xs]}")
    batch, tokens, heads, dims = first.shape
    wanted = (heads * dims,) if over_all else (dims,)
    if (weights[0] is None) != (weights[-1] is None):
        raise ValueError(f"{name}: give a weight to each tensor or to none")
    for w in weights:
        if w is not None and w.shape != wanted:
            raise ValueError(f"{name}: a weight must be {list(wanted)}, got {tuple(w.shape)}")
    if rope_layout not in ("interleaved", "half"):
        raise ValueError(f"{name}: rope_layout must be 'interleaved' or 'half', got {rope_layout!r}")
    if rope is not None:
        for t in rope:
            if t.shape not in ((tokens, dims // 2), (batch, tokens, dims // 2)) or dims % 2:
                raise ValueError(f"{name}: rope must be (cos, sin), each [T, D/2] or [B, T, D/2] of "
                                 f"x {tuple(first.shape)}, got {tuple(t.shape)}")
            if t.dtype != torch.float32 or t.requires_grad:
                raise TypeError(f"{name}: rope tables must be fp32 without gradient, got {t.dtype}")
        if rope[0].shape != rope[1].shape:
            raise ValueError(f"{name}: cos and sin must have one shape, got {tuple(rope[0].shape)} and "
                             f"{tuple(rope[1].shape)}")
        rope = (rope[0].contiguous(), rope[1].contiguous())
        if rope_layout == "half" and dims & (dims - 1):
            raise ValueError(f"{name}: rope_layout 'half' needs a power of two of channels a head, got {dims}")
    xs = tuple([_unit(x) for x in xs])
    norm, half = weights[0] is not None if norm is None else norm, rope_layout == "half"
    if out is not None:
        return (_write_rms_rope(name, xs, weights, eps, rope, half, over_all, norm, out, backend),)
    if _wants_graph(*xs, *weights):
        return _RmsRope.apply(name, backend, eps, rope, half, over_all, norm, len(xs), *xs, *weights)
    outs = tuple([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs])
    _module(name, backend, *xs, *weights, *(rope or ())).rms_rope(xs, weights, eps, rope, half, over_all, norm, outs)
    return outs


def _write_rms_rope(name: str, xs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], eps: float,
                    rope: Rope | None, half: bool, over_all: bool, norm: bool, out: Tensor, backend: Backend) -> Tensor:
    if out.shape != xs[0].shape or out.dtype != xs[0].dtype:
        raise ValueError(f"{name}: out must be {tuple(xs[0].shape)} {xs[0].dtype} like x, got {tuple(out.shape)} "
                         f"{out.dtype}")
    if _wants_graph(*xs, *weights, out):
        raise ValueError(f"{name}: out goes with no autograd graph; call it under torch.no_grad() or without out (the "
                         "bits are the same)")
    module = _module(name, backend, *xs, *weights, *(rope or ()), out)
    target = out if module.writable(out, over_all) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    module.rms_rope(xs, weights, eps, rope, half, over_all, norm, (target,))
    return out if target is out else out.copy_(target)


def qk_norm_rope(x: Tensor, weight: Tensor | None, *, eps: float, rope: Rope | None = None, out: Tensor | None = None,
                 norm: str = "head", rope_layout: str = "interleaved", backend: Backend = "auto") -> Tensor:
    """RMS norm of queries or keys, then rotary embedding; fp32 in between.

    Args:
        x: ``[B, T, H, D]``, any strides with unit stride in D.
        weight: ``[D]`` (`norm="head"`: over D) or ``[H * D]`` (`norm="all"`: over all heads); None: no norm.
        rope: (cos, sin), each ``[T, D/2]`` or ``[B, T, D/2]`` fp32; a pair (a, b) becomes (a c - b s, a s + b c).
        out: Where to write: a view of x's shape and dtype, any strides; only without an autograd graph.
        rope_layout: `interleaved`: pairs are neighbours (FLUX, Qwen-Image, Wan); `half`: channel i with i + D/2.

    Returns:
        out, or a contiguous ``[B, T, H, D]`` of x's dtype.

    Guarantees: run, batch, position. Error: one rounding plus the fp32 sum of the norm.
    """
    if norm not in ("head", "all"):
        raise ValueError(f"qk_norm_rope: norm must be 'head' or 'all', got {norm!r}")
    return _rms_rope("qk_norm_rope", (x,), (weight,), eps, rope, norm == "all", rope_layout, backend,
                     out=out)[0]


def qk_norm_rope_pair(q: Tensor, k: Tensor, weight_q: Tensor | None, weight_k: Tensor | None, *, eps: float,
                      rope: Rope | None = None, rope_layout: str = "interleaved", backend: Backend = "auto"
                      ) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of q and k of one shape in one launch; norms are per head."""
    q, k = _rms_rope("qk_norm_rope_pair", (q, k), (weight_q, weight_k), eps, rope, False, rope_layout, backend)
    return q, k


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, backend: Backend = "auto") -> Tensor:
    """RMS norm over the last dimension of ``[..., C]``; weight ``[C]`` or None. The first dimension counts samples.

    Guarantees: run, batch, position. Error: one rounding plus the fp32 sum of C squares.
    """
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm: needs a non-empty last dimension, got {tuple(x.shape)}")
    batch = x.shape[0] if x.dim() > 1 else 1
    rows = x.reshape(batch, x.shape[1:-1].numel(), 1, x.shape[-1])
    return _rms_rope("rms_norm", (rows,), (weight,), eps, None, False, "interleaved", backend, norm=True)[0].view(
        x.shape)


# Activations -------------------------------------------------------------------------------------------------------

class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, backend, x, other):  # type: ignore[override]
        ctx.module, ctx.op = _module(op, backend, x, other), op
        ctx.save_for_backward(x, other)
        return ctx.module.pointwise(op, x, other)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, other = ctx.saved_tensors
        dx, d_other = ctx.module.pointwise_backward(ctx.op, _unit(dy), x, other)
        return None, None, dx, d_other


def _pointwise(op: str, x: Tensor, other: Tensor | None, backend: Backend) -> Tensor:
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
        raise ValueError(f"{op}: both tensors must have one shape and dtype, got {tuple(x.shape)} {x.dtype} and "
                         f"{tuple(other.shape)} {other.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{op}: needs at least one dimension, got a scalar")
    x, other = _unit(x), None if other is None else _unit(other)
    if _wants_graph(x, other):
        return _Pointwise.apply(op, backend, x, other)
    return _module(op, backend, x, other).pointwise(op, x, other)


def gelu_tanh(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """GELU in its tanh form, ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, elementwise."""
    return _pointwise("gelu_tanh", x, None, backend)


def gelu_tanh_backward(dy: Tensor, x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``dy * gelu'(x)`` of the tanh form. No autograd graph."""
    if dy.shape != x.shape or x.dim() == 0:
        raise ValueError(f"gelu_tanh_backward: dy and x must have one shape, got {tuple(dy.shape)} and "
                         f"{tuple(x.shape)}")
    with torch.no_grad():
        return _module("gelu_tanh_backward", backend, dy, x).pointwise_backward("gelu_tanh", _unit(dy), _unit(x),
                                                                                None)[0]


def activation_slope(op: str, x: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """An activation (`gelu_tanh`, `gelu` or `silu`) and its derivative at x, in one pass. No autograd graph."""
    with torch.no_grad():
        return _module(op, backend, x).pointwise_slope(op, _unit(x))


def gelu(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """GELU in its exact form, ``x Phi(x)``, elementwise."""
    return _pointwise("gelu", x, None, backend)


def silu(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``x / (1 + exp(-x))``, elementwise."""
    return _pointwise("silu", x, None, backend)


def swiglu(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``silu(gate) * up``, elementwise, rounded once."""
    return _pointwise("swiglu", gate, up, backend)


# Gates -------------------------------------------------------------------------------------------------------------

def _check_gate(name: str, x: Tensor, gate: Tensor) -> None:
    if x.dim() < 2 or gate.dim() != 2 or gate.shape != (x.shape[0], x.shape[-1]):
        raise ValueError(f"{name}: needs x [B, ..., C] and gate [B, C], got {tuple(x.shape)} and {tuple(gate.shape)}")


def _tokens(x: Tensor) -> Tensor:
    """[B, ..., C] as [B, T, C] with unit stride in C; a view where strides allow it."""
    if x.dim() == 3:
        return _unit(x)
    return _unit(x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1]))


def scale_by_gate(x: Tensor, gate: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``gate[b] * x`` over ``[B, ..., C]``; no autograd graph (the backward of a gate calls it)."""
    _check_gate("scale_by_gate", x, gate)
    with torch.no_grad():
        return _module("scale_by_gate", backend, x, gate).gate(_tokens(x), _unit(gate), None).view(x.shape)


def column_sum(dy: Tensor, *, backend: Backend = "auto") -> Tensor:
    """fp32 ``[B, C]``: every sample's sum over tokens of ``[B, T, C]``, in an order fixed by T. No autograd graph."""
    if dy.dim() != 3:
        raise ValueError(f"column_sum: needs [B, T, C], got {tuple(dy.shape)}")
    with torch.no_grad():
        return _module("column_sum", backend, dy).column_sums(_unit(dy), None, None, None)


def gate_gradient(dout: Tensor, y: Tensor, *, backend: Backend = "auto") -> Tensor:
    """fp32 ``[B, C]``: every sample's sum over tokens of ``dout * y``, both ``[B, T, C]``. No autograd graph."""
    if dout.dim() != 3 or dout.shape != y.shape:
        raise ValueError(f"gate_gradient: needs two [B, T, C], got {tuple(dout.shape)} and {tuple(y.shape)}")
    with torch.no_grad():
        return _module("gate_gradient", backend, dout, y).column_sums(_unit(dout), _unit(y), None, None)


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, residual, gate, y):  # type: ignore[override]
        ctx.module = _module("gated_residual", backend, residual, gate, y)
        ctx.save_for_backward(gate, y)
        return ctx.module.gate(_tokens(y), gate, _tokens(residual)).view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[override]
        gate, y = ctx.saved_tensors
        _, need_residual, need_gate, need_y = ctx.needs_input_grad
        rows = _tokens(dout)
        d_gate = ctx.module.column_sums(rows, _tokens(y), None, None).to(gate.dtype) if need_gate else None
        dy = ctx.module.gate(rows, gate, None).view(dout.shape) if need_y else None
        return None, dout if need_residual else None, d_gate, dy


def gated_residual(residual: Tensor, gate: Tensor, y: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``residual + gate[b] * y`` over ``[B, ..., C]``, gate ``[B, C]``; rounded once.

    Guarantees: run, batch, position.
    """
    _check_gate("gated_residual", y, gate)
    if residual.shape != y.shape or residual.dtype != y.dtype:
        raise ValueError(f"gated_residual: residual and y must have one shape and dtype, got {tuple(residual.shape)} "
                         f"{residual.dtype} and {tuple(y.shape)} {y.dtype}")
    gate = _unit(gate)
    if _wants_graph(residual, gate, y):
        return _GatedResidual.apply(backend, residual, gate, y)  # type: ignore[return-value]
    module = _module("gated_residual", backend, residual, gate, y)
    return module.gate(_tokens(y), gate, _tokens(residual)).view(y.shape)


def add(a: Tensor, b: Tensor) -> Tensor:
    """``a + b``, rounded once; torch's own, since nothing is summed over."""
    return a + b


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a * b``, rounded once; torch's own, as `add`."""
    return a * b


# Rows of a loss ----------------------------------------------------------------------------------------------------

class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, num_dims):  # type: ignore[override]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.num_dims = num_dims
        lead, last = x.shape[:x.dim() - num_dims], x.shape[x.dim() - num_dims:]
        return _module("mean", backend, x).mean(x.contiguous().view(lead.numel(), last.numel())).view(lead)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        count = ctx.shape[len(ctx.shape) - ctx.num_dims:].numel()
        d = (dy / count).to(ctx.dtype)
        return None, d[(..., *(None,) * ctx.num_dims)].expand(ctx.shape), None


def mean(x: Tensor, num_dims: int, *, backend: Backend = "auto") -> Tensor:
    """fp32 mean over the last `num_dims` dimensions, in an order fixed by their size: the mean log-prob of a sample.

    Guarantees: run, batch, position.
    """
    if not 1 <= num_dims < x.dim() or 0 in x.shape[x.dim() - num_dims:]:
        raise ValueError(f"mean: needs 1 to {x.dim() - 1} non-empty dimensions of {tuple(x.shape)}, got {num_dims}")
    return _Mean.apply(backend, x, num_dims)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x):  # type: ignore[override]
        ctx.module = _module("log_softmax", backend, x)
        y, lse = ctx.module.log_softmax(x)
        # x and an fp32 number a row, not y: exp(y) of a y that was rounded to bf16 is off by as much as |y| * 2**-9.
        ctx.save_for_backward(x, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, lse = ctx.saved_tensors
        return None, ctx.module.log_softmax_backward(dy.contiguous(), x, lse)


def log_softmax(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """log_softmax over the last dimension of ``[..., V]``, one program a row, the row's sum in a fixed order.

    Guarantees: run, batch, position. NaN makes a row NaN, as in torch.
    """
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"log_softmax: needs a non-empty last dimension, got {tuple(x.shape)}")
    rows = _unit(x.reshape(x.shape[:-1].numel(), x.shape[-1]))
    return _LogSoftmax.apply(backend, rows).view(x.shape)


def timestep_embedding(timesteps: Tensor, dim: int, *, flip_sin_to_cos: bool = True, downscale_freq_shift: float = 0.0,
                       scale: float = 1.0, max_period: float = 10000.0) -> Tensor:
    """Sinusoidal embedding ``[B, dim]`` fp32 of timesteps ``[B]``; elementwise, so a row depends on its timestep only.

    Source: the form that diffusers' models were trained with (`get_timestep_embedding`).
    """
    if timesteps.dim() != 1 or dim < 2:
        raise ValueError(f"timestep_embedding: needs timesteps [B] and dim >= 2, got {tuple(timesteps.shape)}, {dim}")
    half = dim // 2
    if half == downscale_freq_shift:
        raise ValueError(f"timestep_embedding: dim // 2 and downscale_freq_shift are both {half}; frequencies divide "
                         "by their difference")
    exponent = -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = scale * (timesteps[:, None].float() * torch.exp(exponent / (half - downscale_freq_shift))[None])
    parts = (torch.cos(angles), torch.sin(angles)) if flip_sin_to_cos else (torch.sin(angles), torch.cos(angles))
    embedding = torch.cat(parts, 1)
    return torch.cat((embedding, embedding.new_zeros((len(embedding), 1))), 1) if dim % 2 else embedding
