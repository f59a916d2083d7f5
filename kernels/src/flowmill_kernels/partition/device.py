"""The CUDA layer under partitions: one split of a GPU into slots, and a stream for any set of them.

Nothing here decides anything. `cuda.core` does the work where it can, `cuda.bindings` where it cannot (both come with
`cuda-python`, the extra `[cuda]`); neither is imported before it is needed. torch's own `green_contexts.create` is
never used: on torch 2.10 to 2.14 two calls give partitions that overlap.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from .planner import Granularity, granularity

GREEN_DRIVER = 12040  # CUDA 12.4: green contexts; several resources of one split in one context


@dataclass(frozen=True)
class Made:
    """A partition that exists."""

    stream: int
    """A CUstream; every kernel on it runs on the partition's SMs."""
    num_sms: int


class Split(Protocol):
    """A GPU cut into slots."""

    num_slots: int
    remainder: int

    def make(self, slots: tuple[int, ...], remainder: bool) -> Made:
        """A stream over these slots, and over the SMs that the slots left over if asked for."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """What partitions need to know and do of a GPU; tests have one without a GPU."""

    index: int
    total_sms: int
    capability: tuple[int, int]
    driver: int
    """CUDA version of the driver, 1000 * major + 10 * minor."""

    def grain(self) -> Granularity: ...
    def split(self, slot: int) -> Split: ...


class CudaDevice:
    """A GPU of this process.

    Raises:
        RuntimeError: no GPU, or no `cuda-python` once a split is asked for.
    """

    def __init__(self, index: int = 0) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(f"no NVIDIA GPU is visible to torch {torch.__version__}")
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.total_sms = properties.multi_processor_count
        self.capability = (properties.major, properties.minor)
        self.driver = _driver_version()

    def grain(self) -> Granularity:
        return granularity(self.capability)

    def split(self, slot: int) -> Split:
        import torch

        torch.cuda.init()
        torch.zeros(1, device=f"cuda:{self.index}")  # the primary context must exist before a green one
        errors = []
        for kind in (_CoreSplit, _BindingsSplit):
            split = None
            try:
                # cuda.core makes its device current; this gives the caller's back.
                with torch.cuda.device(self.index) if torch.backends.cuda.is_built() else nullcontext():
                    split = kind(self.index, slot, self.total_sms)
                # An interface may split and then refuse several groups, or the remainder, in one context: ask now,
                # while the other interface can still take over.
                split.make(tuple(range(min(2, split.num_slots))), split.remainder > 0)
                split.close()
                return split
            except Exception as error:  # a driver may know one interface and not the other
                if split is not None:
                    split.close()
                errors.append(f"{kind.interface}: {type(error).__name__}: {error}")
        raise RuntimeError("SMs could not be split: " + "; ".join(errors))


def _driver_version() -> int:
    """0 if it cannot be asked (cuda-python is missing)."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    return int(_ok(driver.cuDriverGetVersion()))


def _ok(result: tuple) -> Any:
    """The value of a cuda.bindings call.

    Raises:
        RuntimeError: with the driver's name of the error.
    """
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {getattr(error, 'name', error)} ({int(error)})")
    return values[0] if len(values) == 1 else values or None


class _CoreSplit:
    """By cuda.core."""

    interface = "cuda.core"

    def __init__(self, index: int, slot: int, total: int) -> None:
        from cuda.core import ContextOptions, Device, SMResourceOptions

        self._options = ContextOptions
        self._device = Device(index)
        self._device.set_current()
        whole = self._device.resources.sm
        groups, remainder, errors = (), None, []
        for count in range(total // slot, 0, -1):  # it refuses more groups than the die has room for
            try:
                groups, remainder = whole.split(SMResourceOptions(count=[slot] * count))
                break
            except Exception as error:  # cuda.core's CUDAError is no RuntimeError
                errors.append(f"{count}: {type(error).__name__}: {error}")
        if not groups or any(group.sm_count != slot for group in groups):
            raise RuntimeError(f"groups of {slot} SMs asked for, got {[g.sm_count for g in groups]}; refused "
                               f"{errors[:1]}")
        self._groups, self._rest = list(groups), remainder
        self.num_slots = len(self._groups)
        self.remainder = int(getattr(remainder, "sm_count", 0) or 0)
        self._kept: list[Any] = []

    def make(self, slots: tuple[int, ...], remainder: bool) -> Made:
        resources = [self._groups[i] for i in slots]
        if remainder and self.remainder:
            resources.append(self._rest)
        try:
            context = self._device.create_context(self._options(resources=resources))
            stream = context.create_stream()
            self._kept.append((context, stream))
            return Made(int(stream.handle), int(context.resources.sm.sm_count))
        except Exception as error:  # cuda.core's CUDAError is no RuntimeError
            raise RuntimeError(f"cuda.core: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        for context, stream in reversed(self._kept):
            stream.close()
            context.close()
        self._kept = []


class _BindingsSplit:
    """By cuda.bindings: cuDevSmResourceSplitByCount once, then any groups of it in one descriptor."""

    interface = "cuda.bindings"

    def __init__(self, index: int, slot: int, total: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._device = _ok(driver.cuDeviceGet(index))
        whole = _ok(driver.cuDeviceGetDevResource(self._device, self._kind))
        groups, count, rest = _ok(driver.cuDevSmResourceSplitByCount(total // slot, whole, 0, slot))
        self._groups = list(groups)[:int(count)]
        self.num_slots = len(self._groups)
        got = {int(group.sm.smCount) for group in self._groups}
        if got != {slot}:
            raise RuntimeError(f"groups of {slot} SMs asked for, got {sorted(got)}")
        self._rest = rest
        same = int(rest.type) == int(self._kind)
        self.remainder = int(rest.sm.smCount) if same else 0
        self._kept: list[tuple[Any, Any, Any]] = []

    def make(self, slots: tuple[int, ...], remainder: bool) -> Made:
        driver = self._driver
        resources = [self._groups[i] for i in slots]
        if remainder and self.remainder:
            resources.append(self._rest)
        descriptor = _ok(driver.cuDevResourceGenerateDesc(resources, len(resources)))
        context = _ok(driver.cuGreenCtxCreate(descriptor, self._device, 1))  # 1: a default stream, required before 13.1
        stream = _ok(driver.cuGreenCtxStreamCreate(context, 1, 0))  # 1: non-blocking, the only kind there is
        self._kept.append((resources, context, stream))
        granted = _ok(driver.cuGreenCtxGetDevResource(context, self._kind))
        return Made(int(stream), int(granted.sm.smCount))

    def close(self) -> None:
        for _, context, stream in reversed(self._kept):
            self._driver.cuStreamDestroy(stream)
            self._driver.cuGreenCtxDestroy(context)
        self._kept = []
