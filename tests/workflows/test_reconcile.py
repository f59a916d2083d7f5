"""Reconcile: runs of executions that have ended get their status, against a real gRPC server and a real MLflow."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from flyteidl.admin.execution_pb2 import Execution, ExecutionClosure
from flyteidl.admin.project_pb2 import Domain, Project
from flyteidl.admin.version_pb2 import GetVersionResponse, Version
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.service.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

from tasks import metrics
from tasks.contracts.config import ROOT, load_recipe
from workflows import reconcile

MINUTE_S, HOUR_S = 60.0, 3600.0


class FlyteAdmin(AdminServiceServicer):
    """Flyte Admin with the executions it is given, on a free port of loopback; `tls`: (key, certificate)."""

    def __init__(self, tls: tuple[bytes, bytes] | None = None) -> None:
        self.executions: dict[str, ExecutionClosure | grpc.StatusCode] = {}
        """Name -> closure, or the status with which asking for it fails."""
        self.projects = {"flowmill": ("development", "staging", "production")}
        self.refuses: grpc.StatusCode | None = None
        """Status with which every call fails."""
        self.asked: list[str] = []
        self.hook: Callable[[str], None] = lambda name: None
        """Called with the execution's name before each answer."""
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_AdminServiceServicer_to_server(self, self._server)
        if tls:
            self.port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tls]))
        else:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def end(self, name: str, phase: str, ago_s: float = HOUR_S, **closure: Any) -> None:
        """Let an execution have this phase since `ago_s` seconds ago."""
        made = ExecutionClosure(phase=WorkflowExecution.Phase.Value(phase), **closure)
        made.updated_at.FromMilliseconds(int((time.time() - ago_s) * 1000))
        self.executions[name] = made

    def _check(self, context: Any) -> None:
        if self.refuses:
            context.abort(self.refuses, "refused")

    def GetVersion(self, request: Any, context: Any) -> Any:
        self._check(context)
        return GetVersionResponse(control_plane_version=Version(Version="v1.16.8"))

    def GetProject(self, request: Any, context: Any) -> Any:
        self._check(context)
        if request.id not in self.projects:
            context.abort(grpc.StatusCode.NOT_FOUND, f"project [{request.id}] not found")
        return Project(id=request.id, domains=[Domain(id=item) for item in self.projects[request.id]])

    def GetExecution(self, request: Any, context: Any) -> Any:
        self._check(context)
        self.asked.append(f"{request.id.project}/{request.id.domain}/{request.id.name}")
        self.hook(request.id.name)
        found = self.executions.get(request.id.name, grpc.StatusCode.NOT_FOUND)
        if isinstance(found, grpc.StatusCode):
            context.abort(found, f"missing entity of type execution with identifier {request.id.name}")
        return Execution(id=request.id, closure=found)


@pytest.fixture
def flyte() -> Iterator[FlyteAdmin]:
    server = FlyteAdmin()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory) -> Path:
    """An MLflow database without runs: its schema takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow(empty_database, tmp_path, monkeypatch, flyte) -> Any:
    """A client of an MLflow of its own; Flyte and MLflow are where the environment says."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("FLYTE_ENDPOINT", flyte.endpoint)
    monkeypatch.setenv("HOME", str(tmp_path))
    return metrics.client()


def start(mlflow: Any, name: str, ago_s: float = 2 * HOUR_S, **tags: str) -> str:
    """A RUNNING run of the execution `name`, as a task pod makes it."""
    tags = {metrics.EXECUTION_TAG: name, "flyte.project": "flowmill", "flyte.domain": "development", **tags}
    return mlflow.create_run("0", run_name=f"run-{name}", start_time=int((time.time() - ago_s) * 1000),
                             tags={key: value for key, value in tags.items() if value}).info.run_id


def statuses(mlflow: Any) -> dict[str, str]:
    return {run.data.tags[metrics.EXECUTION_TAG]: run.info.status for run in mlflow.search_runs(["0"])}


@pytest.mark.parametrize(("phase", "status"), [
    ("ABORTED", "KILLED"), ("FAILED", "FAILED"), ("TIMED_OUT", "FAILED"), ("SUCCEEDED", "FINISHED"),
    *((phase, "RUNNING") for phase in ("UNDEFINED", "QUEUED", "RUNNING", "SUCCEEDING", "FAILING", "ABORTING"))])
def test_a_run_gets_the_status_of_its_executions_phase(mlflow, flyte, phase, status):
    start(mlflow, "one")
    flyte.end("one", phase)
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": status}
    assert flyte.asked == ["flowmill/development/one"]


def test_every_phase_that_flyte_has_is_tried_above():
    marks = test_a_run_gets_the_status_of_its_executions_phase.pytestmark
    assert {phase for phase, _ in marks[0].args[1]} == set(WorkflowExecution.Phase.keys())


def test_a_change_is_said_in_one_line_and_kept_with_the_run(mlflow, flyte, capsys):
    from flyteidl.admin.execution_pb2 import AbortMetadata

    run_id = start(mlflow, "one")
    flyte.end("one", "ABORTED", 30 * MINUTE_S, abort_metadata=AbortMetadata(cause="wrong\nrecipe", principal="ann"))
    assert reconcile.main([]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == (f"run {run_id} (run-one) of flowmill/development/one: RUNNING -> KILLED; ABORTED: wrong recipe")
    assert last.startswith("reconcile: 1 running, 1 changed, 0 left, 0 failed, ")
    run = mlflow.get_run(run_id)
    assert run.data.tags[reconcile.REASON_TAG] == "ABORTED: wrong recipe"
    # It ended when the execution did, not when it was found.
    assert time.time() - run.info.end_time / 1000 == pytest.approx(30 * MINUTE_S, abs=60)


def test_a_second_pass_changes_nothing(mlflow, flyte, capsys):
    for name, phase in (("a", "ABORTED"), ("b", "RUNNING"), ("c", "FAILED")):
        start(mlflow, name)
        flyte.end(name, phase)
    assert reconcile.main([]) == 0
    runs = [run.to_dictionary() for run in mlflow.search_runs(["0"])]
    flyte.asked.clear()
    capsys.readouterr()
    assert reconcile.main([]) == 0
    assert [run.to_dictionary() for run in mlflow.search_runs(["0"])] == runs
    assert flyte.asked == ["flowmill/development/b"]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_execution_that_has_just_succeeded_is_left_to_its_last_task(mlflow, flyte):
    start(mlflow, "one")
    flyte.end("one", "SUCCEEDED", 4 * MINUTE_S)
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": "RUNNING"}
    flyte.end("one", "SUCCEEDED", 6 * MINUTE_S)
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": "FINISHED"}


def test_an_unknown_execution_is_killed_after_the_grace_period_only(mlflow, flyte, capsys, monkeypatch):
    run_id, now_s = start(mlflow, "one"), time.time()
    assert reconcile.main([]) == 0
    assert "Flyte does not know it; KILLED if so in 60 minutes" in capsys.readouterr().out
    since = mlflow.get_run(run_id).data.tags[reconcile.UNKNOWN_TAG]
    assert float(since) == pytest.approx(now_s, abs=60)
    monkeypatch.setattr(time, "time", lambda: now_s + 50 * MINUTE_S)
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": "RUNNING"}
    assert mlflow.get_run(run_id).data.tags[reconcile.UNKNOWN_TAG] == since
    monkeypatch.setattr(time, "time", lambda: now_s + 61 * MINUTE_S)
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": "KILLED"}
    assert "RUNNING -> KILLED; Flyte does not know it" in capsys.readouterr().out


def test_an_execution_that_flyte_remembers_starts_its_grace_anew(mlflow, flyte):
    run_id = start(mlflow, "one", **{reconcile.UNKNOWN_TAG: f"{time.time() - 59 * MINUTE_S:.0f}"})
    flyte.end("one", "RUNNING")
    assert reconcile.main([]) == 0
    assert reconcile.UNKNOWN_TAG not in mlflow.get_run(run_id).data.tags


def test_runs_of_a_laptop_and_ended_runs_are_left_alone(mlflow, flyte):
    start(mlflow, "local-1234", **{"flyte.project": "", "flyte.domain": ""})
    mlflow.set_terminated(start(mlflow, "done"), "FINISHED")
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"local-1234": "RUNNING", "done": "FINISHED"}
    assert flyte.asked == []


def test_runs_of_every_experiment_and_page_are_seen(mlflow, flyte, monkeypatch):
    other = mlflow.create_experiment("other")
    for name in ("a", "b", "c"):
        start(mlflow, name)
        flyte.end(name, "ABORTED")
    mlflow.set_tag(mlflow.create_run(other, tags={
        metrics.EXECUTION_TAG: "d", "flyte.project": "flowmill", "flyte.domain": "production"}).info.run_id, "a", "b")
    flyte.end("d", "ABORTED")
    search = type(mlflow).search_runs
    monkeypatch.setattr(type(mlflow), "search_runs",
                        lambda *args, **named: search(*args, **{**named, "max_results": 1}))
    assert reconcile.main([]) == 0
    assert sorted(flyte.asked) == [*(f"flowmill/development/{name}" for name in "abc"), "flowmill/production/d"]
    monkeypatch.undo()
    assert mlflow.search_runs(["0", other], "attributes.status = 'RUNNING'") == []


def test_a_dry_run_says_what_it_would_change_and_changes_nothing(mlflow, flyte, capsys):
    start(mlflow, "aborted")
    start(mlflow, "unknown")
    flyte.end("aborted", "ABORTED")
    before = [run.to_dictionary() for run in mlflow.search_runs(["0"])]
    assert reconcile.main(["--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "aborted: would be RUNNING -> KILLED; ABORTED" in output
    assert "1 changed, 1 left, 0 failed (dry run)" in output
    assert [run.to_dictionary() for run in mlflow.search_runs(["0"])] == before


def test_a_run_that_ends_meanwhile_keeps_its_own_status(mlflow, flyte, capsys):
    run_id = start(mlflow, "one")
    flyte.end("one", "ABORTED")
    flyte.hook = lambda name: mlflow.set_terminated(run_id, "FAILED")
    assert reconcile.main([]) == 0
    assert statuses(mlflow) == {"one": "FAILED"}
    assert "ended meanwhile, FAILED" in capsys.readouterr().out


def test_one_bad_run_does_not_stop_the_rest(mlflow, flyte, capsys):
    for name in ("a", "bad", "c"):
        start(mlflow, name)
        flyte.end(name, "ABORTED")
    start(mlflow, "worse", **{reconcile.UNKNOWN_TAG: "yesterday"})
    flyte.executions["bad"] = grpc.StatusCode.INTERNAL
    assert reconcile.main([]) == 1
    assert statuses(mlflow) == {"a": "KILLED", "bad": "RUNNING", "c": "KILLED", "worse": "RUNNING"}
    output = capsys.readouterr().out
    assert "(run-bad): FAILED: Flyte Admin at" in output
    assert "INTERNAL: missing entity" in output
    assert "yesterday" in output
    assert "2 changed, 0 left, 2 failed" in output
    assert "Traceback" not in output


def test_a_flyte_that_goes_away_on_the_way_stops_the_pass(mlflow, flyte, capsys):
    for number in range(9):
        start(mlflow, f"run-{number}")
        flyte.executions[f"run-{number}"] = grpc.StatusCode.UNAVAILABLE
    assert reconcile.main([]) == 1
    captured = capsys.readouterr()
    assert len(flyte.asked) == 3
    assert captured.err.startswith(f"reconcile: Flyte Admin at {flyte.endpoint} (plain): ")
    assert set(statuses(mlflow).values()) == {"RUNNING"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def run_program(module: str, *arguments: str, **environment: str) -> tuple[int, str, str, float]:
    """(exit status, stdout, stderr, seconds) of a program of the project."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env={**os.environ, **environment},
                          capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - started


def test_flyte_down_is_said_within_seconds(mlflow, flyte):
    endpoint = f"127.0.0.1:{free_port()}"
    code, out, err, seconds = run_program("workflows.reconcile", FLYTE_ENDPOINT=endpoint)
    assert (code, out) == (1, "")
    assert err.startswith(f"reconcile: Flyte Admin at {endpoint} (plain): nothing answers there")
    assert "kubectl -n flyte port-forward svc/flyte-binary-grpc 8089" in err
    assert len(err.splitlines()) == 1
    assert seconds < 15


def test_mlflow_down_is_said_within_seconds(mlflow, flyte):
    uri = f"http://127.0.0.1:{free_port()}"
    code, out, err, seconds = run_program("workflows.reconcile", MLFLOW_TRACKING_URI=uri)
    assert (code, out) == (1, "")
    assert err.startswith(f"reconcile: MLflow at {uri}: nothing answers there")
    assert len(err.splitlines()) == 1
    assert seconds < 15


def test_mlflow_going_away_on_the_way_is_said(mlflow, flyte, capsys, monkeypatch):
    from mlflow.exceptions import MlflowException

    for number in range(9):
        start(mlflow, f"run-{number}")
        flyte.end(f"run-{number}", "ABORTED")
    seen = []

    def get_run(self: Any, run_id: str) -> Any:
        seen.append(run_id)
        raise MlflowException("API request failed: connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(type(mlflow), "get_run", get_run)
        assert reconcile.main([]) == 1
    assert len(seen) == 3
    assert "cannot be used: MlflowException: API request failed: connection refused" in capsys.readouterr().err
    assert set(statuses(mlflow).values()) == {"RUNNING"}


def test_a_flyte_that_asks_for_a_token_is_said_and_no_browser_is_opened(mlflow, flyte, capsys):
    start(mlflow, "one")
    flyte.refuses = grpc.StatusCode.UNAUTHENTICATED
    assert reconcile.main([]) == 1
    assert "it asks for a token" in capsys.readouterr().err


def test_without_an_endpoint_it_says_which_variable_to_set(mlflow, capsys, monkeypatch):
    monkeypatch.delenv("FLYTE_ENDPOINT")
    monkeypatch.chdir(os.environ["HOME"])
    from flytekit.configuration.file import get_config_file

    get_config_file.cache_clear()
    assert reconcile.main([]) == 1
    assert "set FLYTE_ENDPOINT=host:port" in capsys.readouterr().err


def test_a_task_pods_run_carries_what_reconcile_looks_for(mlflow, flyte, monkeypatch):
    from tests.runs import tiny

    config = load_recipe("base", tiny())
    local = metrics.ensure_run(config, "local-1", "key")
    assert not set(metrics.CLUSTER_TAGS) & set(mlflow.get_run(local).data.tags)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_PROJECT", "flowmill")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_DOMAIN", "development")
    run_id = metrics.ensure_run(config, "execution-1", "key")
    flyte.end("execution-1", "ABORTED")
    assert reconcile.main([]) == 0
    assert flyte.asked == ["flowmill/development/execution-1"]
    assert mlflow.get_run(run_id).info.status == "KILLED"
    assert mlflow.get_run(local).info.status == "RUNNING"
