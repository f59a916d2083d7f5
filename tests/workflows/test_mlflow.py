"""MLflow: one run a training, complete and never doubled, also when the server goes away."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from tasks import metrics
from tasks.contracts.config import load_recipe
from tasks.contracts.refs import PolicyRef
from tasks.store import open_store
from tests.runs import (
    Place,
    Stop,
    assert_same_training,
    assert_tracked_once,
    histories,
    launcher,  # noqa: F401
    new_place,  # noqa: F401
    picture_steps,
    tiny,
)

EVERY_ITERATION = {
    "reward/total/mean", "reward/total/std", "reward/ocr/mean", "reward/ocr/std", "reward/failed_fraction",
    "advantage/zero_variance_fraction", "update/ratio/mean", "update/ratio/max", "update/first/ratio/mean",
    "update/first/ratio/max", "update/first/log_prob_gap/max", "update/log_prob_gap/mean", "update/clipped_low/mean",
    "update/clipped_high/mean", "update/kl/mean", "update/grad_norm", "update/learning_rate", "update/skipped",
    "update/loss/mean", "rollout/diversity", "time/rollout_s", "time/reward_s", "time/advantage_s", "time/update_s",
    "time/samples_per_s"}
"""The issue's list: reward mean and std per reward, zero-variance fraction, ratio, log-prob gap, clip fraction by sign,
KL, grad norm, sample diversity, seconds a stage, samples a second."""
WITH_KL = tiny(algorithm__kl_coef=0.01, tracking__register_as="painter")


@pytest.fixture(scope="module")
def two_runs(launcher, new_place) -> Place:  # noqa: F811
    """A place with two finished trainings of different seeds."""
    place = new_place()
    for seed in (0, 1):
        done = launcher.run(place, f"{WITH_KL} seed={seed} name=seed-{seed}")
        assert done.returncode == 0, done.output
    return place


@pytest.fixture(scope="module")
def run_of(two_runs):
    """Function: the MLflow run of a seed."""
    return lambda seed: next(run for run in two_runs.runs() if run.data.params["seed"] == str(seed))


def test_one_finished_run_a_training_named_and_tagged(two_runs, run_of):
    assert len(two_runs.runs()) == 2
    for seed in (0, 1):
        run = run_of(seed)
        assert run.info.status == "FINISHED"
        assert run.info.run_name == f"seed-{seed}"
        assert run.data.tags["flyte.execution_id"] == f"local-{run.data.params['report_key'][:16]}"
        assert re.fullmatch("[0-9a-f]{40}", run.data.tags["mlflow.source.git.commit"])


def test_the_parameters_are_the_whole_recipe_and_the_versions(run_of):
    from importlib.metadata import version

    params = run_of(1).data.params
    config = load_recipe("base", f"{WITH_KL} seed=1 name=seed-1")
    assert config.flat().items() <= params.items()
    assert params["algorithm.clip_range"] == "0.001"
    assert params["rewards.ocr.dense"] == "0.5"
    assert params["version.torch"] == version("torch")
    assert params["version.mlflow"] == version("mlflow")
    assert re.fullmatch("[0-9a-f]{40}", params["git_commit"])
    assert params["derived.samples_an_iteration"] == "6"


def test_every_metric_is_there_for_every_iteration(two_runs, run_of):
    found = histories(two_runs, run_of(0).info.run_id)
    assert found.keys() >= EVERY_ITERATION
    for key in EVERY_ITERATION:
        assert [step for step, _ in found[key]] == [1, 2, 3], key
    assert found["update/first/ratio/max"] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert found["update/kl/mean"][0][1] >= 0
    assert [step for step, _ in found["eval/ema/ocr/exact_match"]] == [0, 3]


def test_pictures_are_there_by_step_and_look_like_pictures(two_runs, run_of, tmp_path):
    from PIL import Image

    run_id = run_of(0).info.run_id
    assert picture_steps(two_runs, run_id) == [0, 3]
    (grid, *_) = [item.path for item in two_runs.mlflow().list_artifacts(run_id, "images")
                  if item.path.endswith(".png")]
    for path in (grid, "before_after.png"):
        with Image.open(two_runs.mlflow().download_artifacts(run_id, path, str(tmp_path))) as picture:
            assert picture.width > 100
            assert len(picture.convert("RGB").getcolors(10**6)) > 10


def test_the_policy_is_an_artifact_that_can_be_loaded(two_runs, run_of, tmp_path):
    from safetensors.torch import load_file

    run = run_of(0)
    folder = Path(two_runs.mlflow().download_artifacts(run.info.run_id, "policy", str(tmp_path)))
    ref = PolicyRef.model_validate_json((folder / "policy.json").read_text())
    assert ref.step == 3
    for name in ("ema", "raw"):
        stored = two_runs.store().load(ref.weights, name)
        shipped = load_file(folder / f"{name}.safetensors")
        assert shipped.keys() == stored.keys()
        assert all(torch.equal(shipped[key], stored[key]) for key in stored)


def test_two_runs_can_be_compared_through_the_api(two_runs, run_of):
    curves = [histories(two_runs, run_of(seed).info.run_id) for seed in (0, 1)]
    assert curves[0].keys() - {"time/iteration_s", "time/overhead_fraction"} <= curves[1].keys() | {
        key for key in curves[0] if key.startswith("time/")}
    for key in ("reward/total/mean", "update/grad_norm"):
        one, other = (dict(curve[key]) for curve in curves)
        assert one.keys() == other.keys() == {1, 2, 3}
        assert one != other
    # paired: before training both seeds are the same policy on the same prompts and noise
    assert curves[0]["eval/raw/ocr/score"][0] == curves[1]["eval/raw/ocr/score"][0]
    experiment = two_runs.mlflow().get_experiment_by_name("flowmill").experiment_id
    best = two_runs.mlflow().search_runs([experiment], "metrics.`update/first/ratio/max` = 1",
                                         order_by=["metrics.`reward/total/mean` DESC"])
    assert len(best) == 2


def test_a_training_is_registered_with_the_alias_best(two_runs, run_of):
    client = two_runs.mlflow()
    versions = {item.run_id: item for item in client.search_model_versions("name = 'painter'")}
    assert versions.keys() == {run_of(seed).info.run_id for seed in (0, 1)}
    best = client.get_model_version_by_alias("painter", "best")
    assert float(best.tags["value"]) == max(float(item.tags["value"]) for item in versions.values())


# ---- the module on its own -------------------------------------------------------------------------------------------


@pytest.fixture
def here(new_place, monkeypatch) -> Place:  # noqa: F811
    """A new place that this process writes to."""
    place = new_place()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place.env["MLFLOW_TRACKING_URI"])
    return place


def test_a_run_is_created_once_for_an_execution(here):
    config = load_recipe("base", tiny())
    first = metrics.ensure_run(config, "execution-1", "key")
    assert metrics.ensure_run(config, "execution-1", "key") == first
    assert metrics.find_run("flowmill", "execution-1") == first
    assert metrics.ensure_run(config, "execution-2", "key") != first
    assert metrics.find_run("flowmill", "execution-3") is None
    metrics.finish(first, "FAILED")
    assert metrics.ensure_run(config, "execution-1", "key") == first
    assert {run.info.run_id: run.info.status for run in here.runs()}[first] == "RUNNING"


def test_parameters_that_an_interrupted_creation_left_out_are_added(here, monkeypatch):
    config = load_recipe("base", tiny())
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_log_parameters", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            metrics.ensure_run(config, "execution", "key")
    metrics.ensure_run(config, "execution", "key")
    (run,) = here.runs()
    assert config.flat().items() <= run.data.params.items()


def test_a_status_is_set_once(here):
    run_id = metrics.ensure_run(load_recipe("base", tiny()), "execution", "key")
    metrics.finish(run_id, "FINISHED")
    metrics.finish(run_id, "FAILED")
    assert here.runs()[0].info.status == "FINISHED"


def test_sending_twice_changes_nothing(here, tmp_path):
    from io import BytesIO

    from PIL import Image

    run_id = metrics.ensure_run(load_recipe("base", tiny()), "execution", "key")
    png = BytesIO()
    Image.new("RGB", (8, 8), "red").save(png, "PNG")
    recorder = metrics.Recorder(run_id, open_store(str(tmp_path)))
    for _ in range(2):
        recorder.log({"a": 1.0, "b": float("nan")}, 3, 1_700_000_000_000)
        recorder.log_picture("samples", 3, 1_700_000_000_000, png.getvalue())
    assert histories(here, run_id) == {"a": [(3, 1.0)]}
    assert picture_steps(here, run_id) == [3]
    assert here.runs()[0].data.tags["mlflow.loggedImages"] == "True"


def test_best_moves_only_to_a_better_version_judged_alike(here):
    def train(execution: str, name: str, value: float) -> str:
        run_id = metrics.ensure_run(load_recipe("base", tiny()), execution, "key")
        metrics._register(run_id, "painter", name, value)
        return run_id

    def best() -> str:
        return here.mlflow().get_model_version_by_alias("painter", "best").run_id

    first = train("1", "ocr/exact_match", 0.5)
    assert best() == first
    for worse in (0.4, 0.5, float("nan")):
        train(f"worse-{worse}", "ocr/exact_match", worse)
        assert best() == first
    train("other measure", "jpeg/score", 99.0)
    assert best() == first
    better = train("2", "ocr/exact_match", 0.6)
    assert best() == better
    assert train("1", "ocr/exact_match", 0.7) == best() == first  # a lengthened run: its version is judged again
    assert len(here.mlflow().search_model_versions("name = 'painter'")) == 6


# ---- a server that goes away -----------------------------------------------------------------------------------------


class Server:
    """`mlflow server` on a free port; `stop` keeps its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [Path(sys.executable).with_name("mlflow"), "server", "--host", "127.0.0.1", "--port", str(self.port),
                   "--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}",
                   "--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                                             env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true",
                                                  "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
                assert self._process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(new_place) -> Iterator[Server]:  # noqa: F811
    made = Server(new_place().folder)
    try:
        yield made
    finally:
        made.stop()


def test_a_server_that_is_down_at_the_start_stops_the_run_at_once(launcher, new_place, server):  # noqa: F811
    place, started = new_place(MLFLOW_TRACKING_URI=server.uri), time.monotonic()
    done = launcher.run(place, tiny())
    assert time.monotonic() - started < 15
    assert done.returncode == 1
    assert "Traceback" not in done.output
    assert f"TrackingError: MLflow at {server.uri} cannot be used" in done.text
    assert "Start it, or unset MLFLOW_TRACKING_URI" in done.text


def test_a_server_that_goes_away_in_mid_run_loses_and_doubles_nothing(launcher, new_place, server):  # noqa: F811
    server.start()
    calm, place = new_place(), new_place(MLFLOW_TRACKING_URI=server.uri)
    done = launcher.run(calm, tiny())
    assert done.returncode == 0, done.output
    # Down while the first iteration trains, up again before the third is recorded.
    attempt = launcher.start(place, tiny(), stop=[Stop("tasks.update:train", having=1, then="wait")])
    attempt.wait_until_stopped()
    server.stop()
    attempt.go()
    done = attempt.wait()  # the training ends without MLflow, and says what to do
    assert done.returncode == 0, done.output
    assert "run the same command again" in done.text
    assert [path for path in place.store().list("spool") if path.endswith(".json")]
    assert_same_training(place, calm)
    server.start()
    again = launcher.run(place, tiny(), trace=["tasks.update:train", "tasks.eval:measure"])
    assert again.returncode == 0, again.output
    assert again.calls == []
    assert place.store().list("spool") == []
    found = assert_tracked_once(place, 3, [0, 3])
    calm_found = assert_tracked_once(calm, 3, [0, 3])
    for key, points in calm_found.items():
        if not key.startswith("time/"):
            assert sorted(found[key]) == sorted(points), key


def test_numbers_spooled_in_an_outage_are_sent_with_the_next(new_place, server, tmp_path, monkeypatch):  # noqa: F811
    place, store = new_place(), open_store(str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place.env["MLFLOW_TRACKING_URI"])
    run_id = metrics.ensure_run(load_recipe("base", tiny()), "execution", "key")
    recorder = metrics.Recorder(run_id, store)
    recorder.log({"a": 1.0}, 1, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "tracking_uri", lambda: server.uri)  # nobody listens there
        recorder.log({"a": 2.0}, 2, 2000)
        recorder.log({"a": 3.0}, 3, 3000)
        assert not recorder.flush()
    assert len(store.list("spool")) == 2
    recorder.log({"a": 4.0}, 4, 4000)
    assert store.list("spool") == []
    assert histories(place, run_id) == {"a": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]}


def test_a_failure_while_the_server_is_down_shows_the_failure(launcher, new_place, server):  # noqa: F811
    server.start()
    place = new_place(MLFLOW_TRACKING_URI=server.uri)
    attempt = launcher.start(place, tiny(), stop=[
        Stop("tasks.rollout:draw_trajectories", then="wait"),
        Stop("tasks.rewards.ocr:Reader.__call__", call=2, then="raise RuntimeError('out of paper')")])
    attempt.wait_until_stopped()
    server.stop()
    attempt.go()
    done = attempt.wait()
    assert done.returncode == 1
    assert "RewardError: reward 'ocr': samples 0..5: it raised RuntimeError: out of paper" in done.text
    assert "the run is not marked as failed" in done.text
    assert "Traceback" not in done.output


def test_a_failed_run_is_marked_and_a_rerun_finishes_it(launcher, new_place):  # noqa: F811
    place = new_place()
    done = launcher.run(place, tiny(), stop=Stop("tasks.update:train", having=2, then="raise MemoryError('no more')"))
    assert done.returncode == 1
    (run,) = place.runs()
    assert (run.info.status, run.info.end_time is not None) == ("FAILED", True)
    assert launcher.run(place, tiny()).returncode == 0
    assert_tracked_once(place, 3, [0, 3])


# ---- what a person sees ----------------------------------------------------------------------------------------------


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def open_page(browser: str, url: str, profile: Path) -> str:
    """The DOM of a page after its scripts have run for a minute of the page's own time."""
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={profile}", "--window-size=1600,3000", "--virtual-time-budget=60000", "--dump-dom", url],
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(_chromium() is None, reason="needs the Debian package chromium")
def test_the_compare_page_draws_both_runs_and_their_curves(two_runs, run_of, tmp_path):
    browser = _chromium()
    assert browser is not None
    server = Server(two_runs.folder)
    server.start()
    try:
        runs = [run_of(seed) for seed in (0, 1)]
        experiments = quote(json.dumps([runs[0].info.experiment_id]))
        ids, metric = quote(json.dumps([run.info.run_id for run in runs])), "reward/total/mean"
        both = f"runs={ids}&experiments={experiments}"
        compare = open_page(browser, f"{server.uri}/#/compare-runs?{both}", tmp_path / "profile")
        curves = open_page(
            browser, f"{server.uri}/#/metric?{both}&metric={quote(json.dumps(metric))}&plot_metric_keys="
                     f"{quote(json.dumps([metric]))}&plot_layout=%7B%7D&x_axis=step&y_axis_scale=linear"
                     "&line_smoothness=1&show_point=true", tmp_path / "profile")
    finally:
        server.stop()
    assert "Comparing 2 Runs from 1 Experiment" in compare
    for run in runs:
        assert run.info.run_name in compare
        assert run.info.run_id in compare
    assert "js-plotly-plot" in compare  # the parallel coordinates
    assert "eval/ema/ocr/exact_match" in compare
    # The legend names both curves, and the plot has a drawn line for each.
    legend = set(re.findall(r">(seed-\d) \(reward/total/mean\)<", curves))
    assert legend == {"seed-0", "seed-1"}
    lines = re.findall(r'class="js-line"[^>]* d="(M[^"]+L[^"]+)"', curves)
    assert len(set(lines)) == 2, lines


def test_a_rerun_on_a_cluster_takes_over_the_run_of_the_same_training(monkeypatch, tmp_path):
    """A relaunched execution has another id; its training, its spool and its curve are the same."""
    from tasks import metrics
    from tasks.contracts.config import load_recipe

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_PROJECT", "flowmill")
    config = load_recipe("smoke")
    first = metrics.ensure_run(config, "execution-1", "run", "report")
    metrics.finish(first, "KILLED")
    again = metrics.ensure_run(config, "execution-2", "run", "report")
    assert again == first
    run = metrics.client().get_run(first)
    assert run.info.status == "RUNNING"
    assert run.data.tags[metrics.EXECUTION_TAG] == "execution-2"
    assert metrics.find_run(config.tracking.experiment, "execution-1") is None
    assert metrics.ensure_run(config, "execution-3", "run", "judged otherwise") != first
    assert metrics.ensure_run(config, "execution-2", "run", "report") == first, "a retry"
