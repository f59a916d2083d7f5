"""Makes `flowmill_kernels` importable from the source tree, and names what a machine lacks."""

import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[2] / "kernels" / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu() -> torch.device:
    from flowmill_kernels import unavailable_reason

    if (reason := unavailable_reason("gemm_nt")) is not None or not torch.cuda.is_available():
        pytest.skip(reason or "no GPU: triton runs its interpreter")
    return torch.device("cuda")
