"""Tiles, chosen by dtype and the global N and K of a layer. Pure data and rules; nothing here can change a bit.

Every tile of the catalogue walks K in the same tensor-core steps of 16, so all give the same bits; the GPU tests prove
that for the whole catalogue. That is what allows the second tile of a key, for few rows. The SM count appears nowhere.
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
    """On Hopper: a warp loads, two groups of four warps multiply apart (hopper.py); block_m is 128, block_k 64."""
    register_levels: int = 1
    """Levels of the summation tree kept in registers; deeper ones wait in a scratch buffer."""


LARGE = Tile(128, 256, 64, 3, 8)
LARGE_4 = Tile(128, 256, 64, 4, 8, epilogue_parts=2)
MEDIUM = Tile(128, 128, 64, 4, 8)
SMALL = Tile(64, 32, 128, 4, 4, programs_per_sm=2)
NARROW = Tile(128, 64, 64, 4, 4)
TREE = Tile(128, 128, 64, 4, 8)

CATALOGUE = {"large": LARGE, "large_4": LARGE_4, "medium": MEDIUM, "small": SMALL, "narrow": NARROW, "tree": TREE}
"""Every tile that a rule below may return."""

FEW_ROWS = 64


def tile_for(n: int, k: int, *, m: int, layout: Layout = "nt") -> Tile:
    """Tile of mode `consistent`. `m` only tells few rows from many, between tiles proven bit-equal."""
    if m <= FEW_ROWS:
        return SMALL
    if n <= 512:
        return NARROW
    return LARGE


def tree_tile_for(n: int, k: int, *, m: int) -> Tile:
    """Tile of mode `tp_invariant`: room for a second accumulator is worth more than a wide tile."""
    return SMALL if m <= FEW_ROWS else TREE


def spread_segments(m: int, n: int, num_segments: int) -> bool:
    """Whether the segments go to different programs (split-K). Same bits; for outputs too small to fill a GPU."""
    return num_segments > 1 and -(-m // 128) * -(-n // 128) <= 64
