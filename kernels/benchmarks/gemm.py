"""Speed, bits and error of the GEMMs on the GPU at hand, against cuBLAS in the same run.

    PYTHONPATH=kernels/src python kernels/benchmarks/gemm.py              # everything: the table of kernels/README.md
    PYTHONPATH=kernels/src python kernels/benchmarks/gemm.py speed bits   # some of it

Sections: speed, small, epilogue, bits, error, gradients. Inputs are fresh normal random
numbers; they rotate through several sets, larger together than the L2 cache; outputs are filled with NaN before each
timed call and looked at after it; candidates take turns inside the same seconds, and a figure is the median of their
calls.
"""

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

import flowmill_kernels as fk
from flowmill_kernels.heuristics import CATALOGUE
from flowmill_kernels.shapes import NARROW_SHAPES, ROWS, SHAPES, SM_COUNTS, Shape

DEVICE = "cuda"
Call = Callable[[Tensor, Tensor, Tensor], object]
"""Takes x, w and the output to write."""


def say(line: str) -> None:
    print(line, flush=True)


def weights(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k, device=DEVICE) / math.sqrt(k)).to(dtype)


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, device=DEVICE, dtype=dtype)


def time_calls(shape: Shape, calls: dict[str, Call], *, layout: str = "nt", dtype: torch.dtype = torch.bfloat16,
               budget_s: float = 0.25) -> dict[str, float]:
    """Median milliseconds of each call on one shape; `nn` passes w as [K, N] for an x [M, K]."""
    m, n, k = shape
    item = torch.empty((), dtype=dtype).element_size()
    num_sets = max(2, min(8, -(-256 * 2**20 // (item * (m * k + n * k + m * n)))))
    sets = [(activations(m, k, dtype), weights(n, k, dtype) if layout == "nt" else weights(k, n, dtype),
             torch.empty(m, n, device=DEVICE, dtype=dtype)) for _ in range(num_sets)]
    expected_s = 2 * m * n * k / 600e12
    inner = max(1, min(20, int(0.4e-3 / expected_s)))
    repeats = max(7, min(40, int(budget_s / (expected_s * inner))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):
        # Another order each time: the call before decides how warm and how throttled the GPU is.
        for name, call in random.sample(sorted(calls.items()), len(calls)):
            for *_, y in sets:
                y.fill_(float("nan"))
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The host runs ahead while the GPU sleeps, so that no launch is part of a time.
            torch.cuda._sleep(600_000 * inner)
            start.record()
            for i in range(inner):
                x, w, y = sets[(repeat + i) % num_sets]
                call(x, w, y)
            stop.record()
            stop.synchronize()
            if repeat >= 0:
                times[name].append(start.elapsed_time(stop) / inner)
            if repeat == repeats - 1 and not bool(torch.isfinite(y).all()):
                raise RuntimeError(f"{name} on {shape} left part of its output unwritten")
    return {name: statistics.median(values) for name, values in times.items()}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def cublas(x: Tensor, w: Tensor, y: Tensor) -> None:
    torch.mm(x, w.T, out=y)


def gemm_call(num_sms: int, **options: object) -> Call:
    return lambda x, w, y: fk.gemm_nt(x, w, num_sms=num_sms, out=y, **options)


def speed(num_sms: int) -> dict:
    """`gemm_nt`, `tp_invariant` and dgrad against cuBLAS over SHAPES."""
    rows = {}
    for shape in SHAPES:
        t = time_calls(shape, {"cublas": cublas, "gemm_nt": gemm_call(num_sms),
                               "tp_invariant": gemm_call(num_sms, mode="tp_invariant")})
        d = time_calls(shape, {"cublas": lambda x, w, y: torch.mm(x, w, out=y),
                               "gemm_nn": lambda x, w, y: fk.gemm_nn(x, w, num_sms=num_sms, out=y)}, layout="nn")
        flop = 2 * shape.m * shape.n * shape.k
        rows[str(shape)] = {"cublas_tflops": flop / t["cublas"] / 1e9, "gemm_nt": t["cublas"] / t["gemm_nt"],
                            "tp_invariant": t["cublas"] / t["tp_invariant"], "gemm_nn": d["cublas"] / d["gemm_nn"]}
        say(f"speed {shape!s:18} cublas {t['cublas']:8.3f} ms {rows[str(shape)]['cublas_tflops']:4.0f} TFLOP/s | ratio "
            + "  ".join(f"{name} {rows[str(shape)][name]:.3f}" for name in ("gemm_nt", "tp_invariant", "gemm_nn")))
    means = {name: geometric_mean([row[name] for row in rows.values()])
             for name in ("gemm_nt", "tp_invariant", "gemm_nn")}
    say("speed geometric mean over cuBLAS: " + "  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    return {"rows": rows, "geometric_mean": means}


def small(num_sms: int) -> dict:
    """Few rows."""
    result = {}
    for n, k in ((3072, 3072), (3072, 12288), (12288, 3072), (64, 1536)):
        for m in (1, 64, 577):
            shape = Shape(m, n, k)
            t = time_calls(shape, {"cublas": cublas, "gemm_nt": gemm_call(num_sms),
                                   "tp_invariant": gemm_call(num_sms, mode="tp_invariant")})
            result[str(shape)] = t
            say(f"small {shape!s:16} us: " + "  ".join(f"{name} {1e3 * ms:.1f}" for name, ms in t.items()))
    return result


def epilogue(num_sms: int) -> dict:
    """Fused epilogues against cuBLAS and torch's own elementwise kernels."""
    gelu = torch.nn.functional.gelu
    result = {}
    for shape in (Shape(49984, 6144, 1536), Shape(49984, 1536, 6144)):
        bias = torch.randn(shape.n, device=DEVICE, dtype=torch.bfloat16)
        gate = torch.randn(11, shape.n, device=DEVICE, dtype=torch.bfloat16)  # 49984 = 11 x 4544
        residual = activations(shape.m, shape.n, torch.bfloat16)
        t = time_calls(shape, {
            "cublas": cublas,
            "cublas + gelu": lambda x, w, y, b=bias: y.copy_(gelu(torch.addmm(b, x, w.T), approximate="tanh")),
            "fused gelu": gemm_call(num_sms, bias=bias, activation="gelu_tanh"),
            "cublas + gate": lambda x, w, y, b=bias, g=gate, r=residual: torch.addcmul(
                r.view(11, -1, r.shape[1]), torch.addmm(b, x, w.T).view(11, -1, r.shape[1]), g[:, None],
                out=y.view(11, -1, r.shape[1])),
            "fused gate": gemm_call(num_sms, bias=bias, gate=gate, residual=residual),
        })
        result[str(shape)] = t
        say(f"epilogue {shape!s:16} ms: " + "  ".join(f"{name} {ms:.3f}" for name, ms in t.items()))
    return result


def count_different(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.view(bits) != b.view(bits)).sum())


def bits(num_sms: int, runs: int = 100) -> dict:
    """Differing elements over row counts, positions, SM counts, runs, catalogue tiles and simulated ranks."""
    different, compared = {}, 0
    for n, k in dict.fromkeys((s.n, s.k) for s in (*SHAPES, *NARROW_SHAPES)):
        x, w = activations(max(ROWS), k, torch.bfloat16), weights(n, k, torch.bfloat16)
        shifted = torch.cat((activations(129, k, torch.bfloat16), x))
        for mode in ("consistent", "tp_invariant") if k % 128 == 0 else ("consistent",):
            base = fk.gemm_nt(x, w, num_sms=num_sms, mode=mode)
            bad = dict.fromkeys(("rows", "position", "run", "tile", "spread", "tp"), 0)
            for sms in SM_COUNTS:
                for m in ROWS:
                    bad["rows"] += count_different(fk.gemm_nt(x[:m], w, num_sms=sms, mode=mode), base[:m])
                    compared += m * n
                bad["position"] += count_different(fk.gemm_nt(shifted, w, num_sms=sms, mode=mode)[129:], base)
            out = torch.empty_like(base)
            for _ in range(runs):
                out.fill_(float("nan"))
                bad["run"] += count_different(fk.gemm_nt(x, w, num_sms=num_sms, mode=mode, out=out), base)
                compared += out.numel()
            plan = fk.gemm_nt_schedule(577, n, k, mode=mode)
            for tile in CATALOGUE.values():
                if plan.scheme.num_segments(k) > 1 and tile.block_m * tile.block_n > 128 * 128:
                    continue  # two accumulators of this tile do not fit the registers; no rule returns it here
                other = fk.gemm_nt(x[:577], w, num_sms=num_sms, schedule=dataclasses.replace(plan, tile=tile,
                                                                                             spread=False))
                bad["tile"] += count_different(other, base[:577])
            for spread in (False, True):
                other = fk.gemm_nt(x[:577], w, num_sms=num_sms, schedule=dataclasses.replace(plan, spread=spread))
                bad["spread"] += count_different(other, base[:577])
            if mode == "tp_invariant":
                for ranks in (1, 2, 4, 8):
                    rows = [fk.segment_range(k, rank=r, num_ranks=ranks) for r in range(ranks)]
                    parts = [fk.gemm_nt_partial(x[:577, r.start : r.stop].contiguous(),
                                                w[:, r.start : r.stop].contiguous(), num_ranks=ranks, num_sms=num_sms)
                             for r in rows]
                    row_parallel = fk.combine_partials(parts, dtype=torch.bfloat16, num_sms=num_sms)
                    column_parallel = torch.cat([fk.gemm_nt(x[:577], shard.contiguous(), mode=mode, num_sms=num_sms)
                                                 for shard in w.chunk(ranks)], 1)
                    bad["tp"] += count_different(row_parallel, base[:577])
                    bad["tp"] += count_different(column_parallel, base[:577])
            different[f"{n}x{k} {mode}"] = bad
            say(f"bits N={n} K={k} {mode}: " + "  ".join(f"{name} {count}" for name, count in bad.items()))
        dy = activations(4096, n, torch.bfloat16)
        dgrad = fk.gemm_nn(dy, w, num_sms=num_sms)
        bad = sum(count_different(fk.gemm_nn(dy[:m], w, num_sms=sms), dgrad[:m])
                  for sms in SM_COUNTS for m in ROWS if m <= 4096)
        different[f"{n}x{k} dgrad"] = {"rows": bad}
    total = sum(sum(bad.values()) for bad in different.values())
    say(f"bits: {total} differing elements of more than {compared:.3g} compared (dgrad included)")
    return {"different": total, "cases": different}


def error(num_sms: int) -> dict:
    """Relative Frobenius error against fp64 on the CPU, 24 rows spread over each shape."""
    result = {}
    for shape in SHAPES:
        x, w = activations(shape.m, shape.k, torch.bfloat16), weights(shape.n, shape.k, torch.bfloat16)
        rows = torch.linspace(0, shape.m - 1, 24, device=DEVICE).long()
        exact = x[rows].cpu().double() @ w.cpu().double().T
        result[str(shape)] = {
            "gemm_nt": fk.relative_frobenius_error(fk.gemm_nt(x, w, num_sms=num_sms)[rows].cpu(), exact),
            "tp_invariant": fk.relative_frobenius_error(
                fk.gemm_nt(x, w, num_sms=num_sms, mode="tp_invariant")[rows].cpu(), exact),
            "unrounded": fk.relative_frobenius_error(
                fk.gemm_nt_partial(x, w, num_ranks=1, num_sms=num_sms)[rows].cpu(), exact),
            "cublas": fk.relative_frobenius_error(torch.mm(x, w.T)[rows].cpu(), exact),
        }
        say(f"error {shape!s:18} " + "  ".join(f"{name} {value:.3e}" for name, value in result[str(shape)].items()))
    return result


def gradients(num_sms: int) -> dict:
    """What per-sample gradient sums cost: LoRA-sized and full, beside one cuBLAS wgrad of the whole batch."""
    result = {}
    samples, tokens = 32, 781
    for n, k in ((32, 1536), (1536, 32), (1536, 1536), (6144, 1536)):
        dy = torch.randn(samples, tokens, n, device=DEVICE, dtype=torch.bfloat16)
        x = torch.randn(samples, tokens, k, device=DEVICE, dtype=torch.bfloat16)

        def fixed(dy: Tensor = dy, x: Tensor = x) -> Tensor:
            return fk.leaf_sum(fk.wgrad(dy, x, num_sms=num_sms))

        def vendor(dy: Tensor = dy, x: Tensor = x) -> Tensor:
            return dy.flatten(0, 1).T @ x.flatten(0, 1)

        exact = dy.flatten(0, 1).double().T @ x.flatten(0, 1).double()
        bench = {name: triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")
                 for name, call in (("leaf_sum", fixed), ("cublas", vendor))}
        err = fk.relative_frobenius_error(fixed(), exact)
        fk.assert_bitwise_equal(fixed(), fixed())
        one = torch.cat([fk.wgrad(dy[i : i + 1], x[i : i + 1], num_sms=32) for i in range(samples)])
        fk.assert_bitwise_equal(fk.leaf_sum(one), fixed())
        result[f"{n}x{k}"] = {**bench, "error": err}
        say(f"gradients N={n} K={k}, {samples} samples of {tokens} tokens: leaf_sum {bench['leaf_sum']:.3f} ms, "
            f"cublas {bench['cublas']:.3f} ms, error {err:.2e}; micro-batches 1 = {samples}, SMs 32 = {num_sms}: equal")
    return result


SECTIONS = {"speed": speed, "small": small, "epilogue": epilogue, "bits": bits, "error": error, "gradients": gradients}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help="default: all")
    parser.add_argument("--sms", type=int, help="SMs to use; default: the whole device")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section named {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error(f"needs a GPU: {fk.unavailable_reason('gemm_nt')}")
    properties = torch.cuda.get_device_properties(0)
    num_sms = options.sms or properties.multi_processor_count
    say(f"{properties.name}, {num_sms} SMs, torch {torch.__version__}, triton {triton.__version__}")
    figures = {name: SECTIONS[name](num_sms) for name in (options.sections or SECTIONS)}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1:])
