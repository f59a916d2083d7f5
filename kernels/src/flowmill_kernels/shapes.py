"""The one list of shapes: benchmarks time them, tests check the guarantees over them."""

from typing import NamedTuple


class Shape(NamedTuple):
    """A linear layer's forward: x [m, k] @ w [n, k].T."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


SHAPES = (
    Shape(16384, 12288, 3072),
    Shape(16384, 3072, 12288),
    Shape(8192, 8192, 8192),
    Shape(16384, 16384, 16384),
    Shape(65536, 13824, 5120),
    Shape(65536, 5120, 13824),
    Shape(49984, 1536, 1536),
    Shape(49984, 6144, 1536),
    Shape(49984, 1536, 6144),
    Shape(1024, 3072, 3072),
)
"""Video- and image-model layers in bf16; speed is a geometric mean over these."""

NARROW_SHAPES = (Shape(16384, 64, 1536), Shape(16384, 32, 3072), Shape(16384, 1536, 32))
"""proj_out and LoRA's two projections: guarantees only."""

ROWS = (1, 7, 64, 577, 4096, 16384)
"""Row counts over which bits are compared."""

SM_COUNTS = (132, 96, 32)
"""SM counts over which bits are compared: the whole H200 and two partitions."""

TINY_SHAPES = (Shape(40, 96, 128), Shape(33, 48, 256), Shape(17, 32, 1024), Shape(19, 24, 1280))
"""For the CPU: one segment, two that are cut, and no multiple of a tile anywhere. K is a multiple of 128."""
