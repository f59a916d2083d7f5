"""The three places where an operator runs: the CPU back end, Triton's interpreter, a GPU."""

import importlib.util
import os

import pytest
import torch

interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1 in the environment")

PLACES = pytest.mark.parametrize("place", [
    pytest.param(("cpu", "auto", torch.float32), id="cpu"),
    # The interpreter's bf16 products are wrong, so fp16 there.
    pytest.param(("cpu", "triton", torch.float16), id="interpreter", marks=interpreter),
    pytest.param(("cuda", "auto", torch.bfloat16), id="gpu", marks=pytest.mark.gpu),
])
"""(device, backend, dtype)"""

# One rounding is at most 2**-p relative, in the norm below half of that; fp32: sums of a few thousand terms.
ROUNDING = {torch.float32: 3e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
