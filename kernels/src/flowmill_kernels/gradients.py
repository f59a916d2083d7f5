"""Gradient sums that give the same bits for 1, 2, 4 and 8 ranks and for any micro-batch size.

In: fp32 gradients, one a sample. Out: their sum over the update batch, on every rank. The batch is cut into 8 leaves
by the samples' global numbers; inside a leaf samples are added one after the other in global order; leaves are added
as a balanced tree. A rank owns 8 / ranks whole leaves, so ranks only finish the tree: by exchanges of our own, never
by DDP's or NCCL's reduction, whose order depends on the rank count. LoRA adapters, norms and biases go this way; full
fine-tuning is declined, with its price, in `GradientLeaves`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from . import cpu_backend
from .gemm import Backend, _choose_backend
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
        for name in ("num_samples", "num_ranks", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"LeafPlan.{name} must be an int, got {value!r}")
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

    @cached_property
    def leaves(self) -> range:
        """The leaves of this rank."""
        share = NUM_SEGMENTS // self.num_ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @cached_property
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


def _tree(leaves: Tensor) -> Tensor:
    """`tree_sum` of ``[L, ...]`` leaves in log2(L) operations: the same additions, a level at a time."""
    while len(leaves) > 1:
        leaves = leaves[0::2] + leaves[1::2]
    return leaves[0]


def leaf_sum(gradients: Tensor) -> Tensor:
    """Sum ``[S, ...]`` fp32 per-sample gradients of a whole update batch in one process: the reference of `LeafSum`."""
    plan = LeafPlan(gradients.shape[0])
    total = LeafSum(plan, gradients.shape[1:], device=gradients.device)
    total.add(0, gradients)
    return total.rank_sum()


_TRITON: list[ModuleType] = []  # the module once it is known to work: a model asks hundreds of times a step


def _module(name: str, backend: Backend, *tensors: Tensor) -> ModuleType:
    device = tensors[0].device
    if _TRITON and backend == "auto" and device.type == "cuda" and all(t.device == device for t in tensors):
        return _TRITON[0]
    if _choose_backend(name, backend, tensors) == "cpu":
        return cpu_backend
    from . import triton_gradients

    _TRITON[:] = [triton_gradients]
    return triton_gradients


def _check_leaves(name: str, leaves: Tensor, shape: Sequence[int], first_sample: int, count: int, plan: LeafPlan
                  ) -> None:
    if leaves.dtype != torch.float32 or tuple(leaves.shape) != (len(plan.leaves), *shape):
        raise ValueError(f"{name}: leaves must be fp32 {[len(plan.leaves), *shape]} for rank {plan.rank} of "
                         f"{plan.num_ranks}, got {leaves.dtype} {tuple(leaves.shape)}")
    if not leaves.is_contiguous() and not leaves[0].is_contiguous():
        raise ValueError(f"{name}: each leaf must be contiguous, got strides {leaves.stride()}")
    if count and not (plan.samples.start <= first_sample and first_sample + count <= plan.samples.stop):
        raise ValueError(f"{name}: samples {first_sample}..{first_sample + count - 1} are not all of rank "
                         f"{plan.rank}'s samples {plan.samples}")


def _position(name: str, position: Tensor | None, first_sample: int, module: ModuleType, device: torch.device
              ) -> int | Tensor:
    """Where a kernel finds the number of its first sample."""
    if position is None:
        return first_sample
    if module is cpu_backend or position.dtype != torch.int32 or position.numel() != 1 or position.device != device:
        raise ValueError(f"{name}: position must be one int32 on a GPU beside the leaves, on {device}, got "
                         f"{position.dtype} {tuple(position.shape)} on {position.device}")
    return position


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto",
                 position: Tensor | None = None) -> None:
    """Add every sample's ``dy[s].T @ x[s]`` into its leaf, samples in order, each summed from zero over its tokens.

    Args:
        leaves: ``[L, N, K]`` fp32, the leaves of plan.rank, each contiguous; changed in place.
        dy: ``[S, T, N]``, x: ``[S, T, K]``, same dtype: bf16 or fp16, on the CPU also fp32. Column slices of packed
            tensors are read where they lie.
        first_sample: Global number of sample 0; the samples must be the rank's own and come in order.
        position: One int32 on the GPU; the kernels read sample 0's number there when they run. For CUDA graphs, which
            record an address and not its value; first_sample is then only the number that is checked.

    Raises:
        TypeError, ValueError: for dtypes, shapes, strides and sample numbers that do not fit.

    Guarantees: run, batch (any cut into micro-batches), ranks 1 = 2 = 4 = 8 once the leaves are combined. Error: 3e-5
    (`GUARANTEES["wgrad"]`), from fp32 sums over tokens. Shapes: any; the launch does not depend on an SM count.
    """
    if dy.dim() != 3 or x.dim() != 3 or dy.shape[:2] != x.shape[:2]:
        raise ValueError(f"wgrad_leaves: needs dy [S, T, N] and x [S, T, K], got {tuple(dy.shape)} and "
                         f"{tuple(x.shape)}")
    module = _module("wgrad_leaves", backend, leaves, dy, x)
    allowed = (torch.bfloat16, torch.float16, *((torch.float32,) if module is cpu_backend else ()))
    if dy.dtype != x.dtype or dy.dtype not in allowed:
        raise TypeError(f"wgrad_leaves: dy is {dy.dtype} and x {x.dtype}; both must be the same of "
                        f"{', '.join(map(str, allowed))} on {leaves.device}. Cast them first")
    _check_leaves("wgrad_leaves", leaves, (dy.shape[2], x.shape[2]), first_sample, len(dy), plan)
    if dy.numel() == 0 or x.numel() == 0:
        return
    dy, x = (t if t.stride(2) == 1 else t.contiguous() for t in (dy, x))
    first = _position("wgrad_leaves", position, first_sample, module, leaves.device)
    module.wgrad_leaves(leaves, dy, x, first, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)


def wgrad_leaves_stacked(leaves: Sequence[Tensor], dy: Tensor, x: Tensor, *, first_sample: int, plan: LeafPlan,
                         position: Tensor | None = None) -> None:
    """`wgrad_leaves` of several parameters ``[N, K]`` that share x (the down projections of q, k and v), the same bits.

    Args:
        leaves: ``[L, N, K]`` each, of one shape.
        dy: ``[S, T, len(leaves) * N]``, their columns side by side. On a GPU x is then read once.
    """
    n = leaves[0].shape[1]
    one_kind = len({(t.shape, t.stride()) for t in leaves}) == 1
    module = _module("wgrad_leaves", "auto", *leaves, dy, x)
    if (module is not cpu_backend and one_kind and len(leaves) in (2, 3) and dy.numel() and x.numel()
            and dy.stride(2) == 1 and x.stride(2) == 1 and dy.dtype == x.dtype):
        _check_leaves("wgrad_leaves", leaves[0], (n, x.shape[2]), first_sample, len(dy), plan)
        first = _position("wgrad_leaves", position, first_sample, module, leaves[0].device)
        if module.wgrad_leaves_stacked(leaves, dy, x, first, plan.leaves[0], plan.num_samples, NUM_SEGMENTS):
            return
    for i, part in enumerate(leaves):
        wgrad_leaves(part, dy[..., i * n:(i + 1) * n], x, first_sample=first_sample, plan=plan, position=position)


def add_leaves(leaves: Tensor, per_sample: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto",
               position: Tensor | None = None) -> None:
    """Add fp32 per-sample gradients ``[S, *shape]`` into ``leaves [L, *shape]``, samples in order; in place.

    Arguments as in `wgrad_leaves`.

    Raises:
        ValueError: for dtypes, shapes, strides and sample numbers that do not fit.

    Guarantees: those of `wgrad_leaves`.
    """
    if per_sample.dtype != torch.float32 or per_sample.dim() != leaves.dim():
        raise ValueError(f"add_leaves: gradients must be fp32 [S, {', '.join(map(str, leaves.shape[1:]))}], got "
                         f"{per_sample.dtype} {tuple(per_sample.shape)}")
    _check_leaves("add_leaves", leaves, per_sample.shape[1:], first_sample, len(per_sample), plan)
    if per_sample.numel():
        module = _module("add_leaves", backend, leaves, per_sample)
        first = _position("add_leaves", position, first_sample, module, leaves.device)
        module.add_leaves(leaves, per_sample.contiguous(), first, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)
