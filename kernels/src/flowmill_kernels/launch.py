"""Launching a Triton kernel again without asking triton what it already knows.

A launch through triton's own front end binds, specialises and looks up some forty arguments in Python; a block of a
transformer has dozens of launches of a few tens of microseconds each, and the host falls behind the GPU. Here the
first launch under a key goes through triton and leaves a plan: the compiled kernel, the grid and all arguments that
follow from the key. Later ones fill in the tensors. The key must hold everything else that an argument depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# The launcher's calling convention is triton's own affair; this is the version it was read from. Others take the front
# end, which is slower and computes the same.
_KNOWN = triton.__version__.startswith("3.6.")


class _Descriptor:
    """What a launch reads of a tensor descriptor; the checks were made when the plan was."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


class _Plan:
    __slots__ = ("arguments", "descriptors", "grid", "kernel", "pointers")

    def __init__(self, kernel: Any, grid: tuple[int, int, int], arguments: list) -> None:
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.pointers: list[int] = []
        self.descriptors: list[tuple[int, list[int], list[int]]] = []


_PLANS: dict[Hashable, _Plan] = {}
_LIMIT = 20000


def signature(*tensors: Tensor | None) -> tuple:
    """What of the tensors a launch may depend on, apart from where they lie."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])


def launch(kernel: Any, key: Hashable, tensors: tuple[Tensor | None, ...],
           make: Callable[[], tuple[tuple[int, ...], list, dict]]) -> None:
    """Launch `kernel` on the current device and stream.

    Args:
        key: Equal keys mean equal grids, scalars, constants, shapes and strides.
        tensors: The tensors among the kernel's arguments, pointers first and then descriptors' bases, each in order;
            None where the kernel takes none.
        make: ``() -> (grid, arguments, constants)`` for the first launch; arguments hold every non-constant in order.
    """
    if knobs.runtime.interpret:
        grid, arguments, constants = make()
        kernel[grid](*arguments, **constants)
        return
    tensors = tuple([t for t in tensors if t is not None])
    device = driver.active.get_current_device()
    full = (id(kernel), device, key)
    plan = _PLANS.get(full) if _KNOWN else None
    aligned = True
    for t in tensors:
        if t.data_ptr() & 15:  # type: ignore[union-attr]
            aligned = False
            break
    if plan is None or not aligned:
        grid, arguments, constants = make()
        compiled = kernel[grid](*arguments, **constants)
        if _KNOWN and aligned and compiled is not None and len(_PLANS) < _LIMIT:
            _PLANS[full] = _remember(kernel, compiled, grid, arguments, constants)
        return
    arguments = plan.arguments.copy()
    i = 0
    for at in plan.pointers:
        arguments[at] = tensors[i]
        i += 1
    for at, shape, strides in plan.descriptors:
        arguments[at] = _Descriptor(tensors[i], shape, strides)  # type: ignore[arg-type]
        i += 1
    compiled = plan.kernel
    x, y, z = plan.grid
    compiled.run(x, y, z, driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata, None,
                 None, None, *arguments)


def _remember(kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: list, constants: dict) -> _Plan:
    names = kernel.arg_names
    everything = [*arguments, *(constants[name] for name in names[len(arguments):])]
    plan = _Plan(compiled, (*grid, 1, 1)[:3], everything)  # type: ignore[arg-type]
    for at, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            plan.pointers.append(at)
            everything[at] = None
        elif hasattr(value, "base") and hasattr(value, "block_shape"):
            plan.descriptors.append((at, list(value.shape), list(value.strides)))
            everything[at] = None
    return plan
