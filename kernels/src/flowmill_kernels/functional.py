"""Linear layers with gradients: the Functions that rollout and training share, so that both are the same arithmetic.

In: activations, weights, an optional LoRA adapter, the epilogue. Out: the layer's output with an autograd graph. Every
product is one of gemm.py's, every weight gradient goes through gradients.py (per-sample sums in fixed leaves). A call
without gradients runs the same kernels and skips only what the backward would need.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collector import deliver, deliver_outer, deliver_outers
from .elementwise import (
    activation_slope,
    add,
    column_sum,
    gate_gradient,
    gelu,
    gelu_tanh,
    gelu_tanh_backward,
    multiply,
    scale_by_gate,
)
from .gemm import Backend, HeadNorm, Mode, gemm_nn, gemm_nt, gemm_nt_normed
from .schemes import NUM_SEGMENTS, Activation


@dataclass(frozen=True)
class KernelOptions:
    """How a model's layers are computed; the mode is part of the bits, the rest is not."""

    mode: Mode
    num_sms: int
    """SMs of the caller's partition."""
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.mode not in ("consistent", "tp_invariant"):
            raise ValueError(f"KernelOptions.mode must be 'consistent' or 'tp_invariant', got {self.mode!r}")
        if isinstance(self.num_sms, bool) or not isinstance(self.num_sms, int) or self.num_sms < 1:
            raise ValueError("KernelOptions.num_sms is the SM count of the caller's partition, a positive int; got "
                             f"{self.num_sms!r}")


@dataclass(frozen=True)
class Layer:
    """One linear layer: ``x @ weight.T + bias``, plus ``scale * (x @ lora_a.T) @ lora_b.T`` if it has an adapter."""

    weight: Tensor
    """[N, K]"""
    bias: Tensor | None = None
    """[N]"""
    lora_a: Tensor | None = None
    """[R, K]"""
    lora_b: Tensor | None = None
    """[N, R]"""
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.lora_a is None) != (self.lora_b is None):
            raise ValueError("Layer: lora_a and lora_b come together")
        if self.lora_a is not None and self.lora_b is not None:
            (n, k), (rank, a_k), (b_n, b_rank) = self.weight.shape, self.lora_a.shape, self.lora_b.shape
            if (a_k, b_n, b_rank) != (k, n, rank):
                raise ValueError(f"Layer: weight [{n}, {k}] needs lora_a [R, {k}] and lora_b [{n}, R], got "
                                 f"{tuple(self.lora_a.shape)} and {tuple(self.lora_b.shape)}")


@dataclass(frozen=True)
class _Call:
    """What a call is, apart from its tensors."""

    options: KernelOptions
    activation: Activation
    scales: tuple[float, ...]

    def mode_for(self, k: int) -> Mode:
        """`tp_invariant` needs K in 8 segments of whole steps; another layer is never sharded and stays consistent."""
        return self.options.mode if k % (16 * NUM_SEGMENTS) == 0 else "consistent"


_PER_LAYER = 4  # weight, bias, lora_a, lora_b


def _padded_rank(rank: int) -> int:
    return -(-rank // 16) * 16


def _stack_a(adapters: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """The down projections under each other, each padded with zero rows to whole tensor-core steps."""
    given = [a.to(dtype) for a in adapters if a is not None]
    if len(given) == 1 and given[0].shape[0] % 16 == 0:
        return given[0]
    parts = []
    for a in given:
        parts.append(a)
        if (missing := _padded_rank(a.shape[0]) - a.shape[0]):
            parts.append(a.new_zeros((missing, a.shape[1])))
    return torch.cat(parts)


def _pad_b(b: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, R] with zero columns up to whole tensor-core steps."""
    b = b.to(dtype)
    missing = _padded_rank(b.shape[1]) - b.shape[1]
    return torch.cat((b, b.new_zeros((b.shape[0], missing))), 1) if missing else b


def _columns(adapters: Sequence[Tensor | None]) -> list[slice | None]:
    """Where each layer's adapter lies in the stacked hidden rows."""
    places, at = [], 0
    for a in adapters:
        if a is None:
            places.append(None)
        else:
            places.append(slice(at, at + _padded_rank(a.shape[0])))
            at += _padded_rank(a.shape[0])
    return places


_ROWS: dict[tuple, Tensor] = {}  # a model has a handful of scales, and hundreds of calls a step


def _scale_row(scales: tuple[float, ...], widths: tuple[int, ...], device: torch.device) -> Tensor | None:
    """[1, sum of widths] fp32, each scale as often as its width says; None if all are 1."""
    if all(scale == 1.0 for scale in scales):
        return None
    key = scales, widths, device
    if (row := _ROWS.get(key)) is None:
        row = torch.cat([torch.full((1, width), scale, dtype=torch.float32, device=device)
                         for scale, width in zip(scales, widths, strict=True)], 1)
        if not (row.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph fills it only when it runs
            _ROWS[key] = row
    return row


def _down(call: _Call, x: Tensor, adapters: Sequence[Tensor | None], stacked: Tensor) -> Tensor:
    """``scale * x @ A.T`` of every adapter, side by side: x is read once."""
    parts = [(scale, place.stop - place.start)
             for scale, place in zip(call.scales, _columns(adapters), strict=True) if place is not None]
    scales, widths = zip(*parts, strict=True)
    options = call.options
    return gemm_nt(x, stacked, gate=_scale_row(scales, widths, x.device), mode=call.mode_for(x.shape[-1]),
                   num_sms=options.num_sms, backend=options.backend)


@dataclass(frozen=True)
class _Done:
    """What a forward made."""

    outputs: list[Tensor]
    """One a layer."""
    hidden: Tensor | None
    """The adapters' hidden rows, side by side."""
    stacked: Tensor | None
    """The adapters' down projections under each other."""
    pre: Tensor | None
    """What the activation took, if there is one."""
    rstds: list[Tensor | None]
    """[rows, heads] of every layer that ends in a norm."""


def _forward(call: _Call, x: Tensor, gate: Tensor | None, residual: Tensor | None, weights: Sequence[Tensor | None],
             norms: Sequence[HeadNorm | None] | None = None) -> _Done:
    """All layers of one input; `norms`: for each the norm that ends it, or None.

    The activation is a pass of its own over the rounded sum, in rollout too: training needs that sum for its backward,
    and fusing it into the product was no faster (kernels/README.md).
    """
    options, dtype = call.options, x.dtype
    adapters = weights[2::_PER_LAYER]
    hidden, stacked = None, None
    if any(a is not None for a in adapters):
        stacked = _stack_a(adapters, dtype)
        hidden = _down(call, x, adapters, stacked)
    outputs, rstds, pre = [], [], None
    mode = call.mode_for(x.shape[-1])
    common = {"num_sms": options.num_sms, "backend": options.backend}
    fused_gate, fused_residual = (gate, residual) if call.activation == "none" else (None, None)
    for i, place in enumerate(_columns(adapters)):
        weight, bias, _, lora_b = weights[i * _PER_LAYER:(i + 1) * _PER_LAYER]
        weight = weight.to(dtype)  # type: ignore[union-attr]
        second = None
        if place is not None:
            second = (hidden[..., place], _pad_b(lora_b, dtype))  # type: ignore[index,arg-type]
        rstd = None
        if norms is not None and (norm := norms[i]) is not None:
            y, rstd = gemm_nt_normed(x, weight, bias, norm, extra=second, **common)
        elif mode == "consistent" or second is None:
            y = gemm_nt(x, weight, bias, gate=fused_gate, residual=fused_residual, extra=second, mode=mode, **common)
        else:  # the tree is over K alone, so the adapter's product comes in as a rounded addend
            y = gemm_nt(x, weight, bias, residual=gemm_nt(*second, **common), mode=mode, **common)
            y = _gated(y, fused_gate, fused_residual, options)
        if call.activation != "none":
            pre = y
            y = _gated(gelu_tanh(pre, backend=options.backend), gate, residual, options)
        outputs.append(y)
        rstds.append(rstd)
    return _Done(outputs, hidden, stacked, pre, rstds)


def _gated(y: Tensor, gate: Tensor | None, residual: Tensor | None, options: KernelOptions) -> Tensor:
    if gate is not None:
        y = scale_by_gate(y, gate, backend=options.backend)
    return y if residual is None else add(residual, y)


def _samples(t: Tensor) -> Tensor:
    """[S, T, C]: the first dimension counts samples."""
    return t.flatten(1, -2) if t.dim() != 2 else t.unsqueeze(1)


class _Linears(torch.autograd.Function):
    """Layers that share an input; see `linears` and `linear`."""

    @staticmethod
    def forward(ctx, call: _Call, x: Tensor, gate: Tensor | None, residual: Tensor | None,  # type: ignore[override]
                *weights: Tensor | None) -> tuple[Tensor, ...]:
        done = _forward(call, x, gate, residual, weights)
        ctx.call = call
        ctx.save_for_backward(x, gate, done.hidden, done.stacked, done.pre, *weights)
        return tuple(done.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        x, gate, hidden, stacked, pre, *weights = ctx.saved_tensors
        call = ctx.call
        _, need_x, need_gate, need_residual, *need = ctx.needs_input_grad
        d_gate, d_residual = None, grads[0] if need_residual else None
        dys = [None if g is None else g.contiguous() for g in grads]
        if gate is not None and dys[0] is not None:
            dys[0], d_gate = _through_gate(call, x, gate, dys[0], weights, need_gate)
        if call.activation != "none" and dys[0] is not None:
            dys[0] = gelu_tanh_backward(dys[0], pre, backend=call.options.backend)
        d_x, d_weights = _backward_products(call, x, hidden, stacked, weights, dys, need_x, need)
        return (None, d_x, d_gate, d_residual, *d_weights)


def _through_gate(call: _Call, x: Tensor, gate: Tensor, dy: Tensor, weights: Sequence[Tensor | None], need_gate: bool
                  ) -> tuple[Tensor, Tensor | None]:
    """A gradient behind a layer's gate, and the gate's own if it is needed."""
    d_gate = None
    if need_gate:  # the fused epilogue never wrote what the gate scales, so it is computed once more
        (y,) = _forward(call, x, None, None, weights).outputs
        d_gate = gate_gradient(_samples(dy), _samples(y), backend=call.options.backend).to(gate.dtype)
    return scale_by_gate(dy, gate, backend=call.options.backend), d_gate


def _sum_of_products(products: list[tuple[Tensor, Tensor]], call: _Call, slope: Tensor | None = None) -> Tensor | None:
    """Sum of dy @ w, times `slope` [..., K] an element, in as few kernels as the mode allows: up to four products share
    one accumulator, and the last kernel multiplies, unless it also adds what another one summed."""
    common = {"num_sms": call.options.num_sms, "backend": call.options.backend}
    one_kernel = len(products) == 1 or (call.options.mode == "consistent" and len(products) <= 4
                                        and all(w.shape[0] % 16 == 0 for _, w in products[1:]))
    if slope is not None and one_kernel:
        (dy, w), *extras = products
        return gemm_nn(dy, w, gate=slope.reshape(-1, slope.shape[-1]), extra=extras or None,
                       mode=call.mode_for(dy.shape[-1]), **common)
    if slope is not None:
        total = _sum_of_products(products, call)
        return None if total is None else multiply(total, slope)
    if call.options.mode == "tp_invariant":
        total = None
        for dy, w in products:
            total = gemm_nn(dy, w, residual=total, mode=call.mode_for(dy.shape[-1]), **common)
        return total
    total, rest = None, list(products)
    while rest:
        (dy, w), extras = rest.pop(0), []
        while rest and len(extras) < 3 and rest[0][1].shape[0] % 16 == 0:
            extras.append(rest.pop(0))
        total = gemm_nn(dy, w, extra=extras or None, residual=total, **common)
    return total


def _backward_products(call: _Call, x: Tensor, hidden: Tensor | None, stacked: Tensor | None,
                       weights: Sequence[Tensor | None], dys: Sequence[Tensor | None], need_x: bool,
                       need: Sequence[bool], slope: Tensor | None = None) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (times `slope` if given), and every weight's gradient (None where a collector took it or nobody asked)."""
    options, dtype = call.options, x.dtype
    common = {"num_sms": options.num_sms, "backend": options.backend}
    adapters = weights[2::_PER_LAYER]
    d_weights: list[Tensor | None] = [None] * len(weights)
    products: list[tuple[Tensor, Tensor]] = []
    d_hidden, downs = None, []  # where adapters' down projections lie in `weights`, and in the hidden rows
    xs = _samples(x)
    for i, (place, dy) in enumerate(zip(_columns(adapters), dys, strict=True)):
        at = i * _PER_LAYER
        weight, bias, _, lora_b = weights[at:at + _PER_LAYER]
        need_w, need_bias, need_a, need_b = need[at:at + _PER_LAYER]
        if place is not None and d_hidden is None:
            d_hidden = torch.empty_like(hidden)  # type: ignore[arg-type]
        if dy is None:
            if place is not None:
                d_hidden[..., place] = 0  # type: ignore[index]
            continue
        dy_s = _samples(dy)
        if need_w:
            d_weights[at] = deliver_outer(weight, dy_s, xs)
        if need_bias:
            d_weights[at + 1] = deliver(bias, column_sum(dy_s, backend=options.backend))
        if place is not None:
            if need_b:  # hidden holds the scale already
                own = hidden[..., place.start:place.start + lora_b.shape[1]]  # type: ignore[index]
                d_weights[at + 3] = deliver_outer(lora_b, dy_s, _samples(own))
            if need_a or need_x:
                scale = _scale_row(call.scales[i:i + 1], (place.stop - place.start,), dy.device)
                gemm_nn(dy, _pad_b(lora_b, dtype), gate=scale, out=d_hidden[..., place],  # type: ignore[index]
                        mode=call.mode_for(dy.shape[-1]), **common)
            if need_a:
                downs.append((at + 2, place))
        if need_x:
            products.append((dy, weight.to(dtype)))
    if downs and len({weights[at].shape for at, _ in downs}) == 1 and all(  # type: ignore[union-attr]
            place.stop - place.start == weights[at].shape[0] for at, place in downs) and all(  # type: ignore[union-attr]
            one[1].stop == other[1].start for one, other in itertools.pairwise(downs)):
        columns = slice(downs[0][1].start, downs[-1][1].stop)  # side by side, without padding between them
        found = deliver_outers([weights[at] for at, _ in downs], _samples(d_hidden[..., columns]), xs)  # type: ignore[index,misc]
        for (at, _), gradient in zip(downs, found, strict=True):
            d_weights[at] = gradient
    else:
        for at, place in downs:
            own = d_hidden[..., place.start:place.start + weights[at].shape[0]]  # type: ignore[index,union-attr]
            d_weights[at] = deliver_outer(weights[at], _samples(own), xs)  # type: ignore[arg-type]
    if need_x and d_hidden is not None:
        products.append((d_hidden, stacked))  # type: ignore[arg-type]
    d_x = _sum_of_products(products, call, slope) if need_x else None
    return d_x, d_weights


class _FeedForward(torch.autograd.Function):
    """Two layers and the activation between them; see `feed_forward`."""

    @staticmethod
    def forward(ctx, first: _Call, second: _Call, activation: str, x: Tensor, gate: Tensor | None,  # type: ignore[override]
                residual: Tensor | None, *weights: Tensor | None) -> Tensor:
        one = _forward(first, x, None, None, weights[:_PER_LAYER])
        # What the backward needs of the sum is the slope there, which then goes into the end of a product.
        h, slope = activation_slope(activation, one.outputs[0], backend=first.options.backend)
        two = _forward(second, h, gate, residual, weights[_PER_LAYER:])
        need_gate, need_second = ctx.needs_input_grad[4], ctx.needs_input_grad[6 + _PER_LAYER:]
        ctx.first, ctx.second = first, second
        ctx.save_for_backward(x, h if need_gate or any(need_second) else None, gate, slope, one.hidden,
                              one.stacked, two.hidden, two.stacked, *weights)
        return two.outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, h, gate, slope, hidden, stacked, hidden_2, stacked_2, *weights = ctx.saved_tensors
        _, _, _, need_x, need_gate, need_residual, *need = ctx.needs_input_grad
        d_gate, dy = None, grad.contiguous()
        if gate is not None:
            dy, d_gate = _through_gate(ctx.second, h, gate, dy, weights[_PER_LAYER:], need_gate)
        need_u = need_x or any(need[:_PER_LAYER])
        # Where no gradient asks for h, its place is taken by a tensor of its shape.
        d_u, d_second = _backward_products(ctx.second, slope if h is None else h, hidden_2, stacked_2,
                                           weights[_PER_LAYER:], [dy], need_u, need[_PER_LAYER:], slope)
        d_x, d_first = None, [None] * _PER_LAYER
        if need_u:
            d_x, d_first = _backward_products(ctx.first, x, hidden, stacked, weights[:_PER_LAYER], [d_u], need_x,
                                              need[:_PER_LAYER])
        return (None, None, None, d_x, d_gate, grad if need_residual else None, *d_first, *d_second)


def _prepare(x: Tensor) -> Tensor:
    """x in the dtype of the products: autocast's where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _check_end(x: Tensor, layer: Layer, gate: Tensor | None, residual: Tensor | None) -> Tensor | None:
    """A layer's residual in x's dtype; refuses a gate of another shape."""
    if gate is not None and gate.shape != (x.shape[0], layer.weight.shape[0]):
        raise ValueError(f"linear: gate must be [B, N] = [{x.shape[0]}, {layer.weight.shape[0]}], got "
                         f"{tuple(gate.shape)}")
    return residual if residual is None or residual.dtype == x.dtype else residual.to(x.dtype)


def linears(x: Tensor, layers: Sequence[Layer], *, options: KernelOptions, activation: Activation = "none",
            gate: Tensor | None = None, residual: Tensor | None = None) -> tuple[Tensor, ...]:
    """Several linear layers of one input (q, k and v): the adapters' down projections read x once.

    Args:
        x: ``[B, ..., K]``; its first dimension counts samples, each with its own gradient sum. Do not flatten tokens
            into it: a micro-batch's edge would then cut samples.
        layers: Weights are cast to x's dtype (bf16 or fp16; on the CPU also fp32); gradients come back in their own.
        activation, gate, residual: The epilogue of `gemm_nt`, for a single layer.

    Returns:
        One ``[B, ..., N]`` tensor a layer.

    Raises:
        ValueError: for an epilogue with several layers, and what `gemm_nt` refuses.

    Guarantees: those of `gemm_nt` in both directions; weight gradients those of `leaf_sum`. With an adapter the bits
    differ from those of a merged weight: the merged one is rounded before the product.
    """
    if len(layers) != 1 and (activation != "none" or gate is not None or residual is not None):
        raise ValueError(f"linears: an activation, gate or residual goes with one layer, got {len(layers)}")
    x = _prepare(x)
    residual = _check_end(x, layers[0], gate, residual)
    call = _Call(options, activation, tuple(layer.lora_scale for layer in layers))
    weights = [t for layer in layers for t in (layer.weight, layer.bias, layer.lora_a, layer.lora_b)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, residual, *weights)):
        return _Linears.apply(call, x, gate, residual, *weights)
    return tuple(_forward(call, x, gate, residual, weights).outputs)


def linear(x: Tensor, layer: Layer, *, options: KernelOptions, activation: Activation = "none",
           gate: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """One linear layer, ``residual + gate * activation(x @ W.T + adapter + bias)``; see `linears`.

    Args:
        gate: ``[B, N]``, one row a sample. Its gradient costs one more product of the layer.
        residual: Shape of the output.
    """
    return linears(x, (layer,), options=options, activation=activation, gate=gate, residual=residual)[0]


def feed_forward(x: Tensor, first: Layer, second: Layer, *, options: KernelOptions,
                 activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh", gate: Tensor | None = None,
                 residual: Tensor | None = None) -> Tensor:
    """``residual + gate * second(activation(first(x)))``: the bits of two `linear`s with the activation between them.

    For a backward it keeps the activation's slope, rounded to x's dtype, in place of the sum and of the activation; the
    slope is multiplied into the end of the second layer's dgrad, which saves a pass over the widest tensor of a block.

    Args:
        x, gate, residual: As in `linear`; ``[B, ..., K]``, ``[B, N]``, ``[B, ..., N]``.
        first: ``[H, K]``, each layer with or without an adapter.
        second: ``[N, H]``

    Raises:
        ValueError: for layers that do not fit together, another activation, and what `gemm_nt` refuses.
    """
    if activation not in ("gelu_tanh", "gelu"):
        raise ValueError(f"feed_forward: activation must be 'gelu_tanh' or 'gelu', got {activation!r}")
    if second.weight.shape[1] != first.weight.shape[0]:
        raise ValueError(f"feed_forward: second takes {second.weight.shape[1]} channels and first gives "
                         f"{first.weight.shape[0]}")
    x = _prepare(x)
    layers = (first, second)
    weights = [t for layer in layers for t in (layer.weight, layer.bias, layer.lora_a, layer.lora_b)]
    if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in (x, gate, residual, *weights)):
        u = linear(x, first, options=options)
        h = (gelu_tanh if activation == "gelu_tanh" else gelu)(u, backend=options.backend)
        return linear(h, second, options=options, gate=gate, residual=residual)
    residual = _check_end(x, second, gate, residual)
    calls = [_Call(options, "none", (layer.lora_scale,)) for layer in layers]
    return _FeedForward.apply(*calls, activation, x, gate, residual, *weights)  # type: ignore[return-value]


def patch_embed(x: Tensor, layer: Layer, patch: Sequence[int], *, options: KernelOptions) -> Tensor:
    """A convolution whose kernel is its stride, as a product over patches.

    Args:
        x: ``[B, C, *sizes]`` with two or three sizes, multiples of `patch`.
        layer: weight ``[N, C * prod(patch)]``, the flattened kernel of the convolution.

    Returns:
        ``[B, prod(sizes / patch), N]``, patches in row-major order.
    """
    sizes = x.shape[2:]
    if len(sizes) != len(patch) or any(size % p for size, p in zip(sizes, patch, strict=True)):
        raise ValueError(f"patch_embed: x is {tuple(x.shape)}; its last {len(patch)} sizes must be multiples of the "
                         f"patch {tuple(patch)}")
    split: list[int] = []
    for size, p in zip(sizes, patch, strict=True):
        split += [size // p, p]
    grid = range(2, 2 + 2 * len(patch), 2)
    blocks = x.reshape(*x.shape[:2], *split).permute(0, *grid, 1, *(i + 1 for i in grid))
    count = 1
    for i in grid:
        count *= split[i - 2]
    return linear(blocks.reshape(x.shape[0], count, layer.weight.shape[1]), layer, options=options)


@torch.no_grad()
def merged(layer: Layer, *, options: KernelOptions) -> Layer:
    """The layer with its adapter added into the weight: one product less in every call, and other bits.

    The sum W + scale * B @ A is rounded to the weight's dtype, so outputs differ from the unmerged layer's by that
    rounding; they are still equal for every batch, position and SM count. Never roll out merged and train unmerged.
    """
    if layer.lora_a is None or layer.lora_b is None:
        return layer
    dtype = layer.weight.dtype
    up = _pad_b(layer.lora_b.float() * layer.lora_scale, dtype)
    weight = gemm_nn(up, _stack_a([layer.lora_a], dtype), residual=layer.weight, num_sms=options.num_sms,
                     backend=options.backend)
    return Layer(weight, layer.bias)
