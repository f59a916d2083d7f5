"""The run as on the cluster: every task in its built image, under the manifests' pod, through real services.

`make stack` is the first test; the others are what goes wrong on a cluster, each with the message that a person reads.
"""

import io
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s.stack.__main__ import Stack, package, started
from k8s.stack.pod import StackError
from k8s.stack.propeller import Package, TaskFailed
from tests.images.conftest import engine, images  # noqa: F401
from tests.runs import tiny

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack(engine, images, tmp_path_factory) -> Iterator[Stack]:  # noqa: F811
    """Running services and the packaged workflows."""
    with started({name: images[name] for name in ("train", "reward", "mlflow")}, tmp_path_factory.mktemp("stack"),
                 engine, print) as made:
        yield made


def failure(stack: Stack, overrides: str = "", **pod: Any) -> TaskFailed:
    """How a run fails whose pods differ in `pod`, fields of the `Cluster`."""
    usual = stack.cluster
    stack.cluster = replace(usual, **pod)
    try:
        with pytest.raises(TaskFailed) as caught:
            stack.run("base", tiny(iterations=1) + overrides, print)
    finally:
        stack.cluster = usual
    return caught.value


def log_of(stack: Stack, node: str) -> str:
    """The newest log of a node's containers."""
    logs = sorted((stack.cluster.scratch / "logs").glob(f"*-{node}-*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text()


def with_environment(stack: Stack, **changes: str) -> list[dict[str, Any]]:
    """The task namespace's objects with other values in the ConfigMap."""
    return [{**item, "data": {**item["data"], **changes}} if item["kind"] == "ConfigMap" else item
            for item in stack.cluster.objects]


def test_make_stack_runs_the_smoke_recipe_in_the_images_within_three_minutes(images, tmp_path):  # noqa: F811
    registry, tag = images["train"].rsplit("/", 1)[0], images["train"].rsplit(":", 1)[1]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "k8s.stack", f"--folder={tmp_path}", f"--registry={registry}", f"--tag={tag}"], cwd=ROOT,
        capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - begun
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "17 containers" in done.stdout
    assert "MLflow run 'smoke' FINISHED" in done.stdout
    assert "before_after.png, curve.png, images, policy" in done.stdout
    assert "2 advantages, 2 evaluations, 2 policies, 2 rewards, 2 train_states, 2 trajectories" in done.stdout
    assert seconds <= 180
    leftovers = subprocess.run(["sh", "-c", f"ps -ef | grep -v grep | grep -F {tmp_path} || true"], capture_output=True,
                               text=True)
    assert leftovers.stdout == "", "services run on"


def test_the_first_line_of_a_task_runs_within_four_seconds_of_its_containers_start(stack):
    """A recipe that does not exist is refused on the first line of `plan`; the container's whole life is counted."""
    lines: list[str] = []
    for _ in range(2):  # the second is warm
        with pytest.raises(TaskFailed, match="no recipe 'nothing'"):
            stack.run("nothing", "", lines.append)
    seconds = [float(match[1]) for line in lines if (match := re.search(r"plan .* (\d+\.\d) s  exit", line))]
    print(f"plan from start to end: {seconds} s")
    assert seconds[-1] <= 4


def test_a_wrong_s3_key_fails_with_the_servers_reason_in_the_log(stack):
    secrets = {**stack.cluster.secrets, "flowmill-s3": {"access_key_id": "nobody", "secret_access_key": "wrong"}}
    error = failure(stack, secrets=secrets)
    assert error.node == "n0"
    assert "left no result" in str(error), "without keys not even an error document can be written"
    assert re.search(r"InvalidAccessKeyId|access key|Forbidden|AccessDenied", log_of(stack, "n0"), re.IGNORECASE)


def test_a_missing_bucket_is_named(stack):
    error = failure(stack, objects=with_environment(stack, FLOWMILL_STORE="s3://nowhere/store"))
    assert error.node == "n0"
    assert "'nowhere'" in error.message
    assert re.search(r"bucket .*(does not exist|missing|no bucket)", error.message)


def test_mlflow_down_at_the_start_runs_nothing_and_says_where_it_was_looked_for(stack):
    error = failure(stack, objects=with_environment(stack, MLFLOW_TRACKING_URI="http://127.0.0.1:9"))
    assert error.node == "n0"
    assert "MLflow at http://127.0.0.1:9 cannot be used" in error.message
    assert "nothing was run" in error.message


def test_a_secret_that_is_not_there_is_named(stack):
    usual = stack.cluster
    stack.cluster = replace(usual, secrets={"mlflow": usual.secrets["mlflow"]})
    try:
        with pytest.raises(StackError, match="no Secret 'flowmill-s3' with key 'access_key_id'"):
            stack.run("smoke", "", print)
    finally:
        stack.cluster = usual


def test_a_cache_folder_that_cannot_be_written_is_named(stack):
    error = failure(stack, objects=with_environment(stack, TRITON_CACHE_DIR="/opt/triton"))
    assert "cache folder TRITON_CACHE_DIR=/opt/triton cannot be written to by user 10001" in error.message
    assert "emptyDir" in error.message


def test_mlflow_that_stops_in_mid_run_loses_no_number_and_the_rerun_sends_them(stack):
    overrides = tiny(iterations=2, seed=11)

    def report(line: str) -> None:
        print(line)
        if line.startswith("rollout-1"):
            stack.stop_mlflow()

    first = stack.run("base", overrides, report)
    waiting = list(stack.client.list_objects("flowmill", prefix="store/spool/", recursive=True))
    assert len(waiting) >= 3
    assert "the numbers wait in the store" in log_of(stack, "record-2")
    stack.start_mlflow()
    again = stack.run("base", overrides, print)
    trained = [name for name, _ in again.timings if name.startswith(("rollout", "update"))]
    assert trained == [], "nothing is trained twice"
    from mlflow import MlflowClient

    client = MlflowClient(stack.tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name("flowmill").experiment_id],
                              f"tags.`flyte.execution_id` = '{again.name}'")
    assert [run.info.status for run in runs] == ["FINISHED"]
    history = client.get_metric_history(runs[0].info.run_id, "reward/total/mean")
    assert [item.step for item in history] == [1, 2]
    assert client.search_runs([runs[0].info.experiment_id], f"tags.`flyte.execution_id` = '{first.name}'") == []
    assert not list(stack.client.list_objects("flowmill", prefix="store/spool/", recursive=True))


def test_a_store_that_does_not_answer_is_tried_again_before_the_run_fails(stack):
    lines: list[str] = []
    usual = stack.cluster
    stack.cluster = replace(usual, objects=with_environment(stack, FLOWMILL_S3_ENDPOINT="http://127.0.0.1:9"))
    try:
        with pytest.raises(TaskFailed) as caught:
            stack.run("base", tiny(iterations=1), lines.append)
    finally:
        stack.cluster = usual
    assert "S3 endpoint http://127.0.0.1:9" in caught.value.message
    assert "everything stored before is kept" in caught.value.message
    assert [line for line in lines if line.startswith("n0: attempt")] == [
        "n0: attempt 1 failed and may be tried again", "n0: attempt 2 failed and may be tried again"]


def test_fast_registered_code_wins_over_the_images(stack, tmp_path):
    """A recipe that no image holds, shipped with this folder's code."""
    package({name: stack.images[name] for name in ("train", "reward")}, tmp_path / "package.tgz", fast=True)
    shipped = Package.read(tmp_path / "package.tgz")
    archive = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(shipped.code)) as old, tarfile.open(fileobj=archive, mode="w:gz") as new:
        for member in old:
            new.addfile(member, old.extractfile(member))
        recipe = b"extends: base\nname: shipped with the code\n"
        added = tarfile.TarInfo("workflows/recipes/shipped.yaml")
        added.size, added.mode = len(recipe), 0o644
        new.addfile(added, io.BytesIO(recipe))
    usual = stack.package
    stack.package = replace(shipped, code=archive.getvalue())
    try:
        execution = stack.run("shipped", tiny(iterations=1, seed=12), print)
    finally:
        stack.package = usual
    assert "shipped with the code" in log_of(stack, "n0")
    assert [name for name, _ in execution.timings if name == "rollout-1"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_a_stack_that_is_stopped_leaves_no_server_and_the_next_one_no_container(engine, images, tmp_path, how):  # noqa: F811
    def left() -> list[str]:
        """Containers, and processes that name the folder."""
        return [subprocess.run(command, capture_output=True, text=True).stdout for command in (
            [engine, "ps", "--all", "--quiet", f"--filter=label=flowmill.stack={tmp_path}"],
            ["pgrep", "-f", str(tmp_path)])]

    command = [sys.executable, "-m", "k8s.stack", f"--folder={tmp_path}", f"--tag={images['train'].rsplit(':', 1)[1]}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            if "MLflow at" in line:
                assert all(left())
                process.send_signal(how)
        process.communicate()
    if how == signal.SIGTERM:
        assert process.returncode == 130
    deadline = time.monotonic() + 10  # a process that was told to end may be in the middle of starting
    while (found := left())[1] and time.monotonic() < deadline:
        time.sleep(0.5)
    containers, processes = found
    assert processes == ""
    if how == signal.SIGTERM:
        assert containers == ""
    done = subprocess.run([*command, "--recipe=nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no recipe 'nothing'" in done.stderr
    assert left() == ["", ""]
