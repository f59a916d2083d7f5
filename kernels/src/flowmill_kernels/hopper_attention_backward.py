"""Attention's backward for Hopper in Gluon, for heads of 128: dq, and dk with dv, in two kernels without atomics.

As the forward (`hopper_attention.py`): one warp only loads, groups of four warps own 64 queries, or for dk and dv 64
keys, and run apart. The order of every sum is fixed: blocks of a constant size that start at each segment's first row.
Heads of 64 keep the Triton back end's backward, which is faster there.
"""

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

from .hopper_attention import (
    LOG2_E,
    _barriers,
    _clean_barriers,
    _copy_in,
    _copy_rows,
    _ends,
    _launch,
    _length,
    _load_keys,
    _mask,
    _num_blocks,
    _tile_place,
    _zero_behind,
)


@gluon.jit
def _load_two(one, two, sample, row, head, bar, one_tile, two_tile, ROWS: gl.constexpr, D: gl.constexpr):
    """The same rows of two tensors, for one barrier."""
    mbarrier.expect(bar, one.block_type.nbytes + two.block_type.nbytes)
    _copy_in(one, [sample, row, head, 0], bar, one_tile._reinterpret(one.dtype, [1, ROWS, 1, D], one.layout))
    _copy_in(two, [sample, row, head, 0], bar, two_tile._reinterpret(two.dtype, [1, ROWS, 1, D], two.layout))


@gluon.jit
def _load_pair(one, other, one_too, other_too, block, count, sample, head, bar, one_tile, other_tile,
               ROWS: gl.constexpr, D: gl.constexpr, TWO: gl.constexpr):
    """A block of ROWS rows of two tensors in two segments each, of which the first has `count` blocks."""
    if TWO:
        if block < count:
            _load_two(one, other, sample, block * ROWS, head, bar, one_tile, other_tile, ROWS, D)
        else:
            _load_two(one_too, other_too, sample, (block - count) * ROWS, head, bar, one_tile, other_tile, ROWS, D)
    else:
        _load_two(one, other, sample, block * ROWS, head, bar, one_tile, other_tile, ROWS, D)


@gluon.jit
def _query_loads(q0, q1, do0, do1, k0, v0, k1, v1, len0_ptr, len1_ptr, q_tiles, do_tiles, k_tiles, v_tiles, q_ready,
                 q_empty, k_ready, k_empty, v_ready, v_empty, my_tiles, tiles, heads, units0, tq0, tk0, tk1,
                 BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TWO_Q: gl.constexpr,
                 TWO_K: gl.constexpr, LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """The loading warp of dq: queries and output gradients of both groups, and all their keys and values."""
    step = 0
    for t in range(my_tiles):
        _, unit, sample, head = _tile_place(t, tiles, heads, 2)
        blocks0, blocks = _num_blocks(_length(len0_ptr, sample, tk0, LEN0), _length(len1_ptr, sample, tk1, LEN1),
                                      (unit + 2) * 64 - 1, tk0 - tq0, BLOCK_N, TWO_K, CAUSAL)
        for g in gl.static_range(2):
            mbarrier.wait(q_empty.index(g), (t & 1) ^ 1)
            _load_pair(q0, do0, q1, do1, unit + g, units0, sample, head, q_ready.index(g), q_tiles.index(g),
                       do_tiles.index(g), 64, D, TWO_Q)
        step = _load_keys(k0, v0, k1, v1, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, step, blocks, blocks0,
                          sample, head, BLOCK_N, D, STAGES, TWO_K)


@gluon.jit
def _query_sum(step, blocks, blocks0, len0, len1, last, scale, lse, delta, q, dout, k_tiles, v_tiles, k_ready, k_empty,
               v_ready, v_empty, k_clean, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
               STAGES: gl.constexpr, TWO_K: gl.constexpr, CLEAN: gl.constexpr, CAUSAL: gl.constexpr):
    """dq / softmax scale of 64 queries: all their keys in order."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    dq = gl.zeros([64, D], gl.float32, o_layout)
    minus_lse = gl.expand_dims(-lse, 1)
    delta = gl.expand_dims(delta, 1)
    for i in range(blocks):
        slot = step % STAGES
        phase = step // STAGES & 1
        mbarrier.wait(k_ready.index(slot), phase)
        s = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot), phase)
        dp = warpgroup_mma(dout, v_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        s, valid = _mask(s, i, blocks0, len0, len1, last, s_layout, BLOCK_N, TWO_K, CAUSAL)
        p = gl.exp2(gl.fma(s, scale, minus_lse))
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        ds = p * (dp - delta)
        if CLEAN:
            if valid < BLOCK_N:  # the score's gradient may be 0 * nan there
                keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
                ds = gl.where(gl.expand_dims(keys < valid, 0), ds, 0.0)
            _zero_behind(k_tiles.index(slot), valid, k_ready.index(slot), k_clean.index(slot), phase, GROUP, BLOCK_N, D)
        dq = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), p_layout), k_tiles.index(slot), dq, is_async=True)
        # In flight across iterations the compiler would serialize all products.
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        step += 1
    return dq


@gluon.jit
def _row_values(lse, delta, pair, row, tokens, layout: gl.constexpr, ROWS: gl.constexpr):
    """lse and delta of some queries; lse = inf makes every weight of a query that does not exist exactly 0."""
    rows = row + gl.arange(0, ROWS, layout)
    at = pair.to(gl.int64) * tokens + rows
    return gl.load(lse + at, rows < tokens, other=float("inf")), gl.load(delta + at, rows < tokens, other=0.0)


@gluon.jit
def _query_group(dq0, dq1, lse0, lse1, delta0, delta1, len0_ptr, len1_ptr, q_tile, do_tile, out_tile, k_tiles, v_tiles,
                 q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, k_clean, my_tiles, tiles, heads, units0, units,
                 tq0, tq1, tk0, tk1, scale, softmax_scale, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
                 STAGES: gl.constexpr, TWO_Q: gl.constexpr, TWO_K: gl.constexpr, LEN0: gl.constexpr,
                 LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """Four warps: dq of 64 queries of every tile of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    step = 0
    for t in range(my_tiles):
        pair, first_unit, sample, head = _tile_place(t, tiles, heads, 2)
        unit = first_unit + GROUP
        len0 = _length(len0_ptr, sample, tk0, LEN0)
        len1 = _length(len1_ptr, sample, tk1, LEN1)
        blocks0, blocks = _num_blocks(len0, len1, (first_unit + 2) * 64 - 1, tk0 - tq0, BLOCK_N, TWO_K, CAUSAL)
        if TWO_Q:
            if unit < units0:
                lse, delta = _row_values(lse0, delta0, pair, unit * 64, tq0, row_layout, 64)
            else:
                lse, delta = _row_values(lse1, delta1, pair, (unit - units0) * 64, tq1, row_layout, 64)
        else:
            lse, delta = _row_values(lse0, delta0, pair, unit * 64, tq0, row_layout, 64)
        mbarrier.wait(q_ready, t & 1)
        dq = gl.zeros([64, D], gl.float32, o_layout)
        if (unit < units) & (blocks > 0):
            dq = _query_sum(step, blocks, blocks0, len0, len1, unit * 64 + tk0 - tq0, scale, lse, delta, q_tile,
                            do_tile, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, k_clean, GROUP, BLOCK_N,
                            D, STAGES, TWO_K, LEN0 or LEN1, CAUSAL)
        else:  # no queries, or no keys: let the slots pass
            for i in range(blocks):
                slot = (step + i) % STAGES
                phase = (step + i) // STAGES & 1
                mbarrier.wait(k_ready.index(slot), phase)
                mbarrier.arrive(k_empty.index(slot), count=1)
                mbarrier.wait(v_ready.index(slot), phase)
                mbarrier.arrive(v_empty.index(slot), count=1)
        mbarrier.arrive(q_empty, count=1)
        step += blocks
        tma.store_wait(0)  # the last store may still read this memory
        out_tile.store((dq * softmax_scale).to(dq0.dtype))
        fence_async_shared()
        if TWO_Q:
            if unit < units0:
                _copy_rows(dq0, sample, unit * 64, head, out_tile, D)
            elif unit < units:
                _copy_rows(dq1, sample, (unit - units0) * 64, head, out_tile, D)
        elif unit < units:
            _copy_rows(dq0, sample, unit * 64, head, out_tile, D)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total_tiles", "tiles", "units0", "units", "tq0", "tq1", "tk0", "tk1"])
def _backward_queries(q0, q1, do0, do1, k0, v0, k1, v1, dq0, dq1, lse0, lse1, delta0, delta1, len0, len1, total_tiles,
                      tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, softmax_scale, BLOCK_N: gl.constexpr,
                      D: gl.constexpr, STAGES: gl.constexpr, TWO_Q: gl.constexpr, TWO_K: gl.constexpr,
                      LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """dq: a program walks tiles of 128 queries in steps of the grid."""
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(q0.dtype, [2, 64, D], rows)
    do_tiles = gl.allocate_shared_memory(q0.dtype, [2, 64, D], rows)
    out_tiles = gl.allocate_shared_memory(q0.dtype, [2, 64, D], rows)
    k_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_N, D], rows)
    v_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_N, D], rows)
    q_ready, q_empty = _barriers(2, 1)
    k_ready, k_empty = _barriers(STAGES, 2)
    v_ready, v_empty = _barriers(STAGES, 2)
    k_clean = _clean_barriers(STAGES)
    fence_async_shared()
    my_tiles = gl.cdiv(total_tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize([
        (_query_group, (dq0, dq1, lse0, lse1, delta0, delta1, len0, len1, q_tiles.index(0), do_tiles.index(0),
                        out_tiles.index(0), k_tiles, v_tiles, q_ready.index(0), q_empty.index(0), k_ready, k_empty,
                        v_ready, v_empty, k_clean, my_tiles, tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale,
                        softmax_scale, 0, BLOCK_N, D, STAGES, TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
        (_query_group, (dq0, dq1, lse0, lse1, delta0, delta1, len0, len1, q_tiles.index(1), do_tiles.index(1),
                        out_tiles.index(1), k_tiles, v_tiles, q_ready.index(1), q_empty.index(1), k_ready, k_empty,
                        v_ready, v_empty, k_clean, my_tiles, tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale,
                        softmax_scale, 1, BLOCK_N, D, STAGES, TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
        (_query_loads, (q0, q1, do0, do1, k0, v0, k1, v1, len0, len1, q_tiles, do_tiles, k_tiles, v_tiles, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, my_tiles, tiles, heads, units0, tq0, tk0, tk1,
                        BLOCK_N, D, STAGES, TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
    ], [4, 1], [240, 24])


@gluon.jit
def _query_blocks(unit, units0, tq0, tq1, tk0, len0, len1, BLOCK_M: gl.constexpr, TWO_Q: gl.constexpr,
                  TWO_K: gl.constexpr, CAUSAL: gl.constexpr):
    """(first block of queries, blocks in the first segment, in all) that the tile of keys from `unit` on meets."""
    begin = 0
    if CAUSAL:
        begin = gl.maximum(unit * 64 - (tk0 - tq0), 0) // BLOCK_M
    first = gl.cdiv(tq0, BLOCK_M)
    blocks = first
    if TWO_Q:
        blocks += gl.cdiv(tq1, BLOCK_M)
    # A tile of which no key exists meets none.
    if TWO_K:
        alive = gl.where(unit < units0, (unit * 64 < len0) | ((unit + 1 == units0) & (len1 > 0)),
                         (unit - units0) * 64 < len1)
    else:
        alive = unit * 64 < len0
    return begin, first, gl.where(alive, blocks, begin)


@gluon.jit
def _key_loads(q0, q1, do0, do1, k0, v0, k1, v1, len0_ptr, len1_ptr, q_tiles, do_tiles, k_tiles, v_tiles, k_ready,
               k_empty, ready, empty, my_tiles, tiles, heads, units0, tq0, tq1, tk0, tk1, BLOCK_M: gl.constexpr,
               D: gl.constexpr, STAGES: gl.constexpr, TWO_Q: gl.constexpr, TWO_K: gl.constexpr, LEN0: gl.constexpr,
               LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """The loading warp of dk and dv: keys and values of both groups, and all queries and output gradients."""
    step = 0
    for t in range(my_tiles):
        _, unit, sample, head = _tile_place(t, tiles, heads, 2)
        begin, blocks0, blocks = _query_blocks(unit, units0, tq0, tq1, tk0, _length(len0_ptr, sample, tk0, LEN0),
                                               _length(len1_ptr, sample, tk1, LEN1), BLOCK_M, TWO_Q, TWO_K, CAUSAL)
        for g in gl.static_range(2):
            mbarrier.wait(k_empty.index(g), (t & 1) ^ 1)
            _load_pair(k0, v0, k1, v1, unit + g, units0, sample, head, k_ready.index(g), k_tiles.index(g),
                       v_tiles.index(g), 64, D, TWO_K)
        for i in range(begin, blocks):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            step += 1
            _load_pair(q0, do0, q1, do1, i, blocks0, sample, head, ready.index(slot), q_tiles.index(slot),
                       do_tiles.index(slot), BLOCK_M, D, TWO_Q)


@gluon.jit
def _key_sums(step, begin, blocks, blocks0, pair, lse0, lse1, delta0, delta1, tq0, tq1, first, scale, k, v, q_tiles,
              do_tiles, ready, empty, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              TWO_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """dk / softmax scale and dv of 64 keys: all queries in order; `first`: the first query that sees the first key."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, BLOCK_M, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    col_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    nothing = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([64, D], gl.float32, o_layout)
    dv = gl.zeros([64, D], gl.float32, o_layout)
    for i in range(begin, blocks):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        s = warpgroup_mma(k, q_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if TWO_Q:
            if i < blocks0:
                lse, delta = _row_values(lse0, delta0, pair, i * BLOCK_M, tq0, col_layout, BLOCK_M)
            else:
                lse, delta = _row_values(lse1, delta1, pair, (i - blocks0) * BLOCK_M, tq1, col_layout, BLOCK_M)
        else:
            lse, delta = _row_values(lse0, delta0, pair, i * BLOCK_M, tq0, col_layout, BLOCK_M)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = gl.exp2(gl.fma(s, scale, gl.expand_dims(-lse, 0)))
        if CAUSAL:  # noqa: SIM102
            if i * BLOCK_M < first + 63:
                rows = i * BLOCK_M + gl.arange(0, BLOCK_M, col_layout)
                keys = first + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
                p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(rows, 0), p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(q_tiles.dtype), p_layout), do_tiles.index(slot), dv, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = p * (dp - gl.expand_dims(delta, 0))
        dk = warpgroup_mma(gl.convert_layout(ds.to(q_tiles.dtype), p_layout), q_tiles.index(slot), dk, is_async=True)
        # Sums left in flight into the next iteration came out wrong (heads of 64, triton 3.6).
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dv))
        mbarrier.arrive(empty.index(slot), count=1)
        step += 1
    return dk, dv


@gluon.jit
def _store_keys(dk_out, dv_out, k_tile, v_tile, sample, row, head, D: gl.constexpr):
    _copy_rows(dk_out, sample, row, head, k_tile, D)
    _copy_rows(dv_out, sample, row, head, v_tile, D)


@gluon.jit
def _key_group(dk0, dv0, dk1, dv1, lse0, lse1, delta0, delta1, len0_ptr, len1_ptr, q_tiles, do_tiles, k_tile, v_tile,
               k_ready, k_empty, ready, empty, my_tiles, tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale,
               softmax_scale, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
               TWO_Q: gl.constexpr, TWO_K: gl.constexpr, LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """Four warps: dk and dv of 64 keys of every tile of this program."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    step = 0
    for t in range(my_tiles):
        pair, first_unit, sample, head = _tile_place(t, tiles, heads, 2)
        unit = first_unit + GROUP
        len0 = _length(len0_ptr, sample, tk0, LEN0)
        len1 = _length(len1_ptr, sample, tk1, LEN1)
        begin, blocks0, blocks = _query_blocks(first_unit, units0, tq0, tq1, tk0, len0, len1, BLOCK_M, TWO_Q, TWO_K,
                                               CAUSAL)
        left = len0 - unit * 64  # keys of this group that exist
        if TWO_K:
            left = gl.where(unit < units0, left, len1 - (unit - units0) * 64)
        dk = gl.zeros([64, D], gl.float32, o_layout)
        dv = gl.zeros([64, D], gl.float32, o_layout)
        mbarrier.wait(k_ready, t & 1)
        if (unit < units) & (left > 0) & (blocks > begin):
            dk, dv = _key_sums(step, begin, blocks, blocks0, pair, lse0, lse1, delta0, delta1, tq0, tq1,
                               unit * 64 - (tk0 - tq0), scale, k_tile, v_tile, q_tiles, do_tiles, ready, empty,
                               BLOCK_M, D, STAGES, TWO_Q, CAUSAL)
        else:
            for i in range(blocks - begin):
                slot = (step + i) % STAGES
                mbarrier.wait(ready.index(slot), (step + i) // STAGES & 1)
                mbarrier.arrive(empty.index(slot), count=1)
        step += blocks - begin
        if LEN0 or LEN1:  # keys behind the sample's length take part in nothing
            exists = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, o_layout)) < left, 1)
            dk = gl.where(exists, dk, 0.0)
            dv = gl.where(exists, dv, 0.0)
        k_tile.store((dk * softmax_scale).to(dk0.dtype))
        v_tile.store(dv.to(dk0.dtype))
        fence_async_shared()
        if TWO_K:
            if unit < units0:
                _store_keys(dk0, dv0, k_tile, v_tile, sample, unit * 64, head, D)
            elif unit < units:
                _store_keys(dk1, dv1, k_tile, v_tile, sample, (unit - units0) * 64, head, D)
        elif unit < units:
            _store_keys(dk0, dv0, k_tile, v_tile, sample, unit * 64, head, D)
        tma.store_wait(0)
        mbarrier.arrive(k_empty, count=1)


@gluon.jit(do_not_specialize=["total_tiles", "tiles", "units0", "units", "tq0", "tq1", "tk0", "tk1"])
def _backward_keys(q0, q1, do0, do1, k0, v0, k1, v1, dk0, dv0, dk1, dv1, lse0, lse1, delta0, delta1, len0, len1,
                   total_tiles, tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, softmax_scale,
                   BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TWO_Q: gl.constexpr,
                   TWO_K: gl.constexpr, LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """dk and dv: a program walks tiles of 128 keys in steps of the grid."""
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_tiles = gl.allocate_shared_memory(q0.dtype, [2, 64, D], rows)
    v_tiles = gl.allocate_shared_memory(q0.dtype, [2, 64, D], rows)
    q_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_M, D], rows)
    do_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_M, D], rows)
    k_ready, k_empty = _barriers(2, 1)
    ready, empty = _barriers(STAGES, 2)
    fence_async_shared()
    my_tiles = gl.cdiv(total_tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize([
        (_key_group, (dk0, dv0, dk1, dv1, lse0, lse1, delta0, delta1, len0, len1, q_tiles, do_tiles, k_tiles.index(0),
                      v_tiles.index(0), k_ready.index(0), k_empty.index(0), ready, empty, my_tiles, tiles, heads,
                      units0, units, tq0, tq1, tk0, tk1, scale, softmax_scale, 0, BLOCK_M, D, STAGES, TWO_Q, TWO_K,
                      LEN0, LEN1, CAUSAL)),
        (_key_group, (dk0, dv0, dk1, dv1, lse0, lse1, delta0, delta1, len0, len1, q_tiles, do_tiles, k_tiles.index(1),
                      v_tiles.index(1), k_ready.index(1), k_empty.index(1), ready, empty, my_tiles, tiles, heads,
                      units0, units, tq0, tq1, tk0, tk1, scale, softmax_scale, 1, BLOCK_M, D, STAGES, TWO_Q, TWO_K,
                      LEN0, LEN1, CAUSAL)),
        (_key_loads, (q0, q1, do0, do1, k0, v0, k1, v1, len0, len1, q_tiles, do_tiles, k_tiles, v_tiles, k_ready,
                      k_empty, ready, empty, my_tiles, tiles, heads, units0, tq0, tq1, tk0, tk1, BLOCK_M, D, STAGES,
                      TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
    ], [4, 1], [240, 24])


# (keys a block, slots), (queries a block, slots); blocks are part of the bits.
BACKWARD_QUERIES = {128: (64, 2)}
BACKWARD_KEYS = {128: (64, 2)}


def backward(douts: tuple[Tensor, ...], qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
             lses: tuple[Tensor, ...], deltas: tuple[Tensor, ...], lengths: tuple[Tensor | None, ...], causal: bool,
             scale: float, dqs: tuple[Tensor, ...], dks: tuple[Tensor, ...], dvs: tuple[Tensor, ...], num_sms: int
             ) -> None:
    """Write dq, dk and dv [B, T, H, D]; `deltas` [B, H, T] fp32 are the sums over channels of outputs * douts."""
    (q0, q1), (do0, do1), (k0, k1), (v0, v1) = _ends(qs), _ends(douts), _ends(ks), _ends(vs)
    (dq0, dq1), (dk0, dk1), (dv0, dv1) = _ends(dqs), _ends(dks), _ends(dvs)
    rows = (lses[0], lses[-1], deltas[0], deltas[-1], lengths[0], lengths[-1])
    scales = (scale * LOG2_E, scale)
    n, stages = BACKWARD_QUERIES[qs[0].shape[3]]
    _launch(_backward_queries, (q0, q1, do0, do1, k0, v0, k1, v1, dq0, dq1), (64, 64, 64, 64, n, n, n, n, 64, 64), rows,
            qs, ks, qs, scales, 2, num_sms, causal, lengths, {"BLOCK_N": n, "STAGES": stages})
    m, stages = BACKWARD_KEYS[qs[0].shape[3]]
    _launch(_backward_keys, (q0, q1, do0, do1, k0, v0, k1, v1, dk0, dv0, dk1, dv1),
            (m, m, m, m, 64, 64, 64, 64, 64, 64, 64, 64), rows, qs, ks, ks, scales, 2, num_sms, causal, lengths,
            {"BLOCK_M": m, "STAGES": stages})
