"""Speed and bits of gradient sums on the GPU at hand: what a LoRA training step pays for gradients in fixed leaves.

    PYTHONPATH=kernels/src python kernels/benchmarks/gradients.py               # everything
    PYTHONPATH=kernels/src python kernels/benchmarks/gradients.py bits speed    # some of it

Sections: bits, speed, model, tiles. Inputs are fresh normal random numbers in several sets, larger together than the L2
cache; candidates take turns inside the same seconds, and a figure is the median of their calls. `model` is an update of
SD3.5-M's LoRA (rank 32 on 8 linears of 24 layers) by one micro-batch, and what finishing it costs.
"""

import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import flowmill_kernels as fk
from flowmill_kernels import triton_gradients
from flowmill_kernels.collector import GradientLeaves, deliver, deliver_outer
from flowmill_kernels.triton_gradients import Tile, tile_for

DEVICE = "cuda"
SAMPLES = 32
PLAN = fk.LeafPlan(SAMPLES)
LARGE_PLAN = fk.LeafPlan(8 * SAMPLES)  # the samples at hand are then all of one leaf


class Outer(NamedTuple):
    """A weight gradient [n, k] of `SAMPLES` samples of so many tokens."""

    name: str
    n: int
    k: int
    tokens: int

    @property
    def num_bytes(self) -> int:
        """What must be read, bf16."""
        return 2 * SAMPLES * self.tokens * (self.n + self.k)


SHAPES = (
    Outer("A, image", 32, 1536, 576), Outer("B, image", 1536, 32, 576), Outer("A, text", 32, 1536, 205),
    Outer("B, text", 1536, 32, 205), Outer("A of q, k, v", 96, 1536, 576), Outer("A, 781 tokens", 32, 1536, 781),
    Outer("full, 781 tokens", 6144, 1536, 781),
)
Inputs = tuple[Tensor, Tensor]


def say(line: str) -> None:
    print(line, flush=True)


def inputs(shape: Outer) -> Inputs:
    return tuple(torch.randn(SAMPLES, shape.tokens, c, device=DEVICE, dtype=torch.bfloat16)
                 for c in (shape.n, shape.k))  # type: ignore[return-value]


def time_calls(sets: list[Inputs], calls: dict[str, Callable[[Tensor, Tensor], object]], repeats: int = 15
               ) -> dict[str, float]:
    """Median microseconds of each call on the GPU."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    inner = 10
    for repeat in range(-2, repeats):
        for name, call in random.sample(sorted(calls.items()), len(calls)):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The host runs ahead while the GPU sleeps, so that no launch is part of a time.
            torch.cuda._sleep(4_000_000)
            start.record()
            for i in range(inner):
                call(*sets[i % len(sets)])
            stop.record()
            stop.synchronize()
            if repeat >= 0:
                times[name].append(1e3 * start.elapsed_time(stop) / inner)
    return {name: statistics.median(values) for name, values in times.items()}


def rotating(shape: Outer) -> list[Inputs]:
    return [inputs(shape) for _ in range(max(2, -(-200 * 2**20 // shape.num_bytes)))]


def cublas(dy: Tensor, x: Tensor) -> Tensor:
    """One wgrad of the whole batch, in an order of cuBLAS's choice."""
    return torch.mm(dy.flatten(0, 1).T, x.flatten(0, 1))


def bits() -> None:
    """Leaves against fp64, and their bits over micro-batches, schedules, tiles' neighbours and runs."""
    for shape in SHAPES[:-1]:
        dy, x = inputs(shape)
        want = torch.einsum("stn,stk->nk", dy[:4].double(), x[:4].double())
        base, compared, differing = None, 0, 0
        for spread in (None, False, True):
            for micro in (SAMPLES, 1, 3, 8):
                leaves = torch.zeros(8, shape.n, shape.k, device=DEVICE)
                for first in range(0, SAMPLES, micro):
                    rows = slice(first, first + micro)
                    triton_gradients.wgrad_leaves(leaves, dy[rows], x[rows], first, 0, SAMPLES, 8, spread=spread)
                base = leaves if base is None else base
                compared += leaves.numel()
                differing += int((leaves.view(torch.int32) != base.view(torch.int32)).sum())
        assert base is not None
        for _ in range(100):
            leaves = torch.zeros_like(base)
            fk.wgrad_leaves(leaves, dy, x, first_sample=0, plan=PLAN)
            differing += int((leaves.view(torch.int32) != base.view(torch.int32)).sum())
        say(f"bits {shape.name:18} {differing} of {compared + 100 * base.numel()} differ, error "
            f"{fk.relative_frobenius_error(base[0], want):.1e}")


def speed() -> None:
    """Each shape: a copy of the inputs' bytes, cuBLAS, per-sample sums in torch, and ours."""
    for shape in SHAPES:
        leaves = torch.zeros(8, shape.n, shape.k, device=DEVICE)
        calls: dict[str, Callable[[Tensor, Tensor], object]] = {
            "read x": lambda dy, x: x.view(torch.int32).amax(),
            "cublas": cublas,
            "wgrad_leaves": lambda dy, x, o=leaves: fk.wgrad_leaves(o, dy, x, first_sample=0, plan=PLAN),
            "one leaf": lambda dy, x, o=leaves: fk.wgrad_leaves(o, dy, x, first_sample=0, plan=LARGE_PLAN),
            "4 samples": lambda dy, x, o=leaves: fk.wgrad_leaves(o, dy[:4], x[:4], first_sample=0, plan=PLAN),
        }
        if shape.n * shape.k < 2**20:
            calls["LeafSum"] = lambda dy, x: fk.leaf_sum(fk.wgrad(dy, x, num_sms=132))
        t = time_calls(rotating(shape), calls, 15 if shape.n < 4096 else 5)
        say(f"speed {shape.name:18} us: " + "  ".join(f"{name} {us:.1f}" for name, us in t.items())
            + f"  ({shape.num_bytes / t['wgrad_leaves'] / 1e6:.2f} TB/s)")
    for count in (1536, 9216):
        per_sample, leaves = torch.randn(SAMPLES, count, device=DEVICE), torch.zeros(8, count, device=DEVICE)
        t = time_calls([(per_sample, leaves)],
                       {"add_leaves": lambda a, o: fk.add_leaves(o, a, first_sample=0, plan=PLAN)})
        say(f"speed add_leaves [{SAMPLES}, {count}]: {t['add_leaves']:.1f} us")


def tiles() -> None:
    """Tiles and schedules of the two LoRA shapes; all give the bits of the default."""
    for shape in (*SHAPES[:2], SHAPES[4], SHAPES[6]):
        default, calls, same = tile_for(shape.n, shape.k), {}, {}
        sets = rotating(shape)
        base = torch.zeros(8, shape.n, shape.k, device=DEVICE)
        fk.wgrad_leaves(base, *sets[0], first_sample=0, plan=PLAN)
        for wide, warps in ((32, 4), (64, 4), (128, 4), (128, 8)):
            for stages in (3, 4, 6, 8):
                for spread in (False, True):
                    large = shape.n >= 4096
                    if large and (spread or wide < 128 or stages > 4):
                        continue
                    tile = dataclasses.replace(default, wide=wide, num_warps=warps, num_stages=stages)
                    name = f"{wide}x{tile.narrow} w{warps} s{stages} {'spread' if spread else 'one pass'}"
                    leaves = torch.zeros_like(base)

                    def call(dy: Tensor, x: Tensor, o: Tensor = leaves, t: Tile = tile, s: bool = spread) -> None:
                        triton_gradients.wgrad_leaves(o, dy, x, 0, 0, SAMPLES, 8, tile=t, spread=s)

                    try:
                        call(*sets[0])
                        torch.cuda.synchronize()
                    except Exception as error:  # a tile that does not fit is a result here
                        say(f"tiles {shape.name}: {name} {type(error).__name__}")
                        continue
                    same[name] = torch.equal(leaves, base)
                    calls[name] = call
        t = time_calls(sets, calls, 3)
        best = sorted(t, key=lambda name: t[name])
        shown = best if shape.n >= 4096 else best[:9]
        say(f"tiles {shape.name} us: " + "; ".join(f"{name} {t[name]:.1f}" for name in shown)
            + f" | bits as the default: {sum(same.values())} of {len(same)}, not "
            + str([name for name, equal in same.items() if not equal]))


def model() -> None:
    """SD3.5-M's LoRA: 384 gradients of one micro-batch, then finish; GPU time and the host's."""
    layers, per_layer = 24, 4
    shapes = [(32, 1536, t) for t in (576, 205) for _ in range(per_layer)]
    parameters = [torch.nn.Parameter(torch.zeros(s, device=DEVICE)) for n, k, _ in shapes * layers
                  for s in ((n, k), (k, n))]
    x = {t: torch.randn(SAMPLES, t, 1536, device=DEVICE, dtype=torch.bfloat16) for t in (576, 205)}
    h = {t: torch.randn(SAMPLES, t, 32, device=DEVICE, dtype=torch.bfloat16) for t in (576, 205)}
    collector = GradientLeaves(parameters, PLAN)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    rows = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        events[0].record()
        with collector:
            events[1].record()
            host = time.perf_counter()
            with collector.micro_batch(0, SAMPLES):
                for i, (_, _, t) in enumerate(shapes * layers):
                    deliver_outer(parameters[2 * i], h[t], x[t])
                    deliver_outer(parameters[2 * i + 1], x[t], h[t])
            host = time.perf_counter() - host
            events[2].record()
            collector.finish()
            events[3].record()
        torch.cuda.synchronize()
        rows.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), 1e3 * host,
                     events[2].elapsed_time(events[3]), 1e3 * (time.perf_counter() - began)))
    enter, collect, host, finish, total = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    size = sum(p.numel() for p in parameters)
    say(f"model {len(parameters)} gradients, {size / 1e6:.1f} M parameters, ms: enter {enter:.2f}  collect "
        f"{collect:.2f} (host {host:.2f})  finish {finish:.2f}  all {total:.2f}; leaves {8 * 4 * size / 1e6:.0f} MB")
    w, dy = parameters[0], h[576]
    t = time_calls([(dy, x[576])], {"deliver_outer": lambda dy, x: deliver_outer(w, dy, x),
                                    "deliver": lambda dy, x: deliver(w, torch.zeros(1, *w.shape, device=DEVICE))})
    say("model without a collector, us a gradient: " + "  ".join(f"{name} {us:.1f}" for name, us in t.items()))


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {SAMPLES} samples")
    sections = {"bits": bits, "speed": speed, "model": model, "tiles": tiles}
    for name in sys.argv[1:] or sections:
        sections[name]()


if __name__ == "__main__":
    main()
