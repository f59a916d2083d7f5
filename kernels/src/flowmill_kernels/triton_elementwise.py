"""The Triton back end of the row and elementwise operators: norms, modulation, rotary embedding, activations, gates.

In: checked tensors. Out: new tensors. Everything is fp32 between one load and one rounding. A row's sum is one
`tl.sum` over a block whose size follows from the row's length alone; sums over tokens walk blocks of fixed size in
order, so their bits follow from the number of tokens. No atomics, no fused multiply-add (as in triton_backend.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # rows of one step of a sum over tokens: part of its order
CHUNK = 4096  # elements of one step of a sum over a long row: part of its order

OPS = {"gelu_tanh": 0, "gelu": 1, "silu": 2, "swiglu": 3}


@triton.jit
def _norm_modulate(x, y, y2, weight, bias, scale, shift, scale2, shift2, T, C, eps, stride_xb, stride_xt, stride_s,
                   stride_s2, ROWS: tl.constexpr, BLOCK: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr,
                   MODULATE: tl.constexpr, TWO: tl.constexpr):
    """LayerNorm of ROWS rows of one sample, then one or two modulations."""
    sample = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    if AFFINE:
        w = tl.load(weight + cols, inside, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + cols, inside, other=0.0).to(tl.float32)
    if MODULATE:
        one = 1.0 + tl.load(scale + sample * stride_s + cols, inside, other=0.0).to(tl.float32)
        move = tl.load(shift + sample * stride_s + cols, inside, other=0.0).to(tl.float32)
    if TWO:
        one2 = 1.0 + tl.load(scale2 + sample * stride_s2 + cols, inside, other=0.0).to(tl.float32)
        move2 = tl.load(shift2 + sample * stride_s2 + cols, inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * ROWS
    for i in tl.static_range(ROWS):
        row = first + i
        mask = inside & (row < T)
        v = tl.load(x + sample * stride_xb + row.to(tl.int64) * stride_xt + cols, mask, other=0.0).to(tl.float32)
        v = v - tl.sum(v, 0) / C
        v = tl.where(inside, v, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / C + eps)
        if AFFINE:
            v = v * w
        if BIAS:
            v = v + b
        at = (sample * T + row) * C + cols
        if MODULATE:
            tl.store(y + at, (v * one + move).to(y.dtype.element_ty), mask)
        else:
            tl.store(y + at, v.to(y.dtype.element_ty), mask)
        if TWO:
            tl.store(y2 + at, (v * one2 + move2).to(y.dtype.element_ty), mask)


@triton.jit
def _norm_modulate_backward(dy, dy2, x, add, dx, mean, rstd, weight, scale, scale2, T, C, eps, stride_xb, stride_xt,
                            stride_s, stride_s2, ROWS: tl.constexpr, BLOCK: tl.constexpr, AFFINE: tl.constexpr,
                            MODULATE: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, ADD: tl.constexpr,
                            STATS: tl.constexpr):
    """dx of `_norm_modulate`; `add` is the gradient that reaches x by another way."""
    sample = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    if AFFINE:
        w = tl.load(weight + cols, inside, other=0.0).to(tl.float32)
    if MODULATE and ONE:
        one = 1.0 + tl.load(scale + sample * stride_s + cols, inside, other=0.0).to(tl.float32)
    if TWO:
        one2 = 1.0 + tl.load(scale2 + sample * stride_s2 + cols, inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * ROWS
    for i in tl.static_range(ROWS):
        row = first + i
        mask = inside & (row < T)
        v = tl.load(x + sample * stride_xb + row.to(tl.int64) * stride_xt + cols, mask, other=0.0).to(tl.float32)
        middle = tl.sum(v, 0) / C
        v = tl.where(inside, v - middle, 0.0)
        r = tl.rsqrt(tl.sum(v * v, 0) / C + eps)
        v = v * r
        at = (sample * T + row) * C + cols
        g = tl.zeros((BLOCK,), tl.float32)
        if ONE:
            g = tl.load(dy + at, mask, other=0.0).to(tl.float32)
            if MODULATE:
                g = g * one
        if TWO:
            g = g + tl.load(dy2 + at, mask, other=0.0).to(tl.float32) * one2
        if AFFINE:
            g = g * w
        d = r * ((g - tl.sum(g, 0) / C) - v * (tl.sum(g * v, 0) / C))
        if ADD:
            d = d + tl.load(add + at, mask, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask)
        if STATS:
            tl.store(mean + sample * T + row, middle, row < T)
            tl.store(rstd + sample * T + row, r, row < T)


@triton.jit
def _column_sums(dy, x, mean, rstd, out, T, C, stride_yb, stride_yt, stride_xb, stride_xt, ROWS: tl.constexpr,
                 BLOCK: tl.constexpr, TIMES: tl.constexpr, CENTRED: tl.constexpr, SCALED: tl.constexpr):
    """out[b, c] = sum over t of dy (times x, minus the row's mean, times its rstd), ROWS rows a step, in order."""
    sample = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, T, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & (cols < C)[None, :]
        at = rows.to(tl.int64)[:, None]
        g = tl.load(dy + sample * stride_yb + at * stride_yt + cols[None, :], mask, other=0.0).to(tl.float32)
        if TIMES:
            v = tl.load(x + sample * stride_xb + at * stride_xt + cols[None, :], mask, other=0.0).to(tl.float32)
            if CENTRED:
                v = v - tl.load(mean + sample * T + rows, rows < T, other=0.0)[:, None]
            if SCALED:
                v = v * tl.load(rstd + sample * T + rows, rows < T, other=0.0)[:, None]
            g = g * v
        total = total + tl.sum(g, 0)
    tl.store(out + sample * C + cols, total, cols < C)


@triton.jit
def _rotate(v, cos, sin, at, dims, H: tl.constexpr, D: tl.constexpr, HALF_LAYOUT: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate pairs of the last dimension of v [H, D] by the row's angles."""
    pairs = tl.arange(0, D // 2)
    c = tl.load(cos + at + pairs, pairs < dims // 2, other=1.0)[None, :]
    s = tl.load(sin + at + pairs, pairs < dims // 2, other=0.0)[None, :]
    if INVERSE:
        s = -s
    if HALF_LAYOUT:
        a, b = tl.split(tl.permute(tl.reshape(v, (H, 2, D // 2)), (0, 2, 1)))
    else:
        a, b = tl.split(tl.reshape(v, (H, D // 2, 2)))
    u = a * c - b * s
    w = a * s + b * c
    if HALF_LAYOUT:
        return tl.reshape(tl.permute(tl.join(u, w), (0, 2, 1)), (H, D))
    return tl.reshape(tl.join(u, w), (H, D))


@triton.jit
def _rms_rope_row(x, y, dy, weight, cos, sin, rstd, rope_at, source, target, stat, heads, dims, row_ok, eps, stride_h,
                  stride_yh, H: tl.constexpr, D: tl.constexpr, WEIGHT: tl.constexpr, NORM: tl.constexpr,
                  ALL: tl.constexpr, ROPE: tl.constexpr, HALF_LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
                  STATS: tl.constexpr):
    """One token: H heads of D (padded) channels. Forward writes y; backward writes dx to y."""
    hs = tl.arange(0, H)[:, None]
    ds = tl.arange(0, D)[None, :]
    mask = (hs < heads) & (ds < dims) & row_ok
    v = tl.load(x + source + hs * stride_h + ds, mask, other=0.0).to(tl.float32)
    if NORM:
        square = v * v
        if ALL:
            r = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / (heads * dims) + eps)
        else:
            r = tl.rsqrt(tl.sum(square, 1) / dims + eps)[:, None]
        if WEIGHT:
            if ALL:
                w = tl.load(weight + hs * dims + ds, (hs < heads) & (ds < dims), other=0.0).to(tl.float32)
            else:
                w = tl.load(weight + ds, ds < dims, other=0.0).to(tl.float32)
    if BACKWARD:
        g = tl.load(dy + target + hs * stride_yh + ds, mask, other=0.0).to(tl.float32)
        if ROPE:
            g = _rotate(g, cos, sin, rope_at, dims, H, D, HALF_LAYOUT, True)
        if NORM:
            if WEIGHT:
                g = g * w
            v = v * r
            if ALL:
                g = r * (g - v * (tl.sum(tl.sum(g * v, 1), 0) / (heads * dims)))
            else:
                g = r * (g - v * (tl.sum(g * v, 1) / dims)[:, None])
            if STATS:
                if ALL:
                    tl.store(rstd + stat, r, row_ok)
                else:
                    # one value a head: the column 0 of a [H, 1] block
                    tl.store(rstd + stat * heads + tl.arange(0, H)[:, None], r, (hs < heads) & row_ok)
        v = g
    else:
        if NORM:
            v = v * r
            if WEIGHT:
                v = v * w
        if ROPE:
            v = _rotate(v, cos, sin, rope_at, dims, H, D, HALF_LAYOUT, False)
    tl.store(y + target + hs * stride_yh + ds, v.to(y.dtype.element_ty), mask)


@triton.jit
def _rms_rope(x, x2, y, y2, dy, dy2, weight, weight2, cos, sin, rstd, rstd2, T, heads, dims, eps,
              stride_xb, stride_xt, stride_xh, stride_x2b, stride_x2t, stride_x2h, stride_yb, stride_yt, stride_yh,
              stride_rope, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TWO: tl.constexpr,
              WEIGHT: tl.constexpr, NORM: tl.constexpr, ALL: tl.constexpr, ROPE: tl.constexpr,
              HALF_LAYOUT: tl.constexpr, BACKWARD: tl.constexpr, STATS: tl.constexpr):
    """RMS norm (per head or over all heads) and rotary embedding of ROWS tokens, for one tensor or two (q and k)."""
    sample = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(ROWS):
        row = tl.program_id(0) * ROWS + i
        ok = row < T
        t = tl.minimum(row, T - 1).to(tl.int64)
        rope_at = sample * stride_rope + t * (dims // 2)
        target = sample * stride_yb + t * stride_yt
        stat = sample * T + t
        _rms_rope_row(x, y, dy, weight, cos, sin, rstd, rope_at, sample * stride_xb + t * stride_xt, target, stat,
                      heads, dims, ok, eps, stride_xh, stride_yh, H, D, WEIGHT, NORM, ALL, ROPE, HALF_LAYOUT,
                      BACKWARD, STATS)
        if TWO:
            _rms_rope_row(x2, y2, dy2, weight2, cos, sin, rstd2, rope_at, sample * stride_x2b + t * stride_x2t, target,
                          stat, heads, dims, ok, eps, stride_x2h, stride_yh, H, D, WEIGHT, NORM, ALL, ROPE,
                          HALF_LAYOUT, BACKWARD, STATS)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)): 0 and 1 at the infinities, no overflow that matters."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _pointwise(x, other, y, dy, dx, d_other, count, OP: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """One activation, or its derivative times dy."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    v = tl.load(x + at, mask, other=0.0).to(tl.float32)
    if BACKWARD:
        g = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    if OP == 0:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), as in the GEMM's epilogue
        u = 0.7978845608028654 * (v + 0.044715 * (v * v * v))
        e = 1.0 / (tl.exp(2.0 * u) + 1.0)
        if BACKWARD:
            slope = 0.7978845608028654 * (1.0 + 0.134145 * (v * v))
            tl.store(dx + at, (g * ((1.0 - e) + 2.0 * v * (e * (1.0 - e)) * slope)).to(dx.dtype.element_ty), mask)
        else:
            tl.store(y + at, (0.5 * v * (2.0 - 2.0 * e)).to(y.dtype.element_ty), mask)
    elif OP == 1:
        cdf = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        if BACKWARD:
            pdf = 0.3989422804014327 * tl.exp(-0.5 * (v * v))
            tl.store(dx + at, (g * (cdf + v * pdf)).to(dx.dtype.element_ty), mask)
        else:
            tl.store(y + at, (v * cdf).to(y.dtype.element_ty), mask)
    else:
        s = _sigmoid(v)
        if OP == 2:
            if BACKWARD:
                tl.store(dx + at, (g * (s * (1.0 + v * (1.0 - s)))).to(dx.dtype.element_ty), mask)
            else:
                tl.store(y + at, (v * s).to(y.dtype.element_ty), mask)
        else:
            up = tl.load(other + at, mask, other=0.0).to(tl.float32)
            if BACKWARD:
                tl.store(dx + at, (g * up * (s * (1.0 + v * (1.0 - s)))).to(dx.dtype.element_ty), mask)
                tl.store(d_other + at, (g * (v * s)).to(dx.dtype.element_ty), mask)
            else:
                tl.store(y + at, (v * s * up).to(y.dtype.element_ty), mask)


@triton.jit
def _gate(x, gate, residual, y, T, C, stride_g, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """(residual +) gate[b] * x over [B, T, C]."""
    sample = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (rows < T)[:, None] & (cols < C)[None, :]
    at = (sample * T + rows)[:, None] * C + cols[None, :]
    v = tl.load(x + at, mask, other=0.0).to(tl.float32)
    v = v * tl.load(gate + sample * stride_g + cols, cols < C, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        v = tl.load(residual + at, mask, other=0.0).to(tl.float32) + v
    tl.store(y + at, v.to(y.dtype.element_ty), mask)


@triton.jit
def _mean(x, out, N, BLOCK: tl.constexpr):
    """out[row] = mean of a row of N, BLOCK elements a step, in order."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + row * N + at, at < N, other=0.0).to(tl.float32), 0)
    tl.store(out + row, total / N)


@triton.jit
def _log_softmax(x, y, dy, dx, N, stride, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """log_softmax of a row, or from y and dy its dx = dy - exp(y) * sum(dy)."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    if BACKWARD:
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.sum(tl.load(dy + row * N + at, at < N, other=0.0).to(tl.float32), 0)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            g = tl.load(dy + row * N + at, at < N, other=0.0).to(tl.float32)
            p = tl.exp(tl.load(y + row * N + at, at < N, other=0.0).to(tl.float32))
            tl.store(dx + row * N + at, (g - p * total).to(dx.dtype.element_ty), at < N)
    else:
        top = -float("inf")
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = tl.load(x + row * stride + at, at < N, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(v, 0))  # a NaN that gets lost here comes back in the sum
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = tl.load(x + row * stride + at, at < N, other=-float("inf")).to(tl.float32)
            total += tl.sum(tl.exp(v - top), 0)
        shift = top + tl.log(total)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = tl.load(x + row * stride + at, at < N, other=0.0).to(tl.float32)
            tl.store(y + row * N + at, (v - shift).to(y.dtype.element_ty), at < N)


def _row_shape(columns: int) -> tuple[int, int]:
    """(block, warps) of a kernel that holds a whole row."""
    block = max(32, triton.next_power_of_2(columns))
    return block, min(16, max(1, block // 512))


def norm_modulate(x: Tensor, scale: Tensor | None, shift: Tensor | None, scale2: Tensor | None, shift2: Tensor | None,
                  weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    batch, tokens, columns = x.shape
    y = torch.empty((batch, tokens, columns), dtype=x.dtype, device=x.device)
    y2 = torch.empty_like(y) if scale2 is not None else None
    if y.numel():
        block, warps = _row_shape(columns)
        rows = 4
        _norm_modulate[(triton.cdiv(tokens, rows), batch)](
            x, y, y2, weight, bias, scale, shift, scale2, shift2, tokens, columns, eps, x.stride(0), x.stride(1),
            0 if scale is None else scale.stride(0), 0 if scale2 is None else scale2.stride(0), ROWS=rows, BLOCK=block,
            AFFINE=weight is not None, BIAS=bias is not None, MODULATE=scale is not None, TWO=scale2 is not None,
            num_warps=warps, enable_fp_fusion=False)
    return y, y2


def norm_modulate_backward(dy: Tensor | None, dy2: Tensor | None, x: Tensor, scale: Tensor | None,
                           scale2: Tensor | None, weight: Tensor | None, eps: float, add: Tensor | None, stats: bool
                           ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    batch, tokens, columns = x.shape
    dx = torch.empty((batch, tokens, columns), dtype=x.dtype, device=x.device)
    mean = torch.empty((batch, tokens), dtype=torch.float32, device=x.device) if stats else None
    rstd = torch.empty_like(mean) if mean is not None else None
    if dx.numel():
        block, warps = _row_shape(columns)
        rows = 4
        _norm_modulate_backward[(triton.cdiv(tokens, rows), batch)](
            dy, dy2, x, add, dx, mean, rstd, weight, scale, scale2, tokens, columns, eps, x.stride(0), x.stride(1),
            0 if scale is None else scale.stride(0), 0 if scale2 is None else scale2.stride(0), ROWS=rows, BLOCK=block,
            AFFINE=weight is not None, MODULATE=scale is not None, ONE=dy is not None, TWO=dy2 is not None,
            ADD=add is not None, STATS=stats, num_warps=warps, enable_fp_fusion=False)
    return dx, mean, rstd


def column_sums(dy: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    batch, tokens, columns = dy.shape
    out = torch.empty((batch, columns), dtype=torch.float32, device=dy.device)
    if out.numel():
        block = 64
        _column_sums[(triton.cdiv(columns, block), batch)](
            dy, x, mean, rstd, out, tokens, columns, dy.stride(0), dy.stride(1), 0 if x is None else x.stride(0),
            0 if x is None else x.stride(1), ROWS=TOKENS, BLOCK=block, TIMES=x is not None, CENTRED=mean is not None,
            SCALED=rstd is not None, num_warps=4, enable_fp_fusion=False)
    return out


def rms_rope(xs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], eps: float, rope: tuple[Tensor, Tensor] | None,
             half_layout: bool, over_all: bool, norm: bool, outs: tuple[Tensor, ...],
             dys: tuple[Tensor, ...] | None = None, rstds: tuple[Tensor | None, ...] | None = None) -> None:
    """Write norm and rotation of one or two [B, T, H, D] tensors to `outs`; with `dys` the gradients."""
    x, out = xs[0], outs[0]
    batch, tokens, heads, dims = x.shape
    if out.numel() == 0:
        return
    x2, out2 = (xs[1], outs[1]) if len(xs) == 2 else (x, out)
    h, d = triton.next_power_of_2(heads), max(16, triton.next_power_of_2(dims))
    cos, sin = rope or (None, None)
    dy, dy2 = (None, None) if dys is None else (dys[0], dys[-1])
    rstd, rstd2 = (None, None) if rstds is None else (rstds[0], rstds[-1])
    rows = 2 if h * d <= 4096 else 1
    _rms_rope[(triton.cdiv(tokens, rows), batch)](
        x, x2, out, out2, dy, dy2, weights[0], weights[-1], cos, sin, rstd, rstd2, tokens, heads, dims, eps,
        x.stride(0), x.stride(1), x.stride(2), x2.stride(0), x2.stride(1), x2.stride(2), out.stride(0), out.stride(1),
        out.stride(2), 0 if cos is None or cos.dim() == 2 else cos.stride(0), ROWS=rows, H=h, D=d, TWO=len(xs) == 2,
        WEIGHT=weights[0] is not None, NORM=norm, ALL=over_all, ROPE=cos is not None, HALF_LAYOUT=half_layout,
        BACKWARD=dys is not None, STATS=rstd is not None, num_warps=min(16, max(1, h * d // 512)),
        enable_fp_fusion=False)


def pointwise(op: str, x: Tensor, other: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    if y.numel():
        block = 2048
        _pointwise[(triton.cdiv(y.numel(), block),)](x, other, y, None, None, None, y.numel(), OP=OPS[op],
                                                     BACKWARD=False, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return y


def pointwise_backward(op: str, dy: Tensor, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dx = torch.empty_like(x)
    d_other = None if other is None else torch.empty_like(x)
    if dx.numel():
        block = 2048
        _pointwise[(triton.cdiv(dx.numel(), block),)](x, other, None, dy, dx, d_other, dx.numel(), OP=OPS[op],
                                                      BACKWARD=True, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return dx, d_other


def gate(x: Tensor, gate_rows: Tensor, residual: Tensor | None) -> Tensor:
    batch, tokens, columns = x.shape
    y = torch.empty_like(x)
    if y.numel():
        rows, block = 8, 512
        _gate[(triton.cdiv(tokens, rows), batch, triton.cdiv(columns, block))](
            x, gate_rows, residual, y, tokens, columns, gate_rows.stride(0), ROWS=rows, BLOCK=block,
            RESIDUAL=residual is not None, num_warps=4, enable_fp_fusion=False)
    return y


def mean(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if out.numel():
        _mean[(x.shape[0],)](x, out, x.shape[1], BLOCK=CHUNK, num_warps=8, enable_fp_fusion=False)
    return out


def log_softmax(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        _log_softmax[(x.shape[0],)](x, y, None, None, x.shape[1], x.stride(0), BLOCK=CHUNK, BACKWARD=False,
                                    num_warps=8, enable_fp_fusion=False)
    return y


def log_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    if dx.numel():
        _log_softmax[(y.shape[0],)](None, y, dy, dx, y.shape[1], 0, BLOCK=CHUNK, BACKWARD=True, num_warps=8,
                                    enable_fp_fusion=False)
    return dx
