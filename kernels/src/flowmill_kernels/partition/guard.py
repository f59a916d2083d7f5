"""Finds work on streams that belong to no role: it runs on every SM and breaks everybody's partition.

A torch operation that is dispatched while torch's current stream is none of the partitions' is reported with its call
site. Launches that do not go through torch's dispatcher (a Triton kernel called by hand) are seen only as far as the
tensors they make are torch's. A guard sees the thread that entered it: every thread
enters its own. Where SMs are not partitioned there is nothing to guard, and it lets everything pass.
"""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .partitions import Partitions


class StrayWorkError(RuntimeError):
    """Work on a stream of no role."""


class StreamGuard(TorchDispatchMode):
    """While entered, refuses (or collects) operations on CUDA tensors outside of the partitions' streams.

    Args:
        raises: False collects them in `stray` as "operation at file:line" instead.
        current, on_gpu: How the current stream and a tensor's place are read; for tests.
    """

    def __init__(self, partitions: Partitions, *, raises: bool = True, current: Callable[[], int] | None = None,
                 on_gpu: Callable[[Any], bool] | None = None) -> None:
        super().__init__()
        self._partitions, self._raises = partitions, raises
        self._current = (lambda: torch.cuda.current_stream().cuda_stream) if current is None else current
        self._on_gpu = (lambda t: t.is_cuda) if on_gpu is None else on_gpu
        self.stray: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Views launch nothing; neither does asking for a size.
        if not getattr(func, "is_view", False) and self._touches_gpu(args, kwargs):
            allowed = self._partitions.streams()
            if allowed and self._current() not in allowed:
                place = _call_site()
                self.stray.append(f"{func} at {place}")
                if self._raises:
                    raise StrayWorkError(
                        f"{func} at {place} runs on a stream of no role, so on every SM; put it inside "
                        "partitions.role(...)")
        return func(*args, **kwargs)

    def _touches_gpu(self, args: Any, kwargs: Any) -> bool:
        if any(isinstance(t, torch.Tensor) and self._on_gpu(t) for t in tree_leaves((args, kwargs))):
            return True
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cuda"


def _call_site() -> str:
    """The innermost frame outside of torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith("guard.py"):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
