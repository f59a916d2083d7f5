"""Orders of summation and epilogues as data. No back end, no device: both back ends read these and do the same.

A scheme is a property of (dtype, N, K) alone. Two programs that follow one scheme give the same bits whether they sum
in one pass or spread the segments over the GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

NUM_SEGMENTS = 8
"""K segments of `tp_invariant` and leaves of a gradient sum: the largest rank count."""

Order = Literal["serial", "tree"]
Activation = Literal["none", "gelu_tanh"]
T = TypeVar("T")


@dataclass(frozen=True)
class Scheme:
    """K is cut into segments of `segment_k`, each summed from zero in fp32 in K order; then the segments are added."""

    segment_k: int
    """Length of a segment; the last may be shorter under `serial`."""
    order: Order
    """`serial`: ((s0 + s1) + s2) + ...; `tree`: (s0 + s1) + (s2 + s3), ..."""

    def __post_init__(self) -> None:
        if self.segment_k < 1:
            raise ValueError(f"Scheme.segment_k must be positive, got {self.segment_k}")

    def num_segments(self, k: int) -> int:
        return max(1, -(-k // self.segment_k))


@dataclass(frozen=True)
class Epilogue:
    """What happens to the fp32 sum before its rounding: ``residual + gate * activation(round(sum + bias))``.

    Every operation is in fp32 and on its own (no fused multiply-add), so that each back end and each kernel that ends
    in the same epilogue gives the same bits for the same sum. An activation takes the sum rounded to the output's
    dtype, which is what a pass of its own would read: fused or not, the bits are the same, and training can keep
    exactly what rollout put into the activation. Without one the sum is rounded once, at the end.
    """

    bias: bool = False
    activation: Activation = "none"
    gate: bool = False
    residual: bool = False
    norm: int = 0
    """Channels of a head whose RMS norm ends the epilogue, still in fp32; 0: no norm. With a bias at most."""
    eps: float = 0.0
    """The norm's."""


def serial_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """((p0 + p1) + p2) + ..."""
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """(p0 + p1) + (p2 + p3), ...: the balanced tree; the number of parts must be a power of two."""
    if len(parts) & (len(parts) - 1) or not parts:
        raise ValueError(f"tree_sum needs a power of two of parts, got {len(parts)}")
    level = list(parts)
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def combine(parts: Sequence[Tensor], order: Order) -> Tensor:
    """Add fp32 partial sums in the order of a scheme."""
    return (tree_sum if order == "tree" else serial_sum)(parts, lambda a, b: a + b)


def consistent_scheme(n: int, k: int) -> Scheme:
    """Scheme of mode `consistent` for a GEMM with `n` output columns and contraction length `k`.

    Wide outputs fill a GPU by themselves, so one segment: no second accumulator. Narrow ones (LoRA's down projection,
    `proj_out`) have few tiles even at large M, so K is cut, also where the one-pass kernel is the one that runs.
    """
    return Scheme(512 if n <= 512 and k >= 1024 else k or 1, "serial")


def tp_scheme(k_global: int) -> Scheme:
    """Scheme of mode `tp_invariant`: always 8 segments of the global K, added as a balanced tree.

    Raises:
        ValueError: if K is not a multiple of 128; a segment must be whole tensor-core steps of 16.
    """
    if k_global % (16 * NUM_SEGMENTS) or k_global == 0:
        raise ValueError(
            f"mode 'tp_invariant' needs K to be a positive multiple of {16 * NUM_SEGMENTS} (8 segments of whole "
            f"tensor-core steps), got K={k_global}; use mode 'consistent' or pad the layer")
    return Scheme(k_global // NUM_SEGMENTS, "tree")
