"""Gradient sums that give the same bits for 1, 2, 4 and 8 ranks and for any micro-batch size.

In: fp32 gradients, one a sample. Out: their sum over the update batch, on every rank. The batch is cut into 8 leaves
by the samples' global numbers; inside a leaf samples are added one after the other in global order; leaves are added
as a balanced tree. A rank owns 8 / ranks whole leaves, so ranks only finish the tree: by exchanges of our own, never
by DDP's or NCCL's reduction, whose order depends on the rank count. Any parameter small enough for one fp32 gradient
a sample goes this way (LoRA, norms, biases).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .schemes import NUM_SEGMENTS, tree_sum


@dataclass(frozen=True)
class LeafPlan:
    """Which samples of an update batch belong to which leaf and rank.

    Raises:
        ValueError: for a rank count that does not divide 8: a leaf would be cut between ranks, so the bits would
            depend on the rank count.
    """

    num_samples: int
    """Samples of the whole update batch, over all ranks."""
    num_ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"LeafPlan.num_samples must be positive, got {self.num_samples}")
        if self.num_ranks < 1 or NUM_SEGMENTS % self.num_ranks:
            raise ValueError(f"LeafPlan: {self.num_ranks} ranks do not divide the {NUM_SEGMENTS} leaves of a gradient "
                             "sum; use 1, 2, 4 or 8 ranks")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"LeafPlan.rank must be in 0..{self.num_ranks - 1}, got {self.rank}")

    def leaf_samples(self, leaf: int) -> range:
        """Global sample numbers of a leaf: consecutive, sizes differing by at most one; empty if samples are fewer."""
        return range(-(-leaf * self.num_samples // NUM_SEGMENTS), -(-(leaf + 1) * self.num_samples // NUM_SEGMENTS))

    @property
    def leaves(self) -> range:
        """The leaves of this rank."""
        share = NUM_SEGMENTS // self.num_ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def samples(self) -> range:
        """The global sample numbers of this rank."""
        return range(self.leaf_samples(self.leaves[0]).start, self.leaf_samples(self.leaves[-1]).stop)


class LeafSum:
    """Running gradient sums of one tensor on one rank: fp32, a buffer a leaf of the rank."""

    def __init__(self, plan: LeafPlan, shape: Sequence[int], *, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self._leaves = torch.zeros((len(plan.leaves), *shape), dtype=torch.float32, device=device)
        self._next = plan.samples.start

    @torch.no_grad()
    def add(self, first_sample: int, gradients: Tensor) -> None:
        """Add the fp32 gradients ``[S, *shape]`` of samples ``first_sample, first_sample + 1, ...`` (a micro-batch).

        Raises:
            ValueError: unless these are the rank's next samples: another order would give other bits.
        """
        if gradients.dtype != torch.float32 or gradients.shape[1:] != self._leaves.shape[1:]:
            raise ValueError(f"LeafSum.add: gradients must be fp32 [S, {', '.join(map(str, self._leaves.shape[1:]))}], "
                             f"got {gradients.dtype} {tuple(gradients.shape)}")
        if first_sample != self._next or first_sample + len(gradients) > self.plan.samples.stop:
            raise ValueError(f"LeafSum.add: samples {first_sample}..{first_sample + len(gradients) - 1} came, but rank "
                             f"{self.plan.rank} adds its samples {self.plan.samples} in order and the next is "
                             f"{self._next}")
        for sample, gradient in enumerate(gradients, first_sample):
            leaf = sample * NUM_SEGMENTS // self.plan.num_samples
            self._leaves[leaf - self.plan.leaves.start] += gradient
        self._next += len(gradients)

    def rank_sum(self) -> Tensor:
        """The rank's subtree, fp32.

        Raises:
            ValueError: if samples of the rank are missing.
        """
        if self._next != self.plan.samples.stop:
            raise ValueError(f"LeafSum: samples {self._next}..{self.plan.samples.stop - 1} of rank {self.plan.rank} "
                             "were not added")
        return tree_sum(self._leaves.unbind(), lambda a, b: a + b)


def all_reduce_leaves(rank_sum: Tensor, plan: LeafPlan, exchange: Callable[[Tensor, int], Tensor] | None = None
                      ) -> Tensor:
    """Finish the tree over ranks: every rank gets the sum over the update batch, in the same bits.

    Recursive doubling: in step i a rank exchanges its subtree with rank ``rank xor 2**i`` and both add the lower rank's
    to the higher rank's. log2(ranks) times the tensor travels.

    Args:
        rank_sum: fp32, from `LeafSum.rank_sum`.
        exchange: ``exchange(tensor, peer) -> peer's tensor``; None: torch.distributed's default group, which must have
            plan.num_ranks ranks.
    """
    if exchange is None:
        exchange = _exchange
    total, step = rank_sum, 1
    while step < plan.num_ranks:
        peer = plan.rank ^ step
        other = exchange(total, peer)
        total = total + other if plan.rank < peer else other + total
        step *= 2
    return total


def _exchange(tensor: Tensor, peer: int) -> Tensor:
    """Send to and receive from one rank of the default process group."""
    import torch.distributed as dist

    received = torch.empty_like(tensor)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor.contiguous(), peer),
                                        dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    return received


def leaf_sum(gradients: Tensor) -> Tensor:
    """Sum ``[S, ...]`` fp32 per-sample gradients of a whole update batch in one process: the reference of `LeafSum`."""
    plan = LeafPlan(gradients.shape[0])
    total = LeafSum(plan, gradients.shape[1:], device=gradients.device)
    total.add(0, gradients)
    return total.rank_sum()
