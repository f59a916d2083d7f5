"""Gradient sums that give the same bits for 1, 2, 4 and 8 ranks and for any micro-batch size.

In: fp32 gradients, one a sample. Out: their sum over the update batch, on every rank. The batch is cut into 8 leaves
by the samples' global numbers; inside a leaf samples are added one after the other in global order; leaves are added
as a balanced tree. A rank owns 8 / ranks whole leaves, so ranks only finish the tree: by exchanges of our own, never
by DDP's or NCCL's reduction, whose order depends on the rank count. LoRA adapters, norms and biases go this way; full
fine-tuning is declined, with its price, in `GradientLeaves`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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


# Collecting a model's gradients ------------------------------------------------------------------------------------

LARGE = 2**21
"""Elements above which a parameter is no small one: its 8 leaves of fp32 would be 64 MB and more."""


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


def wgrad_leaves(leaves: Tensor, dy: Tensor, x: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto"
                 ) -> None:
    """Add every sample's ``dy[s].T @ x[s]`` into its leaf, samples in order, each summed from zero over its tokens.

    Args:
        leaves: ``[L, N, K]`` fp32, the leaves of plan.rank, each contiguous; changed in place.
        dy: ``[S, T, N]``, x: ``[S, T, K]``, same dtype: bf16 or fp16, on the CPU also fp32. Column slices of packed
            tensors are read where they lie. dy may hold the columns of several layers that share x (``[S, T, 3 R]``
            for the down projections of q, k and v); then x is read once. The tile depends on N and K, so no equality
            with separate calls is promised: stack always or never.
        first_sample: Global number of sample 0; the samples must be the rank's own and come in order.

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
    module.wgrad_leaves(leaves, dy, x, first_sample, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)


def add_leaves(leaves: Tensor, per_sample: Tensor, *, first_sample: int, plan: LeafPlan, backend: Backend = "auto"
               ) -> None:
    """Add fp32 per-sample gradients ``[S, *shape]`` into ``leaves [L, *shape]``, samples in order; in place.

    Raises:
        ValueError: for dtypes, shapes, strides and sample numbers that do not fit.

    Guarantees: those of `wgrad_leaves`.
    """
    if per_sample.dtype != torch.float32 or per_sample.dim() != leaves.dim():
        raise ValueError(f"add_leaves: gradients must be fp32 [S, {', '.join(map(str, leaves.shape[1:]))}], got "
                         f"{per_sample.dtype} {tuple(per_sample.shape)}")
    _check_leaves("add_leaves", leaves, per_sample.shape[1:], first_sample, len(per_sample), plan)
    if per_sample.numel():
        _module("add_leaves", backend, leaves, per_sample).add_leaves(
            leaves, per_sample.contiguous(), first_sample, plan.leaves[0], plan.num_samples, NUM_SEGMENTS)


_Key = tuple[torch.device, int]
_ACTIVE: dict[_Key, "GradientLeaves"] = {}
_LOCK = threading.Lock()


def _key(parameter: Tensor) -> _Key:
    """A parameter by its memory: backward may hold another Python object of it (checkpointing does)."""
    return parameter.device, parameter.data_ptr()


class GradientLeaves:
    """Collects a model's gradients over an update batch, so that neither micro-batches nor ranks show in their bits.

    While it is entered, the operators of this package hand every registered parameter's per-sample gradients to it and
    return none to autograd::

        with GradientLeaves(parameters, LeafPlan(num_samples, num_ranks, rank)) as leaves:
            for first, batch in micro_batches:
                with leaves.micro_batch(first, len(batch)):
                    loss(batch).backward()  # a sum over samples, or divided by the whole update batch's number
            norm = leaves.finish()          # sets .grad on every rank, the same bits

    Entering sets every parameter's ``.grad`` to None and empties the leaves, so one collector serves all updates.
    A call with `r` times as many rows as samples (conditional and unconditional pass in one batch, one after the other:
    row j * size + s is sample s) counts as r uses of the parameter, as do several calls. Every use has its own leaves,
    and in each leaf the uses are added in order, so every micro-batch must use a parameter equally often.

    Hooks on a registered parameter's gradient see None; read ``.grad`` after finish. While a micro-batch is open, a
    backward of another model on the same device needs a collector of its own.

    Memory: 8 / ranks fp32 copies of all parameters a use: 604 MB on one rank for the 18.9 million of LoRA r32 on 8
    linears of 24 layers 1536 wide. Full fine-tuning is declined for that price: 2.5 billion parameters would take 80 GB
    a use on one rank (10 GB on each of 8), so a parameter of more than 2**21 elements is refused unless `allow_large`.

    Raises:
        ValueError: no parameters, one given twice, an empty or a large one, or several devices.
    """

    def __init__(self, parameters: Iterable[Tensor], plan: LeafPlan, *, allow_large: bool = False) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("GradientLeaves: no parameters were given")
        self._place: dict[_Key, tuple[Tensor, int]] = {}
        self._total = 0
        for p in self.parameters:
            if p.numel() == 0:
                raise ValueError(f"GradientLeaves: a parameter {tuple(p.shape)} has no elements")
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
        self._views: dict[tuple[_Key, int], Tensor] = {}  # a parameter's part of a use
        self._reset()

    def _reset(self) -> None:
        self._next = self.plan.samples.start
        self._size = 0
        self._count: dict[_Key, int] = {}  # uses in the open micro-batch
        self._expected: dict[_Key, int] | None = None  # uses in the first one
        self._failed = False
        self._finished = False

    def __enter__(self) -> "GradientLeaves":
        with _LOCK:
            if any(key in _ACTIVE for key in self._place):
                raise RuntimeError("GradientLeaves: a parameter is in another collector that is entered now")
            _ACTIVE.update(dict.fromkeys(self._place, self))
        self._reset()
        for leaves in self._uses:
            leaves.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        return self

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            for key in self._place:
                if _ACTIVE.get(key) is self:
                    del _ACTIVE[key]

    @contextmanager
    def micro_batch(self, first_sample: int, size: int) -> Iterator[None]:
        """The backward inside belongs to samples ``first_sample .. first_sample + size - 1`` of the update batch.

        Raises:
            ValueError: unless these are the rank's next samples.
            RuntimeError: outside of the collector's `with`, inside another micro-batch, after a failed one or after
                `finish`; at its end, if it used a parameter more or less often than the first micro-batch.
        """
        if _ACTIVE.get(_key(self.parameters[0])) is not self:
            raise RuntimeError("GradientLeaves: enter the collector first (with leaves: ...); a micro-batch outside of "
                               "it would leave its gradients to autograd")
        if self._size:
            raise RuntimeError("GradientLeaves: a micro-batch is already open")
        self._check_whole()
        if size < 1 or first_sample != self._next or first_sample + size > self.plan.samples.stop:
            raise ValueError(f"GradientLeaves: samples {first_sample}..{first_sample + size - 1} came, but rank "
                             f"{self.plan.rank} adds its samples {self.plan.samples} in order and the next is "
                             f"{self._next}")
        self._size, self._count = size, {}
        self._failed = True  # until the end is reached: part of the samples may be in the leaves
        try:
            yield
        finally:
            self._size = 0
        expected = self._count if self._expected is None else self._expected
        for key in {**expected, **self._count}:
            if self._count.get(key, 0) != expected.get(key, 0):
                raise RuntimeError(
                    f"GradientLeaves: a parameter {tuple(self._place[key][0].shape)} was used "
                    f"{self._count.get(key, 0)} times by samples {first_sample}..{first_sample + size - 1}, but "
                    f"{expected.get(key, 0)} times by the first micro-batch; uses are added by their number, so every "
                    "micro-batch must make the same")
        self._expected = expected
        self._failed = False
        self._next += size

    def _check_whole(self) -> None:
        if self._finished:
            raise RuntimeError("GradientLeaves: this update batch is finished; enter the collector again for the next")
        if self._failed:
            raise RuntimeError("GradientLeaves: a micro-batch failed and part of its gradients may be in the sums; "
                               "enter the collector again and repeat the update batch")

    def _leaves(self, parameter: Tensor, key: _Key, use: int) -> Tensor:
        """[leaves, *shape] of one use; the parameter may come as a reshaped view of the registered one."""
        if not parameter.is_contiguous() and self._place[key][0].is_contiguous():
            raise RuntimeError("GradientLeaves: a gradient came for a transposed or strided view "
                               f"{tuple(parameter.shape)} of a registered parameter; use the parameter itself")
        found = self._views.get((key, use))
        if found is None or found.shape[1:] != parameter.shape:
            registered, at = self._place[key]
            if registered.numel() != parameter.numel():
                raise RuntimeError(f"GradientLeaves: a gradient came for {tuple(parameter.shape)}, a part of the "
                                   f"registered parameter {tuple(registered.shape)}; only whole ones can be collected")
            while len(self._uses) <= use:
                self._uses.append(torch.zeros((len(self.plan.leaves), self._total), dtype=torch.float32,
                                              device=parameter.device))
            found = self._uses[use][:, at:at + parameter.numel()].view(-1, *parameter.shape)
            self._views[key, use] = found
        return found

    def _take(self, parameter: Tensor, rows: int) -> Iterator[tuple[slice | None, Tensor]]:
        """(rows, leaves) of each use that a call with so many rows makes; None: all rows."""
        if self._finished or not self._size:
            raise RuntimeError("GradientLeaves: a backward ran outside of micro_batch(); its samples are unknown")
        if rows == 0 or rows % self._size:
            raise ValueError(f"GradientLeaves: a gradient {tuple(parameter.shape)} came for {rows} rows, but the "
                             f"micro-batch has {self._size} samples; rows must be a multiple, one pass after another")
        key = _key(parameter)
        for start in range(0, rows, self._size):
            use = self._count.get(key, 0)
            leaves = self._leaves(parameter, key, use)
            self._count[key] = use + 1
            yield None if rows == self._size else slice(start, start + self._size), leaves

    @torch.no_grad()
    def add(self, parameter: Tensor, per_sample: Tensor) -> None:
        """Add fp32 gradients ``[S, *shape]`` of the open micro-batch."""
        for rows, leaves in self._take(parameter, per_sample.shape[0]):
            part = per_sample if rows is None else per_sample[rows]
            add_leaves(leaves, part, first_sample=self._next, plan=self.plan)

    @torch.no_grad()
    def add_outer(self, parameter: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add ``dy[s].T @ x[s]`` of the open micro-batch's samples."""
        for rows, leaves in self._take(parameter, dy.shape[0]):
            parts = (dy, x) if rows is None else (dy[rows], x[rows])
            wgrad_leaves(leaves, *parts, first_sample=self._next, plan=self.plan)

    @torch.no_grad()
    def finish(self, exchange: Callable[[Tensor, int], Tensor] | None = None) -> float:
        """Combine leaves and ranks, set every parameter's ``.grad`` and return the gradient's Euclidean norm.

        Gradients have their parameter's dtype and are views of one flat tensor a dtype; a parameter that no sample
        used gets zeros. All ranks must call it, also one without samples.

        Args:
            exchange: As in `all_reduce_leaves`; None: torch.distributed's default group where there are several ranks.

        Raises:
            RuntimeError: if samples are missing, a micro-batch failed, it was called before, or autograd itself made a
                gradient for a registered parameter (an operation outside of this package used it).
        """
        if self._size:
            raise RuntimeError("GradientLeaves: finish() was called inside of micro_batch(); call it after the last")
        self._check_whole()
        if self._next != self.plan.samples.stop:
            raise RuntimeError(f"GradientLeaves: samples {self._next}..{self.plan.samples.stop - 1} of rank "
                               f"{self.plan.rank} had no backward")
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"GradientLeaves: autograd made a gradient for a registered parameter {tuple(parameter.shape)}: an "
                    "operation that is not of this package used it, and its sum over samples has no fixed order. Apply "
                    "the kernels to the whole module, or do not register the parameter")
        self._finished = True
        if self._uses:
            leaves = self._uses[0]
            for other in self._uses[1:]:  # a leaf's uses in order; in place, since entering empties them
                leaves += other
            rank_sum = _tree(leaves)
        else:  # a rank without samples takes part in the exchange all the same
            rank_sum = torch.zeros(self._total, dtype=torch.float32, device=self.parameters[0].device)
        total = all_reduce_leaves(rank_sum, self.plan, exchange)
        rounded: dict[torch.dtype, Tensor] = {dtype: total.to(dtype) for dtype in {p.dtype for p in self.parameters}}
        for parameter, at in self._place.values():
            parameter.grad = rounded[parameter.dtype][at:at + parameter.numel()].view(parameter.shape)
        return _norm(total)


def _norm(total: Tensor) -> float:
    """Euclidean norm: fp64 squares added by halving, so the order follows from the number of elements alone."""
    return float(cpu_backend.halving_sum(total.double().square(), -1).sqrt())


def _collector(parameter: Tensor) -> GradientLeaves | None:
    """Who collects this parameter now.

    Raises:
        RuntimeError: if nobody does, but a micro-batch is open on its device: autograd would add its gradients up
            micro-batch after micro-batch, and the bits would depend on their size.
    """
    if (collector := _ACTIVE.get(_key(parameter))) is not None:
        return collector
    with _LOCK:
        others = tuple(_ACTIVE.values())
    if any(other._size and other.parameters[0].device == parameter.device for other in others):
        raise RuntimeError(f"GradientLeaves: a gradient came for {tuple(parameter.shape)}, which no collector has "
                           "registered, inside of micro_batch(): register the parameter (the whole of it, not what was "
                           "computed from it), or freeze it")
    return None


@torch.no_grad()
def _batch_sum(parameter: Tensor, samples: int, add: Callable[[Tensor, LeafPlan], None]) -> Tensor:
    """The gradient of a batch that is an update batch by itself."""
    leaves = torch.zeros((NUM_SEGMENTS, *parameter.shape), dtype=torch.float32, device=parameter.device)
    add(leaves, LeafPlan(max(1, samples)))
    return _tree(leaves).to(parameter.dtype)


def deliver(parameter: Tensor, per_sample: Tensor) -> Tensor | None:
    """For a backward: a parameter's gradient from fp32 per-sample gradients ``[S, *shape]``.

    Returns None where a `GradientLeaves` collects the parameter, else the leaf sum of this batch in its dtype.
    """
    if (collector := _collector(parameter)) is not None:
        return collector.add(parameter, per_sample)
    return _batch_sum(parameter, len(per_sample),
                      lambda leaves, plan: add_leaves(leaves, per_sample, first_sample=0, plan=plan))


def deliver_outer(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """`deliver` of ``dy[s].T @ x[s]`` without those in memory; dy ``[S, T, N]``, x ``[S, T, K]``."""
    if (collector := _collector(parameter)) is not None:
        return collector.add_outer(parameter, dy, x)
    return _batch_sum(parameter, len(dy), lambda leaves, plan: wgrad_leaves(leaves, dy, x, first_sample=0, plan=plan))
