"""Attention: torch's SDPA back ends and ours, by what they keep of the bits and by speed.

    PYTHONPATH=kernels/src python kernels/benchmarks/attention.py [bits] [speed] [--only NAME ...] [--shapes NAME ...]

`bits` counts elements that differ from a reference call: runs again (forward, backward), sample 0 alone and in smaller
batches, sample 0 with its keys cut to its own length against masked. `speed` gives medians over rounds in which the
candidates take turns on fresh inputs, outputs of earlier rounds being freed; times are the GPU's, by events.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flowmill_kernels.attention import attention

# name: (batch of the forward, of the backward, heads, channels, tokens of each segment)
SHAPES = {"sd35": (64, 32, 24, 64, (576, 205)), "sd35_image": (64, 32, 24, 64, (576,)),
          "flux": (8, 8, 24, 128, (4096, 512))}
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
Call = Callable[..., Any]


def sdpa(name: str, mask: Tensor | None = None) -> Call:
    """softmax(q k^T) v of [B, T, H, D] by one of torch's back ends; `_det`: deterministic algorithms asked for."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPA[name.removesuffix("_det")]):
            return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                mask).transpose(1, 2)

    return call


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, num_sms=132)


def joint(*segments: Tensor) -> tuple[Tensor, Tensor]:
    """Ours over two segments that are never one tensor: q, q2, k, k2, v, v2."""
    q, k, v = segments[:2], segments[2:4], segments[4:]
    image, text = attention(q, k, v, num_sms=132)
    return image, text


def make(batch: int, tokens: int, heads: int, dims: int, seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(batch, tokens, heads, dims, device="cuda", dtype=torch.bfloat16, generator=generator)
            for _ in range(4)]


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


def gradients(call: Call, qkv: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in qkv]
    call(*leaves).backward(weight)
    return [t.grad for t in leaves]  # type: ignore[misc]


def bits(names: list[str]) -> list[str]:
    """One line a back end, each check on its own."""
    batch, batch_b, heads, dims, segments = SHAPES["sd35"]
    tokens, kept = sum(segments), 576 + 77
    *qkv, weight = make(batch, tokens, heads, dims, 0)
    lines = [f"{'back end':14s} {'run fwd':>9s} {'run bwd':>9s} {'batch fwd':>10s} {'batch bwd':>10s} "
             f"{'length fwd':>11s} (differing elements of sample 0; length: its 653 keys alone against 781 masked)"]

    def alone(name: str, call: Call) -> list[str]:
        out: list[str] = []
        first = call(*qkv)
        out.append(str(sum(differing(call(*qkv), first) for _ in range(5))))
        small, w = [t[:batch_b] for t in qkv], weight[:batch_b]
        grads = gradients(call, small, w)
        out.append(str(sum(differing(a, b) for _ in range(5)
                           for a, b in zip(gradients(call, small, w), grads, strict=True))))
        out.append("/".join(str(differing(call(*(t[:n] for t in qkv))[0], first[0])) for n in (1, 2, 8)))
        out.append("/".join(str(sum(differing(a[0], b[0]) for a, b in zip(
            gradients(call, [t[:n] for t in qkv], weight[:n]), grads, strict=True))) for n in (1, 2, 8)))
        return out

    for name in names:
        call = ours if name == "ours" else sdpa(name)
        torch.use_deterministic_algorithms(name.endswith("_det"))
        try:
            cells = alone(name, call)
        except Exception as error:
            cells = [f"{type(error).__name__}: {str(error)[:60]}"]
        torch.use_deterministic_algorithms(False)
        try:
            q, k, v = (t[:2] for t in qkv)
            if name == "ours":
                length = torch.tensor([kept, tokens], dtype=torch.int32, device="cuda")
                masked = attention(q, k, v, lengths=length, num_sms=132)
            else:
                mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device="cuda")
                mask[0, ..., kept:] = False
                masked = sdpa(name, mask.expand(2, heads, tokens, tokens))(q, k, v)
            cells.append(str(differing(masked[0], call(q[:1], k[:1, :kept], v[:1, :kept])[0])))
        except Exception as error:
            cells.append(f"{type(error).__name__}: {str(error)[:40]}")
        lines.append(f"{name:14s} " + " ".join(f"{c:>10s}" for c in cells))
    return lines


def candidates(names: list[str], segments: tuple[int, ...]) -> dict[str, Call]:
    made: dict[str, Call] = {}
    for name in names:
        if name == "joint":
            if len(segments) > 1:
                made[name] = joint
        else:
            made[name] = ours if name == "ours" else sdpa(name)
    return made


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call, the host's part hidden behind a sleep of the GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(8_000_000)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def speed(names: list[str], shape: str, rounds: int) -> list[str]:
    """Forward and backward of every candidate on one shape: milliseconds and TFLOP/s (4 or 10 B H T^2 D)."""
    batch, batch_b, heads, dims, segments = SHAPES[shape]
    tokens = sum(segments)
    times: dict[tuple[str, str], list[float]] = {}
    failed: dict[tuple[str, str], str] = {}
    calls = candidates(names, segments)

    def parts(name: str, tensors: list[Tensor]) -> list[Tensor]:
        return [part.contiguous() for t in tensors for part in t.split(list(segments), 1)] if name == "joint" \
            else tensors

    def forward(name: str, *tensors: Tensor) -> float:
        given = parts(name, list(tensors[:3]))
        with torch.no_grad():
            return timed(lambda: calls[name](*given))

    def backward(name: str, *tensors: Tensor) -> float:
        leaves = [t.detach().requires_grad_() for t in parts(name, list(tensors[:3]))]
        out, weights = calls[name](*leaves), parts(name, [tensors[3]])
        return timed(lambda: torch.autograd.grad(out, leaves, weights))

    for index in range(rounds + 1):
        sets = make(batch, tokens, heads, dims, index)
        for name in calls:
            torch.use_deterministic_algorithms(name.endswith("_det"))
            for kind, run, inputs in (("forward", forward, sets),
                                      ("backward", backward, [t[:batch_b].contiguous() for t in sets])):
                if (name, kind) in failed:
                    continue
                try:
                    taken = run(name, *inputs)
                except Exception as error:
                    failed[name, kind] = f"{type(error).__name__}: {str(error)[:70]}"
                    continue
                if index:  # the first round compiles
                    times.setdefault((name, kind), []).append(taken)
            torch.use_deterministic_algorithms(False)
    lines = []
    for name in calls:
        cells = []
        for kind, size, factor in (("forward", batch, 4), ("backward", batch_b, 10)):
            if (name, kind) in failed:
                cells.append(f"{kind} {failed[name, kind]}")
                continue
            ms = statistics.median(times[name, kind])
            cells.append(f"{kind} {ms:8.4f} ms {factor * size * heads * tokens**2 * dims / ms / 1e9:6.0f} TFLOP/s")
        lines.append(f"{shape:11s} {name:14s} " + "   ".join(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["bits", "speed"])
    parser.add_argument("--only", nargs="*", default=[*SDPA, "flash_det", "cudnn_det", "ours", "joint"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*(attention|SDPA).*")  # why SDPA passes over the other back ends
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"]
    if "bits" in args.what:
        lines += bits([name for name in args.only if name != "joint"])
    if "speed" in args.what:
        for shape in args.shapes:
            names = [name for name in args.only if not (shape == "flux" and name in ("math", "efficient"))]
            lines += speed(names, shape, args.rounds)
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
