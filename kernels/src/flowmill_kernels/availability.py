"""Whether a kernel's fast form runs on this machine, and if not, why. Nothing is imported or decided at import."""

import functools
import importlib.util

from .guarantees import GUARANTEES

# Plain torch on any device: never unavailable.
_PLAIN = {"leaf_sum"}


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_reason() -> str | None:
    """Why the Triton back end cannot run here; None if it can."""
    if not _installed():
        return "triton is not installed (pip install 'triton>=3.6,<3.10', Linux only)"
    try:
        from triton import knobs
    except Exception as error:  # a broken triton must not take the CPU path down with it
        return f"triton is installed but does not import: {type(error).__name__}: {error}"
    if knobs.runtime.interpret:
        return None
    import torch

    if not torch.cuda.is_available():
        return f"no NVIDIA GPU is visible to torch {torch.__version__}"
    major, minor = _capability(torch.cuda.current_device())
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}; bf16 tensor cores need 8.0 or newer"
    return None


def _partition_reason() -> str | None:
    """Why SM partitions cannot be made here; the ladder of `flowmill_kernels.partition` then takes another rung."""
    import torch

    if not torch.cuda.is_available():
        return f"no NVIDIA GPU is visible to torch {torch.__version__}"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-python is not installed (pip install 'flowmill-kernels[cuda]')"
    return None


def unavailable_reason(name: str) -> str | None:
    """Say why the fast form of kernel `name` (or `partition`) is unavailable here; None if it is available.

    The operator itself still works where this is not None: on CPU tensors it takes the CPU back end.

    Raises:
        KeyError: for a name that is no kernel of this package; the message lists the names.
    """
    if name == "partition":
        return _partition_reason()
    if name not in GUARANTEES:
        raise KeyError(f"no kernel named {name!r}; there are {', '.join(sorted(GUARANTEES))}")
    return None if name in _PLAIN else triton_reason()
