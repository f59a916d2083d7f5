"""MLflow: one run a training, found again by its tag, written without an active run.

In: numbers of each iteration, evaluations, pictures. Out: MLflow; or, while it cannot be reached, the store's spool,
which the next call sends. A number's time stamp is the time its stage ended, so sending twice changes nothing.
"""

import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.contracts.config import ROOT, RunConfig
from tasks.contracts.errors import FlowmillError
from tasks.contracts.refs import PolicyRef
from tasks.store import Store

log = logging.getLogger("flowmill.metrics")
EXECUTION_TAG = "flyte.execution_id"
CLUSTER_TAGS = {"flyte.project": "FLYTE_INTERNAL_EXECUTION_PROJECT", "flyte.domain": "FLYTE_INTERNAL_EXECUTION_DOMAIN"}
"""Tag -> environment variable of a task pod. Runs of this machine have neither."""
REPORT_TAG = "flowmill.report_key"
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "flytekit", "mlflow", "onnxruntime", "numpy")


class TrackingError(FlowmillError):
    """MLflow cannot be used."""


def tracking_uri() -> str:
    """The environment's MLFLOW_TRACKING_URI, else a sqlite file in the project folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ROOT / 'mlflow.db'}"


def client() -> Any:
    """An MLflow client that gives up quickly: a server that is down must not hold training up for minutes."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient

    # Schema set-up of a new sqlite file logs dozens of lines a person has no use for.
    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri())


def ensure_run(config: RunConfig, execution_id: str, run_key: str, report_key: str = "") -> str:
    """The run of a training, found by its tags, else created.

    A retry has the same execution id. A rerun on a cluster has another, but continues the same training: it takes over
    that training's run, so the numbers that waited in the store and the curve stay in one place.

    Raises:
        TrackingError: MLflow cannot be reached.
    """
    from mlflow.entities import RunStatus
    from mlflow.exceptions import MlflowException

    try:
        with _alone():
            mlflow = client()
            experiment = _experiment(mlflow, config.tracking.experiment)
            cluster = {tag: os.environ[name] for tag, name in CLUSTER_TAGS.items() if os.environ.get(name)}
            tags = {EXECUTION_TAG: execution_id, REPORT_TAG: report_key, **cluster, "flowmill.run_key": run_key,
                    "mlflow.source.git.commit": git_commit()}
            known = {EXECUTION_TAG: execution_id, **({REPORT_TAG: report_key} if report_key else {})}
            found = next((runs for tag, value in known.items() if (
                runs := mlflow.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1))), None)
            if found:
                run = found[0]
                for tag, value in tags.items():
                    if run.data.tags.get(tag) != value:
                        mlflow.set_tag(run.info.run_id, tag, value)
                mlflow.update_run(run.info.run_id, RunStatus.to_string(RunStatus.RUNNING))
            else:
                run = mlflow.create_run(experiment, run_name=config.name, tags=tags)
            run_id = run.info.run_id
            sampling = config.sampling
            derived = {"derived.samples_an_iteration": str(sampling.num_samples),
                       "derived.trained_steps": str(sampling.window_size),
                       "derived.optimizer_steps": str(config.iterations * config.optimizer.updates_per_rollout)}
            parameters = {**config.flat(), **derived, **{f"version.{name}": _version(name) for name in _PACKAGES},
                          "version.python": platform.python_version(), "git_commit": git_commit(), "run_key": run_key,
                          "report_key": report_key}
            _log_parameters(mlflow, run_id, parameters, run.data.params)
            return run_id
    except (MlflowException, OSError) as error:
        raise TrackingError(f"MLflow at {tracking_uri()} cannot be used: {_first_line(error)}. Start it, or unset "
                            "MLFLOW_TRACKING_URI to write to a file; nothing was run.") from error


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock while a sqlite file is set up and a run is looked up or made: two first runs must not race."""
    if not tracking_uri().startswith("sqlite:///"):
        yield
        return
    from filelock import FileLock

    with FileLock(f"{tracking_uri().removeprefix('sqlite:///')}.lock"):
        yield


def _experiment(mlflow: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = mlflow.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    local = tracking_uri().startswith("sqlite:")
    folder = Path(tracking_uri().removeprefix("sqlite:///")).absolute().parent / "mlartifacts" / name if local else None
    try:
        # The kind makes MLflow's pages open with runs and charts; without it they ask for language-model traces.
        return mlflow.create_experiment(name, artifact_location=folder.as_uri() if folder else None,
                                        tags={"mlflow.experimentKind": "custom_model_development"})
    except MlflowException:  # another run made it a moment ago
        found = mlflow.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _log_parameters(mlflow: Any, run_id: str, parameters: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Log what an earlier try has not. MLflow never changes a parameter, so a changed one becomes a tag."""
    from mlflow.entities import Param, RunTag

    wanted = {key: str(value)[:6000] for key, value in sorted(parameters.items())}
    items = [Param(key, value) for key, value in wanted.items() if key not in known]
    for start in range(0, len(items), 100):
        mlflow.log_batch(run_id, params=items[start : start + 100])
    changed = [RunTag(f"changed.{key}", value) for key, value in wanted.items() if known.get(key, value) != value]
    for start in range(0, len(changed), 100):
        mlflow.log_batch(run_id, tags=changed[start : start + 100])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """Commit of the project folder, of the image (baked in as the file COMMIT) or of a registration, or 'unknown'."""
    if os.environ.get("FLOWMILL_COMMIT"):
        return os.environ["FLOWMILL_COMMIT"]
    baked = ROOT / "COMMIT"
    if baked.exists():
        return baked.read_text().strip()
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


class Recorder:
    """Writes one run's numbers; what MLflow cannot take now waits in the store's spool.

    Raises nothing when MLflow is down: a training is worth more than its curve.
    """

    def __init__(self, run_id: str, store: Store) -> None:
        self.run_id = run_id
        self.store = store
        self._spool = f"spool/mlflow/{run_id}"

    def log(self, metrics: Mapping[str, float], step: int, timestamp_ms: int) -> None:
        """Send numbers of one step, after whatever was spooled before."""
        entry = {"metrics": dict(metrics), "step": step, "timestamp_ms": timestamp_ms}
        self._send_or_spool(f"{step:08d}-{timestamp_ms}.json", json.dumps(entry).encode())

    def log_picture(self, key: str, step: int, timestamp_ms: int, png: bytes) -> None:
        """Send a picture of one step; MLflow shows those of one key as a grid by step."""
        self._send_or_spool(f"{step:08d}-{timestamp_ms}-{key}.png", png)

    def flush(self) -> bool:
        """Send what is spooled, oldest first; False if MLflow is still down."""
        return self.attempt(self._flush)

    def _send_or_spool(self, name: str, data: bytes) -> None:
        def send() -> None:
            self._flush()
            self._send(name, data)

        if not self.attempt(send):
            self.store.write_bytes(f"{self._spool}/{name}", data)

    def attempt(self, action: Callable[[], None]) -> bool:
        """Do something with MLflow; False, after a warning, if it cannot be used."""
        from mlflow.exceptions import MlflowException

        try:
            action()
        except (MlflowException, OSError) as error:
            log.warning("MLflow at %s cannot be reached (%s); the numbers wait in the store and are sent later",
                        tracking_uri(), _first_line(error))
            return False
        return True

    def _flush(self) -> None:
        for path in sorted(self.store.list(self._spool)):
            data = self.store.read_bytes(path)
            if data is not None:
                self._send(path.rsplit("/", 1)[-1], data)
            self.store.delete(path)

    def _send(self, name: str, data: bytes) -> None:
        from mlflow.entities import Metric

        mlflow = client()
        if name.endswith(".json"):
            entry = json.loads(data)
            metrics = [Metric(_safe(key), value, entry["timestamp_ms"], entry["step"])
                       for key, value in sorted(entry["metrics"].items()) if value == value]
            for start in range(0, len(metrics), 1000):
                mlflow.log_batch(self.run_id, metrics=metrics[start : start + 1000])
            return
        import io
        import uuid

        from PIL import Image

        # As `MlflowClient.log_image` does it, but for the id in the files' names: a random one would show a picture
        # that is sent again, after a kill in the middle, twice.
        step, timestamp, key = name.removesuffix(".png").split("-", 2)
        stem = f"{key}+step+{int(step)}+timestamp+{timestamp}+{uuid.uuid5(uuid.NAMESPACE_URL, self.run_id + name)}"
        preview = Image.open(io.BytesIO(data))
        preview.thumbnail((256, 256))
        small = io.BytesIO()
        preview.save(small, "WEBP")
        log_file(self.run_id, f"{stem}.png", data, "images")
        log_file(self.run_id, f"{stem}+compressed.webp", small.getvalue(), "images")
        mlflow.set_tag(self.run_id, "mlflow.loggedImages", True)


def log_file(run_id: str, name: str, data: bytes, folder: str = "") -> None:
    """Store one file as an artifact of the run."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / name
        path.write_bytes(data)
        client().log_artifact(run_id, str(path), folder or None)


def log_policy(run_id: str, policy: PolicyRef, store: Store, register_as: str, numbers: Mapping[str, float]) -> None:
    """Store the trained weights as the artifact ``policy``: averaged ones (``ema``) and raw, with their reference.

    With `register_as`, also a version of that registered model; alias ``best`` moves to it if its first
    ``exact_match`` (or first number there is) is higher than that of the version which has the alias.
    """
    assert policy.weights is not None
    for name in ("ema", "raw"):
        log_file(run_id, f"{name}.safetensors", store.load_bytes(policy.weights, f"{name}.safetensors"), "policy")
    log_file(run_id, "policy.json", policy.model_dump_json(indent=1).encode(), "policy")
    if register_as:
        measure = next((name for name in numbers if name.endswith("exact_match")), next(iter(numbers), ""))
        _register(run_id, register_as, measure, numbers.get(measure, float("nan")))


def _register(run_id: str, name: str, measure: str, value: float) -> None:
    from mlflow.exceptions import MlflowException

    mlflow = client()
    try:
        mlflow.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    mine = next((item for item in mlflow.search_model_versions(f"name = '{name}'") if item.run_id == run_id), None)
    if mine is None:
        source = f"{mlflow.get_run(run_id).info.artifact_uri}/policy"
        mine = mlflow.create_model_version(name, source, run_id, tags={"measure": measure, "value": repr(value)})
    else:  # the run went on: its version holds the new weights
        mlflow.set_model_version_tag(name, mine.version, "value", repr(value))
    try:
        best = mlflow.get_model_version_by_alias(name, "best")
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        best = None
    if best is not None and best.tags.get("measure") != measure:
        log.warning("version %s of %s is judged by %s, its best version by %s: they cannot be compared, so the alias "
                    "`best` stays", mine.version, name, measure, best.tags.get("measure"))
    elif best is None or value > float(best.tags["value"]):
        mlflow.set_registered_model_alias(name, "best", mine.version)


def finish(run_id: str, status: str) -> None:
    """End the run: FINISHED, FAILED or KILLED. Set once; a run that has ended keeps its status."""
    mlflow = client()
    if mlflow.get_run(run_id).info.status == "RUNNING":
        mlflow.set_terminated(run_id, status)


def fail(experiment: str, execution_id: str) -> None:
    """Mark the run of an execution FAILED, if there is one and MLflow can be reached."""
    from mlflow.exceptions import MlflowException

    try:
        run_id = find_run(experiment, execution_id)
        if run_id is not None:
            finish(run_id, "FAILED")
    except (MlflowException, OSError) as error:
        log.warning("MLflow at %s cannot be reached (%s); the run is not marked as failed", tracking_uri(),
                    _first_line(error))


def find_run(experiment: str, execution_id: str) -> str | None:
    """Run id of an execution, or None."""
    mlflow = client()
    found = mlflow.get_experiment_by_name(experiment)
    if found is None:
        return None
    runs = mlflow.search_runs([found.experiment_id], f"tags.`{EXECUTION_TAG}` = '{execution_id}'", max_results=1)
    return runs[0].info.run_id if runs else None


def _safe(name: str) -> str:
    """MLflow allows letters, digits, and `_-./ :` in metric names."""
    return "".join(character if character.isalnum() or character in "_-./ :" else "_" for character in name)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else type(error).__name__
