"""The Triton back end: every kernel that runs on an NVIDIA GPU, and in Triton's interpreter with fp16 on a CPU.

In: checked tensors, a scheme, an epilogue and a tile. Out: the result, in the bits that the scheme fixes. A program
walks the output tiles from its own number in steps of the grid, so the grid (the caller's SM count) decides who
computes a tile and never how. On Hopper and later operands come by TMA descriptors, elsewhere by plain pointers.

No atomics. `enable_fp_fusion=False` everywhere: a multiply-add that the compiler fuses in one kernel and not in
another would end the equality of the one-pass kernel and the spread one.
"""

import dataclasses
import functools
import logging
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from .heuristics import MEDIUM_SPLIT, Layout, Tile
from .launch import do_not_replay, launch, signature
from .schemes import Epilogue, Scheme

# triton whose Gluon these kernels are written for; 3.9 renames and changes parts of it.
GLUON_VERSIONS = ((3, 6), (3, 7), (3, 8))
_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _tile_origin(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of output tile number `tile`: columns inside groups of GROUP_M row blocks."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tile // per_group
    inside = tile - group * per_group
    height = min(blocks_m - group * GROUP_M, GROUP_M)
    return (group * GROUP_M + inside % height) * BLOCK_M, inside // height * BLOCK_N


@triton.jit
def _load(x, w, row, col, k, M, N, K, stride_xm, stride_wr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NT: tl.constexpr, TMA: tl.constexpr):
    """One [BLOCK_M, BLOCK_K] and one [BLOCK_K, BLOCK_N] operand; outside of the tensors both are zero."""
    if TMA:
        a = x.load([row, k])
        if NT:
            b = w.load([col, k]).T
        else:
            b = w.load([k, col])
    else:
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = (col + tl.arange(0, BLOCK_N)).to(tl.int64)
        ks = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(x + rows[:, None] * stride_xm + ks[None, :], (rows < M)[:, None] & (ks < K)[None, :], other=0.0)
        inside = (ks < K)[:, None] & (cols < N)[None, :]
        if NT:
            b = tl.load(w + cols[None, :] * stride_wr + ks[:, None], inside, other=0.0)
        else:
            b = tl.load(w + ks[:, None] * stride_wr + cols[None, :], inside, other=0.0)
    return a, b


@triton.jit
def _add_extra(acc, h, b, row, col, M, N, R, stride_hm, stride_br,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NT: tl.constexpr,
               TMA: tl.constexpr):
    """Go on with another product, h [M, R] times b, in the same accumulator."""
    for i in range(tl.cdiv(R, BLOCK_K)):
        a, c = _load(h, b, row, col, i * BLOCK_K, M, N, R, stride_hm, stride_br, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
        acc = tl.dot(a, c, acc)
    return acc


@triton.jit
def _add_extras(acc, h0, b0, h1, b1, h2, b2, row, col, M, N, R0, R1, R2, sh0, sb0, sh1, sb1, sh2, sb2,
                EXTRAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                NT: tl.constexpr, TMA: tl.constexpr):
    acc = _add_extra(acc, h0, b0, row, col, M, N, R0, sh0, sb0, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
    if EXTRAS >= 2:
        acc = _add_extra(acc, h1, b1, row, col, M, N, R1, sh1, sb1, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
    if EXTRAS >= 3:
        acc = _add_extra(acc, h2, b2, row, col, M, N, R2, sh2, sb2, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
    return acc


@triton.jit
def _gelu_rest(v):
    """1 - 0.5 (1 + tanh(u)) with u = sqrt(2/pi) (v + 0.044715 v^3), so that gelu(v) = v (1 - rest).

    As 1 / (exp(2u) + 1), which is right at both infinities. In few instructions, since GELU takes as long as these and
    not as long as the memory: 2 sqrt(2/pi) log2(e) is in the constants, and the multiply-add is written out.
    """
    return 1.0 / (tl.math.exp2(v * tl.fma(v * v, 0.10294324, 2.3022082)) + 1.0)


@triton.jit
def _epilogue(acc, row, col, bias, gate, residual, M, N, rows_per_gate, stride_gate, stride_residual,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
              GATE: tl.constexpr, RESIDUAL: tl.constexpr, OUT: tl.constexpr):
    """``residual + gate * gelu(round(acc + bias))`` in fp32; gate row ``row // rows_per_gate``."""
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = col + tl.arange(0, BLOCK_N)
    if BIAS:
        acc = acc + tl.load(bias + cols, cols < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        acc = acc.to(OUT).to(tl.float32)
        acc = acc * (1.0 - _gelu_rest(acc))
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if GATE:
        at = (rows // rows_per_gate)[:, None] * stride_gate + cols[None, :]
        acc = acc * tl.load(gate + at, inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = rows[:, None] * stride_residual + cols[None, :]
        acc = tl.load(residual + at, inside, other=0.0).to(tl.float32) + acc
    return acc


@triton.jit
def _norm_heads(acc, weight, rstd, row, col, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """RMS norm of every D columns; rstd [M, N / D] is written."""
    HEADS: tl.constexpr = BLOCK_N // D
    by_head = tl.reshape(acc, (BLOCK_M, HEADS, D))
    r = tl.rsqrt(tl.sum(by_head * by_head, 2) / D + eps)
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    heads = col // D + tl.arange(0, HEADS)
    per_row = N // D
    tl.store(rstd + (rows * per_row)[:, None] + heads[None, :], r, (rows < M)[:, None] & (heads < per_row)[None, :])
    weights = tl.load(weight + (col + tl.arange(0, BLOCK_N)) % D).to(tl.float32)
    return tl.reshape(by_head * r[:, :, None], (BLOCK_M, BLOCK_N)) * weights[None, :]


@triton.jit
def _store(y, acc, row, col, M, N, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUT: tl.constexpr,
           TMA: tl.constexpr):
    """Round once and write what lies inside of y."""
    if TMA:
        y.store([row, col], acc.to(OUT))
    else:
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = col + tl.arange(0, BLOCK_N)
        tl.store(y + rows[:, None] * stride_y + cols[None, :], acc.to(OUT), (rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _scratch_at(scratch, level: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's scratch tile of a level. Made anew at each use: kept pointers would cost more than the sums."""
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return scratch + level * (BLOCK_M * BLOCK_N) + at


@triton.jit
def _tree_step(part, segment, one, two, four, scratch, LEVELS: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):
    """Take the sum of segment number `segment` into the tree: add every finished left sibling, keep what waits.

    `one`, `two`, `four` are waiting sums of 1, 2 and 4 segments; those from level LEVELS on wait in `scratch`.
    """
    if segment % 2 == 1:
        if LEVELS >= 1:
            part = one + part
        else:
            part = tl.load(_scratch_at(scratch, 0, BLOCK_M, BLOCK_N)) + part
        if segment % 4 == 3:
            if LEVELS >= 2:
                part = two + part
            else:
                part = tl.load(_scratch_at(scratch, 1, BLOCK_M, BLOCK_N)) + part
            if segment % 8 == 7:
                if LEVELS >= 3:
                    part = four + part
                else:
                    part = tl.load(_scratch_at(scratch, 2, BLOCK_M, BLOCK_N)) + part
            else:
                if LEVELS >= 3:
                    four = part
                else:
                    tl.store(_scratch_at(scratch, 2, BLOCK_M, BLOCK_N), part)
        else:
            if LEVELS >= 2:
                two = part
            else:
                tl.store(_scratch_at(scratch, 1, BLOCK_M, BLOCK_N), part)
    else:
        if LEVELS >= 1:
            one = part
        else:
            tl.store(_scratch_at(scratch, 0, BLOCK_M, BLOCK_N), part)
    return part, one, two, four


@triton.jit
def _finish(total, y, row, col, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate, stride_residual,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, GATE: tl.constexpr,
            RESIDUAL: tl.constexpr, PARTS: tl.constexpr, OUT: tl.constexpr, TMA: tl.constexpr):
    """Epilogue, rounding and store of a tile, in PARTS column blocks one after the other."""
    if PARTS == 1:
        total = _epilogue(total, row, col, bias, gate, residual, M, N, rows_per_gate, stride_gate, stride_residual,
                          BLOCK_M, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, OUT)
        _store(y, total, row, col, M, N, stride_y, BLOCK_M, BLOCK_N, OUT, TMA)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        _finish(left, y, row, col, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate, stride_residual,
                BLOCK_M, HALF, BIAS, GELU, GATE, RESIDUAL, PARTS // 2, OUT, TMA)
        _finish(right, y, row, col + HALF, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate,
                stride_residual, BLOCK_M, HALF, BIAS, GELU, GATE, RESIDUAL, PARTS // 2, OUT, TMA)


@triton.jit(do_not_specialize=["M", "steps", "R0", "R1", "R2", "rows_per_gate"])
def _gemm(x, w, y, bias, gate, residual, scratch, norm, rstd, h0, b0, h1, b1, h2, b2, M, N, K, R0, R1, R2, steps,
          rows_per_gate, eps, stride_xm, stride_wr, stride_y, stride_gate, stride_residual, sh0, sb0, sh1, sb1, sh2,
          sb2, EXTRAS: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
          SEGMENTS: tl.constexpr, TREE: tl.constexpr, LEVELS: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
          GATE: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr,
          NT: tl.constexpr, OUT: tl.constexpr, TMA: tl.constexpr):
    """One pass: a program sums all of K for its tiles. `steps` K blocks make a segment; the last may be shorter."""
    blocks_k = tl.cdiv(K, BLOCK_K)
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if SEGMENTS == 1:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
            row, col = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in range(blocks_k):
                a, c = _load(x, w, row, col, i * BLOCK_K, M, N, K, stride_xm, stride_wr,
                             BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
                acc = tl.dot(a, c, acc)
            if EXTRAS:
                acc = _add_extras(acc, h0, b0, h1, b1, h2, b2, row, col, M, N, R0, R1, R2, sh0, sb0, sh1, sb1, sh2,
                                  sb2, EXTRAS, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
            if NORM:
                acc = _epilogue(acc, row, col, bias, gate, residual, M, N, rows_per_gate, stride_gate, stride_residual,
                                BLOCK_M, BLOCK_N, BIAS, False, False, False, OUT)
                acc = _norm_heads(acc, norm, rstd, row, col, M, N, eps, BLOCK_M, BLOCK_N, NORM)
                _store(y, acc, row, col, M, N, stride_y, BLOCK_M, BLOCK_N, OUT, TMA)
            else:
                _finish(acc, y, row, col, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate,
                        stride_residual, BLOCK_M, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, PARTS, OUT, TMA)
    else:
        mine = scratch
        if TREE and LEVELS < 3:
            mine = scratch + tl.program_id(0).to(tl.int64) * (3 * BLOCK_M * BLOCK_N)
        my_tiles = tl.cdiv(num_tiles - tl.program_id(0), tl.num_programs(0))
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Waiting sums in registers; 0.0 where a level waits in scratch or there is no tree.
        one = total if TREE and LEVELS >= 1 else 0.0
        two = total if TREE and LEVELS >= 2 else 0.0
        four = total if TREE and LEVELS >= 3 else 0.0
        # A short last segment still takes `steps` steps: beyond K both operands are zeros, which change no bit.
        if FLATTEN:
            # One loop over tiles, segments and steps: loads run ahead across both seams, but every step waits for its
            # products. By hand, because triton 3.6's pass for this fails on the tree's conditionals.
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for j in range(my_tiles * SEGMENTS * steps):
                unit = j // steps
                segment = unit % SEGMENTS
                tile = tl.program_id(0) + unit // SEGMENTS * tl.num_programs(0)
                row, col = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
                a, c = _load(x, w, row, col, (segment * steps + j % steps) * BLOCK_K, M, N, K, stride_xm, stride_wr,
                             BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
                acc = tl.dot(a, c, acc)
                if j % steps == steps - 1:
                    if TREE:
                        acc, one, two, four = _tree_step(acc, segment, one, two, four, mine, LEVELS, BLOCK_M, BLOCK_N)
                    else:
                        if segment > 0:
                            acc = total + acc
                        total = acc
                    if segment == SEGMENTS - 1:
                        _finish(acc, y, row, col, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate,
                                stride_residual, BLOCK_M, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, PARTS, OUT, TMA)
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            for unit in range(my_tiles * SEGMENTS):
                segment = unit % SEGMENTS
                tile = tl.program_id(0) + unit // SEGMENTS * tl.num_programs(0)
                row, col = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for i in range(steps):
                    a, c = _load(x, w, row, col, (segment * steps + i) * BLOCK_K, M, N, K, stride_xm, stride_wr,
                                 BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
                    acc = tl.dot(a, c, acc)
                if EXTRAS:  # noqa: SIM102
                    if segment == SEGMENTS - 1:
                        acc = _add_extras(acc, h0, b0, h1, b1, h2, b2, row, col, M, N, R0, R1, R2, sh0, sb0, sh1, sb1,
                                          sh2, sb2, EXTRAS, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
                if TREE:
                    acc, one, two, four = _tree_step(acc, segment, one, two, four, mine, LEVELS, BLOCK_M, BLOCK_N)
                else:
                    if segment > 0:
                        acc = total + acc
                    total = acc
                if segment == SEGMENTS - 1:
                    _finish(acc, y, row, col, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate,
                            stride_residual, BLOCK_M, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, PARTS, OUT, TMA)


@triton.jit(do_not_specialize=["M", "steps", "R0", "R1", "R2"])
def _gemm_segments(x, w, partials, h0, b0, h1, b1, h2, b2, M, N, K, R0, R1, R2, steps, stride_xm, stride_wr,
                   sh0, sb0, sh1, sb1, sh2, sb2, EXTRAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr,
                   GROUP_M: tl.constexpr,
                   SEGMENTS: tl.constexpr, NT: tl.constexpr, TMA: tl.constexpr):
    """Spread: a unit of work is one segment of one tile; fp32 partials [SEGMENTS, M, N] for `_add_segments`."""
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks_k = tl.cdiv(K, BLOCK_K)
    for unit in tl.range(tl.program_id(0), num_tiles * SEGMENTS, tl.num_programs(0)):
        segment = unit // num_tiles
        row, col = _tile_origin(unit % num_tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(segment * steps, min((segment + 1) * steps, blocks_k)):
            a, c = _load(x, w, row, col, i * BLOCK_K, M, N, K, stride_xm, stride_wr, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
            acc = tl.dot(a, c, acc)
        if EXTRAS:  # noqa: SIM102
            if segment == SEGMENTS - 1:
                acc = _add_extras(acc, h0, b0, h1, b1, h2, b2, row, col, M, N, R0, R1, R2, sh0, sb0, sh1, sb1, sh2, sb2,
                                  EXTRAS, BLOCK_M, BLOCK_N, BLOCK_K, NT, TMA)
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = col + tl.arange(0, BLOCK_N)
        at = (segment.to(tl.int64) * M + rows)[:, None] * N + cols[None, :]
        tl.store(partials + at, acc, (rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M", "rows_per_gate"])
def _add_segments(partials, y, bias, gate, residual, M, N, rows_per_gate, stride_y, stride_gate, stride_residual,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENTS: tl.constexpr, TREE: tl.constexpr,
                  BIAS: tl.constexpr, GELU: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr,
                  OUT: tl.constexpr):
    """Add fp32 partials [SEGMENTS, M, N] in the scheme's order, then the epilogue and its rounding."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * blocks_n, tl.num_programs(0)):
        row = tile // blocks_n * BLOCK_M
        col = tile % blocks_n * BLOCK_N
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = col + tl.arange(0, BLOCK_N)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        at = partials + rows[:, None] * N + cols[None, :]
        total = tl.load(at, inside, other=0.0)
        if TREE:
            one = total
            two = total
            four = total
            for segment in tl.static_range(SEGMENTS):
                part = tl.load(at + tl.cast(segment, tl.int64) * M * N, inside, other=0.0)
                total, one, two, four = _tree_step(part, segment, one, two, four, partials, 3, 1, 1)
        else:
            for segment in range(1, SEGMENTS):
                total = total + tl.load(at + tl.cast(segment, tl.int64) * M * N, inside, other=0.0)
        total = _epilogue(total, row, col, bias, gate, residual, M, N, rows_per_gate, stride_gate, stride_residual,
                          BLOCK_M, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, OUT)
        _store(y, total, row, col, M, N, stride_y, BLOCK_M, BLOCK_N, OUT, False)


@triton.jit
def _wgrad(dy, x, dw, T, N, K, num_samples, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr):
    """dw[s] = dy[s].T @ x[s] in fp32 for every sample s: tokens in order, a program a tile of a sample."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    per_sample = tl.cdiv(N, BLOCK_N) * tiles_k
    for unit in tl.range(tl.program_id(0), per_sample * num_samples, tl.num_programs(0)):
        sample = (unit // per_sample).to(tl.int64)
        tile = unit % per_sample
        ns = tile // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
        ks = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for t in range(0, T, BLOCK_T):
            ts = (t + tl.arange(0, BLOCK_T)).to(tl.int64)
            a = tl.load(dy + sample * T * N + ts[None, :] * N + ns[:, None], (ns < N)[:, None] & (ts < T)[None, :],
                        other=0.0)
            b = tl.load(x + sample * T * K + ts[:, None] * K + ks[None, :], (ts < T)[:, None] & (ks < K)[None, :],
                        other=0.0)
            acc = tl.dot(a, b, acc)
        tl.store(dw + sample * N * K + ns.to(tl.int64)[:, None] * K + ks[None, :], acc,
                 (ns < N)[:, None] & (ks < K)[None, :])


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def uses_tma(*tensors: Tensor) -> bool:
    """Whether TMA can take these matrices: Hopper or newer, base and rows aligned to 16 bytes."""
    for t in tensors:
        if t.data_ptr() & 15 or t.stride(0) * t.element_size() & 15:
            return False
    return not tensors[0].is_cuda or _capability(tensors[0].device) >= 9


def stores_by_tma(y: Tensor) -> bool:
    """Whether TMA may write this matrix: it writes 16 bytes at a time, and an uneven end would reach what follows."""
    return y.shape[1] * y.element_size() % 16 == 0 and uses_tma(y)


@functools.cache
def _fit(tile: Tile, loads_in_epilogue: bool, device: torch.device) -> Tile:
    """The tile with the stages and epilogue parts that the GPU's shared memory takes; no bit depends on either."""
    if loads_in_epilogue:  # a gate or residual passes through shared memory in fp32, part by part
        tile = dataclasses.replace(tile, epilogue_parts=max(tile.epilogue_parts, tile.block_n // 32))
    if device.type != "cuda":
        return tile
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    stage = 2 * (tile.block_m + tile.block_n) * tile.block_k
    store = 2 * tile.block_m * tile.block_n // tile.epilogue_parts
    return dataclasses.replace(tile, num_stages=max(2, min(tile.num_stages, (limit - store - 1024) // stage)))


@functools.cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """The module of kernels with split roles where GPU and triton have what they need; None elsewhere, logged once."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    reason = None if version in GLUON_VERSIONS else "they are written for " + ", ".join(
        f"{major}.{minor}" for major, minor in GLUON_VERSIONS)
    if reason is None:
        try:
            from . import hopper
        except Exception as error:  # Gluon is experimental: a build of triton may lack it
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logging.getLogger(__name__).warning(
            "the Gluon kernels for Hopper are not used on triton %s: %s. Plain Triton kernels do the same, slower",
            triton.__version__, reason)
        return None
    return hopper


def _epilogue_args(epilogue: Epilogue, gate: Tensor | None, residual: Tensor | None, m: int) -> tuple[dict, dict]:
    """Run-time and compile-time arguments of `_epilogue`."""
    values = {
        "rows_per_gate": 1 if gate is None else m // gate.shape[0],
        "stride_gate": 0 if gate is None else gate.stride(0),
        "stride_residual": 0 if residual is None else residual.stride(0),
    }
    switches = {"BIAS": epilogue.bias, "GELU": epilogue.activation == "gelu_tanh", "GATE": epilogue.gate,
                "RESIDUAL": epilogue.residual}
    return values, switches


def gemm(x: Tensor, w: Tensor, y: Tensor, *, layout: Layout, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
         gate: Tensor | None, residual: Tensor | None, num_sms: int, tile: Tile, spread: bool, tma: bool,
         extra: tuple[tuple[Tensor, Tensor], ...] = (), norm: Tensor | None = None, rstd: Tensor | None = None) -> None:
    """Write epilogue(x @ w.T) (`nt`) or epilogue(x @ w) (`nn`) to y [M, N]; all rows have unit stride.

    With a norm in the epilogue (one segment alone), its weight is `norm` [D], and rstd [M, N / D] fp32 is written too.
    y of fp32 holds the sum unrounded. A row stride of y, gate and residual is free; operands' too unless `tma`.
    """
    (m, k), n = x.shape, y.shape[1]
    segments = scheme.num_segments(k)
    if (tile.split_roles and not spread and tma and stores_by_tma(y) and (hopper := hopper_kernels(x.device))
            and hopper.takes(y, scheme, k, tile)):
        hopper.gemm(x, w, y, layout=layout, scheme=scheme, epilogue=epilogue, bias=bias, gate=gate, residual=residual,
                    num_sms=num_sms, tile=tile, extra=extra, norm=norm, rstd=rstd)
        return
    if epilogue.norm:  # one tile for all: another layout may add a head's squares in another order
        tile = MEDIUM_SPLIT
    given, tile = tile, _fit(tile, epilogue.gate or epilogue.residual, x.device)
    num_tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    programs = num_sms * tile.programs_per_sm
    tree = scheme.order == "tree" and segments > 1
    pairs = [t for pair in extra for t in pair]
    grid = min(programs, num_tiles * segments if spread else num_tiles)
    store_by_tma = tma and stores_by_tma(y)
    scratch, y_arg = None, y
    if spread:
        scratch = torch.empty((segments, m, n), dtype=torch.float32, device=x.device)
    else:
        if tree and tile.register_levels < 3:
            scratch = torch.empty(3 * grid * tile.block_m * tile.block_n, dtype=torch.float32, device=x.device)
        if tma and not store_by_tma:
            # Reading by TMA and writing by pointers is another kernel; a copy keeps the number of kernels small. The
            # rows here are long enough for what TMA writes behind column N.
            y_arg = torch.empty((m, -(-n // 8) * 8), dtype=y.dtype, device=y.device)[:, :n]

    def make() -> tuple[tuple[int, ...], list, dict]:
        block_k = tile.block_k
        if segments > 1:
            while scheme.segment_k % block_k:  # a block may not cross a segment; tensor-core steps are 16 in any block
                block_k //= 2
            if block_k < 16:
                raise ValueError(f"a segment of {scheme.segment_k} is no multiple of a tensor-core step of 16")
        nt = layout == "nt"
        w_block = [tile.block_n, block_k] if nt else [block_k, tile.block_n]

        def operand(t: Tensor, block: list[int]) -> Tensor | TensorDescriptor:
            return TensorDescriptor(t, list(t.shape), list(t.stride()), block) if tma else t

        x_arg, w_arg = operand(x, [tile.block_m, block_k]), operand(w, w_block)
        others: list = []
        for h, b in extra:
            others += [operand(h, [tile.block_m, block_k]), operand(b, w_block)]
        others += [None] * (6 - len(others))
        ranks = [h.shape[1] for h, _ in extra] + [0] * (3 - len(extra))
        strides = [t.stride(0) for t in pairs] + [0] * (6 - len(pairs))
        constants = {"EXTRAS": len(extra), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": block_k,
                     "GROUP_M": tile.group_m, "SEGMENTS": segments, "NT": nt, "TMA": tma,
                     "num_stages": tile.num_stages, "num_warps": tile.num_warps, "enable_fp_fusion": False}
        steps = max(1, scheme.segment_k // block_k)
        if spread:
            return (grid,), [x_arg, w_arg, scratch, *others, m, n, k, *ranks, steps, x.stride(0), w.stride(0),
                             *strides], constants
        values, switches = _epilogue_args(epilogue, gate, residual, m)
        target = operand(y_arg, [tile.block_m, tile.block_n // tile.epilogue_parts])
        constants |= switches | {
            "TREE": tree, "NORM": epilogue.norm, "LEVELS": tile.register_levels, "PARTS": tile.epilogue_parts,
            "OUT": _TL_DTYPE[y.dtype],
            "FLATTEN": tile.flatten and not extra}  # a loop of two loops cannot be flattened
        arguments = [x_arg, w_arg, target, bias, gate, residual, scratch, norm, rstd, *others, m, n, k, *ranks, steps,
                     values["rows_per_gate"], epilogue.eps, x.stride(0), w.stride(0), y_arg.stride(0),
                     values["stride_gate"], values["stride_residual"], *strides]
        return (grid,), arguments, constants

    key = (signature(x, w, y_arg, bias, gate, residual, norm, *pairs), layout, scheme, epilogue, num_sms, given, spread,
           tma)
    operands = (x, w, *(() if spread else (y_arg,)), *pairs)
    pointers = (scratch,) if spread else (bias, gate, residual, scratch, norm, rstd)
    if not tma:  # everything is a pointer, in the kernel's order
        pointers = (x, w, scratch, *pairs) if spread else (x, w, y_arg, bias, gate, residual, scratch, norm, rstd,
                                                          *pairs)
        operands = ()
    launch(_gemm_segments if spread else _gemm, key, (*pointers, *operands), make)
    if spread:
        add_partials(scratch, y, scheme=scheme, epilogue=epilogue, bias=bias, gate=gate, residual=residual,  # type: ignore[arg-type]
                     num_sms=num_sms)
    elif y_arg is not y:
        do_not_replay()
        y.copy_(y_arg)


def add_partials(partials: Tensor, y: Tensor, *, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
                 gate: Tensor | None, residual: Tensor | None, num_sms: int) -> None:
    """Write epilogue(sum of contiguous fp32 partials [P, M, N] in the scheme's order) to y [M, N]."""
    count, m, n = partials.shape

    def make() -> tuple[tuple[int, ...], list, dict]:
        values, switches = _epilogue_args(epilogue, gate, residual, m)
        rows, cols = (1, 512) if m < 16 else (8, 128)
        grid = min(num_sms * 4, triton.cdiv(m, rows) * triton.cdiv(n, cols))
        arguments = [partials, y, bias, gate, residual, m, n, values["rows_per_gate"], y.stride(0),
                     values["stride_gate"], values["stride_residual"]]
        constants = {"BLOCK_M": rows, "BLOCK_N": cols, "SEGMENTS": count, "TREE": scheme.order == "tree" and count > 1,
                     **switches, "OUT": _TL_DTYPE[y.dtype], "num_warps": 4, "enable_fp_fusion": False}
        return (grid,), arguments, constants

    key = (signature(partials, y, bias, gate, residual), scheme, epilogue, num_sms)
    launch(_add_segments, key, (partials, y, bias, gate, residual), make)


def wgrad(dy: Tensor, x: Tensor, *, num_sms: int) -> Tensor:
    """fp32 [S, N, K] from contiguous dy [S, T, N] and x [S, T, K]."""
    (samples, tokens, n), k = dy.shape, x.shape[2]
    dw = torch.empty((samples, n, k), dtype=torch.float32, device=dy.device)
    block_n, block_k = (32, 128) if n <= 64 else (128, 32) if k <= 64 else (128, 128)
    units = triton.cdiv(n, block_n) * triton.cdiv(k, block_k) * samples
    _wgrad[(min(num_sms * 2, units),)](dy, x, dw, tokens, n, k, samples, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_T=64,
                                       num_stages=3, num_warps=4, enable_fp_fusion=False)
    return dw


def interpreted() -> bool:
    """Whether Triton runs its interpreter, which takes CPU tensors."""
    return bool(knobs.runtime.interpret)
