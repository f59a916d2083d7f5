"""Real runs for tests: the command line's own code in processes that start warm and can be killed at a chosen call.

`python -m tests.runs` imports what a run needs once and forks a child for each run: that saves some 8 CPU-seconds a
run. A child does what `pyflyte run workflows/flowgrpo.py flowgrpo ...` does from its first line on; test_resume checks
that the command itself gives the same bits. Use: `from tests.runs import launcher, new_place  # noqa: F401`.
"""

import gc
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = {"iterations": 3, "sampling.num_groups": 2, "sampling.group_size": 3, "sampling.num_inference_steps": 3,
        "sampling.sde_window.size": 2, "runtime.micro_batch_size": 3, "optimizer.updates_per_rollout": 2,
        "optimizer.decay": "none", "evaluation.num_inference_steps": 3, "evaluation.num_prompts": 6,
        "evaluation.diversity_prompts": 0, "evaluation.num_points": 2, "evaluation.readers": [{"name": "ocr"}],
        **{f"topology.{role}.parallelism": 1 for role in ("rollout", "reward", "update", "evaluate")}}
"""Overrides of the recipe `base` for a run of about a second."""


def tiny(**changes: Any) -> str:
    """Overrides of a tiny run as the command takes them; `a__b=1` is a.b=1."""
    values = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return " ".join(f"'{key}={json.dumps(value)}'" for key, value in values.items())


@dataclass(frozen=True)
class Place:
    """Where one user's runs live: HOME, store and MLflow file of their own."""

    folder: Path
    more_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"HOME": str(self.folder / "home"), "FLOWMILL_STORE": str(self.folder / "store"),
                "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder / 'mlflow.db'}", **self.more_env}

    def store(self) -> Any:
        from tasks.store import open_store

        return open_store(self.env["FLOWMILL_STORE"])

    def mlflow(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.env["MLFLOW_TRACKING_URI"])

    def runs(self, experiment: str = "flowmill") -> list[Any]:
        """The experiment's MLflow runs."""
        found = self.mlflow().get_experiment_by_name(experiment)
        return list(self.mlflow().search_runs([found.experiment_id])) if found else []

    def summary(self) -> dict[str, Any]:
        """The summary of the only finished run."""
        store = self.store()
        paths = [path for path in store.list("reports") if path.endswith("/summary.json")]
        assert len(paths) == 1, paths
        return json.loads(store.read_bytes(paths[0]))


@dataclass(frozen=True)
class Stop:
    """Where a run stops: at the `call`-th call of `at` (``module:name``), before or after its work.

    Attributes:
        having: Count only calls with this argument, or with a path that contains it.
        then: ``kill`` = SIGKILL itself; ``wait`` = until `Attempt.go`; or Python source to run, once, which sees the
            call's ``args`` and, after it, its ``result``.
    """

    at: str
    call: int = 1
    after: bool = False
    having: Any = None
    then: str = "kill"


@dataclass(frozen=True)
class Done:
    """A run that has ended. `returncode` is minus the signal's number if it was killed."""

    returncode: int
    output: str
    calls: list[tuple[str, list[Any]]]
    """The traced calls in order: name, and the numbers and texts among its arguments."""

    @property
    def text(self) -> str:
        """The output without the terminal's line breaks."""
        return " ".join(self.output.split())


class Attempt:
    """A run that has been started."""

    def __init__(self, launcher: "Launcher", pid: int, files: Path) -> None:
        self.pid = pid
        self._launcher, self._files = launcher, files

    def wait_until_stopped(self, timeout_s: float = 60) -> None:
        """Until a `Stop` with ``then="wait"`` is reached."""
        deadline = time.monotonic() + timeout_s
        while not (self._files / "reached").exists():
            assert time.monotonic() < deadline, (self._files / "output").read_text()
            time.sleep(0.02)

    def go(self) -> None:
        (self._files / "go").touch()

    def wait(self, timeout_s: float = 120) -> Done:
        timer = threading.Timer(timeout_s, os.kill, (self.pid, signal.SIGKILL))
        timer.start()
        try:
            status = self._launcher.read()["status"]
        finally:
            timer.cancel()
        calls = [tuple(json.loads(line)) for line in (self._files / "calls").read_text().splitlines()]
        return Done(os.waitstatus_to_exitcode(status), (self._files / "output").read_text(), calls)


class Launcher:
    """The warm process; one run at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = folder / "tmp"
        self.temp.mkdir(parents=True)
        self._numbers = itertools.count()
        # One thread: on a busy machine a second one, outside the stages that set their own number, mostly waits.
        env = {**os.environ, "TMPDIR": str(self.temp), "HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true",
               "OMP_NUM_THREADS": "1"}
        env.pop("FLYTE_INTERNAL_EXECUTION_ID", None)
        self._process = subprocess.Popen([sys.executable, "-m", "tests.runs"], cwd=ROOT, env=env, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the launcher ended"
        return json.loads(line)

    def start(self, place: Place, overrides: str = "", *, recipe: str = "base", stop: Stop | Sequence[Stop] = (),
              trace: Sequence[str] = (), argv: Sequence[str] | None = None) -> Attempt:
        files = self.folder / f"run{next(self._numbers)}"
        files.mkdir()
        job = {"argv": list(argv or ["run", "workflows/flowgrpo.py", "flowgrpo", "--recipe", recipe, "--overrides",
                                     overrides]),
               "env": place.env, "files": str(files), "trace": list(trace),
               "stops": [vars(item) for item in ([stop] if isinstance(stop, Stop) else stop)]}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Attempt(self, self.read()["pid"], files)

    def run(self, place: Place, overrides: str = "", **options: Any) -> Done:
        return self.start(place, overrides, **options).wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts runs; one a test session (and xdist worker)."""
    made = Launcher(tmp_path_factory.mktemp("launcher"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def new_place(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Place]:
    """Function: a new, empty `Place`. Its MLflow file has its tables already: making them takes 2 CPU-seconds."""
    template = tmp_path_factory.mktemp("mlflow") / "mlflow.db"

    def make(**more_env: str) -> Place:
        if not template.exists():
            code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).get_experiment_by_name('x')"
            subprocess.run([sys.executable, "-c", code, f"sqlite:///{template}"], check=True, capture_output=True,
                           env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(template.parent)})
        place = Place(tmp_path_factory.mktemp("place"), more_env)
        (place.folder / "home").mkdir()
        shutil.copy(template, place.folder / "mlflow.db")
        return place

    return make


def trained(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """(digests and numbers, name -> tensor) of the finished run: raw and averaged weights, moments, evaluations."""
    from tasks.contracts.refs import PolicyRef

    store, summary = place.store(), place.summary()
    policy = PolicyRef.model_validate(summary["policy"])
    assert policy.weights is not None
    assert policy.state is not None
    files = ((policy.weights, "raw"), (policy.weights, "ema"), (policy.state, "moments"))
    tensors = {f"{name}/{key}": value for ref, name in files for key, value in store.load(ref, name).items()}
    found = [store.find("evaluations", key) for key in store.keys("evaluations")]
    evaluations = {item.meta["step"]: (item.meta["numbers"], item.digest) for item in found}
    state = store.manifest(policy.state)
    return {"weights": policy.weights.digest, "state": policy.state.digest, "step": policy.step, "meta": state.meta,
            "evaluations": evaluations, "before": summary["before"], "after": summary["after"]}, tensors


def assert_same_training(one: Place, other: Place) -> None:
    """Fail unless both runs ended with the same bits."""
    import torch

    (facts, tensors), (other_facts, other_tensors) = trained(one), trained(other)
    assert facts == other_facts
    assert tensors.keys() == other_tensors.keys()
    assert len(tensors) > 4
    for name, value in tensors.items():
        assert value.dtype == other_tensors[name].dtype
        assert torch.equal(value, other_tensors[name]), name


def histories(place: Place, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value) as MLflow holds them."""
    client = place.mlflow()
    return {key: [(item.step, item.value) for item in client.get_metric_history(run_id, key)]
            for key in client.get_run(run_id).data.metrics}


def assert_tracked_once(place: Place, iterations: int,
                        evaluations: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    """Fail unless MLflow has one run, FINISHED, with each number of each step once and no picture twice."""
    runs = place.runs()
    assert [run.info.status for run in runs] == ["FINISHED"]
    found = histories(place, runs[0].info.run_id)
    for key, points in found.items():
        steps = [step for step, _ in points]
        if key.startswith("eval/"):
            assert sorted(steps) == list(evaluations), key
        elif not key.startswith(("time/iteration", "time/overhead")):  # left out where a run was interrupted
            assert sorted(steps) == list(range(1, iterations + 1)), key
    assert {"reward/total/mean", "eval/raw/ocr/exact_match"} <= found.keys()
    assert len(picture_steps(place, runs[0].info.run_id)) == len(evaluations)
    return found


def picture_steps(place: Place, run_id: str) -> list[int]:
    """Steps of the sample grids that MLflow holds, one entry a picture."""
    names = [item.path.rsplit("/", 1)[-1] for item in place.mlflow().list_artifacts(run_id, "images")]
    return sorted(int(name.replace("%", "+").split("+step+")[1].split("+")[0]) for name in names
                  if name.endswith(".png"))


# ---- the warm process ---------------------------------------------------------------------------------------------


def _resolve(at: str) -> tuple[Any, str, Any]:
    module, _, path = at.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def _instrument(at: str, files: Path, stops: list[dict[str, Any]], log: int | None) -> None:
    """Replace a function by one that notes its calls and stops the process where it should."""
    owner, name, real = _resolve(at)
    lock = threading.Lock()
    counts = [0] * len(stops)

    def met(number: int, stop: dict[str, Any], args: tuple[Any, ...]) -> bool:
        wanted = stop["having"]
        if wanted is not None and not any(
                str(wanted) in str(value) if isinstance(value, Path) else (type(value), value) == (type(wanted), wanted)
                for value in args if isinstance(value, int | str | Path)):
            return False
        with lock:
            counts[number] += 1
            return counts[number] == stop["call"]

    def act(stop: dict[str, Any], args: tuple[Any, ...], result: Any = None) -> None:
        if stop["then"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif stop["then"] == "wait":
            (files / "reached").touch()
            while not (files / "go").exists():
                time.sleep(0.02)
        else:
            exec(stop["then"], {"args": args, "result": result})

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if log is not None:
            plain = [value for value in (*args, *kwargs.values()) if type(value) in (int, str)]
            os.write(log, (json.dumps([at, plain]) + "\n").encode())
        values = (*args, *kwargs.values())
        due = [stop for number, stop in enumerate(stops) if met(number, stop, values)]
        for stop in due:
            if not stop["after"]:
                act(stop, values)
        result = real(*args, **kwargs)
        for stop in due:
            if stop["after"]:
                act(stop, values, result)
        return result

    setattr(owner, name, replacement)


def _child(job: dict[str, Any]) -> None:
    files = Path(job["files"])
    output = os.open(files / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    calls = os.open(files / "calls", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in os.environ if name.startswith(("FLOWMILL_", "MLFLOW_TRACKING", "AWS_", "FLYTE_"))]:
        del os.environ[name]
    os.environ |= job["env"]
    for at in dict.fromkeys([*job["trace"], *(stop["at"] for stop in job["stops"])]):
        _instrument(at, files, [stop for stop in job["stops"] if stop["at"] == at],
                    calls if at in job["trace"] else None)
    from flytekit.clis.sdk_in_container.pyflyte import main

    sys.argv = ["pyflyte", *job["argv"]]
    main()


def _serve() -> None:
    for module in ("torch", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "diffusers", "onnxruntime", "minio",
                   "PIL.Image", "matplotlib.figure", "matplotlib.backends.backend_agg", "peft", "joblib", "diskcache",
                   "tqdm", "flytekit.clis.sdk_in_container.pyflyte", "workflows.flowgrpo", "tasks.policies.tiny_text",
                   "tasks.rewards.ocr", "tasks.algorithms.flow_grpo", "tasks.sampling", "tasks.sde"):
        importlib.import_module(module)
    from diffusers import SD3Transformer2DModel  # lazy imports of its own, 1.5 s
    from sqlalchemy.orm import configure_mappers

    assert SD3Transformer2DModel
    configure_mappers()
    gc.collect()
    gc.freeze()  # else each child's first collection walks, and copies, the whole heap
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _child(json.loads(line))
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"pid": pid, "status": os.waitpid(pid, 0)[1]}), flush=True)


if __name__ == "__main__":
    _serve()
