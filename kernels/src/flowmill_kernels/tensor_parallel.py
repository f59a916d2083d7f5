"""Tensor parallelism that does not change a bit: what a rank holds, and how the ranks' sums become an output.

In: fp32 partial sums of `gemm_nt_partial` or `gemm_nn_partial`, one a rank. Out: the layer's output, equal bit for bit
for 1, 2, 4 and 8 ranks. A column-parallel linear needs nothing from here: its ranks call `gemm_nt` in mode
`tp_invariant` with their rows of the weight. How partials travel is the caller's choice; the sum is not NCCL's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu_backend
from .gemm import Backend, _check_epilogue, _check_ranks, _choose_backend
from .schemes import NUM_SEGMENTS, Activation, Epilogue, Scheme, tp_scheme


def segment_range(k: int, *, rank: int, num_ranks: int) -> range:
    """Columns of x and w that `rank` holds in a row-parallel linear of contraction length k.

    Raises:
        ValueError: for a rank count that does not divide 8, or a k that is not a multiple of 128.
    """
    _check_ranks("segment_range", num_ranks)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"segment_range: rank must be in 0..{num_ranks - 1}, got {rank}")
    length = tp_scheme(k).segment_k * (NUM_SEGMENTS // num_ranks)
    return range(rank * length, (rank + 1) * length)


def head_range(heads: int, *, rank: int, num_ranks: int) -> range:
    """Heads of an attention that `rank` computes: whole heads, so that norms per head need nobody else's columns.

    Raises:
        ValueError: for a rank count that does not divide 8, or the number of heads.
    """
    _check_ranks("head_range", num_ranks)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"head_range: rank must be in 0..{num_ranks - 1}, got {rank}")
    if heads < 1 or heads % num_ranks:
        raise ValueError(f"head_range: {heads} heads cannot be shared by {num_ranks} ranks; a head would be cut, and "
                         f"its norm and softmax with it. Use a rank count that divides {heads}")
    share = heads // num_ranks
    return range(rank * share, (rank + 1) * share)


@torch.no_grad()
def combine_partials(partials: Sequence[Tensor], bias: Tensor | None = None, *, dtype: torch.dtype, num_sms: int,
                     activation: Activation = "none", gate: Tensor | None = None, residual: Tensor | None = None,
                     backend: Backend = "auto") -> Tensor:
    """Add the ranks' fp32 sums as a balanced tree in rank order, then the epilogue of `gemm_nt`.

    Args:
        partials: One ``[..., N]`` fp32 tensor a rank, in rank order: 1, 2, 4 or 8 of them.
        dtype: Of the result. The other arguments are those of `gemm_nt`.
    """
    _check_ranks("combine_partials", len(partials))
    first = partials[0]
    for rank, part in enumerate(partials):
        if part.dtype != torch.float32 or part.shape != first.shape:
            raise ValueError(f"combine_partials: rank {rank} gave {part.dtype} {tuple(part.shape)}; every rank must "
                             f"give torch.float32 {tuple(first.shape)}")
    lead, n = tuple(first.shape[:-1]), first.shape[-1]
    given = tuple(t for t in (*partials, bias, gate, residual) if t is not None)
    chosen = _choose_backend("combine_partials", backend, given)
    _check_epilogue("combine_partials", n, lead, activation, bias, gate, residual, None, dtype)
    y = torch.empty((*lead, n), dtype=dtype, device=first.device)
    if y.numel() == 0:
        return y
    stacked = torch.stack([part.reshape(-1, n) for part in partials])
    common = {"scheme": Scheme(1, "tree"), "bias": bias, "gate": gate,
              "epilogue": Epilogue(bias is not None, activation, gate is not None, residual is not None),
              "residual": None if residual is None else residual.reshape(-1, n).contiguous()}
    if chosen == "cpu":
        cpu_backend.add_partials(stacked, y.view(-1, n), **common)
    else:
        from . import triton_backend

        triton_backend.add_partials(stacked, y.view(-1, n), **common, num_sms=num_sms)
    return y
