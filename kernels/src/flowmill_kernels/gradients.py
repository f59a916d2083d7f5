"""Gradient sums that give the same bits for 1, 2, 4 and 8 ranks and for any micro-batch size.

In: fp32 gradients, one a sample. Out: their sum over the update batch, on every rank. The batch is cut into 8 leaves
by the samples' global numbers; inside a leaf samples are added one after the other in global order; leaves are added
as a balanced tree. A rank owns 8 / ranks whole leaves, so ranks only finish the tree: by exchanges of our own, never
by DDP's or NCCL's reduction, whose order depends on the rank count. Any parameter small enough for one fp32 gradient
a sample goes this way (LoRA, norms, biases).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


# Collecting a model's gradients ------------------------------------------------------------------------------------

LARGE = 2**21
"""Elements above which a parameter is no small one: its 8 leaves of fp32 would be 64 MB and more."""


def _module(name: str, backend: Backend, *tensors: Tensor) -> ModuleType:
    if _choose_backend(name, backend, tensors) == "cpu":
        return cpu_backend
    from . import triton_gradients

    return triton_gradients


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto"
                 ) -> None:
    """Add every sample's ``dy[s].T @ x[s]`` into its leaf, samples in order, each summed from zero over its tokens.

    Args:
        leaves: ``[L, N, K]`` fp32, the leaves of plan.rank; changed in place.
        dy: ``[S, T, N]``. x: ``[S, T, K]``, same dtype: bf16 or fp16, on the CPU also fp32; unit stride in the last
            dimension.
        first_sample: Global number of sample 0; the samples must be the rank's own and come in order.

    Guarantees: run, batch (any cut into micro-batches), ranks 1 = 2 = 4 = 8 once the leaves are combined.
    """
    if dy.dim() != 3 or x.dim() != 3 or dy.shape[:2] != x.shape[:2] or dy.dtype != x.dtype:
        raise ValueError(f"wgrad_leaves: needs dy [S, T, N] and x [S, T, K] of one dtype, got {tuple(dy.shape)} "
                         f"{dy.dtype} and {tuple(x.shape)} {x.dtype}")
    if tuple(leaves.shape) != (len(plan.leaves), dy.shape[2], x.shape[2]) or leaves.dtype != torch.float32:
        raise ValueError(f"wgrad_leaves: leaves must be fp32 {[len(plan.leaves), dy.shape[2], x.shape[2]]}, got "
                         f"{leaves.dtype} {tuple(leaves.shape)}")
    module = _module("wgrad_leaves", backend, leaves, dy, x)
    if module is not cpu_backend and dy.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"wgrad_leaves: on a GPU dy and x must be bf16 or fp16, got {dy.dtype}")
    if dy.numel() == 0 or x.numel() == 0:
        return
    dy, x = (t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in (dy, x))
    module.wgrad_leaves(leaves, dy, x, first_sample, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)


def add_leaves(leaves: Tensor, per_sample: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto"
               ) -> None:
    """Add fp32 per-sample gradients ``[S, *shape]`` into ``leaves [L, *shape]``, samples in order; in place."""
    if per_sample.dtype != torch.float32 or per_sample.shape[1:] != leaves.shape[1:]:
        raise ValueError(f"add_leaves: gradients must be fp32 [S, {', '.join(map(str, leaves.shape[1:]))}], got "
                         f"{per_sample.dtype} {tuple(per_sample.shape)}")
    if per_sample.numel():
        _module("add_leaves", backend, leaves, per_sample).add_leaves(
            leaves, per_sample.contiguous(), first_sample, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)


_ACTIVE: dict[tuple[torch.device, int], "GradientLeaves"] = {}
_LOCK = threading.Lock()


def _key(parameter: Tensor) -> tuple[torch.device, int]:
    """A parameter by its memory: backward may hold another Python object of it (checkpointing does)."""
    return parameter.device, parameter.data_ptr()


class GradientLeaves:
    """Collects a model's gradients over an update batch, so that neither micro-batches nor ranks show in their bits.

    While it is entered, the operators of this package hand every registered parameter's per-sample gradients to it and
    return none to autograd::

        with GradientLeaves(parameters, LeafPlan(num_samples, num_ranks, rank)) as leaves:
            for first, batch in micro_batches:
                with leaves.micro_batch(first, len(batch)):
                    loss(batch).backward()
            norm = leaves.finish()          # sets .grad on every rank, the same bits

    A call with `r` times as many rows as samples (conditional and unconditional pass in one batch, one after the other)
    counts as r uses of the parameter, as do several calls: every use has its own leaves, added in the order of use.

    Memory: 8 / ranks fp32 copies of all parameters a use. Full fine-tuning is declined for that price (and for the
    time: see kernels/README.md): a parameter of more than 2**21 elements is refused unless `allow_large`.
    """

    def __init__(self, parameters: Iterable[Tensor], plan: LeafPlan, *, allow_large: bool = False) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("GradientLeaves: no parameters were given")
        self._place: dict[tuple[torch.device, int], tuple[Tensor, int]] = {}
        self._total = 0
        for p in self.parameters:
            if p.numel() > LARGE and not allow_large:
                raise ValueError(f"GradientLeaves: a parameter {tuple(p.shape)} has {p.numel()} elements; its leaves "
                                 f"would take {4 * p.numel() * len(plan.leaves) / 2**20:.0f} MiB. Per-sample sums are "
                                 "for LoRA, norms and biases; pass allow_large=True to pay for it")
            if p.device != self.parameters[0].device:
                raise ValueError(f"GradientLeaves: parameters lie on {p.device} and {self.parameters[0].device}; use "
                                 "one collector a device")
            if _key(p) in self._place:
                raise ValueError("GradientLeaves: a parameter was given twice, or two share their memory")
            self._place[_key(p)] = (p, self._total)
            self._total += p.numel()
        self._uses: list[Tensor] = []  # [leaves, total] fp32 a use
        self._reset()

    def _reset(self) -> None:
        self._next = self.plan.samples.start
        self._size = 0
        self._count: dict[tuple[torch.device, int], int] = {}
        self._seen: dict[tuple[torch.device, int], int] = {}
        self._finished = False

    def __enter__(self) -> "GradientLeaves":
        with _LOCK:
            if any(key in _ACTIVE for key in self._place):
                raise RuntimeError("GradientLeaves: a parameter is in another collector that is entered now")
            _ACTIVE.update(dict.fromkeys(self._place, self))
        self._reset()
        for leaves in self._uses:
            leaves.zero_()
        return self

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            for key in self._place:
                _ACTIVE.pop(key, None)

    @contextmanager
    def micro_batch(self, first_sample: int, size: int) -> Iterator[None]:
        """The backward inside belongs to samples ``first_sample .. first_sample + size - 1`` of the update batch."""
        if size < 1 or first_sample != self._next or first_sample + size > self.plan.samples.stop:
            raise ValueError(f"GradientLeaves: samples {first_sample}..{first_sample + size - 1} came, but rank "
                             f"{self.plan.rank} adds its samples {self.plan.samples} in order and the next is "
                             f"{self._next}")
        if self._size:
            raise RuntimeError("GradientLeaves: a micro-batch is already open")
        self._size, self._count = size, {}
        try:
            yield
        finally:
            self._size = 0
        self._next += size

    def _leaves(self, parameter: Tensor, use: int) -> Tensor:
        while len(self._uses) <= use:
            self._uses.append(torch.zeros((len(self.plan.leaves), self._total), dtype=torch.float32,
                                          device=parameter.device))
        at = self._place[_key(parameter)][1]
        return self._uses[use][:, at:at + parameter.numel()].view(-1, *parameter.shape)

    def _take(self, parameter: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """(rows, leaves) of each use that a call with so many rows makes."""
        if self._finished or not self._size:
            raise RuntimeError("GradientLeaves: a backward ran outside of micro_batch(); its samples are unknown")
        if rows % self._size:
            raise ValueError(f"GradientLeaves: a gradient {tuple(parameter.shape)} came for {rows} rows, but the "
                             f"micro-batch has {self._size} samples; rows must be a multiple, one pass after another")
        key = _key(parameter)
        for j in range(rows // self._size):
            use = self._count.get(key, 0)
            self._count[key] = use + 1
            self._seen[key] = self._seen.get(key, 0) + (self._size if use == 0 else 0)
            yield slice(j * self._size, (j + 1) * self._size), self._leaves(parameter, use)

    @torch.no_grad()
    def add(self, parameter: Tensor, per_sample: Tensor) -> None:
        """Add fp32 gradients ``[S, *shape]`` of the open micro-batch."""
        for rows, leaves in self._take(parameter, per_sample.shape[0]):
            add_leaves(leaves, per_sample[rows], first_sample=self._next, plan=self.plan)

    @torch.no_grad()
    def add_outer(self, parameter: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add ``dy[s].T @ x[s]`` of the open micro-batch's samples."""
        for rows, leaves in self._take(parameter, dy.shape[0]):
            wgrad_leaves(leaves, dy[rows], x[rows], first_sample=self._next, plan=self.plan)

    @torch.no_grad()
    def finish(self, exchange: Callable[[Tensor, int], Tensor] | None = None) -> float:
        """Combine leaves and ranks, set every parameter's ``.grad`` (its dtype) and return the gradient's norm.

        Args:
            exchange: As in `all_reduce_leaves`; None: torch.distributed's default group where there are several ranks.

        Raises:
            RuntimeError: if samples are missing, or it was called before.
        """
        if self._finished:
            raise RuntimeError("GradientLeaves: finish() was called twice for one update batch")
        if self._next != self.plan.samples.stop:
            raise RuntimeError(f"GradientLeaves: samples {self._next}..{self.plan.samples.stop - 1} of rank "
                               f"{self.plan.rank} had no backward")
        expected = len(self.plan.samples)
        for key, seen in self._seen.items():
            if seen != expected:
                raise RuntimeError(f"GradientLeaves: a parameter {tuple(self._place[key][0].shape)} got gradients of "
                                   f"{seen} of the rank's {expected} samples; every micro-batch must use it")
        self._finished = True
        total = None
        for leaves in self._uses:
            rank_sum = tree_sum(leaves.unbind(), lambda a, b: a + b)
            part = all_reduce_leaves(rank_sum, self.plan, exchange)
            total = part if total is None else total + part
        if total is None:  # this rank's samples reached no parameter; the others' may not have either
            total = torch.zeros(self._total, dtype=torch.float32, device=self.parameters[0].device)
        for parameter, at in self._place.values():
            parameter.grad = total[at:at + parameter.numel()].view(parameter.shape).to(parameter.dtype, copy=True)
        return _norm(total)


def _norm(total: Tensor) -> float:
    """Euclidean norm: fp64 squares added by halving, so the order follows from the number of elements alone."""
    return float(cpu_backend.halving_sum(total.double().square(), -1).sqrt())


def deliver(parameter: Tensor, per_sample: Tensor) -> Tensor | None:
    """For a backward: a parameter's gradient from fp32 per-sample gradients ``[S, *shape]``.

    Returns None where a `GradientLeaves` collects the parameter, else the leaf sum of this batch in its dtype.
    """
    collector = _ACTIVE.get(_key(parameter))
    if collector is not None:
        collector.add(parameter, per_sample)
        return None
    plan = LeafPlan(max(1, per_sample.shape[0]))
    leaves = torch.zeros((NUM_SEGMENTS, *parameter.shape), dtype=torch.float32, device=parameter.device)
    add_leaves(leaves, per_sample, first_sample=0, plan=plan)
    return tree_sum(leaves.unbind(), lambda a, b: a + b).to(parameter.dtype)


def deliver_outer(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """`deliver` of ``dy[s].T @ x[s]`` without those in memory; dy ``[S, T, N]``, x ``[S, T, K]``."""
    collector = _ACTIVE.get(_key(parameter))
    if collector is not None:
        collector.add_outer(parameter, dy, x)
        return None
    plan = LeafPlan(max(1, dy.shape[0]))
    leaves = torch.zeros((NUM_SEGMENTS, *parameter.shape), dtype=torch.float32, device=parameter.device)
    wgrad_leaves(leaves, dy, x, first_sample=0, plan=plan)
    return tree_sum(leaves.unbind(), lambda a, b: a + b).to(parameter.dtype)
