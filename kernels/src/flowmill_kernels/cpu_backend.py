"""The CPU back end: the same operators in plain torch, slow and in a fixed order; everything then runs without a GPU.

Matrix products of a CPU library choose blocks by the number of rows, so none is called: K is walked one index at a
time with elementwise operations, which treat every element alike. Each product and each sum is its own operation;
a compiler then has no multiply-add to fuse in a vector's body and not in its tail.
"""

import torch
from torch import Tensor

from .heuristics import Layout
from .schemes import Epilogue, Scheme, combine, tree_sum


def partial_sums(x: Tensor, w_kn: Tensor, scheme: Scheme, extra: tuple[tuple[Tensor, Tensor], ...] = ()
                 ) -> Tensor:
    """fp32 [segments, M, N]: x [M, K] @ w_kn [K, N] over each K segment, in K order; `extra` goes on in the last."""
    k = x.shape[1]
    parts = []
    for start in range(0, k, scheme.segment_k):
        acc = torch.zeros((x.shape[0], w_kn.shape[1]), dtype=torch.float32)
        for i in range(start, min(start + scheme.segment_k, k)):
            acc += x[:, i : i + 1] * w_kn[i]
        parts.append(acc)
    for h, b in extra:
        for i in range(b.shape[0]):
            parts[-1] += h[:, i : i + 1] * b[i]
    return torch.stack(parts) if parts else torch.zeros((1, x.shape[0], w_kn.shape[1]))


def finish(total: Tensor, epilogue: Epilogue, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None,
           dtype: torch.dtype) -> Tensor:
    """The epilogue of an fp32 sum on any device, and its rounding."""
    if epilogue.bias:
        total = total + bias.float()  # type: ignore[union-attr]
    if epilogue.activation == "gelu_tanh":
        total = total.to(dtype).float().contiguous()
        u = 0.7978845608028654 * (total + 0.044715 * (total * total * total))
        total = 0.5 * total * (2.0 - 2.0 / (torch.exp(2.0 * u) + 1.0))
    if epilogue.gate:
        total = total * gate.float().repeat_interleave(total.shape[0] // gate.shape[0], 0)  # type: ignore[union-attr]
    if epilogue.residual:
        total = residual.float() + total  # type: ignore[union-attr]
    return total.to(dtype)


def _norm_heads(total: Tensor, epilogue: Epilogue, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm of every `epilogue.norm` columns in fp32, and its rstd [M, heads]."""
    by_head = total.unflatten(1, (-1, epilogue.norm))
    r = torch.rsqrt((halving_sum(by_head * by_head, -1) / epilogue.norm + epilogue.eps).contiguous())
    return (by_head * r * weight.float()).flatten(1), r[..., 0]


def gemm(x: Tensor, w: Tensor, y: Tensor, *, layout: Layout, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
         gate: Tensor | None, residual: Tensor | None, extra: tuple[tuple[Tensor, Tensor], ...] = (),
         norm: Tensor | None = None, rstd: Tensor | None = None) -> None:
    """Write epilogue(x @ w.T) (`nt`) or epilogue(x @ w) (`nn`) to y, and a norm's rstd; an fp32 y of fp32 sums stays
    unrounded."""

    def by_k(t: Tensor) -> Tensor:
        return (t.T if layout == "nt" else t).float().contiguous()

    more = tuple((h.float(), by_k(b)) for h, b in extra)
    total = combine(partial_sums(x.float(), by_k(w), scheme, more).unbind(), scheme.order)
    if norm is not None and rstd is not None:
        y_rows, r = _norm_heads(total if bias is None else total + bias.float(), epilogue, norm)
        rstd.copy_(r)
        y.copy_(y_rows)
        return
    y.copy_(finish(total, epilogue, bias, gate, residual, y.dtype))


def add_partials(partials: Tensor, y: Tensor, *, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
                 gate: Tensor | None, residual: Tensor | None) -> None:
    """Write epilogue(sum of fp32 partials [P, M, N] in the scheme's order) to y."""
    y.copy_(finish(combine(partials.unbind(), scheme.order), epilogue, bias, gate, residual, y.dtype))


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """fp32 [S, N, K]: every sample's dy.T @ x, tokens in order."""
    samples, tokens, n = dy.shape
    dw = torch.zeros((samples, n, x.shape[2]), dtype=torch.float32)
    dy, x = dy.float(), x.float()
    for t in range(tokens):
        dw += dy[:, t, :, None] * x[:, t, None, :]
    return dw


# Rows and elements. Sums by halving: every step adds two halves element by element, so a row's order follows from its
# length alone. Inputs of exp, erf and the like are contiguous: a strided one may take another path through the library.

def halving_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension (negative) as a balanced tree, kept as size 1."""
    size = x.shape[dim]
    length = 1 << max(0, size - 1).bit_length()
    if length != size:
        shape = list(x.shape)
        shape[dim] = length - size
        x = torch.cat((x, x.new_zeros(shape)), dim)
    while length > 1:
        length //= 2
        x = x.narrow(dim, 0, length) + x.narrow(dim, length, length)
    return x


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised rows, mean, rstd) in fp32."""
    mean = halving_sum(x.float(), -1) / x.shape[-1]
    centred = x.float() - mean
    rstd = torch.rsqrt((halving_sum(centred * centred, -1) / x.shape[-1] + eps).contiguous())
    return centred * rstd, mean, rstd


def _row(t: Tensor) -> Tensor:
    return t.float()[:, None]


def norm_modulate(x: Tensor, scale: Tensor | None, shift: Tensor | None, scale2: Tensor | None, shift2: Tensor | None,
                  weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    v, _, _ = _normed(x, eps)
    v = v if weight is None else v * weight.float()
    v = v if bias is None else v + bias.float()
    y = v if scale is None or shift is None else v * (1.0 + _row(scale)) + _row(shift)
    y2 = None if scale2 is None or shift2 is None else (v * (1.0 + _row(scale2)) + _row(shift2)).to(x.dtype)
    return y.to(x.dtype), y2


def norm_modulate_backward(dy: Tensor | None, dy2: Tensor | None, x: Tensor, scale: Tensor | None,
                           scale2: Tensor | None, weight: Tensor | None, eps: float, add: Tensor | None, stats: bool
                           ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    v, mean, rstd = _normed(x, eps)
    g = torch.zeros_like(v)
    if dy is not None:
        g = dy.float() if scale is None else dy.float() * (1.0 + _row(scale))
    if dy2 is not None and scale2 is not None:
        g = g + dy2.float() * (1.0 + _row(scale2))
    if weight is not None:
        g = g * weight.float()
    d = rstd * ((g - halving_sum(g, -1) / x.shape[-1]) - v * (halving_sum(g * v, -1) / x.shape[-1]))
    if add is not None:
        d = d + add.float()
    return d.to(x.dtype), (mean[..., 0] if stats else None), (rstd[..., 0] if stats else None)


def column_sums(dy: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    g = dy.float()
    if x is not None:
        v = x.float()
        v = v if mean is None else v - mean[..., None]
        v = v if rstd is None else v * rstd[..., None]
        g = g * v
    if g.shape[1] == 0:
        return torch.zeros((g.shape[0], g.shape[2]))
    return halving_sum(g, -2)[:, 0]


def _rotate(v: Tensor, rope: tuple[Tensor, Tensor], half_layout: bool, inverse: bool) -> Tensor:
    cos, sin = (t.unsqueeze(-2) if t.dim() == 3 else t[None, :, None] for t in rope)
    if inverse:
        sin = -sin
    a, b = v.chunk(2, -1) if half_layout else (v[..., 0::2], v[..., 1::2])
    u, w = a * cos - b * sin, a * sin + b * cos
    return torch.cat((u, w), -1) if half_layout else torch.stack((u, w), -1).flatten(-2)


def rms_rope(xs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], eps: float, rope: tuple[Tensor, Tensor] | None,
             half_layout: bool, over_all: bool, norm: bool, outs: tuple[Tensor, ...],
             dys: tuple[Tensor, ...] | None = None, rstds: tuple[Tensor | None, ...] | None = None) -> None:
    """Write norm and rotation of one or two [B, T, H, D] tensors to `outs`; with `dys` the gradients."""
    for i, (x, weight, out) in enumerate(zip(xs, weights, outs, strict=True)):
        v, r = x.float(), None
        size = x.shape[2] * x.shape[3] if over_all else x.shape[3]

        def total(t: Tensor) -> Tensor:
            if over_all:
                return halving_sum(t.flatten(2), -1).unsqueeze(-1)
            return halving_sum(t, -1)

        if weight is not None and over_all:
            weight = weight.view(x.shape[2], x.shape[3])
        if norm:
            r = torch.rsqrt((total(v * v) / size + eps).contiguous())
        if dys is None:
            v = v if r is None else v * r
            v = v if weight is None else v * weight.float()
            out.copy_(v if rope is None else _rotate(v, rope, half_layout, False))
            continue
        g = dys[i].float()
        g = g if rope is None else _rotate(g, rope, half_layout, True)
        if r is not None:
            g = g if weight is None else g * weight.float()
            v = v * r
            g = r * (g - v * (total(g * v) / size))
            if rstds is not None and rstds[i] is not None:
                rstds[i].copy_(r.reshape(rstds[i].shape))  # type: ignore[union-attr]
        out.copy_(g)


def _gelu_parts(v: Tensor) -> Tensor:
    return 1.0 / (torch.exp(2.0 * (0.7978845608028654 * (v + 0.044715 * (v * v * v)))) + 1.0)


def pointwise(op: str, x: Tensor, other: Tensor | None) -> Tensor:
    v = x.float().contiguous()
    if op == "gelu_tanh":
        y = 0.5 * v * (2.0 - 2.0 * _gelu_parts(v))
    elif op == "gelu":
        y = v * (0.5 * (1.0 + torch.erf(v * 0.7071067811865476)))
    else:
        y = v * (1.0 / (1.0 + torch.exp(-v)))
        y = y if other is None else y * other.float()
    return y.to(x.dtype)


def pointwise_slope(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """An activation and its derivative."""
    return pointwise(op, x, None), pointwise_backward(op, torch.ones_like(x), x, None)[0]


def pointwise_backward(op: str, dy: Tensor, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    v, g = x.float().contiguous(), dy.float()
    if op == "gelu_tanh":
        e = _gelu_parts(v)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * (v * v))
        return (g * ((1.0 - e) + 2.0 * v * (e * (1.0 - e)) * slope)).to(x.dtype), None
    if op == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(v * 0.7071067811865476))
        return (g * (cdf + v * (0.3989422804014327 * torch.exp(-0.5 * (v * v))))).to(x.dtype), None
    s = 1.0 / (1.0 + torch.exp(-v))
    d = s * (1.0 + v * (1.0 - s))
    if other is None:
        return (g * d).to(x.dtype), None
    return (g * other.float() * d).to(x.dtype), (g * (v * s)).to(x.dtype)


def gate(x: Tensor, gate_rows: Tensor, residual: Tensor | None) -> Tensor:
    v = x.float() * _row(gate_rows)
    return (v if residual is None else residual.float() + v).to(x.dtype)


def mean(x: Tensor) -> Tensor:
    return halving_sum(x.float(), -1)[:, 0] / x.shape[1]


def log_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(result, fp32 [N, 2]: each row's maximum and the log of its sum) of x [N, V]."""
    v = x.float().contiguous()
    top = v.amax(1, keepdim=True) if len(v) else v[:, :1]
    log = torch.log(halving_sum(torch.exp((v - top).contiguous()), -1).contiguous())
    return ((v - top) - log).to(x.dtype), torch.cat((top, log), 1)


def log_softmax_backward(dy: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    g, v = dy.float(), x.float()
    return (g - torch.exp(((v - lse[:, :1]) - lse[:, 1:]).contiguous()) * halving_sum(g, -1)).to(x.dtype)


def writable(out: Tensor, over_all: bool) -> bool:
    """Whether `rms_rope` can write into a view: any, it copies."""
    return True


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, first_sample: int, first_leaf: int, num_samples: int,
                 num_leaves: int) -> None:
    add_leaves(leaves, wgrad(dy, x), first_sample, first_leaf, num_samples, num_leaves)


def add_leaves(leaves: Tensor, per_sample: Tensor, first_sample: int, first_leaf: int, num_samples: int,
               num_leaves: int) -> None:
    for sample, gradient in enumerate(per_sample, first_sample):
        leaves[sample * num_leaves // num_samples - first_leaf] += gradient


# Attention. Products walk their inner index one at a time and sums over keys run in key order, so that keys that do not
# exist (weight exactly 0) change no bit.

def sum_leaves(leaves: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """([...] of `dtype`: the balanced tree over leaves [L, ...] fp32; fp64 []: the norm of it before its rounding)."""
    total = tree_sum(leaves.unbind(), lambda a, b: a + b)
    return total.to(dtype), halving_sum(total.double().square().flatten(), -1).sqrt()[0]


def _walk(a: Tensor, b: Tensor) -> Tensor:
    """a [..., I, K] times b [..., K, J], K in order."""
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]))
    for i in range(a.shape[-1]):
        acc += a[..., :, i : i + 1] * b[..., i : i + 1, :]
    return acc


def _joined(segments: tuple[Tensor, ...], lengths: tuple[Tensor | None, ...]) -> Tensor:
    """fp32 [B, H, T, D] of all segments; what does not exist is 0, whatever stands there (0 * nan is nan)."""
    parts = []
    for t, length in zip(segments, lengths, strict=True):
        if length is not None:
            gone = torch.arange(t.shape[1])[None] >= length[:, None]
            t = t.masked_fill(gone[:, :, None, None], 0.0)
        parts.append(t.float().transpose(1, 2))
    return torch.cat(parts, 2)


def _existing(ks: tuple[Tensor, ...], lengths: tuple[Tensor | None, ...], num_queries: int, causal: bool) -> Tensor:
    """Boolean [B, 1, Tq, Tk]: which keys a query sees."""
    parts = [torch.arange(k.shape[1])[None] < (torch.full((k.shape[0],), k.shape[1]) if n is None else n)[:, None]
             for k, n in zip(ks, lengths, strict=True)]
    seen = torch.cat(parts, 1)[:, None, None].expand(-1, 1, num_queries, -1)
    if causal:
        keys = seen.shape[-1]
        seen = seen & (torch.arange(keys)[None] <= torch.arange(num_queries)[:, None] + keys - num_queries)
    return seen


def _weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """exp(score - top) with 0 for keys unseen, and the row sums over keys in order."""
    scores = (_walk(q, k.transpose(2, 3)) * scale).masked_fill(~seen, -torch.inf)
    top = scores.amax(3, keepdim=True) if scores.shape[3] else scores.sum(3, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp((scores - top).contiguous())
    total = torch.zeros_like(top)
    for j in range(p.shape[3]):
        total += p[..., j : j + 1]
    return p, total


def _through_norm(g: Tensor, y: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient behind an RMS norm of heads, all fp32 [B, T, H, D], from the one before it and the norm's result."""
    w, r = weight.float(), rstd.view(*g.shape[:3], 1)
    return r * (g * w - (y / w) * (halving_sum(g * y, -1) / g.shape[3]))


def forward(qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
            lengths: tuple[Tensor | None, ...], causal: bool, scale: float, with_lse: bool
            ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Attention outputs; there is nothing to keep for the backward, which computes the weights again."""
    k, v = _joined(ks, lengths), _joined(vs, lengths)
    outs, kept = [], []
    for q in qs:
        p, total = _weights(q.float().transpose(1, 2), k, _existing(ks, lengths, q.shape[1], causal), scale)
        out = torch.where(total == 0, 0.0, _walk(p.to(q.dtype).float(), v) / total)
        outs.append(out.transpose(1, 2).to(q.dtype).contiguous())
        kept.append(total)
    return tuple(outs), tuple(kept) if with_lse else ()


def backward(douts: tuple[Tensor, ...], qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
             outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], lengths: tuple[Tensor | None, ...], causal: bool,
             scale: float, norms: tuple | None = None
             ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(dq, dk, dv): keys' gradients add their queries in order, segment after segment. With `norms`, (weight, rstd) of
    every segment for queries and for keys, dq and dk are what lies before these norms."""
    k, v = _joined(ks, lengths), _joined(vs, lengths)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    q_norms, k_norms = (None, None) if norms is None else norms
    for i, (q, out, dout) in enumerate(zip(qs, outs, douts, strict=True)):
        q32, do = q.float().transpose(1, 2), dout.float().transpose(1, 2)
        p, total = _weights(q32, k, _existing(ks, lengths, q.shape[1], causal), scale)
        p = torch.where(total == 0, 0.0, p / total)
        delta = halving_sum(do * out.float().transpose(1, 2), -1)
        ds = p * (_walk(do, v.transpose(2, 3)) - delta)
        dq = (_walk(ds, k) * scale).transpose(1, 2)
        if q_norms is not None:
            dq = _through_norm(dq, q.float(), *q_norms[i])
        dqs.append(dq.to(q.dtype).contiguous())
        for row in range(q32.shape[2]):
            dk += ds[..., row, :, None] * q32[..., row, None, :]
            dv += p[..., row, :, None] * do[..., row, None, :]
    sizes = [t.shape[1] for t in ks]
    dks = [t.transpose(1, 2) for t in (dk * scale).split(sizes, 2)]
    if k_norms is not None:
        for i, (y, length, (w, r)) in enumerate(zip(k.split(sizes, 2), lengths, k_norms, strict=True)):
            if length is not None:  # a key that does not exist may have any rstd
                r = r.masked_fill((torch.arange(sizes[i])[None] >= length[:, None]).view(-1, 1), 0.0)
            dks[i] = _through_norm(dks[i], y.transpose(1, 2), w, r)
    dks = tuple(t.to(ks[0].dtype).contiguous() for t in dks)
    dvs = tuple(t.transpose(1, 2).to(ks[0].dtype).contiguous() for t in dv.split(sizes, 2))
    return tuple(dqs), dks, dvs
