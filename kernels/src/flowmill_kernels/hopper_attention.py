"""Attention's forward for Hopper in Gluon, for heads of 64 and 128: warps with split roles.

One warp only loads, by TMA; each group of four warps owns 64 queries. A group starts the scores of the next block of
keys together with the values' product of this one, so that its softmax runs beside the tensor cores; the groups of a
program run apart. The order of every sum is fixed: blocks of a constant size that start at each segment's first row.
`hopper_attention_backward.py` has the backward and takes its loads, masks and launches from here.
Gluon is an experimental interface of triton: versions it is not written for take the Triton back end's kernels.
"""

from typing import Any

import torch
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

from .launch import do_not_replay, launch, signature

LOG2_E = 1.4426950408889634
# Named differently in triton 3.6 and in later versions.
_copy_in = getattr(tma, "async_copy_global_to_shared", None) or tma.async_load
_copy_out = getattr(tma, "async_copy_shared_to_global", None) or tma.async_store


@gluon.jit
def _length(lengths, sample, size, GIVEN: gl.constexpr):
    if GIVEN:
        return gl.minimum(gl.maximum(gl.load(lengths + sample), 0), size)
    else:
        return size


@gluon.jit
def _tile_place(t, tiles, heads, GROUPS: gl.constexpr):
    """Of this program's tile number t: sample and head as one number, first unit of 64 rows, sample, head."""
    number = gl.program_id(0) + t * gl.num_programs(0)
    pair = number // tiles
    unit = (number - pair * tiles) * GROUPS
    sample = pair // heads
    return pair, unit, sample, pair - sample * heads


@gluon.jit
def _num_blocks(len0, len1, last_row, offset, BLOCK_N: gl.constexpr, TWO_K: gl.constexpr, CAUSAL: gl.constexpr):
    """Blocks of keys in the first segment and in all, for a tile whose last query is `last_row`."""
    stop = len0
    if CAUSAL:
        stop = gl.minimum(stop, last_row + 1 + offset)
    first = gl.cdiv(stop, BLOCK_N)
    blocks = first
    if TWO_K:
        blocks += gl.cdiv(len1, BLOCK_N)
    return first, blocks


@gluon.jit
def _load_rows(desc, sample, row, head, bar, tile, ROWS: gl.constexpr, D: gl.constexpr):
    """One TMA copy of ROWS rows of one head; rows behind the segment's end are zeros."""
    mbarrier.expect(bar, desc.block_type.nbytes)
    _copy_in(desc, [sample, row, head, 0], bar, tile._reinterpret(desc.dtype, [1, ROWS, 1, D], desc.layout))


@gluon.jit
def _load_block(one, two, block, count, sample, head, bar, tile, ROWS: gl.constexpr, D: gl.constexpr,
                TWO: gl.constexpr):
    """A block of ROWS rows of two segments, of which the first has `count` blocks."""
    if TWO:
        if block < count:
            _load_rows(one, sample, block * ROWS, head, bar, tile, ROWS, D)
        else:
            _load_rows(two, sample, (block - count) * ROWS, head, bar, tile, ROWS, D)
    else:
        _load_rows(one, sample, block * ROWS, head, bar, tile, ROWS, D)


@gluon.jit
def _load_keys(k0, v0, k1, v1, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, step, blocks, blocks0, sample,
               head, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TWO_K: gl.constexpr):
    """All keys and values of a tile, as slots become free; the steps so far."""
    for i in range(blocks):
        slot = step % STAGES
        free = (step // STAGES & 1) ^ 1
        step += 1
        mbarrier.wait(k_empty.index(slot), free)
        _load_block(k0, k1, i, blocks0, sample, head, k_ready.index(slot), k_tiles.index(slot), BLOCK_N, D, TWO_K)
        mbarrier.wait(v_empty.index(slot), free)
        _load_block(v0, v1, i, blocks0, sample, head, v_ready.index(slot), v_tiles.index(slot), BLOCK_N, D, TWO_K)
    return step


@gluon.jit
def _copy_rows(desc, sample, row, head, tile, D: gl.constexpr):
    """Write 64 rows of one head; those behind the segment's end are left out."""
    _copy_out(desc, [sample, row, head, 0], tile._reinterpret(desc.dtype, [1, 64, 1, D], desc.layout))


@gluon.jit
def _forward_loads(q0, q1, k0, v0, k1, v1, len0_ptr, len1_ptr, q_tiles, k_tiles, v_tiles, q_ready, q_empty, k_ready,
                   k_empty, v_ready, v_empty, my_tiles, tiles, heads, units0, tq0, tk0, tk1, GROUPS: gl.constexpr,
                   BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TWO_Q: gl.constexpr,
                   TWO_K: gl.constexpr, LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr):
    """The loading warp: queries of every group and all their keys, as slots become free."""
    step = 0
    for t in range(my_tiles):
        _, unit, sample, head = _tile_place(t, tiles, heads, GROUPS)
        blocks0, blocks = _num_blocks(_length(len0_ptr, sample, tk0, LEN0), _length(len1_ptr, sample, tk1, LEN1),
                                      (unit + GROUPS) * 64 - 1, tk0 - tq0, BLOCK_N, TWO_K, CAUSAL)
        for g in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(g), (t & 1) ^ 1)
            _load_block(q0, q1, unit + g, units0, sample, head, q_ready.index(g), q_tiles.index(g), 64, D, TWO_Q)
        step = _load_keys(k0, v0, k1, v1, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, step, blocks, blocks0,
                          sample, head, BLOCK_N, D, STAGES, TWO_K)


@gluon.jit
def _zero_behind(tile, valid, ready, clean, phase, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Rows from `valid` on are zeros before any group reads them: 0 * nan is nan.

    The first group overwrites them, the others wait for it. It passes `clean` at every block: no slot is filled again
    before all groups have left it, so the phase is that of `ready`.
    """
    if GROUP == 0:
        if valid < ROWS:
            mbarrier.wait(ready, phase)
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            values = tile.load(layout)
            tile.store(gl.where(gl.expand_dims(rows < valid, 1), values, gl.zeros_like(values)))
            fence_async_shared()
        mbarrier.arrive(clean, count=1)
    elif valid < ROWS:
        mbarrier.wait(clean, phase)


@gluon.jit
def _mask(s, block, blocks0, len0, len1, last, layout: gl.constexpr, BLOCK_N: gl.constexpr, TWO_K: gl.constexpr,
          CAUSAL: gl.constexpr):
    """(scores with -inf for keys that do not exist or lie ahead, keys of this block that exist); `last`: the last key
    that the group's first query sees."""
    start = block * BLOCK_N
    limit = len0
    if TWO_K:
        start = gl.where(block < blocks0, block, block - blocks0) * BLOCK_N
        limit = gl.where(block < blocks0, len0, len1)
    ragged = start + BLOCK_N > limit
    if CAUSAL:
        ragged = ragged | (start + BLOCK_N - 1 > last)
    if ragged:
        keys = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        seen = gl.expand_dims(keys < limit, 0)
        if CAUSAL:
            rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
            seen = seen & (gl.expand_dims(keys, 0) <= gl.expand_dims(rows + last, 1))
        s = gl.where(seen, s, -float("inf"))
    return s, limit - start


@gluon.jit
def _attend(step, blocks, blocks0, len0, len1, last, scale, q, k_tiles, v_tiles, q_empty, k_ready, k_empty, v_ready,
            v_empty, v_clean, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            TWO_K: gl.constexpr, CLEAN: gl.constexpr, CAUSAL: gl.constexpr):
    """The online softmax of 64 queries over at least one block of keys; `scale` includes log2(e)."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    slot = step % STAGES
    mbarrier.wait(k_ready.index(slot), step // STAGES & 1)
    s = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    s, valid = _mask(s, 0, blocks0, len0, len1, last, s_layout, BLOCK_N, TWO_K, CAUSAL)
    if CLEAN:
        _zero_behind(v_tiles.index(slot), valid, v_ready.index(slot), v_clean.index(slot), step // STAGES & 1, GROUP,
                     BLOCK_N, D)
    top = gl.max(s, 1) * scale
    p = gl.exp2(gl.fma(s, scale, gl.expand_dims(-top, 1)))
    total = gl.sum(p, 1)
    weights = gl.convert_layout(p.to(q.dtype), p_layout)
    acc = gl.zeros([64, D], gl.float32, o_layout)
    for i in range(1, blocks):
        before = step
        step += 1
        slot = step % STAGES
        mbarrier.wait(k_ready.index(slot), step // STAGES & 1)
        s = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        old = before % STAGES
        mbarrier.wait(v_ready.index(old), before // STAGES & 1)
        acc = warpgroup_mma(weights, v_tiles.index(old), acc, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        s, valid = _mask(s, i, blocks0, len0, len1, last, s_layout, BLOCK_N, TWO_K, CAUSAL)
        if CLEAN:
            _zero_behind(v_tiles.index(slot), valid, v_ready.index(slot), v_clean.index(slot), step // STAGES & 1,
                         GROUP, BLOCK_N, D)
        new_top = gl.maximum(top, gl.max(s, 1) * scale)
        p = gl.exp2(gl.fma(s, scale, gl.expand_dims(-new_top, 1)))
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(v_empty.index(old), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, o_layout)), 1)
        weights = gl.convert_layout(p.to(q.dtype), p_layout)
    mbarrier.arrive(q_empty, count=1)
    slot = step % STAGES
    mbarrier.wait(v_ready.index(slot), step // STAGES & 1)
    acc = warpgroup_mma(weights, v_tiles.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(v_empty.index(slot), count=1)
    return acc, total, top


@gluon.jit
def _store(out, lse, total, top, out_tile, sample, head, pair, row, tokens, D: gl.constexpr, LSE: gl.constexpr):
    """Rows of one head, those behind the segment's end left out, and their log2-sum-exps."""
    if LSE:
        rows = row + gl.arange(0, 64, total.type.layout)
        gl.store(lse + pair.to(gl.int64) * tokens + rows, gl.where(total == 0.0, float("inf"), top + gl.log2(total)),
                 rows < tokens)
    _copy_rows(out, sample, row, head, out_tile, D)


@gluon.jit
def _forward_group(o0, o1, lse0, lse1, len0_ptr, len1_ptr, q_tile, out_tile, k_tiles, v_tiles, q_ready, q_empty,
                   k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles, tiles, heads, units0, units, tq0, tq1, tk0,
                   tk1, scale, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
                   STAGES: gl.constexpr, TWO_Q: gl.constexpr, TWO_K: gl.constexpr, LEN0: gl.constexpr,
                   LEN1: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr):
    """Four warps: 64 queries of every tile of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                       instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    step = 0
    for t in range(my_tiles):
        pair, first_unit, sample, head = _tile_place(t, tiles, heads, GROUPS)
        unit = first_unit + GROUP
        len0 = _length(len0_ptr, sample, tk0, LEN0)
        len1 = _length(len1_ptr, sample, tk1, LEN1)
        blocks0, blocks = _num_blocks(len0, len1, (first_unit + GROUPS) * 64 - 1, tk0 - tq0, BLOCK_N, TWO_K, CAUSAL)
        mbarrier.wait(q_ready, t & 1)
        acc = gl.zeros([64, D], gl.float32, o_layout)
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        top = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        if (unit < units) & (blocks > 0):
            acc, total, top = _attend(step, blocks, blocks0, len0, len1, unit * 64 + tk0 - tq0, scale, q_tile, k_tiles,
                                      v_tiles, q_empty, k_ready, k_empty, v_ready, v_empty, v_clean, GROUP, BLOCK_N, D,
                                      STAGES, TWO_K, LEN0 or LEN1, CAUSAL)
        else:  # no queries, or no keys: let the slots pass
            mbarrier.arrive(q_empty, count=1)
            for i in range(blocks):
                slot = (step + i) % STAGES
                phase = (step + i) // STAGES & 1
                mbarrier.wait(k_ready.index(slot), phase)
                mbarrier.arrive(k_empty.index(slot), count=1)
                mbarrier.wait(v_ready.index(slot), phase)
                mbarrier.arrive(v_empty.index(slot), count=1)
        step += blocks
        # A sample without a key gives zeros.
        inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
        tma.store_wait(0)  # the last store may still read this memory
        out_tile.store(acc.to(o0.dtype))
        fence_async_shared()
        if TWO_Q:
            if unit < units0:
                _store(o0, lse0, total, top, out_tile, sample, head, pair, unit * 64, tq0, D, LSE)
            elif unit < units:
                _store(o1, lse1, total, top, out_tile, sample, head, pair, (unit - units0) * 64, tq1, D, LSE)
        elif unit < units:
            _store(o0, lse0, total, top, out_tile, sample, head, pair, unit * 64, tq0, D, LSE)
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """`ready` and `empty` of every slot."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return ready, empty


@gluon.jit
def _clean_barriers(COUNT: gl.constexpr):
    """One of every slot, for `_zero_behind`."""
    clean = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(clean.index(i), count=1)
    return clean


@gluon.jit(do_not_specialize=["total_tiles", "tiles", "units0", "units", "tq0", "tq1", "tk0", "tk1"])
def _forward(q0, q1, k0, v0, k1, v1, o0, o1, lse0, lse1, len0, len1, total_tiles, tiles, heads, units0, units, tq0, tq1,
             tk0, tk1, scale, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             TWO_Q: gl.constexpr, TWO_K: gl.constexpr, LEN0: gl.constexpr, LEN1: gl.constexpr, CAUSAL: gl.constexpr,
             LSE: gl.constexpr, REGISTERS: gl.constexpr):
    """A program walks tiles of GROUPS * 64 queries in steps of the grid; a head's tiles are neighbours."""
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(q0.dtype, [GROUPS, 64, D], rows)
    out_tiles = gl.allocate_shared_memory(q0.dtype, [GROUPS, 64, D], rows)
    k_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_N, D], rows)
    v_tiles = gl.allocate_shared_memory(q0.dtype, [STAGES, BLOCK_N, D], rows)
    q_ready, q_empty = _barriers(GROUPS, 1)
    k_ready, k_empty = _barriers(STAGES, GROUPS)
    v_ready, v_empty = _barriers(STAGES, GROUPS)
    v_clean = _clean_barriers(STAGES)
    fence_async_shared()
    my_tiles = gl.cdiv(total_tiles - gl.program_id(0), gl.num_programs(0))
    if GROUPS == 2:
        gl.warp_specialize([
            (_forward_group, (o0, o1, lse0, lse1, len0, len1, q_tiles.index(0), out_tiles.index(0), k_tiles, v_tiles,
                              q_ready.index(0), q_empty.index(0), k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles,
                              tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, 0, GROUPS, BLOCK_N, D, STAGES,
                              TWO_Q, TWO_K, LEN0, LEN1, CAUSAL, LSE)),
            (_forward_group, (o0, o1, lse0, lse1, len0, len1, q_tiles.index(1), out_tiles.index(1), k_tiles, v_tiles,
                              q_ready.index(1), q_empty.index(1), k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles,
                              tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, 1, GROUPS, BLOCK_N, D, STAGES,
                              TWO_Q, TWO_K, LEN0, LEN1, CAUSAL, LSE)),
            (_forward_loads, (q0, q1, k0, v0, k1, v1, len0, len1, q_tiles, k_tiles, v_tiles, q_ready, q_empty, k_ready,
                              k_empty, v_ready, v_empty, my_tiles, tiles, heads, units0, tq0, tk0, tk1, GROUPS, BLOCK_N,
                              D, STAGES, TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_forward_group, (o0, o1, lse0, lse1, len0, len1, q_tiles.index(0), out_tiles.index(0), k_tiles, v_tiles,
                              q_ready.index(0), q_empty.index(0), k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles,
                              tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, 0, GROUPS, BLOCK_N, D, STAGES,
                              TWO_Q, TWO_K, LEN0, LEN1, CAUSAL, LSE)),
            (_forward_group, (o0, o1, lse0, lse1, len0, len1, q_tiles.index(1), out_tiles.index(1), k_tiles, v_tiles,
                              q_ready.index(1), q_empty.index(1), k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles,
                              tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, 1, GROUPS, BLOCK_N, D, STAGES,
                              TWO_Q, TWO_K, LEN0, LEN1, CAUSAL, LSE)),
            (_forward_group, (o0, o1, lse0, lse1, len0, len1, q_tiles.index(2), out_tiles.index(2), k_tiles, v_tiles,
                              q_ready.index(2), q_empty.index(2), k_ready, k_empty, v_ready, v_empty, v_clean, my_tiles,
                              tiles, heads, units0, units, tq0, tq1, tk0, tk1, scale, 2, GROUPS, BLOCK_N, D, STAGES,
                              TWO_Q, TWO_K, LEN0, LEN1, CAUSAL, LSE)),
            (_forward_loads, (q0, q1, k0, v0, k1, v1, len0, len1, q_tiles, k_tiles, v_tiles, q_ready, q_empty, k_ready,
                              k_empty, v_ready, v_empty, my_tiles, tiles, heads, units0, tq0, tk0, tk1, GROUPS, BLOCK_N,
                              D, STAGES, TWO_Q, TWO_K, LEN0, LEN1, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


# Head size: (groups of 64 queries a program, keys a block, slots, registers a thread). The keys a block are part of the
# bits, and fixed by the head size.
FORWARD = {64: (3, 128, 4, 160), 128: (2, 128, 2, 240)}
_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _suited(t: Tensor) -> Tensor:
    """t, or a copy where TMA cannot take its strides or its base; a stand-in for a segment without tokens."""
    if t.shape[1] == 0:
        return t.new_empty((1, 1, 1, t.shape[3]))
    if t.data_ptr() % 16 == 0:
        for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True):
            if size != 1 and (stride <= 0 or stride * t.element_size() % 16):
                break
        else:
            return t
    do_not_replay()
    return t.clone(memory_format=torch.contiguous_format)


def _ends(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The first and the last of one or two segments."""
    first = _suited(tensors[0])
    return first, first if len(tensors) == 1 else _suited(tensors[1])


def _descriptor(t: Tensor, rows: int) -> TensorDescriptor:
    """TMA over t [B, T, H, D] in boxes of some rows of one head."""
    # A dimension of size one may have any stride; TMA wants multiples of 16 bytes.
    strides = [t.shape[3] if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides[:3], 1], [1, rows, 1, t.shape[3]], _ROWS)


def _launch(kernel: Any, described: tuple[Tensor, ...], rows: tuple[int, ...], pointers: tuple[Tensor | None, ...],
            qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], over: tuple[Tensor, ...], scales: tuple[float, ...],
            group: int, num_sms: int, causal: bool, lengths: tuple[Tensor | None, ...], constants: dict) -> None:
    """Start a kernel over tiles of `group` units of 64 rows of `over`, with boxes of `rows` rows of the described."""
    batch, _, heads, dims = qs[0].shape
    units = [-(-t.shape[1] // 64) for t in over]
    tiles = -(-sum(units) // group)
    total = batch * heads * tiles
    if total == 0:
        return
    sizes = (qs[0].shape[1], qs[-1].shape[1], ks[0].shape[1], ks[-1].shape[1])
    constants |= {"D": dims, "TWO_Q": len(qs) == 2, "TWO_K": len(ks) == 2, "LEN0": lengths[0] is not None,
                  "LEN1": lengths[-1] is not None, "CAUSAL": causal}

    def make() -> tuple[tuple[int, ...], list, dict]:
        arguments = [*(_descriptor(t, size) for t, size in zip(described, rows, strict=True)), *pointers, total, tiles,
                     heads, units[0], sum(units), *sizes, *scales]
        return (min(total, num_sms),), arguments, {**constants, "num_warps": 4, "enable_fp_fusion": False}

    key = (signature(*described, *pointers), rows, sizes, scales, num_sms, tuple(constants.values()))
    launch(kernel, key, (*pointers, *described), make)


def forward(qs: tuple[Tensor, ...], ks: tuple[Tensor, ...], vs: tuple[Tensor, ...],
            lengths: tuple[Tensor | None, ...], causal: bool, scale: float, outs: tuple[Tensor, ...],
            lses: tuple[Tensor, ...], num_sms: int) -> None:
    """Write outputs [B, T, H, D] and, unless `lses` is empty, log2-sum-exps [B, H, T] fp32."""
    groups, n, stages, registers = FORWARD[qs[0].shape[3]]
    (q0, q1), (k0, k1), (v0, v1), (o0, o1) = _ends(qs), _ends(ks), _ends(vs), _ends(outs)
    lse0, lse1 = (lses[0], lses[-1]) if lses else (None, None)
    _launch(_forward, (q0, q1, k0, v0, k1, v1, o0, o1), (64, 64, n, n, n, n, 64, 64),
            (lse0, lse1, lengths[0], lengths[-1]), qs, ks, qs, (scale * LOG2_E,), groups, num_sms, causal, lengths,
            {"GROUPS": groups, "BLOCK_N": n, "STAGES": stages, "LSE": bool(lses), "REGISTERS": registers})
