"""The Triton back end of attention: forward, and a backward in two kernels without atomics.

In: q, k, v [B, T, H, D] in one or two segments each. Out: [B, T, H, D] a query segment, and gradients. A query row
walks the keys of its own sample in blocks of fixed size that start at each segment's first key, so its bits depend on
nothing but its own keys: not on the batch, on padding, on how many queries there are or on the grid. Whole blocks carry
no masking and come by TMA on Hopper and later; the last block of a segment comes by masked pointers, since the rows
behind a sample's last belong to its neighbour.

Faster kernels for Hopper: `hopper_attention.py`, the forward of heads of 64 and 128, and
`hopper_attention_backward.py`, the backward of heads of 128.
"""

import functools
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import launch, signature
from .triton_backend import hopper_kernels, uses_tma

LOG2_E = 1.4426950408889634
Norms = tuple[tuple[Tensor, Tensor], ...]
"""(weight [D], rstd [B * T, H] fp32) of every segment."""


@triton.jit
def _block(desc, ptr, stride, base, start, col, limit, dims, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Rows start .. start + ROWS of a sample whose first row is `base`; by pointers, rows from `limit` on are zero."""
    if TMA:
        return desc.load([base + start, col])
    else:
        rows = start + tl.arange(0, ROWS)
        cols = tl.arange(0, D)
        at = (base + rows).to(tl.int64)[:, None] * stride + (col + cols)[None, :]
        return tl.load(ptr + at, (rows < limit)[:, None] & (cols < dims)[None, :], other=0.0)


@triton.jit
def _softmax_step(q, k, v, acc, total, top, scale, valid, MASK: tl.constexpr):
    """One block of keys of the online softmax; `scale` includes log2(e)."""
    s = tl.dot(q, tl.trans(k))
    if MASK:
        s = tl.where(valid, s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    # Written as one fused operation, so that it is one in every form of the kernel.
    p = tl.math.exp2(tl.fma(s, scale, -new_top[:, None]))
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, new_top


@triton.jit
def _attend(q, k_desc, v_desc, k, v, stride_k, stride_v, acc, total, top, first, length, base, col_k, col_v, dims,
            offset, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
            TMA: tl.constexpr):
    """All keys of one segment for M queries from number `first` on."""
    stop = length
    whole = length // N * N
    if CAUSAL:
        stop = tl.minimum(length, first + M + offset)
        whole = tl.minimum(whole, (first + offset + 1) // N * N)
    for start in tl.range(0, whole, N):
        kb = _block(k_desc, k, stride_k, base, start, col_k, stop, dims, N, D, TMA)
        vb = _block(v_desc, v, stride_v, base, start, col_v, stop, dims, N, D, TMA)
        acc, total, top = _softmax_step(q, kb, vb, acc, total, top, scale, 0, False)
    for start in tl.range(whole, stop, N, num_stages=1):
        kb = _block(k_desc, k, stride_k, base, start, col_k, length, dims, N, D, False)
        vb = _block(v_desc, v, stride_v, base, start, col_v, length, dims, N, D, False)
        keys = start + tl.arange(0, N)
        valid = (keys < length)[None, :]
        if CAUSAL:
            valid = valid & (keys[None, :] <= (first + offset + tl.arange(0, M))[:, None])
        acc, total, top = _softmax_step(q, kb, vb, acc, total, top, scale, valid, True)
    return acc, total, top


@triton.jit
def _length(lengths, sample, size, GIVEN: tl.constexpr):
    if GIVEN:
        return tl.minimum(tl.maximum(tl.load(lengths + sample), 0), size)
    else:
        return size


@triton.jit
def _forward(q0, q1, k0_desc, v0_desc, k1_desc, v1_desc, k0, v0, k1, v1, o0, o1, lse0, lse1, len0, len1,
             heads, tiles0, tq0, tq1, tk0, tk1, dims, scale,
             sq0b, sq0t, sq0h, sq1b, sq1t, sq1h, sk0, sk0h, sv0, sv0h, sk1, sk1h, sv1, sv1h,
             M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TWO_Q: tl.constexpr, TWO_K: tl.constexpr,
             LEN0: tl.constexpr, LEN1: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr, TMA: tl.constexpr):
    """M queries of one head of one sample."""
    tile = tl.program_id(0)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    q = q0 + sample.to(tl.int64) * sq0b + head * sq0h
    stride_q = sq0t
    out = o0
    lse = lse0
    tq = tq0
    if TWO_Q:  # noqa: SIM102
        if tile >= tiles0:
            tile = tile - tiles0
            q = q1 + sample.to(tl.int64) * sq1b + head * sq1h
            stride_q = sq1t
            out = o1
            lse = lse1
            tq = tq1
    first = tile * M
    rows = first + tl.arange(0, M)
    cols = tl.arange(0, D)
    inside = (rows < tq)[:, None] & (cols < dims)[None, :]
    qb = tl.load(q + rows.to(tl.int64)[:, None] * stride_q + cols[None, :], inside, other=0.0)
    acc = tl.zeros((M, D), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -float("inf"), tl.float32)
    offset = tk0 - tq0
    acc, total, top = _attend(qb, k0_desc, v0_desc, k0, v0, sk0, sv0, acc, total, top, first,
                              _length(len0, sample, tk0, LEN0), sample * tk0, head * sk0h, head * sv0h, dims, offset,
                              scale, M, N, D, CAUSAL, TMA)
    if TWO_K:
        acc, total, top = _attend(qb, k1_desc, v1_desc, k1, v1, sk1, sv1, acc, total, top, first,
                                  _length(len1, sample, tk1, LEN1), sample * tk1, head * sk1h, head * sv1h, dims,
                                  offset, scale, M, N, D, False, TMA)
    # A sample without a key gives zeros.
    acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
    at = ((sample.to(tl.int64) * tq + rows)[:, None] * heads + head) * dims + cols[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)
    if LSE:
        tl.store(lse + (sample.to(tl.int64) * heads + head) * tq + rows,
                 tl.where(total == 0.0, float("inf"), top + tl.math.log2(total)), rows < tq)


@triton.jit
def _delta(out, dout, delta, heads, tokens, dims, M: tl.constexpr, D: tl.constexpr):
    """delta [B, H, T] = sum over channels of out * dout, both contiguous [B, T, H, D]."""
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    rows = tl.program_id(0) * M + tl.arange(0, M)
    cols = tl.arange(0, D)
    at = ((sample * tokens + rows)[:, None] * heads + head) * dims + cols[None, :]
    inside = (rows < tokens)[:, None] & (cols < dims)[None, :]
    product = tl.load(out + at, inside, other=0.0).to(tl.float32) * tl.load(dout + at, inside, other=0.0).to(tl.float32)
    tl.store(delta + (sample * heads + head) * tokens + rows, tl.sum(product, 1), rows < tokens)


@triton.jit
def _through_norm(g, y, weight, rstd, at, inside, dims, D: tl.constexpr):
    """The gradient behind rows' RMS norm from g, the one before it, and what the norm gave, y = x * rstd * weight."""
    cols = tl.arange(0, D)
    w = tl.load(weight + cols, cols < dims, other=1.0).to(tl.float32)
    inverse = 1.0 / w  # a column, not an element: a quotient is ten instructions
    r = tl.load(rstd + at, inside, other=0.0)[:, None]
    y = y.to(tl.float32)
    return r * (g * w[None, :] - (y * inverse[None, :]) * (tl.sum(g * y, 1) / dims)[:, None])


@triton.jit
def _key_step(kb, vb, q, dout, pairs, dk, dv, scale, keep, MASK: tl.constexpr):
    """What one block of queries adds to the gradients of a block of keys. A row that does not exist has -lse = -inf,
    so its weight is exactly 0."""
    s = tl.dot(kb, tl.trans(q))
    minus_lse, delta = _unpack(pairs)
    p = tl.math.exp2(tl.fma(s, scale, minus_lse[None, :]))
    if MASK:
        p = tl.where(keep, p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv)
    dp = tl.dot(vb, tl.trans(dout))
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _pack(minus_lse, delta):
    """A row's two numbers in 64 bits: a thread then copies two rows at once, 8 copies a block of 64 rows and not 32."""
    low = minus_lse.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (delta.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _unpack(pair):
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _over_queries(kb, vb, q_desc, do_desc, q, dout, pairs, stride_q, tq, base, row_at, col_q, col_o, stride_o, dims,
                  first, offset, scale, dk, dv, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
                  CAUSAL: tl.constexpr, TMA: tl.constexpr):
    """All queries of one segment, in order, for the keys first .. first + N; TAIL rows take the rest."""
    whole = tq // M * M
    if CAUSAL:
        for start in tl.range(tl.maximum(first - offset, 0) // M * M, tq, M, num_stages=1):
            qb = _block(q_desc, q, stride_q, base, start, col_q, tq, dims, M, D, False)
            ob = _block(do_desc, dout, stride_o, base, start, col_o, tq, dims, M, D, False)
            rows = start + tl.arange(0, M)
            keep = (first + tl.arange(0, N))[:, None] <= (rows + offset)[None, :]
            dk, dv = _key_step(kb, vb, qb, ob, tl.load(pairs + row_at + rows), dk, dv, scale, keep, True)
    else:
        for start in tl.range(0, whole, M):
            qb = _block(q_desc, q, stride_q, base, start, col_q, tq, dims, M, D, TMA)
            ob = _block(do_desc, dout, stride_o, base, start, col_o, tq, dims, M, D, TMA)
            dk, dv = _key_step(kb, vb, qb, ob, tl.load(pairs + row_at + start + tl.arange(0, M)), dk, dv, scale, 0,
                               False)
        if TAIL:
            for start in tl.range(whole, tq, TAIL, num_stages=1):  # once; without a loop ptxas serializes the products
                qb = _block(q_desc, q, stride_q, base, start, col_q, tq, dims, TAIL, D, False)
                ob = _block(do_desc, dout, stride_o, base, start, col_o, tq, dims, TAIL, D, False)
                dk, dv = _key_step(kb, vb, qb, ob, tl.load(pairs + row_at + start + tl.arange(0, TAIL)), dk, dv, scale,
                                   0, False)
    return dk, dv


@triton.jit
def _backward_keys(q0_desc, do0_desc, q1_desc, do1_desc, q0, do0, q1, do1, pairs0, pairs1, k0, v0, k1, v1, dk0, dv0,
                   dk1, dv1, norm0, norm1, rstd0, rstd1, len0, len1, heads, tiles0, tq0, tq1, tk0, tk1, rows0, rows1,
                   dims, scale, softmax_scale,
                   sq0, sq0h, sq1, sq1h, sk0, sk0h, sv0, sv0h, sk1, sk1h, sv1, sv1h,
                   M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAIL0: tl.constexpr, TAIL1: tl.constexpr,
                   TWO_Q: tl.constexpr, TWO_K: tl.constexpr, LEN0: tl.constexpr, LEN1: tl.constexpr,
                   CAUSAL: tl.constexpr, NORM: tl.constexpr, TMA: tl.constexpr):
    """dk and dv of N keys of one head of one sample: all its queries in order. With NORM, dk is what lies before the
    keys' norm."""
    tile = tl.program_id(0)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    k = k0 + head * sk0h
    v = v0 + head * sv0h
    stride_k = sk0
    stride_v = sv0
    dk_out = dk0
    dv_out = dv0
    norm = norm0
    rstd = rstd0
    tk = tk0
    length = _length(len0, sample, tk0, LEN0)
    if TWO_K:  # noqa: SIM102
        if tile >= tiles0:
            tile = tile - tiles0
            norm = norm1
            rstd = rstd1
            k = k1 + head * sk1h
            v = v1 + head * sv1h
            stride_k = sk1
            stride_v = sv1
            dk_out = dk1
            dv_out = dv1
            tk = tk1
            length = _length(len1, sample, tk1, LEN1)
    first = tile * N
    dk = tl.zeros((N, D), tl.float32)
    dv = tl.zeros((N, D), tl.float32)
    if first < length:
        kb = _block(k, k, stride_k, sample * tk, first, 0, length, dims, N, D, False)
        vb = _block(v, v, stride_v, sample * tk, first, 0, length, dims, N, D, False)
        pair = sample.to(tl.int64) * heads + head
        dk, dv = _over_queries(kb, vb, q0_desc, do0_desc, q0, do0, pairs0, sq0, tq0, sample * tq0, pair * rows0,
                               head * sq0h, head * dims, heads * dims, dims, first, tk0 - tq0, scale, dk, dv, M, N, D,
                               TAIL0, CAUSAL, TMA)
        if TWO_Q:
            dk, dv = _over_queries(kb, vb, q1_desc, do1_desc, q1, do1, pairs1, sq1, tq1, sample * tq1,
                                   pair * rows1, head * sq1h, head * dims, heads * dims, dims, first, 0, scale, dk, dv,
                                   M, N, D, TAIL1, False, TMA)
    rows = first + tl.arange(0, N)
    cols = tl.arange(0, D)
    # Keys behind the sample's length take part in nothing.
    exists = (rows < length)[:, None]
    at_row = (sample.to(tl.int64) * tk + rows) * heads + head
    at = at_row[:, None] * dims + cols[None, :]
    inside = (rows < tk)[:, None] & (cols < dims)[None, :]
    dk = dk * softmax_scale
    if NORM:
        yb = _block(k, k, stride_k, sample * tk, first, 0, length, dims, N, D, False)
        dk = _through_norm(dk, yb, norm, rstd, at_row, rows < length, dims, D)
    tl.store(dk_out + at, tl.where(exists, dk, 0.0).to(dk_out.dtype.element_ty), inside)
    tl.store(dv_out + at, tl.where(exists, dv, 0.0).to(dv_out.dtype.element_ty), inside)


@triton.jit
def _query_step(q, dout, kb, vb, lse, delta, dq, scale, valid, MASK: tl.constexpr):
    """What one block of keys adds to the gradients of a block of queries."""
    s = tl.dot(q, tl.trans(kb))
    p = tl.math.exp2(tl.fma(s, scale, -lse[:, None]))
    if MASK:
        p = tl.where(valid, p, 0.0)
    dp = tl.dot(dout, tl.trans(vb))
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(kb.dtype), kb, dq)


@triton.jit
def _over_keys(q, dout, lse, delta, k_desc, v_desc, k, v, stride_k, stride_v, dq, first, length, base, col_k, col_v,
               dims, offset, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
               CAUSAL: tl.constexpr, TMA: tl.constexpr):
    """All keys of one segment; behind the last whole block they come in blocks of TAIL: one block unless CAUSAL."""
    stop = length
    whole = length // N * N
    if CAUSAL:
        stop = tl.minimum(length, first + M + offset)
        whole = tl.minimum(whole, (first + offset + 1) // N * N)
    for start in tl.range(0, whole, N):
        kb = _block(k_desc, k, stride_k, base, start, col_k, stop, dims, N, D, TMA)
        vb = _block(v_desc, v, stride_v, base, start, col_v, stop, dims, N, D, TMA)
        dq = _query_step(q, dout, kb, vb, lse, delta, dq, scale, 0, False)
    if TAIL:
        for start in tl.range(whole, stop, TAIL, num_stages=1):
            kb = _block(k_desc, k, stride_k, base, start, col_k, length, dims, TAIL, D, False)
            vb = _block(v_desc, v, stride_v, base, start, col_v, length, dims, TAIL, D, False)
            keys = start + tl.arange(0, TAIL)
            valid = (keys < length)[None, :]
            if CAUSAL:
                valid = valid & (keys[None, :] <= (first + offset + tl.arange(0, M))[:, None])
            dq = _query_step(q, dout, kb, vb, lse, delta, dq, scale, valid, True)
    return dq


@triton.jit
def _backward_queries(k0_desc, v0_desc, k1_desc, v1_desc, q0, do0, q1, do1, pairs0, pairs1, k0, v0, k1, v1, dq0, dq1,
                      out0, out1, lse0, lse1, norm0, norm1, rstd0, rstd1, len0, len1, heads, tiles0, tq0, tq1, tk0, tk1,
                      rows0, rows1, dims, scale, softmax_scale,
                      sq0, sq0h, sq1, sq1h, sk0, sk0h, sv0, sv0h, sk1, sk1h, sv1, sv1h,
                      M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAIL0: tl.constexpr, TAIL1: tl.constexpr,
                      TWO_Q: tl.constexpr, TWO_K: tl.constexpr, LEN0: tl.constexpr, LEN1: tl.constexpr,
                      CAUSAL: tl.constexpr, NORM: tl.constexpr, TMA: tl.constexpr):
    """dq of M queries of one head of one sample: all its keys in order. Also writes their (lse, delta) for the other
    kernel, (inf, 0) up to the tile's end.
    With NORM, dq is what lies before the queries' norm."""
    tile = tl.program_id(0)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    q = q0 + head * sq0h
    stride_q = sq0
    dout = do0
    dq_out = dq0
    out = out0
    lse = lse0
    pairs = pairs0
    padded = rows0
    norm = norm0
    rstd = rstd0
    tq = tq0
    if TWO_Q:  # noqa: SIM102
        if tile >= tiles0:
            tile = tile - tiles0
            norm = norm1
            rstd = rstd1
            q = q1 + head * sq1h
            stride_q = sq1
            dout = do1
            dq_out = dq1
            out = out1
            lse = lse1
            pairs = pairs1
            padded = rows1
            tq = tq1
    first = tile * M
    rows = first + tl.arange(0, M)
    cols = tl.arange(0, D)
    qb = _block(q, q, stride_q, sample * tq, first, 0, tq, dims, M, D, False)
    ob = _block(dout, dout, heads * dims, sample * tq, first, head * dims, tq, dims, M, D, False)
    pair = sample.to(tl.int64) * heads + head
    row_lse = tl.load(lse + pair * tq + rows, rows < tq, other=float("inf"))
    yb = _block(out, out, heads * dims, sample * tq, first, head * dims, tq, dims, M, D, False)
    row_delta = tl.sum(yb.to(tl.float32) * ob.to(tl.float32), 1)
    tl.store(pairs + pair * padded + rows, _pack(-row_lse, row_delta))
    dq = tl.zeros((M, D), tl.float32)
    dq = _over_keys(qb, ob, row_lse, row_delta, k0_desc, v0_desc, k0, v0, sk0, sv0, dq, first,
                    _length(len0, sample, tk0, LEN0), sample * tk0, head * sk0h, head * sv0h, dims, tk0 - tq0, scale, M,
                    N, D, TAIL0, CAUSAL, TMA)
    if TWO_K:
        dq = _over_keys(qb, ob, row_lse, row_delta, k1_desc, v1_desc, k1, v1, sk1, sv1, dq, first,
                        _length(len1, sample, tk1, LEN1), sample * tk1, head * sk1h, head * sv1h, dims, 0, scale, M, N,
                        D, TAIL1, False, TMA)
    at_out = (sample.to(tl.int64) * tq + rows) * heads + head
    dq = dq * softmax_scale
    if NORM:
        yb = _block(q, q, stride_q, sample * tq, first, 0, tq, dims, M, D, False)
        dq = _through_norm(dq, yb, norm, rstd, at_out, rows < tq, dims, D)
    tl.store(dq_out + at_out[:, None] * dims + cols[None, :], dq.to(dq_out.dtype.element_ty),
             (rows < tq)[:, None] & (cols < dims)[None, :])


def _rows_of_samples(t: Tensor) -> Tensor:
    """t, or a copy, such that sample b's token i is row b * T + i of a matrix and a head's channels lie together."""
    batch, tokens, _, _ = t.shape
    rows = t.stride(3) == 1 and (batch == 1 or tokens == 0 or t.stride(0) == tokens * t.stride(1))
    return t if rows else t.contiguous()


def _all_tma(tensors: tuple[Tensor, ...], padded: int) -> bool:
    """Whether TMA can take them, each [B, T, H, D] as a matrix [B * T, H * D]."""
    for t in tensors:
        if padded != t.shape[3] or t.stride(2) != padded or t.shape[1] == 0 or not uses_tma(t[0, :, 0]):
            return False
    return True


def _descriptors(tensors: tuple[Tensor, ...], rows: int, tma: bool) -> list[TensorDescriptor | None]:
    if not tma:
        return [None] * len(tensors)
    matrices = [t.as_strided((t.shape[0] * t.shape[1], t.shape[2] * t.shape[3]), (t.stride(1), 1)) for t in tensors]
    return [TensorDescriptor(m, list(m.shape), list(m.stride()), [rows, t.shape[3]])
            for m, t in zip(matrices, tensors, strict=True)]


# (queries a program, keys a block, warps, stages). The keys a block are part of the bits, and fixed by D.
FORWARD = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)}
# Keys: (queries a block, keys a program, ...); queries: (queries a program, keys a block, ...).
BACKWARD_KEYS = {64: (64, 64, 4, 3), 128: (64, 128, 8, 2), 256: (32, 64, 8, 1)}
KEYS_REGISTERS = {64: 168}  # a thread: three programs an SM in place of two, worth the few that are spilled
BACKWARD_QUERIES = {64: (64, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1)}


@functools.cache
def _specialized(device: torch.device) -> tuple[ModuleType, ModuleType] | None:
    """The modules of kernels with split roles, forward and backward, where GPU and triton have what they need."""
    if hopper_kernels(device) is None:
        return None
    from . import hopper_attention, hopper_attention_backward

    return hopper_attention, hopper_attention_backward


def _rest(tokens: int, block: int, any_number: bool) -> int:
    """Rows of the block that takes what fills none of `block` rows: fewer where they are enough, which adds fewer exact
    zeros and so changes no bit. 0: none is left over. `any_number`: lengths differ, so any may be left over."""
    if any_number:
        return block
    left = tokens % block
    return min(block, max(16, triton.next_power_of_2(left))) if left else 0


def _sizes(table: dict, padded: int) -> tuple[int, int, int, int]:
    return next(value for size, value in table.items() if padded <= size)


def _pairs(tensors: tuple) -> tuple:
    """(first, second or first, whether there are two)."""
    return tensors[0], tensors[-1], len(tensors) == 2


def forward(qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
            lengths: tuple[Tensor | None, ...], causal: bool, scale: float, with_lse: bool, num_sms: int
            ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs [B, T, H, D] and, if asked for, log2-sum-exps [B, H, T] fp32."""
    batch, _, heads, dims = qs[0].shape
    outs = tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for q in qs)
    lses: tuple[Tensor, ...] = ()
    if with_lse:
        lses = tuple(torch.empty((batch, heads, q.shape[1]), dtype=torch.float32, device=q.device) for q in qs)
    if sum(out.numel() for out in outs) == 0:
        return outs, lses
    if (special := _specialized(qs[0].device)) is not None and dims in special[0].FORWARD:
        special[0].forward(qs, ks, vs, lengths, causal, scale, outs, lses, num_sms)
        return outs, lses
    padded = max(16, triton.next_power_of_2(dims))
    sizes = _sizes(FORWARD, padded)
    ks, vs = tuple(map(_rows_of_samples, ks)), tuple(map(_rows_of_samples, vs))
    q0, q1, two_q = _pairs(qs)
    (k0, k1, two_k), (v0, v1, _) = _pairs(ks), _pairs(vs)
    o0, o1, _ = _pairs(outs)
    lse0, lse1, _ = _pairs(lses) if with_lse else (None, None, False)
    len0, len1 = lengths[0], lengths[-1]
    described = (k0, v0, k1, v1)
    tma = _all_tma(described, padded)

    def make() -> tuple[tuple[int, ...], list, dict]:
        m, n, warps, stages = sizes
        tiles = [triton.cdiv(q.shape[1], m) for q in qs]
        arguments = [
            q0, q1, *_descriptors(described, n, tma), k0, v0, k1, v1, o0, o1, lse0, lse1, len0, len1, heads, tiles[0],
            q0.shape[1], q1.shape[1], k0.shape[1], k1.shape[1], dims, scale * LOG2_E,
            q0.stride(0), q0.stride(1), q0.stride(2), q1.stride(0), q1.stride(1), q1.stride(2),
            k0.stride(1), k0.stride(2), v0.stride(1), v0.stride(2), k1.stride(1), k1.stride(2), v1.stride(1),
            v1.stride(2)]
        constants = {"M": m, "N": n, "D": padded, "TWO_Q": two_q, "TWO_K": two_k, "LEN0": len0 is not None,
                     "LEN1": len1 is not None, "CAUSAL": causal, "LSE": with_lse, "TMA": tma, "num_warps": warps,
                     "num_stages": stages, "enable_fp_fusion": False}
        return (sum(tiles), batch * heads), arguments, constants

    pointers = (q0, q1, k0, v0, k1, v1, o0, o1, lse0, lse1, len0, len1)
    launch(_forward, (signature(*pointers), two_q, two_k, causal, scale, sizes, tma),
           (*pointers, *(described if tma else ())), make)
    return outs, lses


def backward(douts: tuple[Tensor, ...], qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
             outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], lengths: tuple[Tensor | None, ...], causal: bool,
             scale: float, num_sms: int, norms: tuple[Norms, Norms] | None = None
             ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(dq, dk, dv), contiguous, from contiguous douts.

    norms: For queries and for keys, (weight [D], rstd [B * T, H] fp32) of every segment: dq and dk are then what lies
        before these norms. For heads without a backward in Gluon.
    """
    batch, _, heads, dims = qs[0].shape
    dqs, dks, dvs = (tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in ts) for ts in (qs, ks, vs))
    if sum(q.numel() for q in qs) == 0:
        for t in (*dks, *dvs):
            t.zero_()
        return dqs, dks, dvs
    padded = max(16, triton.next_power_of_2(dims))
    if norms is None and (special := _specialized(qs[0].device)) is not None and dims in special[1].BACKWARD_KEYS:
        deltas = tuple(torch.empty_like(lse) for lse in lses)
        for out, dout, delta in zip(outs, douts, deltas, strict=True):
            if out.numel():
                tokens = out.shape[1]
                launch(_delta, (signature(out), padded), (out, dout, delta),
                       lambda: ((triton.cdiv(tokens, 64), batch * heads), [out, dout, delta, heads, tokens, dims],  # noqa: B023
                                {"M": 64, "D": padded, "num_warps": 4, "enable_fp_fusion": False}))
        special[1].backward(douts, qs, ks, vs, lses, deltas, lengths, causal, scale, dqs, dks, dvs, num_sms)
        return dqs, dks, dvs
    qs, ks, vs = (tuple(map(_rows_of_samples, ts)) for ts in (qs, ks, vs))
    q0, q1, two_q = _pairs(qs)
    (k0, k1, two_k), (v0, v1, _) = _pairs(ks), _pairs(vs)
    (do0, do1, _), (lse0, lse1, _) = _pairs(douts), _pairs(lses)
    len0, len1 = lengths[0], lengths[-1]
    block = _sizes(BACKWARD_QUERIES, padded)[0]
    pairs = tuple(torch.empty((batch, heads, -(-q.shape[1] // block) * block), dtype=torch.int64, device=q.device)
                  for q in qs)
    (pairs0, pairs1, _) = _pairs(pairs)
    shared = (q0, do0, q1, do1, pairs0, pairs1, k0, v0, k1, v1)

    def run(kernel, table: dict, outputs: tuple[Tensor, ...], walked: tuple[Tensor, ...], over: tuple[Tensor, ...],
            tile: int, through: Norms | None) -> None:
        """One of the two kernels: programs over `over` in tiles, blocks of `walked` one after the other."""
        sizes = _sizes(table, padded)
        tma = _all_tma(walked, padded)
        tiles = [-(-t.shape[1] // sizes[tile]) for t in over]
        ends: tuple[Tensor | None, ...] = (None,) * 4
        if through is not None:
            (w0, r0), (w1, r1) = through[0], through[-1]
            ends = (w0, w1, r0, r1)

        def make() -> tuple[tuple[int, ...], list, dict]:
            m, n, warps, stages = sizes
            arguments = [
                *_descriptors(walked, sizes[1 - tile], tma), *shared, *outputs, *ends, len0, len1, heads, tiles[0],
                q0.shape[1], q1.shape[1], k0.shape[1], k1.shape[1], pairs0.shape[2], pairs1.shape[2], dims,
                scale * LOG2_E, scale, q0.stride(1), q0.stride(2), q1.stride(1), q1.stride(2), k0.stride(1),
                k0.stride(2), v0.stride(1), v0.stride(2), k1.stride(1), k1.stride(2), v1.stride(1), v1.stride(2)]
            rest = [_rest(t.shape[1], sizes[1 - tile], causal or (tile == 0 and given is not None))
                    for t, given in zip((walked[0], walked[2]), (len0, len1), strict=True)]
            constants = {"M": m, "N": n, "D": padded, "TAIL0": rest[0], "TAIL1": rest[1], "TWO_Q": two_q,
                         "TWO_K": two_k, "LEN0": len0 is not None, "LEN1": len1 is not None, "CAUSAL": causal,
                         "NORM": through is not None, "TMA": tma, "num_warps": warps, "num_stages": stages,
                         "enable_fp_fusion": False}
            if kernel is _backward_keys and padded in KEYS_REGISTERS:
                constants["maxnreg"] = KEYS_REGISTERS[padded]
            return (sum(tiles), batch * heads), arguments, constants

        if sum(tiles):
            pointers = (*shared, *outputs, *ends, len0, len1)
            launch(kernel, (signature(*pointers), two_q, two_k, causal, scale, sizes, tma),
                   (*pointers, *(walked if tma else ())), make)

    # Queries first: that kernel writes the pairs that the other one reads.
    q_norms, k_norms = (None, None) if norms is None else norms
    run(_backward_queries, BACKWARD_QUERIES, (dqs[0], dqs[-1], outs[0], outs[-1], lse0, lse1), (k0, v0, k1, v1), qs, 0,
        q_norms)
    run(_backward_keys, BACKWARD_KEYS, (dks[0], dvs[0], dks[-1], dvs[-1]), (q0, do0, q1, do1), ks, 1, k_norms)
    return dqs, dks, dvs
