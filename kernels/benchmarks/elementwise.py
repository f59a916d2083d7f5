"""Memory speed of the row and elementwise operators, forward and backward, against a device copy in the same run.

    PYTHONPATH=kernels/src python kernels/benchmarks/elementwise.py [speed] [host]

`speed`: GB/s of bytes that must move (each input read once, each output written once) and its share of the copy's, for
SD3.5-M's streams: 64 samples of 576 image or 205 text tokens, 1536 channels, bf16, and a vocabulary of 128256. Inputs
are fresh random numbers, rotated through sets larger together than the L2 cache; figures are medians; launches are
hidden behind a sleep of the GPU. `host`: microseconds that a call costs the host.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flowmill_kernels import elementwise as ew
from flowmill_kernels import triton_elementwise as te

DEVICE, DTYPE = "cuda", torch.bfloat16
BATCH, CHANNELS, HEADS = 64, 1536, 24
Case = tuple[Callable[..., object], Callable[[], tuple], int]
"""The call, what makes its arguments, and the bytes it must move."""


def say(line: str) -> None:
    print(line, flush=True)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def cases(batch: int, tokens: int, channels: int, heads: int) -> dict[str, Case]:
    """Every operator at one shape: `x` is one [batch, tokens, channels] tensor's bytes."""
    x = batch * tokens * channels * DTYPE.itemsize
    dims = channels // heads
    shape = batch, tokens, channels

    def full() -> Tensor:
        return random(*shape)

    def packed() -> tuple[Tensor, Tensor]:
        buffer = random(batch, tokens, 3, heads, dims)
        return buffer[:, :, 0], buffer[:, :, 1]

    def rows() -> Tensor:
        return random(batch, 6 * channels)[:, channels:2 * channels]

    def table() -> tuple[Tensor, Tensor]:
        return random(tokens, dims // 2, dtype=torch.float32), random(tokens, dims // 2, dtype=torch.float32)

    def norm_backward(x: Tensor, dy: Tensor, scale: Tensor) -> object:
        return te.norm_modulate_backward(dy, None, x, scale, None, None, 1e-6, None, False)

    def pair_backward(qk: tuple[Tensor, Tensor], dys: tuple[Tensor, Tensor], w: Tensor, rope: tuple | None) -> None:
        outs = tuple(torch.empty_like(dy) for dy in dys)
        te.rms_rope(qk, (w, w), 1e-6, rope, False, False, True, outs, dys)

    def pair(qk: tuple[Tensor, Tensor], w: Tensor, rope: tuple | None) -> object:
        return ew.qk_norm_rope_pair(*qk, w, w, eps=1e-6, rope=rope)

    def dys() -> tuple[Tensor, Tensor]:
        return random(batch, tokens, heads, dims), random(batch, tokens, heads, dims)

    return {
        "copy": (lambda a, b: b.copy_(a), lambda: (full(), full()), 2 * x),
        "layer_norm_modulate": (ew.layer_norm_modulate, lambda: (full(), rows(), rows()), 2 * x),
        "layer_norm_modulate, twice": (lambda a, s: ew.layer_norm_modulate(a, s, s, scale2=s, shift2=s),
                                       lambda: (full(), rows()), 3 * x),
        "layer_norm_modulate, backward": (norm_backward, lambda: (full(), full(), rows()), 3 * x),
        "rms_norm": (lambda a, w: ew.rms_norm(a, w, eps=1e-6), lambda: (full(), random(channels)), 2 * x),
        "qk_norm_rope_pair": (pair, lambda: (packed(), random(dims), table()), 4 * x),
        "qk_norm_rope_pair, no rope": (pair, lambda: (packed(), random(dims), None), 4 * x),
        "qk_norm_rope_pair, backward": (pair_backward, lambda: (packed(), dys(), random(dims), table()), 6 * x),
        "qk_norm_rope all": (lambda a, w, r: ew.qk_norm_rope(a, w, eps=1e-6, rope=r, norm="all"),
                             lambda: (packed()[0], random(channels), table()), 2 * x),
        "gelu_tanh": (ew.gelu_tanh, lambda: (full(),), 2 * x),
        "gelu_tanh, backward": (ew.gelu_tanh_backward, lambda: (full(), full()), 3 * x),
        "gelu": (ew.gelu, lambda: (full(),), 2 * x),
        "silu": (ew.silu, lambda: (full(),), 2 * x),
        "swiglu": (ew.swiglu, lambda: (full(), full()), 3 * x),
        "swiglu, of a packed buffer": (lambda a: ew.swiglu(*a.chunk(2, -1)),
                                       lambda: (random(batch, tokens, 2 * channels),), 3 * x),
        "swiglu, backward": (lambda a, b, c: te.pointwise_backward("swiglu", a, b, c), lambda: (full(), full(), full()),
                             5 * x),
        "gated_residual": (ew.gated_residual, lambda: (full(), rows(), full()), 3 * x),
        "scale_by_gate": (ew.scale_by_gate, lambda: (full(), rows()), 2 * x),
        "column_sum": (ew.column_sum, lambda: (full(),), x),
        "gate_gradient": (ew.gate_gradient, lambda: (full(), full()), 2 * x),
        "add": (ew.add, lambda: (full(), full()), 3 * x),
        "mean": (lambda a: ew.mean(a, 2), lambda: (full(),), x),
        "log_softmax": (ew.log_softmax, lambda: (full(),), 2 * x),
        "log_softmax, backward": (lambda d, a, lse: te.log_softmax_backward(d, a, lse),
                                  lambda: (full().flatten(0, 1), full().flatten(0, 1),
                                           random(batch * tokens, dtype=torch.float32)), 3 * x),
    }


def microseconds(case: Case, repeats: int = 7) -> float:
    call, make, moved = case
    sets = [make() for _ in range(max(2, min(6, -(-200 * 2**20 // moved))))]
    inner = max(4, min(20, int(600e-6 / (moved / 4e12))))
    times = []
    for repeat in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(300_000 * inner)  # the host runs ahead meanwhile
        start.record()
        for i in range(inner):
            call(*sets[(repeat + i) % len(sets)])
        stop.record()
        stop.synchronize()
        if repeat:
            times.append(1e3 * start.elapsed_time(stop) / inner)
    return statistics.median(times)


def speed(batch: int, tokens: int, channels: int, heads: int) -> None:
    table = cases(batch, tokens, channels, heads)
    copy = table["copy"][2] / microseconds(table["copy"]) / 1e3
    say(f"\n{batch} x {tokens} x {channels} bf16; copy {copy:.0f} GB/s")
    say(f"{'operator':34s} {'us':>8s} {'GB/s':>7s} {'of copy':>8s}")
    for name, case in table.items():
        try:
            us = microseconds(case)
            rate = case[2] / us / 1e3
            say(f"{name:34s} {us:8.1f} {rate:7.0f} {rate / copy:8.2f}")
        except Exception as error:
            say(f"{name:34s} failed: {type(error).__name__}: {str(error)[:200]}")


def vocabulary(rows: int = 1024, words: int = 128256) -> None:
    copy = microseconds((lambda a, b: b.copy_(a), lambda: (random(rows, words), random(rows, words)),
                         4 * rows * words))
    us = microseconds((ew.log_softmax, lambda: (random(rows, words),), 4 * rows * words))
    back = microseconds((lambda d, a, lse: te.log_softmax_backward(d, a, lse), lambda: (
        random(rows, words), random(rows, words), random(rows, dtype=torch.float32)), 6 * rows * words))
    say(f"\nlog_softmax {rows} x {words} bf16: {us:.0f} us forward, {back:.0f} us backward; copy {copy:.0f} us")


def host(calls: int = 300) -> None:
    say("\nhost time of a call (us), small tensors")
    for name, (call, make, _) in cases(1, 16, CHANNELS, HEADS).items():
        arguments = make()
        for _ in range(20):
            call(*arguments)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(*arguments)
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        say(f"{name:34s} {1e6 * spent / calls:8.1f}")


def main() -> None:
    wanted = sys.argv[1:] or ["speed", "host"]
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {te.triton.__version__}")
    if "speed" in wanted:
        speed(BATCH, 576, CHANNELS, HEADS)
        speed(BATCH, 205, CHANNELS, HEADS)
        speed(8, 4608, 3072, 24)
        vocabulary()
    if "host" in wanted:
        host()


if __name__ == "__main__":
    main()
