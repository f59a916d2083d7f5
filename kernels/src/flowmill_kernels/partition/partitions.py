"""Roles on one GPU, each on its own SMs: streams that are made at start, chosen again at safe points.

In: what each role asks for, in one layout or several. Out: for a role its stream, its SM count (what persistent
kernels take their grid from) and the isolation mode that holds. Nothing is created after the start: a resize is
another layout's stream.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .device import CudaDevice, Device
from .ladder import Isolation, IsolationMode, Mps, Surroundings, choose, find_mps
from .planner import PartitionError, Plan, Role, plan

Roles = Mapping[str, int | float] | Sequence[Role]


@dataclass(frozen=True)
class Slot:
    """A role's place on the GPU now."""

    role: str
    num_sms: int
    """What the role's kernels take as num_sms. The whole GPU where SMs are not partitioned; 1 without a GPU."""
    stream: Any
    """torch.cuda.Stream; None without a GPU."""
    isolation_mode: IsolationMode


class Partitions:
    """Partitions of one GPU; also a context manager that closes them.

    Make them with `create`. Thread-safe: roles may be entered in different threads at the same time, and re-entered.
    """

    def __init__(self, plans: dict[str, Plan], isolation: Isolation, slots: dict[str, dict[str, Slot]],
                 close: Callable[[], None]) -> None:
        self.plans, self.isolation = plans, isolation
        self._slots, self._close = slots, close
        self._layout = next(iter(slots))
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # `exclusive`: roles take turns
        self._inside: dict[str, int] = {}
        self._graphs: dict[tuple[str, str, Any], Any] = {}
        self._capturing = threading.RLock()
        self._closed = False

    @staticmethod
    def create(roles: Roles | Mapping[str, Roles], *, device: Device | None = None, processes: int = 1,
               mps: Mps | None = None, streams: Callable[[int], Any] | None = None) -> "Partitions":
        """Plan, choose the isolation mode and make every stream of every layout.

        Args:
            roles: ``{"rollout": 96, "reward": 36}`` (SMs, or fractions as floats), or Role objects; or several such
                layouts by name, ``{"day": {...}, "night": {...}}``, all with the same roles. The first is in force.
            device: Where; None: GPU 0 of this process, or none.
            processes: Processes that share the GPU, this one included.
            mps: The MPS daemon, as `find_mps` sees it; None: look.
            streams: How a raw stream becomes the caller's; None: torch.cuda.ExternalStream.

        Raises:
            PartitionError: roles that make no sense on any GPU. What only this GPU cannot do (too few SMs, an old
                driver, no MPS daemon) is no error: the next rung holds, and `isolation` says why.
        """
        layouts = _layouts(roles)
        missing = None
        if device is None:
            try:
                device = CudaDevice()
            except RuntimeError as error:  # also a GPU that is there and cannot be reached (another UID's MPS daemon)
                missing = str(error)
        names = [role.name for role in next(iter(layouts.values()))]
        around = Surroundings(device is not None, 0 if device is None else device.driver, processes,
                              find_mps() if mps is None else mps, os.getuid(), gpu_error=missing)
        if device is None:
            isolation = choose(around)
            slots = {layout: {name: Slot(name, 1, None, isolation.mode) for name in names} for layout in layouts}
            return Partitions({}, isolation, slots, lambda: None)
        plans, split, error = {}, None, None
        try:
            grain = device.grain()
            plans = {name: plan(given, device.total_sms, grain) for name, given in layouts.items()}
        except PartitionError as too_much:
            error = str(too_much)
        place = device.index
        make = (lambda handle: _external_stream(handle, place)) if streams is None else streams
        isolation = choose(_with_error(around, error))
        slots = {}
        if isolation.mode in ("mps+green", "green"):
            try:
                split = device.split(grain.slot)
                plans = {name: plan(given, device.total_sms, grain, num_slots=split.num_slots,
                                    remainder=split.remainder) for name, given in layouts.items()}
                slots = _make(plans, split, isolation.mode, make)
                _tell(plans, split)
            except (RuntimeError, PartitionError) as refused:  # the driver says no to what its version promises
                if split is not None:
                    split.close()
                split, isolation = None, choose(_with_error(around, str(refused)))
        if split is None:
            plain = {name: Slot(name, device.total_sms, make(0), isolation.mode) for name in names}
            slots, plans = dict.fromkeys(layouts, plain), {}
        return Partitions(plans, isolation, slots, (lambda: None) if split is None else split.close)

    @property
    def isolation_mode(self) -> IsolationMode:
        return self.isolation.mode

    @property
    def layout(self) -> str:
        """Name of the layout in force."""
        return self._layout

    def slot(self, role: str) -> Slot:
        """A role's place now, without entering it."""
        self._check_open()
        try:
            return self._slots[self._layout][role]
        except KeyError:
            raise KeyError(f"no role {role!r}; there are {', '.join(self._slots[self._layout])}") from None

    def streams(self) -> set[int]:
        """Raw handles of the streams in force; empty where SMs are not partitioned."""
        if self.isolation_mode not in ("mps+green", "green"):
            return set()
        return {slot.stream.cuda_stream for slot in self._slots[self._layout].values()}

    @contextmanager
    def role(self, role: str) -> Iterator[Slot]:
        """Make the role's stream torch's current one; in mode `exclusive` wait for the other roles first."""
        turn = self._turn if self.isolation_mode == "exclusive" else None
        if turn is not None:
            turn.acquire()
        try:
            with self._lock:
                slot = self.slot(role)
                self._inside[role] = self._inside.get(role, 0) + 1
            try:
                with _current(slot.stream):
                    try:
                        yield slot
                    finally:
                        if turn is not None and slot.stream is not None:
                            slot.stream.synchronize()  # the turn ends when the work does, also after an error
            finally:
                with self._lock:
                    self._inside[role] -= 1
        finally:
            if turn is not None:
                turn.release()

    def resize(self, layout: str) -> None:
        """Change to another pre-made layout. The new streams wait for the old ones' work.

        Raises:
            KeyError: for a layout that was not made at the start.
            RuntimeError: while a role is entered: its kernels would run on SMs that another role now has. Leave the
                roles first, at a denoising-step boundary for instance.
        """
        with self._lock:
            self._check_open()
            if layout not in self._slots:
                raise KeyError(f"no layout {layout!r}; there are {', '.join(self._slots)}")
            busy = [role for role, count in self._inside.items() if count]
            if busy:
                raise RuntimeError(f"resize({layout!r}) while {', '.join(busy)} is entered; leave it first")
            if layout == self._layout:
                return
            old, new = self._slots[self._layout], self._slots[layout]
            for slot in new.values():
                for before in old.values():
                    if slot.stream is not None and slot.stream is not before.stream:
                        slot.stream.wait_stream(before.stream)
            self._layout = layout

    def replay(self, role: str, key: Any, work: Callable[[], Any]) -> Any:
        """Run `work` as a CUDA graph on the role's stream: captured once a layout, since a graph keeps its partition.

        Args:
            key: Names the work; the same key must mean the same kernels on the same tensors.
            work: Launches kernels on tensors that stay where they are; its result is what every replay writes again.
                The first call runs it twice (once to compile, once as the graph), so it must not add to its own
                inputs, and must not wait for the GPU.

        Returns:
            work's result (static tensors).
        """
        with self.role(role) as slot:
            if slot.stream is None:
                return work()
            import torch

            name = (self._layout, role, key)
            with self._capturing:
                found = self._graphs.get(name)
                if found is None:
                    work()  # compiles and allocates outside of the capture
                    slot.stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    # thread_local: with the default, a cudaMalloc in another role's thread would break the capture.
                    with torch.cuda.graph(graph, stream=slot.stream, capture_error_mode="thread_local"):
                        result = work()
                    found = self._graphs[name] = graph, result
            found[0].replay()
            return found[1]

    def close(self) -> None:
        """Wait for the roles' work and give the streams back; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            busy = [role for role, count in self._inside.items() if count]
            if busy:
                raise RuntimeError(f"close() while {', '.join(busy)} is entered; leave it first")
            self._closed = True
            try:
                for layout in self._slots.values():
                    for slot in layout.values():
                        if slot.stream is not None:
                            slot.stream.synchronize()
            finally:  # failed work must not keep the streams
                self._graphs.clear()
                self._close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("these partitions are closed")

    def __enter__(self) -> "Partitions":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __str__(self) -> str:
        if not self.plans:
            return str(self.isolation)
        return f"{self.isolation}; {self.plans[self._layout]}"


def _layouts(roles: Any) -> dict[str, tuple[Role, ...]]:
    from .planner import as_roles

    several = isinstance(roles, Mapping) and roles and all(
        isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))
        for value in roles.values())
    layouts = {name: as_roles(given) for name, given in roles.items()} if several else {"default": as_roles(roles)}
    first, *others = ({role.name for role in given} for given in layouts.values())
    if any(other != first for other in others):
        raise PartitionError(f"every layout must name the same roles, got {[sorted(s) for s in (first, *others)]}")
    return layouts


def _with_error(around: Surroundings, error: str | None) -> Surroundings:
    import dataclasses

    return dataclasses.replace(around, partition_error=error)


def _tell(plans: dict[str, Plan], split: Any) -> None:
    """Log who got less than asked by a slot or more: the driver's split had no more."""
    for layout, planned in plans.items():
        for grant in planned.grants:
            if grant.asked - grant.num_sms >= planned.slot:
                logging.getLogger(__name__).warning(
                    "role %r of layout %r asked for %g SMs and got %d: the driver made %d slots of %d SMs of this GPU, "
                    "and %d SMs over. Ask for less, or say the least that is of use (Role.floor)", grant.role, layout,
                    grant.asked, grant.num_sms, split.num_slots, planned.slot, split.remainder)


def _make(plans: dict[str, Plan], split: Any, mode: IsolationMode, make: Callable[[int], Any]
          ) -> dict[str, dict[str, Slot]]:
    """Every role's stream in every layout; equal partitions of a role share one."""
    made: dict[tuple, Slot] = {}
    slots: dict[str, dict[str, Slot]] = {}
    for layout, planned in plans.items():
        slots[layout] = {}
        for grant in planned.grants:
            key = (grant.role, grant.slots, grant.remainder)
            if key not in made:
                partition = split.make(grant.slots, grant.remainder)
                if partition.num_sms != grant.num_sms:
                    raise RuntimeError(f"role {grant.role!r} was to have {grant.num_sms} SMs, the driver made "
                                       f"{partition.num_sms}")
                made[key] = Slot(grant.role, partition.num_sms, make(partition.stream), mode)
            slots[layout][grant.role] = made[key]
    return slots


def _external_stream(handle: int, device: int) -> Any:
    import torch

    # With the device: left out it is torch's current one, and entering the stream would change to that.
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.Stream(device=device)


@contextmanager
def _current(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    if hasattr(stream, "make_current"):  # a stream that is not torch's
        with stream.make_current():
            yield
        return
    import torch

    with torch.cuda.stream(stream):
        yield
