"""Attention together with the projections that feed it: queries and keys leave their product normalised.

In: one or two streams of tokens (image and text) with their q, k and v layers and their norms. Out: what attention
gives for every stream that asks. One Function from the tokens to the result, because its backward has no gradient of
the normalised queries and keys: attention's backward ends in what lies before the norms, so neither direction has a
pass over queries and keys alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cpu_backend
from .attention import Lengths, _check_lengths, _module, attention
from .elementwise import Rope, qk_norm_rope, qk_norm_rope_pair
from .functional import _PER_LAYER, KernelOptions, Layer, _backward_products, _Call, _forward, _prepare, linears
from .gemm import HeadNorm, ends_in_norm


@dataclass(frozen=True)
class Stream:
    """Tokens ``[B, T, K]`` with projections of their own that take part in one attention."""

    x: Tensor
    q: Layer | None
    """None: these tokens ask nothing (the last block's text)."""
    k: Layer
    v: Layer
    norm_q: Tensor | None = None
    """``[D]``, weight of the queries' RMS norm a head; both norms or none."""
    norm_k: Tensor | None = None
    eps: float = 1e-6
    rope: Rope | None = None
    """(cos, sin) of `qk_norm_rope`, interleaved."""

    def layers(self) -> list[Layer]:
        return [self.k, self.v] if self.q is None else [self.q, self.k, self.v]

    def norms(self) -> list[Tensor | None]:
        """Weights, a layer each."""
        return [self.norm_k, None] if self.q is None else [self.norm_q, self.norm_k, None]


@dataclass(frozen=True)
class _Spec:
    """What a call is, apart from its tensors."""

    calls: tuple[_Call, ...]
    eps: tuple[float, ...]
    asks: tuple[bool, ...]
    heads: int
    lengths: tuple[Tensor | None, ...]

    @property
    def options(self) -> KernelOptions:
        return self.calls[0].options


_ZEROS: dict[int, tuple[ref, int, bool]] = {}  # by id: the weight, its version and what was found; a model has dozens


def _has_zero(weight: Tensor) -> bool:
    """Whether a norm's weight hides its input. Looking makes the host wait, once a weight; True if it cannot look."""
    version = 0 if weight.is_inference() else weight._version
    if (seen := _ZEROS.get(id(weight))) is not None and seen[0]() is weight and seen[1] == version:
        return seen[2]
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    found = bool((weight == 0).any())
    if len(_ZEROS) > 4096:
        _ZEROS.clear()
    _ZEROS[id(weight)] = ref(weight), version, found
    return found


def _split(spec: _Spec, tensors: Sequence[Tensor | None]) -> list[tuple[Tensor, list[Tensor | None], list]]:
    """(x, norm weights, layers' tensors) of every stream."""
    parts, at = [], 0
    for asks in spec.asks:
        count = 3 if asks else 2
        x, norms = tensors[at], list(tensors[at + 1:at + 1 + count])
        at += 1 + count
        parts.append((x, norms, list(tensors[at:at + _PER_LAYER * count])))
        at += _PER_LAYER * count
    return parts


@dataclass(frozen=True)
class _Made:
    """What a forward made."""

    qs: tuple[Tensor, ...]
    ks: tuple[Tensor, ...]
    vs: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    lses: tuple[Tensor, ...]
    kept: tuple[Tensor | None, ...]
    """For every stream: the adapters' hidden rows, their down projections, the rstds of its queries and its keys."""


def _backend(options: KernelOptions, tensors: tuple[Tensor, ...]) -> tuple[ModuleType, dict]:
    """The back end, and what its attention takes beyond the tensors."""
    module = _module(options.backend, tensors)
    return module, {} if module is cpu_backend else {"num_sms": options.num_sms}


def _project_and_attend(spec: _Spec, tensors: Sequence[Tensor | None], with_lse: bool) -> _Made:
    qs, ks, vs, kept = [], [], [], []
    for call, eps, asks, (x, norms, weights) in zip(spec.calls, spec.eps, spec.asks, _split(spec, tensors),
                                                    strict=True):
        done = _forward(call, x, None, None, weights, [None if w is None else HeadNorm(w, eps) for w in norms])
        *q, k, v = (t.unflatten(-1, (spec.heads, -1)) for t in done.outputs)
        qs += q
        ks.append(k)
        vs.append(v)
        kept += [done.hidden, done.stacked, *done.rstds[:2 if asks else 1]]
    module, more = _backend(spec.options, (*qs, *ks, *vs))
    outs, lses = module.forward(tuple(qs), tuple(ks), tuple(vs), spec.lengths, False, ks[0].shape[3] ** -0.5, with_lse,
                                **more)
    return _Made(tuple(qs), tuple(ks), tuple(vs), outs, lses, tuple(kept))


class _ProjectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        made = _project_and_attend(spec, tensors, True)
        ctx.spec, ctx.counts = spec, (len(made.qs), len(made.ks), len(made.kept))
        ctx.save_for_backward(*made.qs, *made.ks, *made.vs, *made.outs, *made.lses, *made.kept, *tensors)
        ctx.set_materialize_grads(False)
        return made.outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        spec, (num_q, num_k, num_kept) = ctx.spec, ctx.counts
        saved = iter(ctx.saved_tensors)
        qs, ks, vs, outs, lses, kept = (tuple(next(saved) for _ in range(n))
                                        for n in (num_q, num_k, num_k, num_q, num_q, num_kept))
        tensors = list(saved)
        parts, needs = _split(spec, tensors), _split(spec, list(ctx.needs_input_grad[1:]))
        douts = tuple(torch.zeros_like(out) if g is None else g.contiguous()
                      for g, out in zip(grads, outs, strict=True))
        q_norms, k_norms, at = [], [], 0
        hidden = []
        for asks, (_, norms, _) in zip(spec.asks, parts, strict=True):
            hidden.append(kept[at:at + 2])
            at += 2
            if asks:
                q_norms.append((norms[0], kept[at]))
                at += 1
            k_norms.append((norms[-2], kept[at]))
            at += 1
        # A norm's own gradient needs what it took, and so does a weight of 0: then that is computed once more.
        again = any(any(needed[:-1]) for _, needed, _ in needs) or any(_has_zero(w) for w, _ in (*q_norms, *k_norms))
        module, more = _backend(spec.options, (*qs, *ks, *vs))
        dqs, dks, dvs = module.backward(
            douts, qs, ks, vs, outs, lses, spec.lengths, False, ks[0].shape[3] ** -0.5, **more,
            norms=None if again else (tuple(q_norms), tuple(k_norms)))
        found: list[Tensor | None] = [None]
        left = list(dqs)
        for s, (asks, call, eps) in enumerate(zip(spec.asks, spec.calls, spec.eps, strict=True)):
            (x, norms, weights), (need_x, need_norms, need) = parts[s], needs[s]
            dys = [left.pop(0)] if asks else []
            dys += [dks[s], dvs[s]]
            d_norms: list[Tensor | None] = [None] * len(norms)
            if again:
                for i in range(len(norms) - 1):
                    dys[i], d_norms[i] = _norm_backward(call, i, x, weights, norms[i], eps, dys[i], need_norms[i])
            dys = [dy.flatten(2) for dy in dys]
            d_x, d_weights = _backward_products(call, x, *hidden[s], weights, dys, need_x, need)
            found += [d_x, *d_norms, *d_weights]
        return tuple(found)


def _norm_backward(call: _Call, layer: int, x: Tensor, weights: list, norm: Tensor, eps: float, dy: Tensor, need: bool
                   ) -> tuple[Tensor, Tensor | None]:
    """A gradient behind a norm [B, T, H, D] and the norm's own, from the layer's product without its norm."""
    alone = _Call(call.options, "none", call.scales[layer:layer + 1])
    mine = weights[_PER_LAYER * layer:_PER_LAYER * (layer + 1)]
    with torch.enable_grad():
        raw = _forward(alone, x, None, None, mine).outputs[0].view(dy.shape).requires_grad_()
        y = qk_norm_rope(raw, norm, eps=eps, backend=call.options.backend)
    d_raw, *d_norm = torch.autograd.grad(y, [raw, norm] if need else [raw], dy, allow_unused=True)
    return d_raw, d_norm[0] if d_norm else None


def _fuses(streams: Sequence[Stream], heads: int, options: KernelOptions) -> bool:
    """By shapes, rotary embedding and the mode alone, so that rollout and training agree."""
    if any(s.rope is not None for s in streams):
        return False
    for s in streams:
        for layer, norm in zip(s.layers()[:-1], s.norms()[:-1], strict=True):  # values have no norm
            n, k = layer.weight.shape
            if norm is None or not ends_in_norm(n, k, n // heads, options.mode):
                return False
    return True


def projected_attention(streams: Sequence[Stream], heads: int, *, options: KernelOptions, lengths: Lengths = None
                        ) -> tuple[Tensor, ...]:
    """``attention(norm(q(x)), norm(k(x)), v(x))`` over one stream or two that see each other.

    In mode `consistent` and for heads of 16, 32 or 64 channels with norms and no rotary embedding, the norm is the end
    of the projection (`gemm_nt_normed`, `ends_in_norm`); elsewhere this is `linears`, `qk_norm_rope` and `attention`
    one after the other, which rounds between product and norm. Values have no part in the choice.

    Args:
        streams: Of one batch and dtype. A first stream must ask; layers of N = heads * D.
        lengths: As in `attention`: which keys of a stream exist.

    Returns:
        ``[B, T, H, D]`` for every stream with a q.

    Raises:
        ValueError: for streams that do not fit together, and what the parts refuse.

    Guarantees: those of `linear` and `attention` in both directions.
    """
    streams = tuple(streams)
    if len(streams) not in (1, 2) or streams[0].q is None:
        raise ValueError(f"projected_attention: needs one or two streams, of which the first asks, got {len(streams)}")
    for s in streams:
        sizes = {layer.weight.shape[0] for layer in s.layers()}
        if len(sizes) > 1 or (size := sizes.pop()) % heads:
            raise ValueError(f"projected_attention: q, k and v must have one N, a multiple of {heads} heads, got "
                             f"{[layer.weight.shape[0] for layer in s.layers()]}")
        for norm in (s.norm_q, s.norm_k):
            if norm is not None and norm.shape != (size // heads,):
                raise ValueError(f"projected_attention: a norm's weight must be [{size // heads}], got "
                                 f"{tuple(norm.shape)}")
        if s.q is not None and (s.norm_q is None) != (s.norm_k is None):
            raise ValueError("projected_attention: give a weight to both norms of a stream or to none")
    if not _fuses(streams, heads, options):
        return _one_after_the_other(streams, heads, options, lengths)
    xs = [_prepare(s.x) for s in streams]
    given = (None,) * len(streams) if lengths is None else (lengths,) if isinstance(lengths, Tensor) else lengths
    spec = _Spec(tuple(_Call(options, "none", tuple(layer.lora_scale for layer in s.layers())) for s in streams),
                 tuple(s.eps for s in streams), tuple(s.q is not None for s in streams), heads,
                 _check_lengths(given, tuple(xs)))
    tensors: list[Tensor | None] = []
    for s, x in zip(streams, xs, strict=True):
        tensors += [x, *s.norms()]
        for layer in s.layers():
            tensors += [layer.weight, layer.bias, layer.lora_a, layer.lora_b]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _ProjectedAttention.apply(spec, *tensors)  # type: ignore[return-value]
    return _project_and_attend(spec, tensors, False).outs


def _one_after_the_other(streams: Sequence[Stream], heads: int, options: KernelOptions, lengths: Lengths
                         ) -> tuple[Tensor, ...]:
    qs, ks, vs = [], [], []
    for s in streams:
        *q, k, v = (t.unflatten(-1, (heads, -1)) for t in linears(s.x, s.layers(), options=options))
        how = {"eps": s.eps, "rope": s.rope, "backend": options.backend}
        if (s.norm_k is not None or s.rope is not None) and q:
            q[0], k = qk_norm_rope_pair(q[0], k, s.norm_q, s.norm_k, **how)
        elif s.norm_k is not None or s.rope is not None:
            k = qk_norm_rope(k, s.norm_k, **how)
        qs += q
        ks.append(k)
        vs.append(v)
    return tuple(attention(qs, ks, vs, lengths=lengths, num_sms=options.num_sms, backend=options.backend))
