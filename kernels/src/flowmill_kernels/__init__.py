"""GEMMs and gradient sums with declared bitwise guarantees, the same arithmetic in rollout and in training.

In: tensors of a linear layer and the SM count of the caller's partition. Out: tensors whose bits depend on nothing but
the row, the weights and K. Next: the DiT operators and `apply_kernels` build on these. Importing needs neither a GPU
nor triton; `unavailable_reason` says what the machine at hand lacks, and the CPU back end then does the work.
"""

from .availability import unavailable_reason
from .gemm import Schedule, gemm_nn, gemm_nn_partial, gemm_nt, gemm_nt_partial, gemm_nt_schedule, wgrad
from .gradients import LeafPlan, LeafSum, all_reduce_leaves, leaf_sum
from .guarantees import GUARANTEES, Guarantees
from .numeric import assert_bitwise_equal, relative_frobenius_error
from .schemes import NUM_SEGMENTS, Epilogue, Scheme
from .tensor_parallel import combine_partials, segment_range

__all__ = [
    "GUARANTEES", "NUM_SEGMENTS", "Epilogue", "Guarantees", "LeafPlan", "LeafSum", "Schedule", "Scheme",
    "all_reduce_leaves", "assert_bitwise_equal", "combine_partials", "gemm_nn", "gemm_nn_partial", "gemm_nt",
    "gemm_nt_partial", "gemm_nt_schedule", "leaf_sum", "relative_frobenius_error", "segment_range",
    "unavailable_reason", "wgrad",
]
