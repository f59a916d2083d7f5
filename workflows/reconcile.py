"""Reconcile: `python -m workflows.reconcile` gives MLflow runs of ended Flyte executions the status they deserve.

In: MLflow's runs that are RUNNING and belong to an execution on the cluster; Flyte Admin's word on each execution.
Out: their status in MLflow. A CronJob runs it, because an execution that is aborted in the console, or whose last task
could not reach MLflow, leaves its run RUNNING for ever: `on_failure` does not run then. Left out: runs of this machine
(no tag `flyte.project`) and everything about artifacts.

    ABORTED -> KILLED     FAILED, TIMED_OUT -> FAILED     SUCCEEDED, and some minutes later -> FINISHED
    unknown to Flyte -> noted in a tag, KILLED if it still is after the grace period

Only runs that are RUNNING change, so running it twice changes nothing. One MLflow belongs to one Flyte: an execution of
another Flyte is an unknown one.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tasks import metrics
from workflows.preflight import (
    CALL_S,
    UnusableError,
    check_mlflow,
    flyte_admin,
    flyte_platform,
    flyte_trouble,
    grpc_code,
)

if TYPE_CHECKING:
    from flyteidl.admin.execution_pb2 import ExecutionClosure

PROJECT_TAG, DOMAIN_TAG = metrics.CLUSTER_TAGS
UNKNOWN_TAG = "flowmill.unknown_to_flyte_since"
"""Unix seconds at which Flyte was first seen not to know a run's execution."""
REASON_TAG = "flowmill.reconciled"
_STATUS = {"ABORTED": "KILLED", "FAILED": "FAILED", "TIMED_OUT": "FAILED", "SUCCEEDED": "FINISHED"}
_GONE_AFTER = 3
"""Runs in a row that a service did not answer for: then it is the service, not the run."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a run."""

    status: Literal["KILLED", "FAILED", "FINISHED"]
    reason: str
    ended_s: float | None
    """Unix time at which the execution ended; None: not known."""


@dataclass(frozen=True)
class Grace:
    """Seconds to wait."""

    succeeded_s: float = 300
    """For the run's last task, which sets FINISHED itself."""
    unknown_s: float = 3600
    """For Flyte to remember an execution, say after its database was restored."""


def judge(closure: "ExecutionClosure | None", now_s: float, grace: Grace, unknown_since_s: float) -> Verdict | None:
    """The verdict on a run whose execution has this closure, None = unknown to Flyte; None while it may still run."""
    if closure is None:
        if now_s - unknown_since_s < grace.unknown_s:
            return None
        return Verdict("KILLED", "Flyte does not know it", None)
    from flyteidl.core.execution_pb2 import WorkflowExecution

    phase = WorkflowExecution.Phase.Name(closure.phase)
    status: Any = _STATUS.get(phase)
    ended_s = closure.updated_at.ToNanoseconds() / 1e9 or None
    if status is None or (phase == "SUCCEEDED" and now_s - (ended_s or 0) < grace.succeeded_s):
        return None
    said = " ".join((closure.abort_metadata.cause or closure.error.message).split())[:200]
    return Verdict(status, f"{phase}: {said}" if said else phase, ended_s)


class Reconciler:
    """One pass over MLflow's running runs. Make it with both services checked: `reconcile` does."""

    def __init__(self, mlflow: Any, admin: Any, grace: Grace, dry_run: bool) -> None:
        self._mlflow, self._admin, self._grace, self._dry_run = mlflow, admin, grace, dry_run
        self.counts = {"changed": 0, "left": 0, "failed": 0}

    def running(self) -> list[Any]:
        """All runs that are RUNNING and carry a project, a domain and an execution. Listed whole before any changes."""
        where = "attributes.status = 'RUNNING' AND " + " AND ".join(
            f"tags.`{tag}` LIKE '%'" for tag in (PROJECT_TAG, DOMAIN_TAG, metrics.EXECUTION_TAG))
        experiments = [item.experiment_id for item in _pages(self._mlflow.search_experiments)]
        if not experiments:
            return []
        return _pages(self._mlflow.search_runs, experiment_ids=experiments, filter_string=where, max_results=1000)

    def settle(self, run: Any) -> None:
        """Ask Flyte about one run and do what follows."""
        tags: Mapping[str, str] = run.data.tags
        execution = "/".join(tags[tag] for tag in (PROJECT_TAG, DOMAIN_TAG, metrics.EXECUTION_TAG))
        now_s, closure = time.time(), self._closure(tags)
        since_s = float(tags.get(UNKNOWN_TAG, now_s))
        verdict = judge(closure, now_s, self._grace, since_s)
        run_id, name = run.info.run_id, f"run {run.info.run_id} ({run.info.run_name}) of {execution}"
        if verdict is None:
            self.counts["left"] += 1
            if closure is not None and UNKNOWN_TAG in tags and not self._dry_run:
                self._mlflow.delete_tag(run_id, UNKNOWN_TAG)
            elif closure is None:
                if UNKNOWN_TAG not in tags and not self._dry_run:
                    self._mlflow.set_tag(run_id, UNKNOWN_TAG, f"{now_s:.0f}")
                left_s = max(0.0, self._grace.unknown_s - (now_s - since_s))
                print(f"{name}: Flyte does not know it; KILLED if so in {left_s / 60:.0f} minutes", flush=True)
            return
        # Looked up again: since the list was made, the run may have ended by itself, and its word counts.
        status = self._mlflow.get_run(run_id).info.status
        if status != "RUNNING":
            self.counts["left"] += 1
            print(f"{name}: ended meanwhile, {status}", flush=True)
            return
        if not self._dry_run:
            ended_s = max(min(verdict.ended_s or now_s, now_s), run.info.start_time / 1000)
            self._mlflow.set_terminated(run_id, verdict.status, int(ended_s * 1000))
            self._mlflow.set_tag(run_id, REASON_TAG, verdict.reason)
        self.counts["changed"] += 1
        would = "would be " if self._dry_run else ""
        print(f"{name}: {would}RUNNING -> {verdict.status}; {verdict.reason}", flush=True)

    def _closure(self, tags: Mapping[str, str]) -> "ExecutionClosure | None":
        from flyteidl.admin.execution_pb2 import WorkflowExecutionGetRequest
        from flyteidl.core.identifier_pb2 import WorkflowExecutionIdentifier
        from grpc import RpcError, StatusCode

        wanted = WorkflowExecutionIdentifier(project=tags[PROJECT_TAG], domain=tags[DOMAIN_TAG],
                                             name=tags[metrics.EXECUTION_TAG])
        try:
            return self._admin.GetExecution(WorkflowExecutionGetRequest(id=wanted), timeout=CALL_S).closure
        except RpcError as error:
            if grpc_code(error) is StatusCode.NOT_FOUND:
                return None
            raise


def _pages(search: Any, **arguments: Any) -> list[Any]:
    found, token = [], None
    while True:
        page = search(page_token=token, **arguments)
        found.extend(page)
        token = page.token
        if not token:
            return found


def reconcile(grace: Grace, dry_run: bool = False, tls: bool = False) -> dict[str, int]:
    """One pass; how many runs were changed, left as they are, and failed to be looked at.

    Raises:
        UnusableError: Flyte or MLflow cannot be reached, or went away on the way; said within seconds.
    """
    from flyteidl.admin.version_pb2 import GetVersionRequest
    from grpc import RpcError
    from mlflow.exceptions import MlflowException

    platform = flyte_platform(tls)
    admin = flyte_admin(platform)
    try:
        admin.GetVersion(GetVersionRequest(), timeout=CALL_S)
    except RpcError as error:
        raise flyte_trouble(platform, error) from error
    if metrics.tracking_uri().startswith("http"):
        check_mlflow()
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines a run that ends
    try:
        worker = Reconciler(metrics.client(), admin, grace, dry_run)
        runs = worker.running()
    except (MlflowException, OSError) as error:
        raise _mlflow_trouble(error) from error
    failed_in_a_row = 0
    for run in runs:
        try:
            worker.settle(run)
            failed_in_a_row = 0
        except Exception as error:  # whatever is wrong with one run, the others get their turn
            worker.counts["failed"] += 1
            failed_in_a_row += 1
            trouble = flyte_trouble(platform, error) if isinstance(error, RpcError) else _mlflow_trouble(error)
            print(f"run {run.info.run_id} ({run.info.run_name}): FAILED: {trouble}", flush=True)
            if failed_in_a_row == _GONE_AFTER and _is_outage(error):
                raise trouble from error
    return worker.counts


def _is_outage(error: Exception) -> bool:
    from grpc import RpcError, StatusCode
    from mlflow.exceptions import MlflowException

    if isinstance(error, RpcError):
        return grpc_code(error) in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.UNAUTHENTICATED)
    return isinstance(error, MlflowException | OSError)


def _mlflow_trouble(error: Exception) -> UnusableError:
    first = (str(error).splitlines() or [""])[0][:300]
    return UnusableError(f"MLflow at {metrics.tracking_uri()} cannot be used: {type(error).__name__}: {first}. Start "
                         "it, or correct MLFLOW_TRACKING_URI.")


def main(arguments: list[str] | None = None) -> int:
    """The program; its exit status: 1 if a service cannot be used or a run could not be looked at."""
    parser = argparse.ArgumentParser(prog="python -m workflows.reconcile",
                                     description="Give MLflow runs of ended Flyte executions their status.")
    parser.add_argument("--dry-run", action="store_true", help="say what would change and change nothing")
    parser.add_argument("--tls", action="store_true", help="Flyte Admin at FLYTE_ENDPOINT speaks TLS")
    parser.add_argument("--succeeded-grace-s", type=float, default=Grace.succeeded_s, metavar="S",
                        help="seconds after success until a run is marked FINISHED (%(default)s)")
    parser.add_argument("--unknown-grace-s", type=float, default=Grace.unknown_s, metavar="S",
                        help="seconds that an execution may be unknown to Flyte (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.succeeded_grace_s, options.unknown_grace_s) < 0:
        parser.error("grace periods are seconds; expected 0 or more")
    start = time.monotonic()
    try:
        counts = reconcile(Grace(options.succeeded_grace_s, options.unknown_grace_s), options.dry_run, options.tls)
    except UnusableError as error:
        print(f"reconcile: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"reconcile: {sum(counts.values())} running, "
          + ", ".join(f"{value} {key}" for key, value in counts.items())
          + f"{' (dry run)' if options.dry_run else ''}, {time.monotonic() - start:.1f} s", flush=True)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
