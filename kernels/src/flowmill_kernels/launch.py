"""Launching Triton kernels again without asking triton what it already knows.

A launch through triton's own front end binds, specialises and looks up some forty arguments in Python, and operators
check shapes around it; together that is a tenth of a millisecond, and a transformer's backward has thousands of
launches: the host would fall behind the GPU. So an operator that is called again with tensors of the same shapes,
strides and types replays its tape: which kernels it launched, with which scalars, and which argument was which tensor.
Only addresses are new. The first call under a key goes the slow way and makes the tape.

The launcher's calling convention is triton's own affair; tapes are kept for the version that it was read from. Other
versions, interpreted kernels and tensors that are not aligned to 16 bytes take the front end: slower, the same bits.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_KNOWN = triton.__version__.startswith("3.6.")
_LIMIT = 20000
_TAPES: dict[Hashable, "Tape"] = {}
_PLANS: dict[Hashable, tuple] = {}


def signature(*tensors: Tensor | None) -> tuple:
    """What of the tensors a launch may depend on, apart from where they lie."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])


class _Recorder(threading.local):
    """Launches of the operator that is being recorded in this thread; None where none is."""

    launches: list | None = None
    spoilt = False


_RECORDER = _Recorder()


class _Thread(threading.local):
    """GPUs whose context this thread has made current."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_THREAD = _Thread()


def _bind(device: int) -> None:
    """Make the GPU's context current in this thread, once: torch does it at a thread's first call into CUDA, but a
    replayed launch may come before any, and the driver's own calls then find no context."""
    if device not in _THREAD.devices:
        torch.cuda.mem_get_info(device)
        _THREAD.devices.add(device)


def launch(kernel: Any, key: Hashable, tensors: tuple[Tensor | None, ...],
           make: Callable[[], tuple[tuple[int, ...], list, dict]]) -> None:
    """Launch `kernel` on the tensors' device and its current stream.

    Args:
        key: Equal keys mean equal grids, scalars, constants, shapes and strides.
        tensors: The tensors among the kernel's arguments, pointers first and then descriptors' bases, each in order;
            None where the kernel takes none.
        make: ``() -> (grid, arguments, constants)`` for the first launch; arguments hold every non-constant in order.
    """
    where = next(t.device for t in tensors if t is not None)
    if where.type == "cuda" and where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            launch(kernel, key, tensors, make)
        return
    fast = _KNOWN and _RECORDER.launches is None and not knobs.runtime.interpret
    addresses: list[int] = []
    if fast:
        addresses = [t.data_ptr() for t in tensors if t is not None]
        device = driver.active.get_current_device()
        full = (id(kernel), device, key)
        for address in addresses:
            if address & 15:
                fast = False
                break
        else:
            _bind(device)
            if (plan := _PLANS.get(full)) is not None:
                _start(plan, addresses, driver.active.get_current_stream(device))
                return
    grid, arguments, constants = make()
    compiled = kernel[grid](*arguments, **constants)
    if _RECORDER.launches is not None:
        _RECORDER.launches.append((kernel, compiled, grid, arguments, constants))
    elif fast:
        if len(_PLANS) >= _LIMIT:
            _PLANS.clear()
        numbers = iter(range(len(addresses)))
        described = [value.base for value in arguments if hasattr(value, "block_shape")]
        first = len(addresses) - len(described)
        later = iter(range(first, len(addresses)))
        plan = _flatten(kernel, compiled, grid, arguments, constants, lambda _: next(numbers), lambda _: next(later))
        if plan is not None:
            _PLANS[full] = plan


def _start(plan: tuple, addresses: list[int], stream: int) -> None:
    start, template, pointers, descriptors = plan
    arguments = template.copy()
    arguments[3] = stream
    for at, source in pointers:
        arguments[at] = addresses[source]
    if descriptors:
        fill = driver.active.utils.fill_tma_descriptor
        for at, source, *how in descriptors:
            arguments[at] = fill(addresses[source], *how)
    start(*arguments)


def replay(key: Hashable, inputs: tuple[Tensor | None, ...], run: Callable[[], Any]) -> Any:
    """``run()``, or the same launches once more.

    Args:
        key: Equal keys mean equal grids, scalars and constants, given equal shapes, strides and types of `inputs`.
        inputs: Every tensor that `run` reads or writes and did not make itself.
        run: Starts kernels by `launch` alone, touches no tensor otherwise but to make it, and returns a tensor that it
            made, a tuple of such (or None), or None.
    """
    if not _KNOWN or knobs.runtime.interpret:
        return run()
    where = next(t.device for t in inputs if t is not None)
    if where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            return replay(key, inputs, run)
    device = driver.active.get_current_device()
    full = (key, device, signature(*inputs))
    tape = _TAPES.get(full)
    addresses = [t.data_ptr() for t in inputs if t is not None]
    for address in addresses:
        if address & 15:
            return run()
    if _RECORDER.launches is not None:
        return run()  # inside another operator, whose tape these launches belong to
    if tape is not None:
        _bind(device)
        return tape.play(addresses, device)
    if len(set(addresses)) != len(addresses) or 0 in addresses:
        return run()  # arguments that cannot be told apart this time
    _RECORDER.launches, _RECORDER.spoilt = [], False
    try:
        result = run()
        launches, spoilt = _RECORDER.launches, _RECORDER.spoilt
    finally:
        _RECORDER.launches = None
    if len(_TAPES) >= _LIMIT:  # rather forget what was than never learn what is
        _TAPES.clear()
    if not spoilt and (tape := Tape.record(launches, addresses, result)) is not None:
        _TAPES[full] = tape
    return result


def do_not_replay() -> None:
    """Said by an operator that touches a tensor without a launch (a copy): what is being recorded is then no tape."""
    _RECORDER.spoilt = True


class Tape:
    """The launches of one operator call."""

    __slots__ = ("allocations", "launches", "result")

    def __init__(self, launches: list, allocations: list, result: Any) -> None:
        self.launches, self.allocations, self.result = launches, allocations, result

    def play(self, addresses: list[int], device: int) -> Any:
        made = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype, where in self.allocations]
        addresses = addresses + [t.data_ptr() for t in made]
        stream = driver.active.get_current_stream(device)
        for plan in self.launches:
            _start(plan, addresses, stream)
        if isinstance(self.result, tuple):
            return tuple([None if i is None else made[i] for i in self.result])
        return None if self.result is None else made[self.result]

    @staticmethod
    def record(launches: list, addresses: list[int], result: Any) -> "Tape | None":
        """The tape of these launches; None if something in them is not understood."""
        places = {address: i for i, address in enumerate(addresses)}
        allocations: list[tuple] = []

        def place(t: Tensor) -> int | None:
            """Number of the tensor at this address; what `run` made must be whole and contiguous."""
            if t.data_ptr() in places:
                return places[t.data_ptr()]
            if not t.is_contiguous() or t.storage_offset() or t.data_ptr() & 15:
                return None
            places[t.data_ptr()] = len(addresses) + len(allocations)
            allocations.append((tuple(t.shape), t.dtype, t.device))
            return places[t.data_ptr()]

        # Results first: a tensor is made in the shape in which it is returned, whatever view a kernel took of it.
        results = result if isinstance(result, tuple) else (result,)
        numbers = [None if t is None else place(t) for t in results]
        if any(t is not None and (n is None or n < len(addresses)) for t, n in zip(results, numbers, strict=True)):
            return None
        made = [None if n is None else n - len(addresses) for n in numbers]
        taped = [_flatten(*one, place, place) for one in launches]
        if any(one is None for one in taped):
            return None
        return Tape(taped, allocations, tuple(made) if isinstance(result, tuple) else made[0])


def _flatten(kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: list, constants: dict,
             place: Callable[[Tensor], int | None], place_base: Callable[[Tensor], int | None]) -> tuple | None:
    """(C launcher, its arguments, where addresses go, where and how tensor maps go)."""
    from triton.backends.nvidia import driver as nvidia

    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    names = kernel.arg_names
    everything = [*arguments, *(constants[name] for name in names[len(arguments):])]
    described = [value for value in arguments if hasattr(value, "block_shape")]
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
    start = launcher.launch
    if described:
        if len(metadata) != len(described) or any(one is None for one in metadata):
            return None
        cells = dict(zip(start.__code__.co_freevars, start.__closure__, strict=True))
        start = cells["launcher"].cell_contents
    x, y, z = (*grid, 1, 1)[:3]
    template: list[Any] = [x, y, z, 0, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None,
                           None, compiled.packed_metadata, None, None, None]
    pointers, descriptors = [], []
    for value in everything:
        if isinstance(value, Tensor):
            source = place(value)
            if source is None:
                return None
            pointers.append((len(template), source))
            template.append(0)
        elif hasattr(value, "block_shape"):
            how = metadata[len(descriptors)]
            source = place_base(value.base)
            if source is None or how["fp4_padded"] or value.padding != "zero":
                return None
            shape, strides = list(value.shape), list(value.strides)
            kind = nvidia.TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]]
            descriptors.append((len(template), source, how["swizzle"], how["elem_size"], kind, how["block_size"], shape,
                                strides, 0))
            template += [None, *shape, *strides]
        else:
            template.append(value)
    return start, template, pointers, descriptors
