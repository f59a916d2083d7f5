"""Attention whose bits depend on nothing but the sample: full, joint over two segments, and causal.

In: q, k, v [B, T, H, D], each one tensor or a pair of segments (image and text) that are never concatenated. Out: one
[B, T, H, D] a query segment, with an autograd graph. torch's own back ends change a sample's bits with the batch, the
padding or the run (kernels/README.md has the measurement), hence these.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cpu_backend
from .gemm import Backend, _choose_backend

Segments = Tensor | Sequence[Tensor]
Lengths = Tensor | Sequence[Tensor | None] | None


def _module(backend: Backend, tensors: tuple[Tensor, ...]) -> ModuleType:
    if _choose_backend("attention", backend, tensors) == "cpu":
        return cpu_backend
    from . import triton_attention

    return triton_attention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, causal, scale, lengths, counts, more, *tensors):  # type: ignore[override]
        num_q, num_k = counts
        qs, ks, vs = tensors[:num_q], tensors[num_q:num_q + num_k], tensors[num_q + num_k:]
        outs, lses = module.forward(qs, ks, vs, lengths, causal, scale, True, **more)
        ctx.module, ctx.settings, ctx.counts, ctx.more = module, (causal, scale), counts, more
        ctx.save_for_backward(*tensors, *outs, *lses, *lengths)
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        num_q, num_k = ctx.counts
        saved = ctx.saved_tensors
        qs, ks, vs = saved[:num_q], saved[num_q:num_q + num_k], saved[num_q + num_k:num_q + 2 * num_k]
        rest = saved[num_q + 2 * num_k:]
        outs, lses, lengths = rest[:num_q], rest[num_q:2 * num_q], rest[2 * num_q:]
        douts = tuple(torch.zeros_like(out) if g is None else g.contiguous()
                      for g, out in zip(grads, outs, strict=True))
        causal, scale = ctx.settings
        dqs, dks, dvs = ctx.module.backward(douts, qs, ks, vs, outs, lses, lengths, causal, scale, **ctx.more)
        return None, None, None, None, None, None, *dqs, *dks, *dvs


def _tuple(segments: Segments, label: str) -> tuple[Tensor, ...]:
    given = (segments,) if isinstance(segments, Tensor) else tuple(segments)
    if len(given) not in (1, 2):
        raise ValueError(f"attention: {label} must be one tensor or two segments, got {len(given)}")
    return given


def _check(qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...]) -> None:
    first = qs[0]
    for label, tensors in (("q", qs), ("k", ks), ("v", vs)):
        for t in tensors:
            if t.dim() != 4 or t.shape[0] != first.shape[0] or t.shape[2:] != first.shape[2:]:
                raise ValueError(f"attention: {label} must be [B, T, H, D] = [{first.shape[0]}, T, "
                                 f"{', '.join(map(str, first.shape[2:]))}] like q, got {tuple(t.shape)}")
            if t.dtype != first.dtype or t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise TypeError(f"attention: {label} is {t.dtype}; q, k and v must all be bf16 or fp16 (on the CPU "
                                "also fp32) of one kind")
    if len(ks) != len(vs) or any(k.shape != v.shape for k, v in zip(ks, vs, strict=True)):
        raise ValueError(f"attention: k and v must have the same segments, got {[tuple(k.shape) for k in ks]} and "
                         f"{[tuple(v.shape) for v in vs]}")
    if not 1 <= first.shape[3] <= 256:
        raise ValueError(f"attention: at most 256 channels a head, got {first.shape[3]}")


def _check_lengths(lengths: Sequence[Tensor | None], ks: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    if len(lengths) != len(ks):
        raise ValueError(f"attention: lengths must be given a key segment ({len(ks)}), got {len(lengths)}")
    for length, k in zip(lengths, ks, strict=True):
        if length is None:
            continue
        if length.dtype != torch.int32 or tuple(length.shape) != (k.shape[0],) or length.device != k.device:
            raise ValueError(f"attention: lengths must be int32 [{k.shape[0]}] on {k.device}, got {length.dtype} "
                             f"{tuple(length.shape)} on {length.device}")
    return tuple(lengths)


@overload
def attention(q: Tensor, k: Segments, v: Segments, *, lengths: Lengths = None, causal: bool = False,
              scale: float | None = None, num_sms: int, backend: Backend = "auto") -> Tensor: ...


@overload
def attention(q: Sequence[Tensor], k: Segments, v: Segments, *, lengths: Lengths = None, causal: bool = False,
              scale: float | None = None, num_sms: int, backend: Backend = "auto") -> tuple[Tensor, ...]: ...


def attention(q: Segments, k: Segments, v: Segments, *, lengths: Lengths = None, causal: bool = False,
              scale: float | None = None, num_sms: int, backend: Backend = "auto") -> Tensor | tuple[Tensor, ...]:
    """softmax(q k^T * scale) v for every head; every query segment sees all key segments.

    Args:
        q, k, v: ``[B, T, H, D]`` each, or a pair of such segments; bf16 or fp16 (on the CPU also fp32), unit stride in
            D. Slices of a packed projection are not copied. D is 64 or 128 for speed, any up to 256.
        lengths: int32 ``[B]`` (a pair of them or None for two key segments), between 0 and T (larger ones count as T,
            negative ones as 0: looking would make the host wait): keys from lengths[b] on do not exist for sample b, so
            padding never reaches a bit, whatever stands there. Queries there are computed like others and have to be
            finite if their sample's gradients are wanted; a sample without any key gives zeros.
        causal: Query i sees keys j <= i + Tk - Tq; one segment each, Tq <= Tk, no lengths. Decoding from a cache (Tq of
            1 or a few) gives prefill's bits.
        scale: Default D ** -0.5.
        num_sms: SMs of the caller's partition; never read from the device, and no part of the bits. The CPU back end
            ignores it.

    Returns:
        Contiguous ``[B, T, H, D]`` of q's dtype for every query segment: a tensor if q was one, else a tuple.

    Guarantees: run, batch, position of sample and head, SM count, padding; forward and backward
    (`GUARANTEES["attention"]`). Softmax and sums are fp32, weights are rounded to q's dtype before the second product,
    as in FlashAttention.
    Source: the online softmax of FlashAttention-2, arXiv 2307.08691, with the backward in two passes.
    """
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError("attention: num_sms is the SM count of the caller's partition, a positive int; got "
                         f"{num_sms!r}")
    qs, ks, vs = _tuple(q, "q"), _tuple(k, "k"), _tuple(v, "v")
    _check(qs, ks, vs)
    num_q, num_k = len(qs), len(ks)
    given: Sequence[Tensor | None] = ((None,) * len(ks) if lengths is None else
                                      (lengths,) if isinstance(lengths, Tensor) else lengths)
    checked = _check_lengths(given, ks)
    if causal and (num_q > 1 or num_k > 1 or checked[0] is not None or qs[0].shape[1] > ks[0].shape[1]):
        raise ValueError("attention: causal takes one segment without lengths and no more queries than keys, got "
                         f"{num_q} and {num_k} segments, {qs[0].shape[1]} queries and {ks[0].shape[1]} keys")
    factor = float(qs[0].shape[3] ** -0.5 if scale is None else scale)
    if not math.isfinite(factor) or factor <= 0:
        raise ValueError(f"attention: scale must be positive, got {scale}")
    tensors = tuple(t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous() for t in (*qs, *ks, *vs))
    module = _module(backend, tensors)
    if module is not cpu_backend and tensors[0].dtype == torch.float32:
        raise TypeError("attention: on a GPU q, k and v must be bf16 or fp16, got torch.float32. Cast them first")
    more = {} if module is cpu_backend else {"num_sms": num_sms}
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        outs = _Attention.apply(module, causal, factor, checked, (num_q, num_k), more, *tensors)
    else:
        outs, _ = module.forward(tensors[:num_q], tensors[num_q:num_q + num_k], tensors[num_q + num_k:], checked,
                                 causal, factor, False, **more)
    return outs[0] if isinstance(q, Tensor) else tuple(outs)
