"""Collecting a model's gradients over an update batch, so that neither micro-batches nor ranks show in their bits.

In: what the operators' backwards deliver, per-sample gradients of whole parameters. Out: `.grad` on every rank and the
norm. The sums are gradients.py's; here is whose they are: which parameter, which use of it, which samples.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .gradients import LeafPlan, _module, _tree, add_leaves, all_reduce_leaves, wgrad_leaves, wgrad_leaves_stacked
from .schemes import NUM_SEGMENTS

LARGE = 2**21
"""Elements above which a parameter is no small one: its 8 leaves of fp32 would be 64 MB and more."""

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
        self._position: Tensor | None = None  # where recorded kernels find their first sample's number (graph.py)
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
            add_leaves(leaves, part, first_sample=self._next, plan=self.plan, position=self._position)

    @torch.no_grad()
    def add_outer(self, parameter: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add ``dy[s].T @ x[s]`` of the open micro-batch's samples."""
        self.add_outers([parameter], dy, x)

    @torch.no_grad()
    def add_outers(self, parameters: Sequence[Tensor], dy: Tensor, x: Tensor) -> None:
        """`add_outer` of parameters of one shape, whose columns lie side by side in dy."""
        for of_one_use in zip(*(self._take(p, dy.shape[0]) for p in parameters), strict=True):
            rows = of_one_use[0][0]
            parts = (dy, x) if rows is None else (dy[rows], x[rows])
            wgrad_leaves_stacked([leaves for _, leaves in of_one_use], *parts, first_sample=self._next, plan=self.plan,
                                 position=self._position)

    @torch.no_grad()
    def finish(self, exchange: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        """Combine leaves and ranks, set every parameter's ``.grad`` and return the gradient's Euclidean norm.

        The norm is fp64 ``[]`` on the parameters' device, like torch's `clip_grad_norm_`'s: nothing waits for the GPU
        before somebody reads it.

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
        module = _module("GradientLeaves", "auto", self.parameters[0])
        if self._uses:
            leaves = self._uses[0]
            for other in self._uses[1:]:  # a leaf's uses in order; in place, since entering empties them
                leaves += other
        else:  # a rank without samples takes part in the exchange all the same
            leaves = torch.zeros((1, self._total), dtype=torch.float32, device=self.parameters[0].device)
        if self.plan.num_ranks > 1:
            rank_sum, _ = module.sum_leaves(leaves, torch.float32)
            leaves = all_reduce_leaves(rank_sum, self.plan, exchange)[None]
        dtypes = {p.dtype for p in self.parameters}
        total, norm = module.sum_leaves(leaves, dtypes.pop() if len(dtypes) == 1 else torch.float32)
        sizes = [p.numel() for p in self.parameters]
        for dtype in {p.dtype for p in self.parameters}:
            parts = total.to(dtype).split(sizes)  # all at once: slices one by one take milliseconds
            for parameter, part in zip(self.parameters, parts, strict=True):
                if parameter.dtype == dtype:
                    parameter.grad = part.view(parameter.shape)
        return norm


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


def deliver_outers(parameters: Sequence[Tensor], dy: Tensor, x: Tensor) -> list[Tensor | None]:
    """`deliver_outer` of parameters of one shape ``[N, K]`` that share x; dy ``[S, T, len(parameters) * N]``."""
    collectors = [_collector(p) for p in parameters]
    if (first := collectors[0]) is not None and all(c is first for c in collectors):
        first.add_outers(parameters, dy, x)
        return [None] * len(parameters)
    n = parameters[0].shape[0]
    return [deliver_outer(p, dy[..., i * n:(i + 1) * n], x) for i, p in enumerate(parameters)]
