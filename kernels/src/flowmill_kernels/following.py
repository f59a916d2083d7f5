"""Kernels that come up while the kernel before them ends: programmatic dependent launch, compute capability 9.0 on.

A training step is thousands of kernels, and between two of them a GPU is idle for some microseconds: the next one's
programs are placed, set up their barriers and fetch their descriptors. A kernel that calls `follow` before it touches
memory, and is marked `follows`, does all that while the kernel before it still runs. Its own memory accesses begin when
that one has finished, so no result changes.
"""

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it)
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import current_target

Kernel = TypeVar("Kernel")
_MARKED: set[Any] = set()
_CAPABLE: dict[torch.device, bool] = {}


@triton.constexpr_function
def can_follow():
    """Whether the kernel that is being compiled can."""
    if knobs.runtime.interpret:
        return False
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 90


@triton.jit
def follow():
    """Wait for the kernel before to finish, then let the next one come up; before the first access to memory."""
    if can_follow():
        gdc_wait()
        gdc_launch_dependents()


def follows(kernel: Kernel) -> Kernel:
    """Mark a kernel that calls `follow`: `launch` then starts it early."""
    _MARKED.add(kernel.fn)  # type: ignore[attr-defined]
    return kernel


def options(kernel: Any, device: torch.device) -> dict[str, bool]:
    """What to launch the kernel with, beside its own options."""
    if kernel.fn not in _MARKED or device.type != "cuda":
        return {}
    if (capable := _CAPABLE.get(device)) is None:
        capable = _CAPABLE[device] = torch.cuda.get_device_capability(device)[0] >= 9
    return {"launch_pdl": True} if capable else {}
