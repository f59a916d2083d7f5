"""Kernels for Hopper in Gluon: the sums of the Triton back end, by warps with split roles.

One warp only loads; two groups of four warps own 64 rows each of a tile of 128. The groups run apart: while one adds or
stores, the other multiplies, and loads run ahead through segments and tiles. Plain Triton cannot keep the waiting sums
of `tp_invariant`'s tree near without stalling the tensor cores at each segment: its best form reached 0.43 of cuBLAS.
Here the sum of one segment waits in registers, that of two in shared memory, that of four in device memory, and the
next products start before a sum is put away (`_sum_trees`).

The order of every sum is the scheme's, so the bits are those of the Triton kernel; tests prove it. Gluon is an
experimental interface of triton: versions it is not written for take the Triton back end's own kernel.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .heuristics import Layout, Tile
from .launch import launch, signature
from .schemes import NUM_SEGMENTS, Epilogue, Scheme

BLOCK_M = 128
SHARED_BYTES = 232448  # of a block on compute capability 9.0
_GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
# Named differently in triton 3.6 and in later versions.
_copy_in = getattr(tma, "async_copy_global_to_shared", None) or tma.async_load
_copy_out = getattr(tma, "async_copy_shared_to_global", None) or tma.async_store


@gluon.jit
def _origin(tile, M, N, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of a tile: columns inside groups of GROUP_M row blocks."""
    per_group = GROUP_M * gl.cdiv(N, BLOCK_N)
    group = tile // per_group
    inside = tile - group * per_group
    height = min(gl.cdiv(M, 128) - group * GROUP_M, GROUP_M)
    return (group * GROUP_M + inside % height) * 128, inside // height * BLOCK_N


@gluon.jit
def _load_block(x, w, a_tiles, b_tiles, ready, empty, step, row, col, k, NT: gl.constexpr, STAGES: gl.constexpr):
    """Both operands of one K block, once its slot is free."""
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * x.block_type.nbytes + w.block_type.nbytes)
    _copy_in(x, [row, k], bar, a_tiles.index(slot * 2))
    _copy_in(x, [row + 64, k], bar, a_tiles.index(slot * 2 + 1))
    if NT:
        _copy_in(w, [col, k], bar, b_tiles.index(slot))
    else:
        _copy_in(w, [k, col], bar, b_tiles.index(slot))


@gluon.jit
def _load_all(x, w, h0, b0, h1, b1, h2, b2, a_tiles, b_tiles, ready, empty, M, N, my_tiles, blocks_k, blocks_0,
              blocks_1, blocks_2, EXTRAS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
              GROUP_M: gl.constexpr, NT: gl.constexpr,
              STAGES: gl.constexpr):
    """The loading warp: every operand block of every tile of this program, in order, as slots become free."""
    step = 0
    for t in range(my_tiles):
        row, col = _origin(gl.program_id(0) + t * gl.num_programs(0), M, N, BLOCK_N, GROUP_M)
        for i in range(blocks_k):
            _load_block(x, w, a_tiles, b_tiles, ready, empty, step, row, col, i * BLOCK_K, NT, STAGES)
            step += 1
        # More products in the same accumulator.
        if EXTRAS >= 1:
            for i in range(blocks_0):
                _load_block(h0, b0, a_tiles, b_tiles, ready, empty, step, row, col, i * BLOCK_K, NT, STAGES)
                step += 1
        if EXTRAS >= 2:
            for i in range(blocks_1):
                _load_block(h1, b1, a_tiles, b_tiles, ready, empty, step, row, col, i * BLOCK_K, NT, STAGES)
                step += 1
        if EXTRAS >= 3:
            for i in range(blocks_2):
                _load_block(h2, b2, a_tiles, b_tiles, ready, empty, step, row, col, i * BLOCK_K, NT, STAGES)
                step += 1


@gluon.jit
def _multiply(acc, step, a_tiles, b_tiles, ready, HALF: gl.constexpr, FIRST: gl.constexpr, NT: gl.constexpr,
              STAGES: gl.constexpr):
    """Start the products of one K block for 64 rows, once it has come."""
    slot = step % STAGES
    mbarrier.wait(ready.index(slot), step // STAGES & 1)
    if NT:
        b = b_tiles.index(slot).permute((1, 0))
    else:
        b = b_tiles.index(slot)
    return warpgroup_mma(a_tiles.index(slot * 2 + HALF), b, acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def _begin(step, a_tiles, b_tiles, ready, layout: gl.constexpr, BLOCK_N: gl.constexpr, HALF: gl.constexpr,
           NT: gl.constexpr, STAGES: gl.constexpr):
    """Start a segment's first block, which overwrites the accumulator.

    A zeroed one would be one more tile of live registers, and the compiler then serializes the products.
    """
    return _multiply(gl.zeros([64, BLOCK_N], gl.float32, layout), step, a_tiles, b_tiles, ready, HALF, True, NT, STAGES)


@gluon.jit
def _go_on(acc, step, steps, a_tiles, b_tiles, ready, empty, HALF: gl.constexpr, NT: gl.constexpr,
           STAGES: gl.constexpr):
    """Sum the rest of a begun segment, the last block's products still under way; a slot goes back to the loader once
    it is read."""
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    for i in range(1, steps):
        acc = _multiply(acc, step + i, a_tiles, b_tiles, ready, HALF, False, NT, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((step + i - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _end_segment(acc, step, steps, empty, STAGES: gl.constexpr):
    """Wait for the last block's products and give its slot back."""
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((step + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _finish_pair(acc, step, steps, a_tiles, b_tiles, ready, empty, layout: gl.constexpr, BLOCK_N: gl.constexpr,
                 HALF: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr):
    """Sum of two neighbouring segments for 64 rows, the first block of the first being under way in `acc`.

    The second starts before the first one's last products are done.
    """
    one = _go_on(acc, step, steps, a_tiles, b_tiles, ready, empty, HALF, NT, STAGES)
    step += steps
    other = _begin(step, a_tiles, b_tiles, ready, layout, BLOCK_N, HALF, NT, STAGES)
    one = warpgroup_mma_wait(num_outstanding=1, deps=(one,))
    mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
    other = _go_on(other, step, steps, a_tiles, b_tiles, ready, empty, HALF, NT, STAGES)
    return one + _end_segment(other, step, steps, empty, STAGES)


@gluon.jit
def _column_values(pointer, col, N, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """[BLOCK_N] values that rows of a tile share."""
    cols = col + gl.arange(0, BLOCK_N, layout)
    return gl.load(pointer + cols, cols < N, other=0.0)


@gluon.jit
def _gate_rows(row, M, rows_per_gate):
    """The gate row of the first of some rows, and the next one; all rows may lie beyond M."""
    last = (M - 1) // rows_per_gate
    first = gl.minimum(row // rows_per_gate, last)
    return first, gl.minimum(first + 1, last)


@gluon.jit
def _epilogue(acc, row, col, bias_row, gate_one, gate_two, gate, residual, out_tile, M, N, rows_per_gate, stride_gate,
              stride_residual, layout: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BIAS: gl.constexpr,
              GELU: gl.constexpr, GATE: gl.constexpr, RESIDUAL: gl.constexpr, TILE_IN: gl.constexpr):
    """``residual + gate * gelu(round(acc + bias))``, operation for operation as in the Triton back end.

    `bias_row` [BLOCK_N]; for GATE 2, `gate_one` and `gate_two` are the rows of `_gate_rows`, and `gate` is not read.
    With TILE_IN the residual, or for GATE 3 a factor an element, lies in `out_tile`.
    """
    rows = (row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))).to(gl.int64)
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if BIAS:
        acc = acc + gl.expand_dims(bias_row.to(gl.float32), 0)
    if GELU:
        acc = acc.to(out_tile.dtype).to(gl.float32)
        acc = acc * (1.0 - 1.0 / (gl.exp2(acc * gl.fma(acc * acc, 0.10294324, 2.3022082)) + 1.0))  # _gelu_rest there
    if GATE == 1 or (RESIDUAL and not TILE_IN):
        inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(cols < N, 0)
    if GATE == 2:
        # At least as many rows a gate as there are here, so two gate rows will do.
        first, _ = _gate_rows(row, M, rows_per_gate)
        before = gl.expand_dims(rows < (first + 1) * rows_per_gate, 1)
        acc = acc * gl.where(before, gl.expand_dims(gate_one, 0), gl.expand_dims(gate_two, 0)).to(gl.float32)
    if GATE == 1:
        at = gl.expand_dims(rows // rows_per_gate * stride_gate, 1) + gl.expand_dims(cols, 0)
        acc = acc * gl.load(gate + at, inside, other=0.0).to(gl.float32)
    if GATE == 3:
        acc = acc * out_tile.load(layout).to(gl.float32)
    if RESIDUAL:
        if TILE_IN:
            acc = out_tile.load(layout).to(gl.float32) + acc
        else:
            at = gl.expand_dims(rows * stride_residual, 1) + gl.expand_dims(cols, 0)
            acc = gl.load(residual + at, inside, other=0.0).to(gl.float32) + acc
    return acc


@gluon.jit
def _norm_heads(acc, weight_row, rstd, row, col, M, N, eps, layout: gl.constexpr, BLOCK_N: gl.constexpr,
                D: gl.constexpr):
    """RMS norm of every D columns of 64 rows; rstd [M, N / D] is written. A head's columns lie in four threads."""
    HEADS: gl.constexpr = BLOCK_N // D
    by_head = acc.reshape([64, HEADS, D])
    r = gl.rsqrt(gl.sum(by_head * by_head, 2) / D + eps)
    rows = (row + gl.arange(0, 64, gl.SliceLayout(1, r.type.layout))).to(gl.int64)
    heads = col // D + gl.arange(0, HEADS, gl.SliceLayout(0, r.type.layout))
    per_row = N // D
    gl.store(rstd + (gl.expand_dims(rows * per_row, 1) + gl.expand_dims(heads, 0)), r,
             gl.expand_dims(rows < M, 1) & gl.expand_dims(heads < per_row, 0))
    acc = gl.convert_layout((by_head * gl.expand_dims(r, 2)).reshape([64, BLOCK_N]), layout)
    return acc * gl.expand_dims(weight_row.to(gl.float32), 0)


@gluon.jit
def _four_at(four, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where the values of a tile wait in device memory: every thread's own together, threads side by side.

    The pattern is that of the accumulator: a pair of columns a thread, 8 rows a step. Any bijection would do.
    """
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)), 0)
    # 8 rows x 8 columns are one warp-wide access of 2 values a thread.
    return four + ((rows // 8 * (BLOCK_N // 8) + cols // 8) * 64 + rows % 8 * 8 + cols % 8)


@gluon.jit
def _four_store(four, part, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    gl.store(_four_at(four, layout, BLOCK_N), part)


@gluon.jit
def _four_load(four, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    return gl.load(_four_at(four, layout, BLOCK_N))


@gluon.jit
def _sum_halves(y, bias, gate, residual, norm, rstd, a_tiles, b_tiles, two_tile, out_tile, bias_tiles, gate_tiles,
                norm_tiles, ready, empty, arrived, M, N, my_tiles, steps, rows_per_gate, eps, stride_gate,
                stride_residual, HALF: gl.constexpr,
                SEGMENTS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, BIAS: gl.constexpr,
                GELU: gl.constexpr, GATE: gl.constexpr, RESIDUAL: gl.constexpr, NORM: gl.constexpr,
                TILE_IN: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr):
    """Four warps: 64 rows of every tile of this program, up to 4 segments, the epilogue and the store."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, BLOCK_N, 16])
    across: gl.constexpr = gl.BlockedLayout([BLOCK_N // 128], [32], [4], [0])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    step = 0
    for t in range(my_tiles):
        row, col = _origin(gl.program_id(0) + t * gl.num_programs(0), M, N, BLOCK_N, GROUP_M)
        row += HALF * 64
        # What the epilogue needs comes while the products run, and waits where it takes no registers from them.
        part = _begin(step, a_tiles, b_tiles, ready, layout, BLOCK_N, HALF, NT, STAGES)
        if BIAS:
            bias_tiles.index(HALF).store(_column_values(bias, col, N, across, BLOCK_N))
        if GATE == 2:
            first, second = _gate_rows(row, M, rows_per_gate)
            gate_tiles.index(2 * HALF).store(_column_values(gate + first * stride_gate, col, N, across, BLOCK_N))
            gate_tiles.index(2 * HALF + 1).store(_column_values(gate + second * stride_gate, col, N, across, BLOCK_N))
        if NORM:
            norm_tiles.index(HALF).store(gl.load(norm + (col + gl.arange(0, BLOCK_N, across)) % NORM))
        if TILE_IN:  # into the memory that the result leaves by, once the last result has left
            tma.store_wait(0)
            mbarrier.expect(arrived, residual.block_type.nbytes)
            _copy_in(residual, [row, col], arrived, out_tile)
        if SEGMENTS == 1:
            part = _go_on(part, step, steps, a_tiles, b_tiles, ready, empty, HALF, NT, STAGES)
            part = _end_segment(part, step, steps, empty, STAGES)
            step += steps
        else:
            for pair in gl.static_range(SEGMENTS // 2):
                if pair == 1:
                    tma.store_wait(0)  # the last store may still read this memory
                    two_tile.store(part)
                    part = _begin(step, a_tiles, b_tiles, ready, layout, BLOCK_N, HALF, NT, STAGES)
                part = _finish_pair(part, step, steps, a_tiles, b_tiles, ready, empty, layout, BLOCK_N, HALF, NT,
                                    STAGES)
                step += 2 * steps
            if SEGMENTS == 4:
                part = two_tile.load(layout) + part
        if TILE_IN:
            mbarrier.wait(arrived, t & 1)
        bias_row = 0
        gate_one = 0
        gate_two = 0
        if BIAS:
            bias_row = bias_tiles.index(HALF).load(columns)
        if GATE == 2:
            gate_one = gate_tiles.index(2 * HALF).load(columns)
            gate_two = gate_tiles.index(2 * HALF + 1).load(columns)
        part = _epilogue(part, row, col, bias_row, gate_one, gate_two, gate, residual, out_tile, M, N, rows_per_gate,
                         stride_gate, stride_residual, layout, 64, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, TILE_IN)
        if NORM:
            part = _norm_heads(part, norm_tiles.index(HALF).load(columns), rstd, row, col, M, N, eps, layout, BLOCK_N,
                               NORM)
        if SEGMENTS < 4 and not TILE_IN:
            tma.store_wait(0)
        out_tile.store(part.to(y.dtype))
        fence_async_shared()
        _copy_out(y, [row, col], out_tile)
    tma.store_wait(0)


@gluon.jit
def _finish_tree(part, y, bias, gate, residual, four, two_tile, out_tile, row, col, M, N, rows_per_gate, stride_gate,
                 stride_residual, layout: gl.constexpr, BLOCK_N: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr,
                 GATE: gl.constexpr, RESIDUAL: gl.constexpr):
    """The tree's last additions for 64 rows whose last pair of segments is in `part`, the epilogue and the store."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    bias_row = 0
    gate_one = 0
    gate_two = 0
    if BIAS:
        bias_row = _column_values(bias, col, N, columns, BLOCK_N)
    if GATE == 2:
        first, second = _gate_rows(row, M, rows_per_gate)
        gate_one = _column_values(gate + first * stride_gate, col, N, columns, BLOCK_N)
        gate_two = _column_values(gate + second * stride_gate, col, N, columns, BLOCK_N)
    part = two_tile.load(layout) + part
    part = _four_load(four, layout, BLOCK_N) + part
    part = _epilogue(part, row, col, bias_row, gate_one, gate_two, gate, residual, out_tile, M, N, rows_per_gate,
                     stride_gate, stride_residual, layout, 64, BLOCK_N, BIAS, GELU, GATE, RESIDUAL, False)
    out_tile.store(part.to(y.dtype))
    fence_async_shared()
    _copy_out(y, [row, col], out_tile)


@gluon.jit
def _sum_trees(y, bias, gate, residual, scratch, a_tiles, b_tiles, two_tile, out_tile, ready, empty, M, N, my_tiles,
               steps, rows_per_gate, stride_gate, stride_residual, HALF: gl.constexpr, BLOCK_N: gl.constexpr,
               GROUP_M: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr, GATE: gl.constexpr,
               RESIDUAL: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr):
    """As `_sum_halves` for 8 segments with the sum of four in device memory, and never idle between sums.

    The products of the next block, of the next tile too, are under way while a finished sum is added, put away or
    stored. What crosses the loop's seam is a finished sum: products under way there would be serialized.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, BLOCK_N, 16])
    four = scratch + (gl.program_id(0).to(gl.int64) * 2 + HALF) * (64 * BLOCK_N)
    step = 0
    row = M  # the tile before the first one: rows that do not exist, so nothing is stored
    col = 0
    part = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for t in range(my_tiles):
        ahead = _begin(step, a_tiles, b_tiles, ready, layout, BLOCK_N, HALF, NT, STAGES)
        _finish_tree(part, y, bias, gate, residual, four, two_tile, out_tile, row, col, M, N, rows_per_gate,
                     stride_gate, stride_residual, layout, BLOCK_N, BIAS, GELU, GATE, RESIDUAL)
        row, col = _origin(gl.program_id(0) + t * gl.num_programs(0), M, N, BLOCK_N, GROUP_M)
        row += HALF * 64
        for pair in gl.static_range(4):
            part = _finish_pair(ahead, step, steps, a_tiles, b_tiles, ready, empty, layout, BLOCK_N, HALF, NT, STAGES)
            step += 2 * steps
            if pair < 3:
                ahead = _begin(step, a_tiles, b_tiles, ready, layout, BLOCK_N, HALF, NT, STAGES)
            if pair == 0:
                tma.store_wait(0)  # the last store may still read this memory
                two_tile.store(part)
            elif pair == 1:
                _four_store(four, two_tile.load(layout) + part, layout, BLOCK_N)
            elif pair == 2:
                two_tile.store(part)
    _finish_tree(part, y, bias, gate, residual, four, two_tile, out_tile, row, col, M, N, rows_per_gate, stride_gate,
                 stride_residual, layout, BLOCK_N, BIAS, GELU, GATE, RESIDUAL)
    tma.store_wait(0)


@gluon.jit
def _make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """`ready` and `empty` of every slot."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    fence_async_shared()
    return ready, empty


@gluon.jit(do_not_specialize=["M", "steps", "blocks_0", "blocks_1", "blocks_2", "rows_per_gate"])
def _halves_gemm(x, w, y, bias, gate, residual, scratch, norm, rstd, h0, b0, h1, b1, h2, b2, M, N, steps, blocks_0,
                 blocks_1, blocks_2, rows_per_gate, eps, stride_gate, stride_residual, EXTRAS: gl.constexpr,
                 TILE_IN: gl.constexpr, SEGMENTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                 GROUP_M: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr, GATE: gl.constexpr,
                 RESIDUAL: gl.constexpr, NORM: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr):
    """One pass over K in SEGMENTS segments of `steps` blocks of 64; a program walks tiles in steps of the grid."""
    a_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 64, BLOCK_K], x.layout)
    b_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    # Waiting sums, each in the memory that the output's tile leaves by.
    PER_WAITING: gl.constexpr = 32 // y.dtype.primitive_bitwidth
    if SEGMENTS == 8:
        # A thread finds its own values again, 16 bytes at a time, its neighbours' beside them: no bank conflict.
        wait_layout: gl.constexpr = gl.SharedLinearLayout(
            [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32],
             [0, 64]], [], 1024)
        two_0 = gl.allocate_shared_memory(gl.float32, [64, BLOCK_N], wait_layout)
        two_1 = gl.allocate_shared_memory(gl.float32, [64, BLOCK_N], wait_layout)
        out_0 = two_0._reinterpret(y.dtype, [PER_WAITING, 64, BLOCK_N], y.layout).index(0)
        out_1 = two_1._reinterpret(y.dtype, [PER_WAITING, 64, BLOCK_N], y.layout).index(0)
    elif SEGMENTS == 4:
        wait_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        two_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_N], wait_layout)
        two_0 = two_tiles.index(0)
        two_1 = two_tiles.index(1)
        out_tiles = two_tiles._reinterpret(y.dtype, [2 * PER_WAITING, 64, BLOCK_N], y.layout)
        out_0 = out_tiles.index(0)
        out_1 = out_tiles.index(PER_WAITING)
    else:
        out_tiles = gl.allocate_shared_memory(y.dtype, [2, 64, BLOCK_N], y.layout)
        out_0 = out_tiles.index(0)
        out_1 = out_tiles.index(1)
        two_0 = out_0
        two_1 = out_1
    ready, empty = _make_barriers(STAGES, 2)
    num_tiles = gl.cdiv(M, 128) * gl.cdiv(N, BLOCK_N)
    my_tiles = gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))
    my_steps = steps + blocks_0 + blocks_1 + blocks_2  # to the multiplying warps the other products are more of K
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if TILE_IN:
        for i in gl.static_range(2):
            mbarrier.init(arrived.index(i), count=1)
        fence_async_shared()
    # For each half: the bias of its columns, two gate rows, and the weights of a norm.
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bias_tiles = gl.allocate_shared_memory(bias.dtype.element_ty if BIAS else y.dtype, [2, BLOCK_N if BIAS else 1],
                                           row_layout)
    gate_tiles = gl.allocate_shared_memory(gate.dtype.element_ty if GATE == 2 else y.dtype,
                                           [4, BLOCK_N if GATE == 2 else 1], row_layout)
    norm_tiles = gl.allocate_shared_memory(norm.dtype.element_ty if NORM else y.dtype, [2, BLOCK_N if NORM else 1],
                                           row_layout)
    if SEGMENTS == 8:
        gl.warp_specialize([
            (_sum_trees, (y, bias, gate, residual, scratch, a_tiles, b_tiles, two_0, out_0, ready, empty, M, N,
                          my_tiles, my_steps, rows_per_gate, stride_gate, stride_residual, 0, BLOCK_N, GROUP_M, BIAS,
                          GELU, GATE, RESIDUAL, NT, STAGES)),
            (_sum_trees, (y, bias, gate, residual, scratch, a_tiles, b_tiles, two_1, out_1, ready, empty, M, N,
                          my_tiles, my_steps, rows_per_gate, stride_gate, stride_residual, 1, BLOCK_N, GROUP_M, BIAS,
                          GELU, GATE, RESIDUAL, NT, STAGES)),
            (_load_all, (x, w, h0, b0, h1, b1, h2, b2, a_tiles, b_tiles, ready, empty, M, N, my_tiles, SEGMENTS * steps,
                         blocks_0, blocks_1, blocks_2, EXTRAS, BLOCK_N, BLOCK_K, GROUP_M, NT, STAGES)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_sum_halves, (y, bias, gate, residual, norm, rstd, a_tiles, b_tiles, two_0, out_0, bias_tiles, gate_tiles,
                           norm_tiles, ready, empty, arrived.index(0), M, N, my_tiles, my_steps, rows_per_gate, eps,
                           stride_gate, stride_residual, 0, SEGMENTS, BLOCK_N, GROUP_M, BIAS, GELU, GATE, RESIDUAL,
                           NORM, TILE_IN, NT, STAGES)),
            (_sum_halves, (y, bias, gate, residual, norm, rstd, a_tiles, b_tiles, two_1, out_1, bias_tiles, gate_tiles,
                           norm_tiles, ready, empty, arrived.index(1), M, N, my_tiles, my_steps, rows_per_gate, eps,
                           stride_gate, stride_residual, 1, SEGMENTS, BLOCK_N, GROUP_M, BIAS, GELU, GATE, RESIDUAL,
                           NORM, TILE_IN, NT, STAGES)),
            (_load_all, (x, w, h0, b0, h1, b1, h2, b2, a_tiles, b_tiles, ready, empty, M, N, my_tiles, SEGMENTS * steps,
                         blocks_0, blocks_1, blocks_2, EXTRAS, BLOCK_N, BLOCK_K, GROUP_M, NT, STAGES)),
        ], [4, 1], [240, 24])


def takes(y: Tensor, scheme: Scheme, k: int, tile: Tile) -> bool:
    """Whether these kernels can do it: one segment, or a tree of whole blocks of 64, of 8 with 128 columns; a 16-bit
    output unless a tree."""
    if scheme.num_segments(k) == 1:
        return y.element_size() == 2
    eight = scheme.num_segments(k) == NUM_SEGMENTS
    return scheme.order == "tree" and scheme.segment_k % tile.block_k == 0 and (not eight or tile.block_n == 128)


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    layout = _layout(tuple(block), tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])


def _takes_tma(t: Tensor) -> bool:
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def gemm(x: Tensor, w: Tensor, y: Tensor, *, layout: Layout, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
         gate: Tensor | None, residual: Tensor | None, num_sms: int, tile: Tile,
         extra: tuple[tuple[Tensor, Tensor], ...] = (), norm: Tensor | None = None, rstd: Tensor | None = None) -> None:
    """As the Triton back end's `gemm`; operands must suit TMA, and `takes` must hold. `extra` and a norm want one
    segment."""
    (m, k), n = x.shape, y.shape[1]
    segments = scheme.num_segments(k)
    grid = min(num_sms, -(-m // BLOCK_M) * -(-n // tile.block_n))
    scratch = None
    if segments == NUM_SEGMENTS:  # the sums of four
        scratch = torch.empty(grid * BLOCK_M * tile.block_n, dtype=torch.float32, device=x.device)
    rows_per_gate = 1 if gate is None else m // gate.shape[0]
    gate_kind = 0 if gate is None else 2 if rows_per_gate >= BLOCK_M // 2 else 1
    tile_in = residual  # comes by TMA while the products run
    if gate is not None and len(gate) == m and residual is None:
        tile_in = gate
    if segments > 1 or tile_in is None or tile_in.dtype != y.dtype or not _takes_tma(tile_in):
        tile_in = None
    elif tile_in is gate:
        gate_kind, gate = 3, None
    pairs = [t for pair in extra for t in pair]

    def make() -> tuple[tuple[int, ...], list, dict]:
        nt = layout == "nt"
        steps = triton.cdiv(k, tile.block_k) if segments == 1 else scheme.segment_k // tile.block_k
        w_block = [tile.block_n, tile.block_k] if nt else [tile.block_k, tile.block_n]
        stage = x.element_size() * (BLOCK_M + tile.block_n) * tile.block_k
        room = SHARED_BYTES - 1024 - (4 if segments >= 4 else y.element_size()) * BLOCK_M * tile.block_n
        for rows, values in ((2, bias), (4, gate if gate_kind == 2 else None), (2, norm)):
            room -= 0 if values is None else rows * tile.block_n * values.element_size()
        x_arg, w_arg = _descriptor(x, [BLOCK_M // 2, tile.block_k]), _descriptor(w, w_block)
        out_block = [BLOCK_M // 2, tile.block_n]
        others: list = []
        for h, b in extra:
            others += [_descriptor(h, [BLOCK_M // 2, tile.block_k]), _descriptor(b, w_block)]
        others += [None] * (6 - len(others))
        blocks = [triton.cdiv(h.shape[1], tile.block_k) for h, _ in extra] + [0] * (3 - len(extra))
        arguments = [
            x_arg, w_arg, _descriptor(y, out_block), bias, gate,
            residual if tile_in is None else _descriptor(tile_in, out_block), scratch, norm, rstd,
            *others, m, n, steps, *blocks, rows_per_gate, epilogue.eps, 0 if gate is None else gate.stride(0),
            0 if residual is None else residual.stride(0)]
        constants = {
            "EXTRAS": len(extra), "TILE_IN": tile_in is not None, "SEGMENTS": segments, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "BIAS": epilogue.bias,
            "GELU": epilogue.activation == "gelu_tanh",
            "GATE": gate_kind, "RESIDUAL": epilogue.residual, "NORM": epilogue.norm,
            "NT": nt, "STAGES": min(tile.num_stages, room // stage), "num_warps": 4, "enable_fp_fusion": False}
        return (grid,), arguments, constants

    key = (signature(x, w, y, bias, gate, residual, tile_in, norm, *pairs), layout, scheme, epilogue, num_sms, tile,
           gate_kind)
    pointers = (bias, gate, residual if tile_in is None else None, scratch, norm, rstd)
    descriptors = (x, w, y, tile_in, *pairs)
    launch(_halves_gemm, key, (*pointers, *descriptors), make)
