"""The CPU back end: the same operators in plain torch, slow and in a fixed order; everything then runs without a GPU.

Matrix products of a CPU library choose blocks by the number of rows, so none is called: K is walked one index at a
time with elementwise operations, which treat every element alike. Each product and each sum is its own operation;
a compiler then has no multiply-add to fuse in a vector's body and not in its tail.
"""

import torch
from torch import Tensor

from .heuristics import Layout
from .schemes import Epilogue, Scheme, combine


def partial_sums(x: Tensor, w_kn: Tensor, scheme: Scheme) -> Tensor:
    """fp32 [segments, M, N]: x [M, K] @ w_kn [K, N] over each K segment, in K order."""
    k = x.shape[1]
    parts = []
    for start in range(0, k, scheme.segment_k):
        acc = torch.zeros((x.shape[0], w_kn.shape[1]), dtype=torch.float32)
        for i in range(start, min(start + scheme.segment_k, k)):
            acc += x[:, i : i + 1] * w_kn[i]
        parts.append(acc)
    return torch.stack(parts) if parts else torch.zeros((1, x.shape[0], w_kn.shape[1]))


def finish(total: Tensor, epilogue: Epilogue, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None,
           dtype: torch.dtype) -> Tensor:
    """The epilogue of an fp32 sum on any device, and its one rounding."""
    if epilogue.bias:
        total = total + bias.float()
    if epilogue.activation == "gelu_tanh":
        u = 0.7978845608028654 * (total + 0.044715 * (total * total * total))
        total = 0.5 * total * (2.0 - 2.0 / (torch.exp(2.0 * u) + 1.0))
    if epilogue.gate:
        total = total * gate.float().repeat_interleave(total.shape[0] // gate.shape[0], 0)
    if epilogue.residual:
        total = residual.float() + total
    return total.to(dtype)


def gemm(x: Tensor, w: Tensor, y: Tensor, *, layout: Layout, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
         gate: Tensor | None, residual: Tensor | None) -> None:
    """Write epilogue(x @ w.T) (`nt`) or epilogue(x @ w) (`nn`) to y; an fp32 y of fp32 sums stays unrounded."""
    w_kn = (w.T if layout == "nt" else w).float().contiguous()
    total = combine(partial_sums(x.float(), w_kn, scheme).unbind(), scheme.order)
    y.copy_(finish(total, epilogue, bias, gate, residual, y.dtype))


def add_partials(partials: Tensor, y: Tensor, *, scheme: Scheme, epilogue: Epilogue, bias: Tensor | None,
                 gate: Tensor | None, residual: Tensor | None) -> None:
    """Write epilogue(sum of fp32 partials [P, M, N] in the scheme's order) to y."""
    y.copy_(finish(combine(partials.unbind(), scheme.order), epilogue, bias, gate, residual, y.dtype))


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """fp32 [S, N, K]: every sample's dy.T @ x, tokens in order."""
    samples, tokens, n = dy.shape
    dw = torch.zeros((samples, n, x.shape[2]), dtype=torch.float32)
    dy, x = dy.float(), x.float()
    for t in range(tokens):
        dw += dy[:, t, :, None] * x[:, t, None, :]
    return dw
