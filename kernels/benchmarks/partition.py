"""What roles cost each other on one GPU: bursts of small kernels (a reward) beside a saturating bf16 GEMM (a rollout).

    PYTHONPATH=kernels/src python kernels/benchmarks/partition.py [--seconds 1.5] [--no-mps] [--out table.json]

One process: each alone, together on plain streams, with priority, on an SM partition (96 + 36 of 132 SMs where the
driver's split has them; the granted sizes are printed first). Two processes: without MPS and with it, each alone and
together; the MPS daemon is started with directories of its own and told to quit at the end. Prints the table and two
figures: p95 of the bursts, plain / partitioned, and partitioned / alone (alone on the whole GPU, and alone on the
partition). Together means together: the GEMM runs from before the first burst until after the last. A part that fails
costs its own rows only. No setting of the GPU is changed.
The parent process never touches the GPU: its context would take turns with the others'.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

SIZE = 8192
BURST = 12  # small products, each followed by an elementwise kernel
LEAST_BURSTS = 200  # for a p95


def loads(seconds: float) -> tuple[Callable, Callable, Callable]:
    """(GEMM loop by cuBLAS, the same by gemm_nt, bursts): each takes a stream (and an SM count) and returns figures."""
    import torch

    from flowmill_kernels import gemm_nt

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c, small = torch.empty_like(a), torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(small)
    torch.cuda.synchronize()

    def loop(stream: torch.cuda.Stream, work: Callable[[], object], stop: Callable[[], bool] | None) -> dict:
        """Until `stop` says so; None: for `seconds`."""
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            events, count, start = [], 0, time.perf_counter()
            while time.perf_counter() - start < seconds if stop is None else not stop():
                work()
                count += 1
                events.append(torch.cuda.Event())
                events[-1].record(stream)
                if len(events) > 3:  # a queue that is short and never empty
                    events.pop(0).synchronize()
            stream.synchronize()
            return {"tflops": 2 * SIZE**3 * count / (time.perf_counter() - start) / 1e12}

    def cublas(stream: torch.cuda.Stream, num_sms: int, stop: Callable[[], bool] | None = None) -> dict:
        return loop(stream, lambda: torch.mm(a, b, out=c), stop)

    def ours(stream: torch.cuda.Stream, num_sms: int, stop: Callable[[], bool] | None = None) -> dict:
        return loop(stream, lambda: gemm_nt(a, b, num_sms=num_sms, out=c), stop)

    def bursts(stream: torch.cuda.Stream, num_sms: int, stop: Callable[[], bool] | None = None) -> dict:
        times: list[float] = []
        with torch.cuda.stream(stream):
            torch.mm(small, small, out=out)
            stream.synchronize()
            start = time.perf_counter()
            while time.perf_counter() - start < seconds or len(times) < LEAST_BURSTS:
                before = time.perf_counter()
                for _ in range(BURST):
                    torch.mm(small, small, out=out)
                    out.mul_(0.5)
                stream.synchronize()
                times.append((time.perf_counter() - before) * 1e3)
                time.sleep(0.001)
                if time.perf_counter() - start > 4 * seconds:
                    break
        times.sort()
        return {"n": len(times), "p50": statistics.median(times), "p95": times[int(0.95 * (len(times) - 1))]}

    return cublas, ours, bursts


def together(one: Callable[[Callable[[], bool]], dict], other: Callable[[], dict]) -> dict:
    """Both at once; A starts first and ends when B has.

    Raises:
        RuntimeError: A failed, so B was alone.
    """
    results: dict[str, dict] = {}
    over = threading.Event()
    thread = threading.Thread(target=lambda: results.update(A=one(over.is_set)))
    thread.start()
    try:
        time.sleep(0.1)
        results["B"] = other()
    finally:
        over.set()
        thread.join()
    if "A" not in results:
        raise RuntimeError("load A failed; its traceback is above")
    return results


def one_process(seconds: float) -> dict:
    import torch

    from flowmill_kernels.partition import Partitions

    cublas, ours, bursts = loads(seconds)
    rows: dict[str, dict] = {}
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    plain = [torch.cuda.Stream() for _ in range(2)]
    high = torch.cuda.Stream(priority=-5)

    def measure(name: str, part: Callable[[], dict]) -> None:
        try:
            rows[name] = part()
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)

    measure("each alone, whole GPU", lambda: {"A": cublas(plain[0], whole), "B": bursts(plain[1], whole)})
    measure("together, plain streams", lambda: together(lambda stop: cublas(plain[0], whole, stop),
                                                        lambda: bursts(plain[1], whole)))
    measure("together, B with high priority", lambda: together(lambda stop: cublas(plain[0], whole, stop),
                                                               lambda: bursts(high, whole)))
    with Partitions.create({"A": 96, "B": whole - 96}) as partitions:
        print(partitions, flush=True)
        rows["mode"] = {"isolation_mode": partitions.isolation_mode}
        if partitions.isolation_mode == "green":
            a, b = partitions.slot("A"), partitions.slot("B")
            measure("each alone, partitioned", lambda: {"A": cublas(a.stream, a.num_sms),
                                                        "B": bursts(b.stream, b.num_sms)})
            measure("together, partitioned", lambda: together(lambda stop: cublas(a.stream, a.num_sms, stop),
                                                              lambda: bursts(b.stream, b.num_sms)))
            measure("alone, partitioned, A by gemm_nt", lambda: {"A": ours(a.stream, a.num_sms)})
            measure("together, partitioned, A by gemm_nt", lambda: together(
                lambda stop: ours(a.stream, a.num_sms, stop), lambda: bursts(b.stream, b.num_sms)))
    return rows


def gone(path: str) -> bool:
    return not os.path.exists(path)


def worker(role: str, seconds: float) -> None:
    """A process of one role: reads "plain" or "green" a line, and a file to run as long as; answers JSON."""
    import torch

    from flowmill_kernels.partition import Partitions

    cublas, _, bursts = loads(seconds)
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    partitions = Partitions.create({"A": 96, "B": whole - 96}, processes=2)
    slot, plain = partitions.slot(role), torch.cuda.Stream()
    load = cublas if role == "A" else bursts
    print(json.dumps({"mode": str(partitions.isolation), "sms": slot.num_sms}), flush=True)
    for line in sys.stdin:
        kind, _, path = line.strip().partition(" ")
        stop = functools.partial(gone, path) if path else None
        print(json.dumps(load(plain if kind == "plain" else slot.stream, slot.num_sms, stop)), flush=True)
    partitions.close()


class Worker:
    def __init__(self, role: str, seconds: float, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", role, "--seconds", str(seconds)], env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.read()

    def ask(self, what: str) -> None:
        self.process.stdin.write(what + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def read(self) -> dict:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def two_processes(label: str, seconds: float, environment: dict[str, str]) -> dict:
    rows: dict[str, dict] = {}
    workers: list[Worker] = []
    try:
        for role in "AB":
            workers.append(Worker(role, seconds, environment))
        a, b = workers
        print(f"{label}: {a.hello['mode']}", flush=True)
        for kind in ("plain", "green") if "green" in a.hello["mode"].split("(")[0] else ("plain",):
            a.ask(kind)
            alone = {"A": a.read()}
            b.ask(kind)
            rows[f"{label}, each alone, {kind}"] = alone | {"B": b.read()}
            with tempfile.NamedTemporaryFile() as running:  # A goes on while this is there
                a.ask(f"{kind} {running.name}")
                time.sleep(0.1)
                b.ask(kind)
                answer = b.read()
            rows[f"{label}, together, {kind}"] = {"A": a.read(), "B": answer}
    except (RuntimeError, OSError) as error:  # the rows so far are worth having
        print(f"{label}: {error}", flush=True)
    finally:
        for one in workers:
            one.stop()
    return rows


def with_mps(seconds: float) -> dict:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("nvidia-cuda-mps-control is not installed: rows with MPS left out", flush=True)
        return {}
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as root:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{root}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{root}/log"}
        for directory in environment.values():
            os.makedirs(directory)
        started = subprocess.run([control, "-d"], env={**os.environ, **environment}, capture_output=True, text=True,
                                 timeout=20, check=False)
        if started.returncode:
            print(f"the MPS daemon did not start: {started.stderr.strip()}", flush=True)
            return {}
        try:
            time.sleep(0.5)
            return two_processes("two processes, MPS", seconds, environment)
        finally:
            subprocess.run([control], input="quit\n", env={**os.environ, **environment}, capture_output=True, text=True,
                           timeout=20, check=False)


def show(rows: dict) -> None:
    print(f"\n| A = bf16 GEMM {SIZE}, B = bursts of {2 * BURST} small kernels | A TFLOP/s | B p50 / p95 ms | bursts |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        a, b = row.get("A"), row.get("B")
        if a or b:
            left = f"{a['tflops']:.0f}" if a else "-"
            few = "" if not b or b["n"] >= LEAST_BURSTS else " (too few)"
            right = f"{b['p50']:.2f} / {b['p95']:.2f} | {b['n']}{few}" if b else "- | -"
            print(f"| {name} | {left} | {right} |")


def figures(rows: dict) -> str:
    """The two figures, of one run. `alone` without more is the whole GPU: what a reward had before it shared."""
    names = ("together, plain streams", "together, partitioned", "each alone, whole GPU", "each alone, partitioned")
    if missing := [name for name in names if name not in rows]:
        return f"no figures: isolation_mode {rows['mode']['isolation_mode']}, not measured: {', '.join(missing)}"
    plain, green, whole, part = (rows[name]["B"]["p95"] for name in names)
    return (f"B's p95, one process: plain / partitioned = {plain / green:.2f} (wanted 3.5 or more); partitioned "
            f"together / alone on the whole GPU = {green / whole:.2f} (wanted 1.25 or less), "
            f"/ alone on its partition = {green / part:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--no-pairs", action="store_true")
    parser.add_argument("--worker", choices=["A", "B"])
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.seconds)
        return
    if args.single:
        print(json.dumps(one_process(args.seconds)), flush=True)
        return
    command = [sys.executable, __file__, "--single", "--seconds", str(args.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # errors are seen as they come
    if done.returncode:
        sys.exit(f"the one-process part ended with status {done.returncode}")
    *said, last = done.stdout.strip().splitlines()
    print(*said, sep="\n", flush=True)
    rows = json.loads(last)
    if not args.no_pairs:
        with tempfile.TemporaryDirectory() as nothing:  # makes sure that no other daemon is met
            rows |= two_processes("two processes", args.seconds, {"CUDA_MPS_PIPE_DIRECTORY": nothing})
        if not args.no_mps:
            rows |= with_mps(args.seconds)
    show(rows)
    print(f"\n{figures(rows)}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
