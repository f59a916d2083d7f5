"""What each kernel promises about its bits, as data. tests/kernels reads this table and tests exactly what it says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Guarantees:
    """Changes under which a kernel's bits stay the same, on one GPU model and one version of triton.

    A promise not made here may hold by accident and must not be relied on. No promise is made between GPU models,
    nor between the CPU back end and a GPU: they sum in different orders inside a tensor-core instruction.
    """

    run: bool
    """Repeating the call."""
    batch: bool
    """The number of other rows (for gradients: samples in a micro-batch)."""
    position: bool
    """Where the row stands among the others."""
    sm_count: bool
    """The number of SMs given by the caller."""
    tensor_parallel: tuple[int, ...]
    """Rank counts (of tensor parallelism; for gradients: of data parallelism) that give the same bits."""
    error_bound: str
    """Bound of the relative Frobenius error against fp64, and where it comes from."""


# One rounding of the result to p bits is at most 2**-p relative, in any element; in the norm it is about 0.42 of that
# for the smooth distributions met here. The fp32 sum adds at most K * 2**-24 * |x| |w| (Higham, ASNA 2nd ed., 3.1).
_GEMM_BOUND = "2**-8 (bf16) or 2**-11 (fp16) a rounding (two with an activation), plus the sum, 3e-5 for K <= 16384"

GUARANTEES: dict[str, Guarantees] = {
    "gemm_nt": Guarantees(True, True, True, True, (1,), _GEMM_BOUND),
    "gemm_nn": Guarantees(True, True, True, True, (1,), _GEMM_BOUND),
    "gemm_nt_tp": Guarantees(True, True, True, True, (1, 2, 4, 8), _GEMM_BOUND),
    # A sample's own gradient; its samples do not mix.
    "wgrad": Guarantees(True, True, True, True, (1,), "3e-5: fp32 sum over a sample's tokens, no rounding after it"),
    "elementwise": Guarantees(True, True, True, True, (1,), "2**-8 (bf16), 2**-11 (fp16) of one rounding; fp32: 2e-6"),
    "attention": Guarantees(True, True, True, True, (1,), "2**-7 (bf16): weights and result are rounded once each"),
    "attention_backward": Guarantees(True, True, True, True, (1,), "3 * 2**-7 (bf16): weights, their gradient, result"),
    # Only tensor-parallel shards may give other bits: a shard of N or K may have another scheme.
    "linear": Guarantees(True, True, True, True, (1,), _GEMM_BOUND + "; an adapter's and a GELU's input round too"),
    # Samples come in global order; how they are cut into micro-batches does not show.
    "wgrad_leaves": Guarantees(True, True, False, True, (1, 2, 4, 8), "3e-5: fp32 sums over tokens and samples"),
    "leaf_sum": Guarantees(True, True, False, True, (1, 2, 4, 8), "1e-5: fp32 sum over the samples of a batch"),
}
