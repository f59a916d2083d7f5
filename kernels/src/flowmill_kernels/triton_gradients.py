"""The Triton back end of gradient sums: per-sample weight gradients added into fixed leaves, without a copy a sample.

A program owns one output tile of one leaf. It walks the leaf's samples in order; a sample's sum starts from zero and
runs over its tokens in steps of TOKENS; then it is added to the tile. So a leaf's bits depend on its samples alone, not
on how they were cut into micro-batches. No atomics.
"""

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64  # tokens a step: whole tensor-core steps, part of the order


@triton.jit
def _wgrad_leaves(dy, x, leaves, first_sample, first_leaf, num_samples, batch, T, N, K, stride_leaf, stride_ys,
                  stride_yt, stride_xs, stride_xt, LEAVES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  BLOCK_T: tl.constexpr):
    """leaves[l] += sum over this batch's samples s of leaf l, in order, of dy[s].T @ x[s]."""
    leaf = first_leaf + tl.program_id(1)
    # Samples of leaf l are ceil(l S / L) .. ceil((l + 1) S / L) - 1, as in LeafPlan.
    start = (leaf * num_samples + LEAVES - 1) // LEAVES
    stop = ((leaf + 1) * num_samples + LEAVES - 1) // LEAVES
    start = tl.maximum(start, first_sample)
    stop = tl.minimum(stop, first_sample + batch)
    blocks_k = tl.cdiv(K, BLOCK_K)
    ns = tl.program_id(0) // blocks_k * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.program_id(0) % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (ns < N)[:, None] & (ks < K)[None, :]
    at = tl.program_id(1).to(tl.int64) * stride_leaf + ns.to(tl.int64)[:, None] * K + ks[None, :]
    if start < stop:
        total = tl.load(leaves + at, inside, other=0.0)
        for sample in range(start, stop):
            s = (sample - first_sample).to(tl.int64)
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for t in range(0, T, BLOCK_T):
                ts = (t + tl.arange(0, BLOCK_T)).to(tl.int64)
                a = tl.load(dy + s * stride_ys + ts[:, None] * stride_yt + ns[None, :],
                            (ts < T)[:, None] & (ns < N)[None, :], other=0.0)
                b = tl.load(x + s * stride_xs + ts[:, None] * stride_xt + ks[None, :],
                            (ts < T)[:, None] & (ks < K)[None, :], other=0.0)
                acc = tl.dot(tl.trans(a), b, acc)
            total = total + acc
        tl.store(leaves + at, total, inside)


@triton.jit
def _add_leaves(per_sample, leaves, first_sample, first_leaf, num_samples, batch, count, stride_leaf,
                LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    """leaves[l] += sum over this batch's samples of leaf l, in order, of per_sample [batch, count]."""
    leaf = first_leaf + tl.program_id(1)
    start = (leaf * num_samples + LEAVES - 1) // LEAVES
    stop = ((leaf + 1) * num_samples + LEAVES - 1) // LEAVES
    start = tl.maximum(start, first_sample)
    stop = tl.minimum(stop, first_sample + batch)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if start < stop:
        total = tl.load(leaves + tl.program_id(1).to(tl.int64) * stride_leaf + at, inside, other=0.0)
        for sample in range(start, stop):
            s = (sample - first_sample).to(tl.int64)
            total = total + tl.load(per_sample + s * count + at, inside, other=0.0)
        tl.store(leaves + tl.program_id(1).to(tl.int64) * stride_leaf + at, total, inside)


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, first_sample: int, first_leaf: int, num_samples: int,
                 num_leaves: int) -> None:
    """Add into leaves [L, N, K]; the leaf dimension's stride is free."""
    (batch, tokens, n), k = dy.shape, x.shape[2]
    block_n, block_k = (32, 64) if n <= 32 else (64, 32) if k <= 32 else (64, 64)
    tiles = triton.cdiv(n, block_n) * triton.cdiv(k, block_k)
    _wgrad_leaves[(tiles, leaves.shape[0])](
        dy, x, leaves, first_sample, first_leaf, num_samples, batch, tokens, n, k, leaves.stride(0), dy.stride(0),
        dy.stride(1), x.stride(0), x.stride(1), LEAVES=num_leaves, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_T=TOKENS,
        num_warps=4, num_stages=4, enable_fp_fusion=False)


def add_leaves(leaves: Tensor, per_sample: Tensor, first_sample: int, first_leaf: int, num_samples: int,
               num_leaves: int) -> None:
    """Add contiguous per_sample [S, ...] fp32 into leaves [L, ...]; the leaf dimension's stride is free."""
    count = leaves[0].numel()
    _add_leaves[(triton.cdiv(count, 1024), leaves.shape[0])](
        per_sample, leaves, first_sample, first_leaf, num_samples, per_sample.shape[0], count, leaves.stride(0),
        LEAVES=num_leaves, BLOCK=1024, num_warps=4, enable_fp_fusion=False)

