"""The Triton back end of gradient sums: per-sample weight gradients added into fixed leaves.

A sample's sum starts from zero and runs over its tokens in steps of TOKENS; then it is added to its leaf, samples in
order. So a leaf's bits depend on its samples alone, not on how they were cut into micro-batches. No atomics.

Two schedules give the same bits: in one pass a program owns one tile of one leaf and walks the leaf's samples; spread,
a program owns one tile of one sample, and a second kernel adds the samples. Spread is for many samples of few leaves,
where the first would leave most of a GPU idle; small parameters' per-sample gradients stay in the L2 cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, signature
from .schemes import NUM_SEGMENTS

TOKENS = 64  # tokens a step: whole tensor-core steps, part of the order

SQUARES = 1024  # elements of one block of a norm's sum: part of its order

_TOKENS = tl.constexpr(TOKENS)
_LEAVES = tl.constexpr(NUM_SEGMENTS)


@dataclass(frozen=True)
class Tile:
    """Tile of a weight gradient, by the parameter's sizes alone; `wide` counts along the larger of N and K."""

    wide: int
    narrow: int
    num_warps: int
    num_stages: int


def _cdiv(a: int, b: int) -> int:
    """Ceiling of a / b; triton's own costs the host microseconds a call."""
    return -(-a // b)


@cache
def tile_for(n: int, k: int) -> Tile:
    """The tile of a gradient [n, k]: the smaller side whole where it fits, so that the larger operand is read once."""
    narrow = min(128, max(16, 1 << (min(n, k) - 1).bit_length()))
    return Tile(64, narrow, 4, 6 if narrow <= 32 else 4) if narrow <= 64 else Tile(128, narrow, 8, 4)


def spreads(n: int, k: int, tokens: int, tile: Tile, samples: int, leaves: int) -> bool:
    """Whether to spread so many samples of so many leaves: one pass would run few programs for long."""
    programs = _cdiv(max(n, k), tile.wide) * _cdiv(min(n, k), tile.narrow) * leaves
    return programs < 128 and _cdiv(samples, leaves) * _cdiv(tokens, TOKENS) > 64


@triton.jit
def _add_tokens(acc, wide, narrow, s, t, a_at, b_at, T, A, B, stride_ws, stride_wt, stride_ns, stride_nt):
    """acc + wide[s].T @ narrow[s] of the tokens t .. t + TOKENS."""
    ts = (t + tl.arange(0, _TOKENS)).to(tl.int64)
    a = tl.load(wide + s * stride_ws + ts[:, None] * stride_wt + a_at[None, :],
                (ts < T)[:, None] & (a_at < A)[None, :], other=0.0)
    b = tl.load(narrow + s * stride_ns + ts[:, None] * stride_nt + b_at[None, :],
                (ts < T)[:, None] & (b_at < B)[None, :], other=0.0)
    return tl.dot(tl.trans(a), b, acc)


@triton.jit
def _number(first_sample, FROM_DEVICE: tl.constexpr):
    """The number of the batch's first sample: the argument, or what it points to."""
    if FROM_DEVICE:
        return tl.load(first_sample)
    else:
        return first_sample


@triton.jit
def _leaf_range(leaf, first_sample, num_samples, batch):
    """The micro-batch's samples of a leaf. Leaf l holds ceil(l S / L) .. ceil((l + 1) S / L) - 1, as in LeafPlan."""
    start = (leaf * num_samples + _LEAVES - 1) // _LEAVES
    stop = ((leaf + 1) * num_samples + _LEAVES - 1) // _LEAVES
    return tl.maximum(start, first_sample), tl.minimum(stop, first_sample + batch)


# Numbers that change from call to call are not specialized: each new one would compile the kernel again.

@triton.jit(do_not_specialize=["first_sample", "first_leaf", "num_samples", "batch", "T"])
def _wgrad(wide, narrow, out, out_1, out_2, first_sample, first_leaf, num_samples, batch, T, A, B, stride_out,
           stride_ws, stride_wt, stride_ns, stride_nt, X_WIDE: tl.constexpr, SPREAD: tl.constexpr,
           BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, FROM_DEVICE: tl.constexpr, EACH: tl.constexpr):
    """Spread: out[s] = wide[s].T @ narrow[s]. One pass: out[l] += those of the leaf's samples, in order.

    out is [.., N, K], whichever of x (K columns) and dy (N columns) is the wide one. With EACH, the EACH first rows of
    N go to out, the next to out_1, the rest to out_2.
    """
    blocks_a = tl.cdiv(A, BLOCK_A)
    a_at = tl.program_id(0) % blocks_a * BLOCK_A + tl.arange(0, BLOCK_A)
    b_at = tl.program_id(0) // blocks_a * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = (a_at < A)[:, None] & (b_at < B)[None, :]
    row = tl.program_id(1)
    to = out + row.to(tl.int64) * stride_out
    if EACH:
        whole = tl.where(b_at < EACH, out, tl.where(b_at < 2 * EACH, out_1, out_2)) + row.to(tl.int64) * stride_out
        to = whole[None, :] + ((b_at % EACH).to(tl.int64)[None, :] * A + a_at[:, None])
    elif X_WIDE:
        to = to + (b_at.to(tl.int64)[None, :] * A + a_at[:, None])
    else:
        to = to + (a_at.to(tl.int64)[:, None] * B + b_at[None, :])
    acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    if SPREAD:
        for t in range(0, T, _TOKENS):
            acc = _add_tokens(acc, wide, narrow, row.to(tl.int64), t, a_at, b_at, T, A, B, stride_ws, stride_wt,
                              stride_ns, stride_nt)
        tl.store(to, acc, inside)
    else:
        first = _number(first_sample, FROM_DEVICE)
        start, stop = _leaf_range(first_leaf + row, first, num_samples, batch)
        if start < stop:
            total = tl.load(to, inside, other=0.0)
            steps = tl.cdiv(T, _TOKENS)
            for step in range((stop - start) * steps):  # one loop, so that loads run ahead over a sample's end
                sample = start - first + step // steps
                t = step % steps * _TOKENS
                acc = _add_tokens(acc, wide, narrow, sample.to(tl.int64), t, a_at, b_at, T, A, B, stride_ws, stride_wt,
                                  stride_ns, stride_nt)
                if t + _TOKENS >= T:
                    total = total + acc
                    acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
            tl.store(to, total, inside)


@triton.jit(do_not_specialize=["first_sample", "first_leaf", "num_samples", "batch"])
def _add_leaves(per_sample, leaves, first_sample, first_leaf, num_samples, batch, count, stride_leaf,
                BLOCK: tl.constexpr, FROM_DEVICE: tl.constexpr):
    """leaves[l] += sum over this batch's samples of leaf l, in order, of per_sample [batch, count]."""
    row = tl.program_id(1)
    first = _number(first_sample, FROM_DEVICE)
    start, stop = _leaf_range(first_leaf + row, first, num_samples, batch)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if start < stop:
        to = leaves + row.to(tl.int64) * stride_leaf + at
        total = tl.load(to, inside, other=0.0)
        for sample in range(start, stop):
            s = (sample - first).to(tl.int64)
            total = total + tl.load(per_sample + s * count + at, inside, other=0.0)
        tl.store(to, total, inside)


@triton.jit
def _leaf(leaves, leaf, stride_leaf, at, inside):
    return tl.load(leaves + tl.full((), leaf, tl.int64) * stride_leaf + at, inside, other=0.0)


@triton.jit
def _sum_leaves(leaves, out, squares, count, stride_leaf, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    """out = the balanced tree over LEAVES leaves; squares[block] = sum of its squares before out's rounding, fp64."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = _leaf(leaves, 0, stride_leaf, at, inside)
    if LEAVES >= 2:
        total = total + _leaf(leaves, 1, stride_leaf, at, inside)
    if LEAVES >= 4:
        total = total + (_leaf(leaves, 2, stride_leaf, at, inside) + _leaf(leaves, 3, stride_leaf, at, inside))
    if LEAVES == 8:
        right = _leaf(leaves, 4, stride_leaf, at, inside) + _leaf(leaves, 5, stride_leaf, at, inside)
        last = _leaf(leaves, 6, stride_leaf, at, inside) + _leaf(leaves, 7, stride_leaf, at, inside)
        total = total + (right + last)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)
    wide = total.to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(wide * wide, 0))


@triton.jit(do_not_specialize=["count"])
def _root_of_sum(x, out, count, BLOCK: tl.constexpr):
    """The root of the sum of x [count], in one program: BLOCK elements at a time, in order."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = total + tl.load(x + at, at < count, other=0.0)
    tl.store(out, tl.sqrt(tl.sum(total, 0)))


def sum_leaves(leaves: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """([...] of `dtype`: the balanced tree over leaves [L, ...] fp32, each contiguous; fp64 []: the norm of it before
    its rounding). L is 1, 2, 4 or 8; the order of the squares follows from the number of elements alone."""
    count = leaves[0].numel()
    blocks = _cdiv(count, SQUARES)
    out = torch.empty(leaves.shape[1:], dtype=dtype, device=leaves.device)
    squares = torch.empty(blocks, dtype=torch.float64, device=leaves.device)
    norm = torch.empty((), dtype=torch.float64, device=leaves.device)
    launch(_sum_leaves, (signature(leaves, out), len(leaves)), (leaves, out, squares),
           lambda: ((blocks,), [leaves, out, squares, count, leaves.stride(0)],
                    {"LEAVES": len(leaves), "BLOCK": SQUARES, "num_warps": 4, "enable_fp_fusion": False}))
    launch(_root_of_sum, (blocks,), (squares, norm),
           lambda: ((1,), [squares, norm, blocks], {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}))
    return out, norm


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, first_sample: int | Tensor, first_leaf: int, num_samples: int,
                 num_leaves: int, *, tile: Tile | None = None, spread: bool | None = None) -> None:
    """Add into leaves [L, N, K], whose leaf dimension's stride is free; `tile` and `spread` by hand: only speed.

    dy [S, T, N] and x [S, T, K] have unit stride in their last dimension; num_leaves is NUM_SEGMENTS. first_sample may
    be int32 [1] on the GPU, read when the kernels run.
    """
    (batch, tokens, n), k = dy.shape, x.shape[2]
    tile = tile or tile_for(n, k)
    wide, narrow, a, b = (x, dy, k, n) if n <= k else (dy, x, n, k)
    if spread is None:
        # Of the number of leaves alone, not of their place: a recorded launch serves every micro-batch.
        spread = spreads(n, k, tokens, tile, batch, _cdiv(batch * num_leaves, num_samples))
    out = torch.empty((batch, n, k), dtype=torch.float32, device=dy.device) if spread else leaves

    position = first_sample if isinstance(first_sample, Tensor) else None

    def make() -> tuple[tuple[int, ...], list, dict]:
        arguments = [wide, narrow, out, None, None, first_sample, first_leaf, num_samples, batch, tokens, a, b,
                     out.stride(0), wide.stride(0), wide.stride(1), narrow.stride(0), narrow.stride(1)]
        constants = {"X_WIDE": n <= k, "SPREAD": spread, "BLOCK_A": tile.wide, "BLOCK_B": tile.narrow,
                     "FROM_DEVICE": position is not None, "EACH": 0, "num_warps": tile.num_warps,
                     "num_stages": tile.num_stages, "enable_fp_fusion": False}
        return (_cdiv(a, tile.wide) * _cdiv(b, tile.narrow), out.shape[0]), arguments, constants

    key = (signature(wide, narrow, out), None if position is not None else first_sample, first_leaf, num_samples, tile,
           spread, n <= k)
    launch(_wgrad, key, (wide, narrow, out, position), make)
    if spread:
        add_leaves(leaves, out, first_sample, first_leaf, num_samples, num_leaves)


STACKED = Tile(64, 128, 4, 4)


def wgrad_leaves_stacked(leaves: Sequence[Tensor], dy: Tensor, x: Tensor, first_sample: int | Tensor, first_leaf: int,
                         num_samples: int, num_leaves: int) -> bool:
    """`wgrad_leaves` of two or three [L, N, K] at once, whose columns of dy [S, T, 2 N or 3 N] lie side by side: x is
    read once, the bits are the same. False, and nothing done, where separate calls are the better schedule."""
    (batch, tokens, width), (_, n, k) = dy.shape, leaves[0].shape
    if width > STACKED.narrow or n > k or spreads(n, k, tokens, tile_for(n, k), batch,
                                                  _cdiv(batch * num_leaves, num_samples)):
        return False
    position = first_sample if isinstance(first_sample, Tensor) else None
    out, out_1, out_2 = leaves[0], leaves[1], leaves[-1]

    def make() -> tuple[tuple[int, ...], list, dict]:
        arguments = [x, dy, out, out_1, out_2, first_sample, first_leaf, num_samples, batch, tokens, k, width,
                     out.stride(0), x.stride(0), x.stride(1), dy.stride(0), dy.stride(1)]
        constants = {"X_WIDE": True, "SPREAD": False, "BLOCK_A": STACKED.wide, "BLOCK_B": STACKED.narrow,
                     "FROM_DEVICE": position is not None, "EACH": n, "num_warps": STACKED.num_warps,
                     "num_stages": STACKED.num_stages, "enable_fp_fusion": False}
        return (_cdiv(k, STACKED.wide), out.shape[0]), arguments, constants

    key = (signature(x, dy, *leaves), None if position is not None else first_sample, first_leaf, num_samples)
    launch(_wgrad, key, (x, dy, out, out_1, out_2, position), make)
    return True


def add_leaves(leaves: Tensor, per_sample: Tensor, first_sample: int | Tensor, first_leaf: int, num_samples: int,
               num_leaves: int) -> None:
    """Add contiguous per_sample [S, ...] fp32 into leaves [L, ...]; the leaf dimension's stride is free."""
    count = per_sample.numel() // per_sample.shape[0]
    position = first_sample if isinstance(first_sample, Tensor) else None
    key = (signature(per_sample, leaves), None if position is not None else first_sample, first_leaf, num_samples)
    launch(_add_leaves, key, (per_sample, leaves, position),
           lambda: ((_cdiv(count, 1024), leaves.shape[0]),
                    [per_sample, leaves, first_sample, first_leaf, num_samples, per_sample.shape[0], count,
                     leaves.stride(0)],
                    {"BLOCK": 1024, "FROM_DEVICE": position is not None, "num_warps": 4, "enable_fp_fusion": False}))
