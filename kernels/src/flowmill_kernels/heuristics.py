"""Tiles, chosen by a layer's N and K, its rows and the caller's SMs. Pure data and rules; nothing can change a bit.

Every tile of the catalogue walks K in the same tensor-core steps of 16, so all give the same bits; the GPU tests prove
that for the whole catalogue. That is what allows a choice by rows and SMs: how well tiles fill the GPU.
"""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["nt", "nn"]
"""`nt`: the weight is [N, K] (forward); `nn`: the second operand is [K, N] (dgrad)."""


@dataclass(frozen=True)
class Tile:
    """How one program works; see the Triton back end."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    """Row blocks that are walked together so that their weights stay in L2."""
    epilogue_parts: int = 1
    """2 halves the shared memory of the store, which frees a pipeline stage."""
    flatten: bool = False
    """Fuse the tile and K loops, so that the next tile's loads start before the epilogue."""
    programs_per_sm: int = 1
    split_roles: bool = False
    """On Hopper: one warp loads, two groups of four warps multiply 64 rows each (hopper.py); block_m is 128."""
    register_levels: int = 1
    """Levels of the summation tree kept in registers; deeper ones wait elsewhere. Without split roles only."""


LARGE = Tile(128, 256, 64, 4, 8, group_m=16, epilogue_parts=2, flatten=True)
LARGE_SPLIT = Tile(128, 256, 64, 3, 8, group_m=16, split_roles=True)
MEDIUM = Tile(128, 128, 64, 4, 8)
MEDIUM_SPLIT = Tile(128, 128, 64, 6, 8, split_roles=True)
FEW = Tile(64, 64, 64, 6, 4, programs_per_sm=2)
FEW_NARROW = Tile(64, 32, 128, 6, 4)
THIN = Tile(128, 32, 64, 5, 4, programs_per_sm=2)
FEW_THIN = Tile(64, 32, 128, 4, 4, programs_per_sm=3)
NARROW = Tile(128, 64, 64, 5, 4)
TREE = Tile(128, 128, 64, 4, 8)
TREE_SPLIT = Tile(128, 128, 64, 5, 8, split_roles=True)

CATALOGUE = {"large": LARGE, "large_split": LARGE_SPLIT, "medium": MEDIUM, "medium_split": MEDIUM_SPLIT, "few": FEW,
             "few_narrow": FEW_NARROW, "thin": THIN, "few_thin": FEW_THIN, "narrow": NARROW, "tree": TREE,
             "tree_split": TREE_SPLIT}
"""Every tile that a rule below may return, and those that stand in for split roles elsewhere than on Hopper."""


def tile_for(n: int, k: int, *, m: int, num_sms: int, gated: bool = False) -> Tile:
    """Tile of mode `consistent`, among tiles proven bit-equal.

    Measured on an H200 (kernels/benchmarks/gemm.py). `gated`: for gates that change within 64 rows a 256 wide tile has
    too few registers.
    """
    if n <= 96 and m > 64:  # adapters: what counts is how many loads are under way
        if -(-m // 128) * -(-n // 32) >= num_sms:
            return THIN
        return FEW_THIN if n <= 32 else NARROW
    if n <= 512:
        return NARROW if m > 64 else FEW_NARROW
    if m <= 64:
        return FEW_NARROW if n < 4096 else FEW
    if m <= 1024:
        return MEDIUM if m <= 600 else LARGE
    if gated:
        return MEDIUM_SPLIT
    return split_tile_for(n, k, m=m, num_sms=num_sms)


def split_tile_for(n: int, k: int, *, m: int, num_sms: int) -> Tile:
    """Tile of split roles: for many rows, and for any number where head norms follow, since the threads of all of these
    hold a head's channels alike."""
    if n * k > 2**26:
        return MEDIUM_SPLIT
    # The last round of tiles leaves SMs idle, fewer with narrow tiles; these cost 2 % more a column.
    rows = -(-m // 128)
    wide, narrow = (-(-rows * -(-n // tile.block_n) // num_sms) * tile.block_n for tile in (LARGE_SPLIT, MEDIUM_SPLIT))
    return MEDIUM_SPLIT if 1.02 * narrow < wide else LARGE_SPLIT


def tree_tile_for(n: int, k: int, *, m: int) -> Tile:
    """Tile of mode `tp_invariant`: room for a second accumulator is worth more than a wide tile."""
    return FEW_NARROW if m <= 64 else TREE_SPLIT


def spread_segments(m: int, n: int, num_segments: int) -> bool:
    """Whether the segments go to different programs (split-K). Same bits; for outputs too small to fill a GPU."""
    return num_segments > 1 and -(-m // 128) * -(-n // 128) <= 40
