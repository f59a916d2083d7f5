"""The operators of a transformer block that are no product: norms, modulation, rotary embedding, activations, gates.

In: activations [B, ..., C] whose first dimension counts samples. Out: the same, with an autograd graph where one is
asked for. Rollout and training call the same functions, so both are the same arithmetic: fp32 between one load and one
rounding. A row's bits depend on that row (and its sample's modulation); a per-sample gradient's on that sample's
tokens. Parameters' gradients are per-sample sums that gradients.py adds in fixed leaves.
"""

from types import ModuleType

import torch
from torch import Tensor

from . import cpu_backend
from .gemm import Backend, _choose_backend
from .gradients import deliver

Rope = tuple[Tensor, Tensor]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _module(name: str, backend: Backend, *tensors: Tensor | None) -> ModuleType:
    """The back end for these tensors; see `_choose_backend` for what it raises."""
    given = tuple(t for t in tensors if t is not None)
    for t in given:
        if t.dtype not in _DTYPES:
            raise TypeError(f"{name}: tensors must be bf16, fp16 or fp32, got {t.dtype}. Cast first")
    if _choose_backend(name, backend, given) == "cpu":
        return cpu_backend
    from . import triton_elementwise

    return triton_elementwise


def _unit(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension; most callers' views already have it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _wants_graph(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# LayerNorm and modulation ------------------------------------------------------------------------------------------

class _NormModulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, backend, eps, x, scale, shift, scale2, shift2, weight, bias):  # type: ignore[override]
        ctx.module, ctx.eps = _module(name, backend, x, scale, shift, weight), eps
        ctx.save_for_backward(x, scale, scale2, weight, bias)
        ctx.two = scale2 is not None
        ctx.set_materialize_grads(False)
        y, y2 = ctx.module.norm_modulate(x, scale, shift, scale2, shift2, weight, bias, eps)
        # x comes out as well: what its other readers send back is then added in the same kernel.
        return (y, y2, x.view_as(x)) if ctx.two else (y, x.view_as(x))

    @staticmethod
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
            factor = 1.0 if s is None else 1.0 + s.float()
            if need_weight:
                per_sample_weight.append(times * factor)  # type: ignore[operator]
            if need_bias:
                per_sample_bias.append(plain * factor)  # type: ignore[operator]
        d_weight = deliver(weight, sum(per_sample_weight[1:], per_sample_weight[0])) if need_weight else None
        d_bias = deliver(bias, sum(per_sample_bias[1:], per_sample_bias[0])) if need_bias else None
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
    x, scale, shift, scale2, shift2 = (t if t is None else _unit(t) for t in (x, scale, shift, scale2, shift2))
    if _wants_graph(x, scale, shift, scale2, shift2, weight, bias):
        results = _NormModulate.apply(name, backend, eps, x, scale, shift, scale2, shift2, weight, bias)
    else:
        module = _module(name, backend, x, scale, shift, weight)
        y, y2 = module.norm_modulate(x, scale, shift, scale2, shift2, weight, bias, eps)  # type: ignore[arg-type]
        results = (y, x) if y2 is None else (y, y2, x)
    results = results if keep else results[:-1]
    return results[0] if len(results) == 1 else results


# RMS norm and rotary embedding -------------------------------------------------------------------------------------

class _RmsRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, backend, eps, rope, half, over_all, norm, count, *tensors):  # type: ignore[override]
        xs, weights = tensors[:count], tensors[count:]
        ctx.module = _module(name, backend, *tensors)
        ctx.settings = eps, rope, half, over_all, norm
        ctx.count = count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)
        ctx.module.rms_rope(xs, weights, eps, rope, half, over_all, norm, outs)
        return outs

    @staticmethod
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
              over_all: bool, rope_layout: str, backend: Backend) -> tuple[Tensor, ...]:
    first = xs[0]
    if first.dim() != 4 or any(x.shape != first.shape or x.dtype != first.dtype for x in xs):
        raise ValueError(f"{name}: needs [B, T, H, D] tensors of one shape and dtype, got "
                         f"{[(tuple(x.shape), x.dtype) for x in xs]}")
    batch, tokens, heads, dims = first.shape
    wanted = (heads * dims,) if over_all else (dims,)
    if len({w is None for w in weights}) != 1:
        raise ValueError(f"{name}: give a weight to each tensor or to none")
    for w in weights:
        if w is not None and tuple(w.shape) != wanted:
            raise ValueError(f"{name}: a weight must be {list(wanted)}, got {tuple(w.shape)}")
    if rope_layout not in ("interleaved", "half"):
        raise ValueError(f"{name}: rope_layout must be 'interleaved' or 'half', got {rope_layout!r}")
    if rope is not None:
        for t in rope:
            if tuple(t.shape) not in ((tokens, dims // 2), (batch, tokens, dims // 2)) or dims % 2:
                raise ValueError(f"{name}: rope must be (cos, sin), each [T, D/2] or [B, T, D/2] of "
                                 f"x {tuple(first.shape)}, got {tuple(t.shape)}")
            if t.dtype != torch.float32 or t.requires_grad:
                raise TypeError(f"{name}: rope tables must be fp32 without gradient, got {t.dtype}")
        rope = (rope[0].contiguous(), rope[1].contiguous())
        if rope_layout == "half" and dims & (dims - 1):
            raise ValueError(f"{name}: rope_layout 'half' needs a power of two of channels a head, got {dims}")
    xs = tuple(_unit(x) for x in xs)
    norm, half = weights[0] is not None, rope_layout == "half"
    if _wants_graph(*xs, *weights):
        return _RmsRope.apply(name, backend, eps, rope, half, over_all, norm, len(xs), *xs, *weights)
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)
    _module(name, backend, *xs, *weights).rms_rope(xs, weights, eps, rope, half, over_all, norm, outs)
    return outs


def qk_norm_rope(x: Tensor, weight: Tensor | None, *, eps: float, rope: Rope | None = None, norm: str = "head",
                 rope_layout: str = "interleaved", backend: Backend = "auto") -> Tensor:
    """RMS norm of queries or keys, then rotary embedding; fp32 in between.

    Args:
        x: ``[B, T, H, D]``, any strides with unit stride in D.
        weight: ``[D]`` (`norm="head"`: over D) or ``[H * D]`` (`norm="all"`: over all heads); None: no norm.
        rope: (cos, sin), each ``[T, D/2]`` or ``[B, T, D/2]`` fp32; a pair (a, b) becomes (a c - b s, a s + b c).
        rope_layout: `interleaved`: pairs are neighbours (FLUX, Qwen-Image, Wan); `half`: channel i with i + D/2.

    Returns:
        Contiguous ``[B, T, H, D]`` of x's dtype.

    Guarantees: run, batch, position. Error: one rounding plus the fp32 sum of the norm.
    """
    if norm not in ("head", "all"):
        raise ValueError(f"qk_norm_rope: norm must be 'head' or 'all', got {norm!r}")
    return _rms_rope("qk_norm_rope", (x,), (weight,), eps, rope, norm == "all", rope_layout, backend)[0]


def qk_norm_rope_pair(q: Tensor, k: Tensor, weight_q: Tensor | None, weight_k: Tensor | None, *, eps: float,
                      rope: Rope | None = None, rope_layout: str = "interleaved", backend: Backend = "auto"
                      ) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of q and k of one shape in one launch; norms are per head."""
    q, k = _rms_rope("qk_norm_rope_pair", (q, k), (weight_q, weight_k), eps, rope, False, rope_layout, backend)
    return q, k


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, backend: Backend = "auto") -> Tensor:
    """RMS norm over the last dimension of ``[B, ..., C]``; weight ``[C]`` or None (then a weight of ones)."""
    if x.dim() < 2:
        raise ValueError(f"rms_norm: x must be [B, ..., C], got {tuple(x.shape)}")
    if weight is None:
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    rows = x.reshape(x.shape[0], -1, 1, x.shape[-1])
    return _rms_rope("rms_norm", (rows,), (weight,), eps, None, False, "interleaved", backend)[0].view(x.shape)


# Activations -------------------------------------------------------------------------------------------------------

class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, backend, x, other):  # type: ignore[override]
        ctx.module, ctx.op = _module(op, backend, x, other), op
        ctx.save_for_backward(x, other)
        return ctx.module.pointwise(op, x, other)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, other = ctx.saved_tensors
        dx, d_other = ctx.module.pointwise_backward(ctx.op, dy.contiguous(), x, other)
        return None, None, dx, d_other


def _pointwise(op: str, x: Tensor, other: Tensor | None, backend: Backend) -> Tensor:
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
        raise ValueError(f"{op}: both tensors must have one shape and dtype, got {tuple(x.shape)} {x.dtype} and "
                         f"{tuple(other.shape)} {other.dtype}")
    x, other = x.contiguous(), None if other is None else other.contiguous()
    if _wants_graph(x, other):
        return _Pointwise.apply(op, backend, x, other)
    return _module(op, backend, x, other).pointwise(op, x, other)


def gelu_tanh(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """GELU in its tanh form, ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, elementwise."""
    return _pointwise("gelu_tanh", x, None, backend)


def gelu_tanh_backward(dy: Tensor, x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``dy * gelu'(x)`` of the tanh form."""
    return _module("gelu_tanh_backward", backend, dy, x).pointwise_backward("gelu_tanh", dy.contiguous(),
                                                                            x.contiguous(), None)[0]


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


def scale_by_gate(x: Tensor, gate: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``gate[b] * x`` over ``[B, ..., C]``; no autograd graph (the backward of a gate calls it)."""
    _check_gate("scale_by_gate", x, gate)
    rows = x.contiguous().view(x.shape[0], -1, x.shape[-1])
    return _module("scale_by_gate", backend, x, gate).gate(rows, _unit(gate), None).view(x.shape)


def column_sum(dy: Tensor, *, backend: Backend = "auto") -> Tensor:
    """fp32 ``[B, C]``: every sample's sum over tokens of ``[B, T, C]``, in an order fixed by T. No autograd graph."""
    if dy.dim() != 3:
        raise ValueError(f"column_sum: needs [B, T, C], got {tuple(dy.shape)}")
    return _module("column_sum", backend, dy).column_sums(_unit(dy), None, None, None)


def gate_gradient(dout: Tensor, y: Tensor, *, backend: Backend = "auto") -> Tensor:
    """fp32 ``[B, C]``: every sample's sum over tokens of ``dout * y``, both ``[B, T, C]``. No autograd graph."""
    if dout.dim() != 3 or dout.shape != y.shape:
        raise ValueError(f"gate_gradient: needs two [B, T, C], got {tuple(dout.shape)} and {tuple(y.shape)}")
    return _module("gate_gradient", backend, dout, y).column_sums(_unit(dout), _unit(y), None, None)


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, residual, gate, y):  # type: ignore[override]
        ctx.module = _module("gated_residual", backend, residual, gate, y)
        ctx.save_for_backward(gate, y)
        rows = [t.view(t.shape[0], -1, t.shape[-1]) for t in (y, residual)]
        return ctx.module.gate(rows[0], gate, rows[1]).view(y.shape)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        gate, y = ctx.saved_tensors
        dout = dout.contiguous()
        rows = dout.view(dout.shape[0], -1, dout.shape[-1])
        _, need_residual, need_gate, need_y = ctx.needs_input_grad
        d_gate = ctx.module.column_sums(rows, y.view(rows.shape), None, None).to(gate.dtype) if need_gate else None
        dy = ctx.module.gate(rows, gate, None).view(dout.shape) if need_y else None
        return None, dout if need_residual else None, d_gate, dy


def gated_residual(residual: Tensor, gate: Tensor, y: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``residual + gate[b] * y`` over ``[B, ..., C]``, gate ``[B, C]``; rounded once."""
    _check_gate("gated_residual", y, gate)
    if residual.shape != y.shape or residual.dtype != y.dtype:
        raise ValueError(f"gated_residual: residual and y must have one shape and dtype, got {tuple(residual.shape)} "
                         f"{residual.dtype} and {tuple(y.shape)} {y.dtype}")
    return _GatedResidual.apply(backend, residual.contiguous(), _unit(gate), y.contiguous())


def add(a: Tensor, b: Tensor) -> Tensor:
    """``a + b``, rounded once; torch's own, since nothing is summed over."""
    return a + b


# Rows of a loss ----------------------------------------------------------------------------------------------------

class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, num_dims):  # type: ignore[override]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.num_dims = num_dims
        lead = x.shape[:x.dim() - num_dims]
        rows = 1
        for size in lead:
            rows *= size
        return _module("mean", backend, x).mean(x.contiguous().view(rows, -1)).view(lead)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        count = 1
        for size in ctx.shape[len(ctx.shape) - ctx.num_dims:]:
            count *= size
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
        y = ctx.module.log_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return None, ctx.module.log_softmax_backward(dy.contiguous(), y)


def log_softmax(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """log_softmax over the last dimension of ``[..., V]``, one program a row, the row's sum in a fixed order.

    Guarantees: run, batch, position. NaN makes a row NaN, as in torch.
    """
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"log_softmax: needs a non-empty last dimension, got {tuple(x.shape)}")
    return _LogSoftmax.apply(backend, x.reshape(-1, x.shape[-1])).view(x.shape)


def timestep_embedding(timesteps: Tensor, dim: int, *, flip_sin_to_cos: bool = True, downscale_freq_shift: float = 0.0,
                       scale: float = 1.0, max_period: float = 10000.0) -> Tensor:
    """Sinusoidal embedding ``[B, dim]`` fp32 of timesteps ``[B]``; elementwise, so a row depends on its timestep only.

    Source: the form that diffusers' models were trained with (`get_timestep_embedding`).
    """
    if timesteps.dim() != 1 or dim < 2:
        raise ValueError(f"timestep_embedding: needs timesteps [B] and dim >= 2, got {tuple(timesteps.shape)}, {dim}")
    half = dim // 2
    exponent = -torch.log(torch.tensor(max_period)).item() * torch.arange(half, dtype=torch.float32,
                                                                         device=timesteps.device)
    angles = scale * (timesteps[:, None].float() * torch.exp(exponent / (half - downscale_freq_shift))[None])
    parts = (torch.cos(angles), torch.sin(angles)) if flip_sin_to_cos else (torch.sin(angles), torch.cos(angles))
    embedding = torch.cat(parts, 1)
    return torch.cat((embedding, embedding.new_zeros((len(embedding), 1))), 1) if dim % 2 else embedding
