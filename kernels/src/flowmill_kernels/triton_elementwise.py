"""The Triton back end of the row and elementwise operators: norms, modulation, rotary embedding, activations, gates.

In: checked tensors, unit stride in their last dimension. Out: new tensors. Everything is fp32 between one load and one
rounding. A row's sum is one `tl.sum` over a block whose size and threads follow from the row's length alone; sums over
tokens walk blocks of fixed size in order, so their bits follow from the number of tokens.

Triton compiles a kernel anew for pointers and strides that are multiples of 16, and then spreads a row over threads in
another way: a sum in another order. So a row's length decides alone which of the two a kernel gets: lengths that are
multiples of 16 take the aligned one, and tensors that are not aligned are copied; other lengths take the one that
assumes nothing (`_both`). No atomics, no fused multiply-add (as in triton_backend.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import do_not_replay, launch, signature
from .triton_backend import _gelu_rest

TOKEN_CHUNK = 1024  # tokens of one partial sum over tokens: part of its order
CHUNK = 4096  # elements of one step of a sum over a long row: part of its order
MEAN_CHUNK = 16384  # elements of one partial sum of a mean: part of its order
WHOLE_ROW = 16384  # the longest row of log_softmax that is held at once

OPS = {"gelu_tanh": 0, "gelu": 1, "silu": 2, "swiglu": 3}


def _both(kernel: Any) -> tuple[Any, Any]:
    """(the kernel for lengths that are multiples of 16, the one for all others)."""
    if not isinstance(kernel, triton.JITFunction):  # the interpreter specializes nothing
        return kernel, kernel
    runtime = [p.name for p in kernel.params if not p.is_constexpr]
    return kernel, triton.jit(kernel.fn, do_not_specialize=runtime, do_not_specialize_on_alignment=runtime)


@triton.jit
def _place(blocks):
    """(sample, block of rows) of this program; one grid axis, since the others end at 65535."""
    sample = tl.program_id(0) // blocks
    return sample.to(tl.int64), tl.program_id(0) - sample * blocks


@triton.jit
def _columns(p, at, cols, inside):
    return tl.load(p + at + cols, inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "blocks"])
def _norm_modulate(x, y, y2, weight, bias, scale, shift, scale2, shift2, T, C, eps, blocks, stride_xb, stride_xt,
                   stride_scale, stride_shift, stride_scale2, stride_shift2, ROWS: tl.constexpr, STEPS: tl.constexpr,
                   BLOCK: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, MODULATE: tl.constexpr,
                   TWO: tl.constexpr, STAGES: tl.constexpr):
    """LayerNorm of STEPS times ROWS rows of one sample, then one or two modulations."""
    sample, block = _place(blocks)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < C
    if AFFINE:
        w = _columns(weight, 0, cols, inside)
    if BIAS:
        b = _columns(bias, 0, cols, inside)
    if MODULATE:
        one = 1.0 + _columns(scale, sample * stride_scale, cols, inside)
        move = _columns(shift, sample * stride_shift, cols, inside)
    if TWO:
        one2 = 1.0 + _columns(scale2, sample * stride_scale2, cols, inside)
        move2 = _columns(shift2, sample * stride_shift2, cols, inside)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = ((block * STEPS + step) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = inside & (rows < T)
        v = tl.load(x + sample * stride_xb + rows.to(tl.int64) * stride_xt + cols, mask, other=0.0).to(tl.float32)
        v = v - (tl.sum(v, 1) / C)[:, None]
        v = tl.where(inside, v, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, 1) / C + eps)[:, None]
        if AFFINE:
            v = v * w
        if BIAS:
            v = v + b
        at = (sample * T + rows) * C + cols
        if MODULATE:
            tl.store(y + at, (v * one + move).to(y.dtype.element_ty), mask)
        else:
            tl.store(y + at, v.to(y.dtype.element_ty), mask)
        if TWO:
            tl.store(y2 + at, (v * one2 + move2).to(y.dtype.element_ty), mask)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["T", "blocks"])
def _norm_modulate_backward(dy, dy2, x, add, dx, mean, rstd, weight, scale, scale2, T, C, eps, blocks, stride_xb,
                            stride_xt, stride_scale, stride_scale2, ROWS: tl.constexpr, STEPS: tl.constexpr,
                            BLOCK: tl.constexpr, AFFINE: tl.constexpr, MODULATE: tl.constexpr, ONE: tl.constexpr,
                            TWO: tl.constexpr, ADD: tl.constexpr, STATS: tl.constexpr, STAGES: tl.constexpr):
    """dx of `_norm_modulate`; `add` is the gradient that reaches x by another way."""
    sample, block = _place(blocks)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < C
    if AFFINE:
        w = _columns(weight, 0, cols, inside)
    if MODULATE and ONE:
        one = 1.0 + _columns(scale, sample * stride_scale, cols, inside)
    if TWO:
        one2 = 1.0 + _columns(scale2, sample * stride_scale2, cols, inside)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        lines = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        rows = lines[:, None]
        mask = inside & (rows < T)
        at = (sample * T + rows) * C + cols
        v = tl.load(x + sample * stride_xb + rows.to(tl.int64) * stride_xt + cols, mask, other=0.0).to(tl.float32)
        if ONE:
            g = tl.load(dy + at, mask, other=0.0).to(tl.float32)
            if MODULATE:
                g = g * one
            if TWO:
                g = g + tl.load(dy2 + at, mask, other=0.0).to(tl.float32) * one2
        else:
            g = tl.load(dy2 + at, mask, other=0.0).to(tl.float32) * one2
        if ADD:  # on its way while the sums are taken
            more = tl.load(add + at, mask, other=0.0)
        if AFFINE:
            g = g * w
        middle, g_middle = tl.reduce((v, g), 1, _add_both)
        middle = middle / C
        v = tl.where(inside, v - middle[:, None], 0.0)
        square, product = tl.reduce((v * v, g * v), 1, _add_both)
        r = tl.rsqrt(square / C + eps)
        d = r[:, None] * ((g - (g_middle / C)[:, None]) - (v * r[:, None]) * (product * r / C)[:, None])
        if ADD:
            d = d + more.to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask)
        if STATS:
            tl.store(mean + sample * T + lines, middle, lines < T)
            tl.store(rstd + sample * T + lines, r, lines < T)


@triton.jit(do_not_specialize=["T", "blocks", "chunks"])
def _column_sums(dy, x, mean, rstd, out, T, C, blocks, chunks, stride_yb, stride_yt, stride_xb, stride_xt,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKEN_CHUNK: tl.constexpr, TIMES: tl.constexpr,
                 CENTRED: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr):
    """out[b, chunk, c] = sum over the chunk's tokens of dy (times x, minus the row's mean, times its rstd)."""
    part, block = _place(blocks)
    sample = part // chunks
    first = (part - sample * chunks).to(tl.int32) * TOKEN_CHUNK
    cols = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first, min(first + TOKEN_CHUNK, T), ROWS, num_stages=STAGES):
        lines = start + tl.arange(0, ROWS)
        mask = (lines < T)[:, None] & (cols < C)
        at = lines.to(tl.int64)[:, None]
        g = tl.load(dy + sample * stride_yb + at * stride_yt + cols, mask, other=0.0).to(tl.float32)
        if TIMES:
            v = tl.load(x + sample * stride_xb + at * stride_xt + cols, mask, other=0.0).to(tl.float32)
            if CENTRED:
                v = v - tl.load(mean + sample * T + lines, lines < T, other=0.0)[:, None]
            if SCALED:
                v = v * tl.load(rstd + sample * T + lines, lines < T, other=0.0)[:, None]
            g = g * v
        total = total + g
    ends = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + part * C + ends, tl.sum(total, 0), ends < C)


@triton.jit
def _rotate(v, c, s, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, HALF_LAYOUT: tl.constexpr):
    """Rotate the pairs of each ROPE channels of v [ROWS, BLOCK] by angles of cosine c and sine s [ROWS, BLOCK / 2]."""
    if HALF_LAYOUT:
        a, b = tl.split(tl.permute(tl.reshape(v, (ROWS, BLOCK // ROPE, 2, ROPE // 2)), (0, 1, 3, 2)))
        a, b = tl.reshape(a, (ROWS, BLOCK // 2)), tl.reshape(b, (ROWS, BLOCK // 2))
    else:
        a, b = tl.split(tl.reshape(v, (ROWS, BLOCK // 2, 2)))
    u = a * c - b * s
    w = a * s + b * c
    if HALF_LAYOUT:
        u, w = tl.reshape(u, (ROWS, BLOCK // ROPE, ROPE // 2)), tl.reshape(w, (ROWS, BLOCK // ROPE, ROPE // 2))
        return tl.reshape(tl.permute(tl.join(u, w), (0, 1, 3, 2)), (ROWS, BLOCK))
    return tl.reshape(tl.join(u, w), (ROWS, BLOCK))


@triton.jit
def _rms_rope_rows(x, y, dy, weight, cos, sin, rstd, sample, first, count, heads, dims, eps, stride_xb, stride_xt,
                   stride_xh, stride_yb, stride_yt, stride_yh, rope_tokens, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   WEIGHT: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, HALF_LAYOUT: tl.constexpr,
                   BACKWARD: tl.constexpr, STATS: tl.constexpr):
    """ROWS (token, head) rows of one tensor. Forward writes y; backward reads dy [B, T, H, D] and writes dx to y."""
    lines = first + tl.arange(0, ROWS)
    ok = lines < count
    token = lines // heads
    head = (lines - token * heads).to(tl.int64)
    token = token.to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = ok[:, None] & (cols < dims)
    v = tl.load(x + sample * stride_xb + (token * stride_xt + head * stride_xh)[:, None] + cols, mask, other=0.0)
    v = v.to(tl.float32)
    c, s, g, w = 0.0, 0.0, 0.0, 0.0  # where the constants below leave them out
    if ROPE:
        # Before the sums: behind them the memory would be waited for twice, one after the other.
        pairs = tl.arange(0, BLOCK // 2)
        where = ((sample * rope_tokens + token) * (ROPE // 2))[:, None] + (pairs % (ROPE // 2))[None, :]
        inside = ok[:, None] & (pairs < dims // 2)[None, :]
        c = tl.load(cos + where, inside, other=1.0)
        s = tl.load(sin + where, inside, other=0.0)
    if WEIGHT:
        w = _columns(weight, 0, cols, cols < dims)
    if BACKWARD:
        at = (sample * count + lines.to(tl.int64)) * dims
        g = tl.load(dy + at[:, None] + cols, mask, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(v * v, 1) / dims + eps)
        v = v * r[:, None]
    if BACKWARD:
        if ROPE:
            g = _rotate(g, c, -s, ROWS, BLOCK, ROPE, HALF_LAYOUT)
        if WEIGHT:
            g = g * w
        if NORM:
            g = r[:, None] * (g - v * (tl.sum(g * v, 1) / dims)[:, None])
            if STATS:
                tl.store(rstd + sample * count + lines, r, ok)
        v = g
    else:
        if WEIGHT:
            v = v * w
        if ROPE:
            v = _rotate(v, c, s, ROWS, BLOCK, ROPE, HALF_LAYOUT)
    target = sample * stride_yb + (token * stride_yt + head * stride_yh)[:, None]
    tl.store(y + target + cols, v.to(y.dtype.element_ty), mask)  # type: ignore[union-attr]


@triton.jit(do_not_specialize=["count", "blocks", "heads", "rope_tokens"])
def _rms_rope(x, x2, y, y2, dy, dy2, weight, weight2, cos, sin, rstd, rstd2, count, heads, dims, eps, blocks,
              stride_xb, stride_xt, stride_xh, stride_x2b, stride_x2t, stride_x2h, stride_yb, stride_yt, stride_yh,
              rope_tokens, ROWS: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr, WEIGHT: tl.constexpr,
              NORM: tl.constexpr, ROPE: tl.constexpr, HALF_LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
              STATS: tl.constexpr):
    """RMS norm and rotary embedding of one tensor, or of two (q and k) whose programs take turns."""
    sample, block = _place(blocks)
    if TWO:
        first = block // 2 * ROWS
        if block % 2 == 0:
            _rms_rope_rows(x, y, dy, weight, cos, sin, rstd, sample, first, count, heads, dims, eps, stride_xb,
                           stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, rope_tokens, ROWS, BLOCK, WEIGHT,
                           NORM, ROPE, HALF_LAYOUT, BACKWARD, STATS)
        else:
            _rms_rope_rows(x2, y2, dy2, weight2, cos, sin, rstd2, sample, first, count, heads, dims, eps, stride_x2b,
                           stride_x2t, stride_x2h, stride_yb, stride_yt, stride_yh, rope_tokens, ROWS, BLOCK, WEIGHT,
                           NORM, ROPE, HALF_LAYOUT, BACKWARD, STATS)
    else:
        _rms_rope_rows(x, y, dy, weight, cos, sin, rstd, sample, block * ROWS, count, heads, dims, eps, stride_xb,
                       stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, rope_tokens, ROWS, BLOCK, WEIGHT, NORM,
                       ROPE, HALF_LAYOUT, BACKWARD, STATS)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)): 0 and 1 at the infinities, no overflow that matters."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normal_cdf(v):
    """(cdf(v), exp(-v^2 / 2)) of the normal distribution, within 1e-7.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. Its exponential is the density's, and it takes a
    third fewer instructions than tl.erf, which would be slower than the memory. The multiply-adds are written out, so
    that they are no compiler's choice.
    """
    bell = tl.exp(-0.5 * (v * v))
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(v))  # 0.3275911 / sqrt(2)
    p = tl.fma(t, 0.53070271, -0.72657601)  # half of 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592
    p = tl.fma(t, p, 0.71070687)
    p = tl.fma(t, p, -0.14224837)
    p = tl.fma(t, p, 0.1274148)
    tail = p * t * bell
    return tl.where(v < 0, tail, 1.0 - tail), bell


@triton.jit
def _activation(v, up, OP: tl.constexpr):
    """An activation of v; `up` is SwiGLU's second factor."""
    if OP == 0:
        y = v * (1.0 - _gelu_rest(v))  # as in the GEMM's epilogue
    elif OP == 1:
        cdf, _ = _normal_cdf(v)
        y = v * cdf
    else:
        y = v * _sigmoid(v)
        if OP == 3:
            y = y * up
    return y


@triton.jit
def _slope(v, OP: tl.constexpr):
    """The activation's derivative at v."""
    if OP == 0:
        rest = _gelu_rest(v)
        share = 1.0 - rest
        d = tl.fma(v * (rest * share), tl.fma(v * v, 0.21406445, 1.5957691), share)
    elif OP == 1:
        cdf, bell = _normal_cdf(v)
        d = cdf + v * (0.3989422804014327 * bell)
    else:
        s = _sigmoid(v)
        d = s * (1.0 + v * (1.0 - s))
    return d


@triton.jit(do_not_specialize=["blocks"])
def _pointwise(x, other, y, dy, dx, d_other, C, blocks, stride_x, stride_other, stride_dy, OP: tl.constexpr,
               KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of C elements; outputs are contiguous. KIND 0: an activation to y; 1: its derivative times dy to dx; 2: the
    activation to y and its derivative to dx."""
    row, block = _place(blocks)
    cols = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    v = tl.load(x + row * stride_x + cols, mask, other=0.0).to(tl.float32)
    up = 0.0
    if OP == 3:
        up = tl.load(other + row * stride_other + cols, mask, other=0.0).to(tl.float32)
    at = row * C + cols
    if KIND == 1:
        g = tl.load(dy + row * stride_dy + cols, mask, other=0.0).to(tl.float32)
        if OP == 3:
            tl.store(d_other + at, (g * (v * _sigmoid(v))).to(dx.dtype.element_ty), mask)
            g = g * up
        tl.store(dx + at, (g * _slope(v, OP)).to(dx.dtype.element_ty), mask)
    else:
        tl.store(y + at, _activation(v, up, OP).to(y.dtype.element_ty), mask)
        if KIND == 2:
            tl.store(dx + at, _slope(v, OP).to(dx.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T", "blocks", "col_blocks"])
def _gate(x, gate, residual, y, T, C, blocks, col_blocks, stride_g, stride_xb, stride_xt, stride_rb, stride_rt,
          ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """(residual +) gate[b] * x over [B, T, C]."""
    sample, block = _place(blocks)
    row_block = block // col_blocks
    cols = ((block - row_block * col_blocks) * BLOCK + tl.arange(0, BLOCK))[None, :]
    rows = (row_block * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < T) & (cols < C)
    v = tl.load(x + sample * stride_xb + rows.to(tl.int64) * stride_xt + cols, mask, other=0.0).to(tl.float32)
    v = v * tl.load(gate + sample * stride_g + cols, cols < C, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = sample * stride_rb + rows.to(tl.int64) * stride_rt + cols
        v = tl.load(residual + at, mask, other=0.0).to(tl.float32) + v
    tl.store(y + (sample * T + rows) * C + cols, v.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["blocks", "divisor"])
def _row_sums(x, out, N, blocks, divisor, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """out[row, chunk] = sum of a row's chunk / divisor, BLOCK elements a step added in order, lanes at the end."""
    row, block = _place(blocks)
    total = tl.zeros((BLOCK,), tl.float32)
    first = block * CHUNK
    for start in range(first, min(first + CHUNK, N), BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * N + at, at < N, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0) / divisor)


@triton.jit(do_not_specialize=["rows"])
def _log_softmax(x, y, lse, rows, N, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """log_softmax of ROWS whole rows; lse [rows, 2] fp32: maximum and log of the sum, apart for large values' sake."""
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = lines.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (lines < rows)[:, None] & (cols < N)
    v = tl.load(x + line * stride_x + cols, mask, other=-float("inf")).to(tl.float32)
    top = tl.max(v, 1)
    # A NaN that the maximum loses comes back in the sum.
    log = tl.log(tl.sum(tl.where(mask, tl.exp(v - top[:, None]), 0.0), 1))
    tl.store(y + line * N + cols, ((v - top[:, None]) - log[:, None]).to(y.dtype.element_ty), mask)
    tl.store(lse + 2 * lines, top, lines < rows)
    tl.store(lse + 2 * lines + 1, log, lines < rows)


@triton.jit(do_not_specialize=["rows"])
def _log_softmax_backward(dy, x, lse, dx, rows, N, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dx = dy - exp(x - lse) * sum(dy) of ROWS whole rows."""
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = lines.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (lines < rows)[:, None] & (cols < N)
    g = tl.load(dy + line * N + cols, mask, other=0.0).to(tl.float32)
    v = tl.load(x + line * stride_x + cols, mask, other=0.0).to(tl.float32)
    top = tl.load(lse + 2 * lines, lines < rows, other=0.0)[:, None]
    log = tl.load(lse + 2 * lines + 1, lines < rows, other=0.0)[:, None]
    d = g - tl.exp((v - top) - log) * tl.sum(g, 1)[:, None]
    tl.store(dx + line * N + cols, d.to(dx.dtype.element_ty), mask)


@triton.jit
def _log_softmax_long(x, y, lse, N, stride_x, BLOCK: tl.constexpr):
    """log_softmax of one row in two walks: a running maximum and sum, chunk by chunk, then the result."""
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride_x + at, at < N, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(v, 0))
        # -inf: nothing but -inf so far. Not subtracted, as -inf - -inf is NaN; the sum stays 0 and its log -inf.
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(v - base), 0)
        top = new
    log = tl.log(total)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride_x + at, at < N, other=0.0).to(tl.float32)
        tl.store(y + row * N + at, ((v - top) - log).to(y.dtype.element_ty), at < N)
    tl.store(lse + 2 * row, top)
    tl.store(lse + 2 * row + 1, log)


@triton.jit
def _log_softmax_long_backward(dy, x, lse, dx, N, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(dy + row * N + at, at < N, other=0.0).to(tl.float32)
    sum_dy = tl.sum(total, 0)
    top = tl.load(lse + 2 * row)
    log = tl.load(lse + 2 * row + 1)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(dy + row * N + at, at < N, other=0.0).to(tl.float32)
        v = tl.load(x + row * stride_x + at, at < N, other=0.0).to(tl.float32)
        tl.store(dx + row * N + at, (g - tl.exp((v - top) - log) * sum_dy).to(dx.dtype.element_ty), at < N)


_NORM_MODULATE = _both(_norm_modulate)
_NORM_MODULATE_BACKWARD = _both(_norm_modulate_backward)
_COLUMN_SUMS = _both(_column_sums)
_RMS_ROPE = _both(_rms_rope)
_ROW_SUMS = _both(_row_sums)
_LOG_SOFTMAX = _both(_log_softmax)
_LOG_SOFTMAX_BACKWARD = _both(_log_softmax_backward)
_LOG_SOFTMAX_LONG = _both(_log_softmax_long)
_LOG_SOFTMAX_LONG_BACKWARD = _both(_log_softmax_long_backward)


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _row_shape(columns: int) -> tuple[int, int, int, int, int]:
    """(block, rows, steps, stages, warps) of a LayerNorm of rows of so many columns; all of it is part of the bits."""
    block = max(16, _pow2(columns))
    steps, stages = (8, 3) if block <= 8192 else (1, 1)  # longer rows leave no registers for a loop
    return block, max(1, 2048 // block), steps, stages, min(16, max(4, block // 512))


def _row_shape_backward(columns: int) -> tuple[int, int, int, int, int]:
    block = max(16, _pow2(columns))
    return block, max(1, 2048 // block), 1, 1, min(16, max(4, block // 512))


def _head_shape(columns: int, backward: bool) -> tuple[int, int, int]:
    """(block, rows, warps) of the RMS norm of rows of so many columns; all of it is part of the bits."""
    block = max(16, _pow2(columns))
    return block, max(1, 2048 // block), min(16, max(4 if block <= 256 and not backward else 2, block // 1024))


def _sum_shape(columns: int) -> tuple[int, int, int, int]:
    """(block, tokens, stages, warps) of a sum over tokens; all of it is part of the bits."""
    return min(64, max(16, _pow2(columns))), 16, 4, 2


def _gate_shape(columns: int) -> tuple[int, int, int]:
    """(block, rows, warps); elementwise, so no part of the bits."""
    block = min(512, max(16, _pow2(columns)))
    return block, 1024 // block, 2


def _point_shape(op: str, backward: bool) -> tuple[int, int]:
    """(block, warps); elementwise, so no part of the bits."""
    return (2048 if backward or op == "swiglu" else 4096), 4


def _aligned(t: Tensor) -> Tensor:
    """t, or a copy of it, whose rows all start at multiples of 16 bytes and elements; for lengths that allow it."""
    if t.data_ptr() % 16 == 0:
        if t.is_contiguous():
            return t
        for stride, size in zip(t.stride()[:-1], t.shape, strict=False):
            if stride % 16 and size > 1:
                break
        else:
            return t
    return _copied(t)


def _copied(t: Tensor) -> Tensor:
    do_not_replay()
    return t.clone(memory_format=torch.contiguous_format)


def _all_aligned(columns: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as the kernel for this row length expects them (see the module's docstring)."""
    return tensors if columns % 16 else tuple([t if t is None else _aligned(t) for t in tensors])


def _step(t: Tensor | None, dim: int) -> int:
    """Stride of a dimension; 0 where it has one element: its stride may be anything, 1 as well."""
    return 0 if t is None or t.shape[dim] == 1 else t.stride(dim)


def norm_modulate(x: Tensor, scale: Tensor | None, shift: Tensor | None, scale2: Tensor | None, shift2: Tensor | None,
                  weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    batch, tokens, columns = x.shape
    y = torch.empty((batch, tokens, columns), dtype=x.dtype, device=x.device)
    y2 = torch.empty_like(y) if scale2 is not None else None
    if y.numel() == 0:
        return y, y2
    given = _all_aligned(columns, x, weight, bias, scale, shift, scale2, shift2)

    def make() -> tuple[tuple[int], list, dict]:
        x, _, _, scale, shift, scale2, shift2 = given
        block, rows, steps, stages, warps = _row_shape(columns)
        blocks = -(-tokens // (rows * steps))
        return (blocks * batch,), [
            x, y, y2, *given[1:], tokens, columns, eps, blocks, _step(x, 0), _step(x, 1), _step(scale, 0),
            _step(shift, 0), _step(scale2, 0), _step(shift2, 0)], {
            "ROWS": rows, "STEPS": steps, "BLOCK": block, "AFFINE": weight is not None, "BIAS": bias is not None,
            "MODULATE": scale is not None, "TWO": scale2 is not None, "STAGES": stages, "num_warps": warps,
            "enable_fp_fusion": False}

    launch(_NORM_MODULATE[columns % 16 != 0], (signature(*given), eps), (given[0], y, y2, *given[1:]), make)
    return y, y2


def norm_modulate_backward(dy: Tensor | None, dy2: Tensor | None, x: Tensor, scale: Tensor | None,
                           scale2: Tensor | None, weight: Tensor | None, eps: float, add: Tensor | None, stats: bool
                           ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dy, dy2 and add are contiguous."""
    batch, tokens, columns = x.shape
    dx = torch.empty((batch, tokens, columns), dtype=x.dtype, device=x.device)
    mean = torch.empty((batch, tokens), dtype=torch.float32, device=x.device) if stats else None
    rstd = torch.empty_like(mean) if mean is not None else None
    if dx.numel() == 0:
        return dx, mean, rstd
    given = _all_aligned(columns, dy, dy2, x, add, weight, scale, scale2)
    pointers = (*given[:4], dx, mean, rstd, *given[4:])

    def make() -> tuple[tuple[int], list, dict]:
        dy, dy2, x, add, weight, scale, scale2 = given
        block, rows, steps, stages, warps = _row_shape_backward(columns)
        blocks = -(-tokens // (rows * steps))
        return (blocks * batch,), [
            *pointers, tokens, columns, eps, blocks, _step(x, 0), _step(x, 1), _step(scale, 0), _step(scale2, 0)], {
            "ROWS": rows, "STEPS": steps, "BLOCK": block, "AFFINE": weight is not None, "MODULATE": scale is not None,
            "ONE": dy is not None, "TWO": dy2 is not None, "ADD": add is not None, "STATS": stats, "STAGES": stages,
            "num_warps": warps, "enable_fp_fusion": False}

    launch(_NORM_MODULATE_BACKWARD[columns % 16 != 0], (signature(*given), eps, stats), pointers, make)
    return dx, mean, rstd


def column_sums(dy: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    batch, tokens, columns = dy.shape
    chunks = max(1, -(-tokens // TOKEN_CHUNK))
    out = torch.empty((batch, chunks, columns), dtype=torch.float32, device=dy.device)
    if out.numel() == 0:
        return out[:, 0]
    given = _all_aligned(columns, dy, x)
    pointers = (*given, mean, rstd, out)

    def make() -> tuple[tuple[int], list, dict]:
        dy, x = given
        block, rows, stages, warps = _sum_shape(columns)
        blocks = -(-columns // block)
        return (blocks * chunks * batch,), [
            *pointers, tokens, columns, blocks, chunks, _step(dy, 0), _step(dy, 1), _step(x, 0), _step(x, 1)], {
            "ROWS": rows, "BLOCK": block, "TOKEN_CHUNK": TOKEN_CHUNK, "TIMES": x is not None,
            "CENTRED": mean is not None, "SCALED": rstd is not None, "STAGES": stages, "num_warps": warps,
            "enable_fp_fusion": False}

    launch(_COLUMN_SUMS[columns % 16 != 0], (signature(*given, mean, rstd), TOKEN_CHUNK), pointers, make)
    return out[:, 0] if chunks == 1 else column_sums(out, None, None, None)


def writable(out: Tensor, over_all: bool) -> bool:
    """Whether `rms_rope` can write into this view of a wider buffer."""
    if out.stride(3) != 1 or (over_all and out.stride(2) != out.shape[3]):
        return False
    columns = out.shape[2] * out.shape[3] if over_all else out.shape[3]
    return columns % 16 != 0 or not (out.data_ptr() % 16 or any(s % 16 for s in out.stride()[:2 if over_all else 3]))


def rms_rope(xs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], eps: float, rope: tuple[Tensor, Tensor] | None,
             half_layout: bool, over_all: bool, norm: bool, outs: tuple[Tensor, ...],
             dys: tuple[Tensor, ...] | None = None, rstds: tuple[Tensor | None, ...] | None = None) -> None:
    """Write norm and rotation of one or two [B, T, H, D] tensors to `outs`; with contiguous `dys` the gradients.

    Several outs have one set of strides; an out that is not contiguous is `writable`.
    """
    if outs[0].numel() == 0:
        return
    angles = xs[0].shape[3]
    if over_all:  # a token is one row, whose pairs take the angles of their head
        xs = tuple([x.flatten(2).unsqueeze(2) for x in xs])
        outs = tuple([o.view(*o.shape[:2], 1, -1) for o in outs])
    batch, tokens, heads, dims = xs[0].shape
    two = len(xs) == 2
    x, x2, weight, weight2 = _all_aligned(dims, xs[0], xs[-1] if two else None, weights[0],
                                          weights[-1] if two else None)
    dy, dy2 = _all_aligned(dims, *((None, None) if dys is None else (dys[0], dys[-1] if two else None)))
    # Contiguous, so only their start can be out of line.
    cos, sin = (None, None) if rope is None else [_copied(t) if t.data_ptr() % 16 else t for t in rope]
    rstd, rstd2 = (None, None) if rstds is None else (rstds[0], rstds[-1] if two else None)
    pointers = (x, x2, outs[0], outs[-1] if two else None, dy, dy2, weight, weight2, cos, sin, rstd, rstd2)

    def make() -> tuple[tuple[int], list, dict]:
        block, rows, warps = _head_shape(dims, dys is not None)
        blocks = -(-tokens * heads // rows) * len(xs)
        out = outs[0]
        return (blocks * batch,), [
            *pointers, tokens * heads, heads, dims, eps, blocks, _step(x, 0), _step(x, 1), _step(x, 2), _step(x2, 0),
            _step(x2, 1), _step(x2, 2), _step(out, 0), _step(out, 1), _step(out, 2),
            tokens if cos is not None and cos.dim() == 3 else 0], {
            "ROWS": rows, "BLOCK": block, "TWO": two, "WEIGHT": weight is not None, "NORM": norm,
            "ROPE": 0 if cos is None else angles, "HALF_LAYOUT": half_layout, "BACKWARD": dys is not None,
            "STATS": rstd is not None, "num_warps": warps, "enable_fp_fusion": False}

    key = signature(x, x2, outs[0], dy, weight, weight2, cos), angles, eps, half_layout, norm, rstd is None
    launch(_RMS_ROPE[dims % 16 != 0], key, pointers, make)


def _launch_pointwise(op: str, x: Tensor, other: Tensor | None, y: Tensor | None, dy: Tensor | None,
                      dx: Tensor | None, d_other: Tensor | None) -> None:
    rows, columns = 1, x.numel()  # contiguous tensors are one row
    if not (x.is_contiguous() and (other is None or other.is_contiguous()) and (dy is None or dy.is_contiguous())):
        columns = x.shape[-1]
        rows = x.numel() // columns
        x = x.reshape(rows, columns)
        other, dy = (None if t is None else t.reshape(rows, columns) for t in (other, dy))
    pointers = (x, other, y, dy, dx, d_other)

    def make() -> tuple[tuple[int], list, dict]:
        block, warps = _point_shape(op, dx is not None)
        if rows > 1:
            block = min(block, max(128, _pow2(columns)))
        blocks = -(-columns // block)
        strides = [0 if t is None or rows == 1 else t.stride(0) for t in (x, other, dy)]
        kind = 0 if dx is None else 1 if y is None else 2
        return (blocks * rows,), [*pointers, columns, blocks, *strides], {
            "OP": OPS[op], "KIND": kind, "BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}

    launch(_pointwise, (signature(x, other, dy), op, y is None, dx is None), pointers, make)


def pointwise(op: str, x: Tensor, other: Tensor | None) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        _launch_pointwise(op, x, other, y, None, None, None)
    return y


def pointwise_slope(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    y, slope = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if y.numel():
        _launch_pointwise(op, x, None, y, None, slope, None)
    return y, slope


def pointwise_backward(op: str, dy: Tensor, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_other = None if other is None else torch.empty_like(dx)
    if dx.numel():
        _launch_pointwise(op, x, other, None, dy, dx, d_other)
    return dx, d_other


def gate(x: Tensor, gate_rows: Tensor, residual: Tensor | None) -> Tensor:
    batch, tokens, columns = x.shape
    y = torch.empty((batch, tokens, columns), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    pointers = (x, gate_rows, residual, y)

    def make() -> tuple[tuple[int], list, dict]:
        block, rows, warps = _gate_shape(columns)
        col_blocks = -(-columns // block)
        blocks = -(-tokens // rows) * col_blocks
        return (blocks * batch,), [
            *pointers, tokens, columns, blocks, col_blocks, gate_rows.stride(0), x.stride(0), x.stride(1),
            *((0, 0) if residual is None else residual.stride()[:2])], {
            "ROWS": rows, "BLOCK": block, "RESIDUAL": residual is not None, "num_warps": warps,
            "enable_fp_fusion": False}

    launch(_gate, signature(x, gate_rows, residual), pointers, make)
    return y


def _sum_rows(x: Tensor, divisor: float, chunk: int) -> Tensor:
    """fp32 [rows, chunks]: sums of each row's chunks over `divisor`."""
    rows, length = x.shape
    blocks = -(-length // chunk)
    out = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    (x,) = _all_aligned(length, x)  # type: ignore[assignment]

    def make() -> tuple[tuple[int], list, dict]:
        return (rows * blocks,), [x, out, length, blocks, float(divisor)], {
            "BLOCK": min(CHUNK, max(16, _pow2(length))), "CHUNK": chunk, "num_warps": 8, "enable_fp_fusion": False}

    launch(_ROW_SUMS[length % 16 != 0], (signature(x), divisor, chunk), (x, out), make)
    return out


def mean(x: Tensor) -> Tensor:
    """x is contiguous."""
    length = x.shape[1]
    if x.shape[0] == 0:
        return torch.empty(0, dtype=torch.float32, device=x.device)
    if length > MEAN_CHUNK:
        x = _sum_rows(x, 1.0, MEAN_CHUNK)
    return _sum_rows(x, length, 2**30)[:, 0]


def _whole_rows(length: int) -> dict:
    """Constants of the kernels that hold whole rows; all of it is part of the bits."""
    block = max(16, _pow2(length))
    return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": min(16, max(1, block // 512)),
            "enable_fp_fusion": False}


def _walk() -> dict:
    """Constants of the kernels that walk a long row; all of it is part of the bits."""
    return {"BLOCK": CHUNK, "num_warps": 8, "enable_fp_fusion": False}


def log_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(result, fp32 [rows, 2]: each row's maximum and the log of its sum)."""
    rows, length = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, lse
    (x,) = _all_aligned(length, x)  # type: ignore[assignment]

    def make() -> tuple[tuple[int], list, dict]:
        if length > WHOLE_ROW:
            return (rows,), [x, y, lse, length, _step(x, 0)], _walk()
        constants = _whole_rows(length)
        return (-(-rows // constants["ROWS"]),), [x, y, lse, rows, length, _step(x, 0)], constants

    kernels = _LOG_SOFTMAX_LONG if length > WHOLE_ROW else _LOG_SOFTMAX
    launch(kernels[length % 16 != 0], signature(x), (x, y, lse), make)
    return y, lse


def log_softmax_backward(dy: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """dy is contiguous."""
    rows, length = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return dx
    dy, x = _all_aligned(length, dy, x)  # type: ignore[assignment]

    def make() -> tuple[tuple[int], list, dict]:
        if length > WHOLE_ROW:
            return (rows,), [dy, x, lse, dx, length, _step(x, 0)], _walk()
        constants = _whole_rows(length)
        return (-(-rows // constants["ROWS"]),), [dy, x, lse, dx, rows, length, _step(x, 0)], constants

    kernels = _LOG_SOFTMAX_LONG_BACKWARD if length > WHOLE_ROW else _LOG_SOFTMAX_BACKWARD
    launch(kernels[length % 16 != 0], signature(dy, x), (dy, x, lse, dx), make)
    return dx
