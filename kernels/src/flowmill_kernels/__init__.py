"""GEMMs and gradient sums with declared bitwise guarantees, the same arithmetic in rollout and in training.

In: tensors of a linear layer and the SM count of the caller's partition. Out: tensors whose bits depend on nothing but
the row, the weights and K. Next: the DiT operators and `apply_kernels` build on these. Importing needs neither a GPU
nor triton; `unavailable_reason` says what the machine at hand lacks, and the CPU back end then does the work.
"""

from .apply import AppliedKernels, Replacement, apply_kernels, remove_kernels
from .attention import attention
from .availability import unavailable_reason
from .blocks import UnsupportedError
from .collector import GradientLeaves
from .elementwise import (
    gated_residual,
    gelu,
    gelu_tanh,
    layer_norm_modulate,
    log_softmax,
    mean,
    qk_norm_rope,
    qk_norm_rope_pair,
    rms_norm,
    silu,
    swiglu,
    timestep_embedding,
)
from .functional import KernelOptions, Layer, feed_forward, linear, linears, merged, patch_embed
from .gemm import (
    HeadNorm,
    Schedule,
    gemm_nn,
    gemm_nn_partial,
    gemm_nt,
    gemm_nt_normed,
    gemm_nt_partial,
    gemm_nt_schedule,
    wgrad,
)
from .gradients import LeafPlan, LeafSum, add_leaves, all_reduce_leaves, leaf_sum, wgrad_leaves
from .graph import MicroBatchGraph
from .guarantees import GUARANTEES, Guarantees
from .numeric import assert_bitwise_equal, relative_frobenius_error
from .projected import Stream, projected_attention
from .schemes import NUM_SEGMENTS, Epilogue, Scheme
from .tensor_parallel import combine_partials, head_range, segment_range

__all__ = [
    "GUARANTEES", "NUM_SEGMENTS", "AppliedKernels", "Epilogue", "GradientLeaves", "Guarantees", "HeadNorm",
    "KernelOptions", "Layer", "LeafPlan", "LeafSum", "MicroBatchGraph", "Replacement", "Schedule", "Scheme", "Stream",
    "UnsupportedError", "add_leaves", "all_reduce_leaves", "apply_kernels", "assert_bitwise_equal", "attention",
    "combine_partials", "feed_forward", "gated_residual", "gelu", "gelu_tanh", "gemm_nn", "gemm_nn_partial", "gemm_nt",
    "gemm_nt_normed", "gemm_nt_partial", "gemm_nt_schedule", "head_range", "layer_norm_modulate", "leaf_sum", "linear",
    "linears", "log_softmax", "mean", "merged", "patch_embed", "projected_attention", "qk_norm_rope",
    "qk_norm_rope_pair", "relative_frobenius_error", "remove_kernels", "rms_norm", "segment_range", "silu", "swiglu",
    "timestep_embedding", "unavailable_reason", "wgrad", "wgrad_leaves",
]
