"""What a person sees who gives a run something it cannot use: one clear message, exit status 1, nothing lost."""

import os
import subprocess
from pathlib import Path

import pytest

from tasks.policies.tiny_text import CHECKPOINT
from tests.fixtures_s3 import s3_server  # noqa: F401
from tests.runs import (
    Place,
    Stop,
    assert_same_training,
    launcher,  # noqa: F401
    new_place,  # noqa: F401
    tiny,
)

TRAIN = "tasks.update:train"
DRAW = "tasks.rollout:draw_trajectories"
READ = "tasks.rewards.ocr:Reader.__call__"
"""Calls of a tiny run: 1 = the evaluation before training, then one an iteration."""


@pytest.fixture(scope="module")
def half_done(launcher, new_place) -> Place:  # noqa: F811
    """A place where somebody has trained one iteration already."""
    place = new_place()
    assert launcher.run(place, tiny(iterations=1)).returncode == 0
    return place


@pytest.fixture(scope="module")
def uninterrupted(launcher, new_place) -> Place:  # noqa: F811
    place = new_place()
    assert launcher.run(place, tiny()).returncode == 0
    return place


def everything(place: Place) -> list[object]:
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted((place.folder / "store").rglob("*"))
             if path.is_file()]
    return [files, [(run.info.run_id, run.info.status) for run in place.runs()]]


def assert_says(done, kind: str, *words: str, lines: int = 8) -> str:
    """Fail unless the run was refused and the last thing on the terminal is this message, with no traceback."""
    assert done.returncode == 1, done.output
    assert "Traceback" not in done.output
    assert "Error encountered" not in done.output
    message = done.output[done.output.rindex(f"{kind}: "):]
    assert message.count("\n") <= lines, message
    text = " ".join(message.split())
    for word in words:
        # The terminal breaks a long path wherever its line ends.
        assert "".join(word.split()) in "".join(message.split()), message
    return text


REFUSED = {
    "misspelt key": ("sampling.group_siz=4", "ConfigError", "sampling.group_siz: unknown key", "mean 'group_size'?"),
    "misspelt plugin key": ("rewards.ocr.dens=0.5", "ConfigError", "unknown key", "did you mean 'dense'?"),
    "wrong type": ("sampling.group_size=many", "ConfigError", "sampling.group_size: got 'many'", "valid integer"),
    "number with a fraction": ("sampling.group_size=2.5", "ConfigError", "sampling.group_size: got 2.5", "integer"),
    "out of range": ("sampling.noise_level=-1", "ConfigError", "sampling.noise_level: got -1", "greater than 0"),
    "unknown plugin": ("'rewards=[{name: pikscore}]'", "ConfigError", "no rewards plugin named 'pikscore'",
                       "found jpeg_compressibility, ocr", "tasks/rewards/pikscore.py"),
    "group of one": ("sampling.group_size=1", "ConfigError", "needs group_size >= 2, got 1", "every advantage is 0"),
    "not an override": ("sampling.group_size", "ConfigError", "is not key=value"),
}


@pytest.mark.parametrize(("change", "kind", "words"), [(row[0], row[1], row[2:]) for row in REFUSED.values()],
                         ids=list(REFUSED))
def test_a_recipe_that_cannot_run_is_refused_before_anything_happens(launcher, half_done, change, kind, words):  # noqa: F811
    before = everything(half_done)
    done = launcher.run(half_done, f"{tiny()} {change}")
    assert_says(done, kind, *words)
    assert done.output.startswith("Running Execution on local.")
    assert everything(half_done) == before


def test_an_unknown_recipe_lists_those_there_are(launcher, half_done):  # noqa: F811
    assert_says(launcher.run(half_done, recipe="demoo"), "ConfigError", "no recipe 'demoo'", "base, demo", "smoke")


GOOD = 'a red sign that says "7K"\n'
PROMPTS = {
    "missing": (None, "cannot be read", "No such file", "prompts.train"),
    "not text": (b"\xff\xfe\x00\x01" * 20, "cannot be read", "UTF-8"),
    "truncated": (f"{GOOD}green text rea".encode(), "does not end with a newline", "'green text rea'", "Copy it again"),
    "empty": (b"", "is empty", "one prompt a line"),
    "empty prompt": ((GOOD + "\n" + GOOD).encode(), "line 2", "the prompt is empty", "Remove the line"),
    "cannot be painted": ((GOOD + 'a red sign that says "hello"\n').encode(), "asks for the text 'hello'", "exactly 2"),
}


@pytest.mark.parametrize("role", ["train", "evaluate"])
@pytest.mark.parametrize(("content", "words"), [(row[0], row[1:]) for row in PROMPTS.values()], ids=list(PROMPTS))
def test_a_prompts_file_that_cannot_be_used_is_refused(launcher, half_done, tmp_path, content, words, role):  # noqa: F811
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    before = everything(half_done)
    done = launcher.run(half_done, f"{tiny()} prompts.{role}={file}")
    assert_says(done, "ContractError" if "exactly 2" in words else "ConfigError", *words)
    assert everything(half_done) == before


@pytest.mark.parametrize("damage", [lambda data: data[:5000], lambda data: b"\0" * 100, None],
                         ids=["truncated", "other bytes", "missing"])
def test_a_corrupt_checkpoint_is_refused(launcher, half_done, tmp_path, damage):  # noqa: F811
    file = tmp_path / "tiny.safetensors"
    if damage:
        file.write_bytes(damage(CHECKPOINT.read_bytes()))
    before = everything(half_done)
    done = launcher.run(half_done, f"{tiny()} policy.checkpoint={file}")
    assert_says(done, "CheckpointError", file.name, "Leave policy.checkpoint empty")
    assert everything(half_done) == before


def test_the_run_that_was_there_before_still_continues(launcher, half_done, uninterrupted):  # noqa: F811
    done = launcher.run(half_done, tiny(), trace=[DRAW])
    assert done.returncode == 0, done.output
    assert [plain for _, plain in done.calls] == [[2], [3]]


def fix_and_finish(launcher, place, uninterrupted, *, drawn, overrides=None):  # noqa: F811
    """The run was marked FAILED; the same command then draws only `drawn` and ends like a run without trouble."""
    assert [run.info.status for run in place.runs()] == ["FAILED"]
    done = launcher.run(place, overrides or tiny(), trace=[DRAW])
    assert done.returncode == 0, done.output
    assert [plain for _, plain in done.calls] == [[number] for number in drawn]
    assert_same_training(place, uninterrupted)
    assert [run.info.status for run in place.runs()] == ["FINISHED"]


def test_a_reward_that_raises_names_the_samples_and_keeps_the_rollout(launcher, new_place, uninterrupted):  # noqa: F811
    place = new_place()
    done = launcher.run(place, tiny(), stop=Stop(READ, call=3, then="raise RuntimeError('out of paper')"))
    assert_says(done, "RewardError", "reward 'ocr': samples 6..11: it raised RuntimeError: out of paper",
                "Fix the reward and rerun: the rollout is kept")
    fix_and_finish(launcher, place, uninterrupted, drawn=[3])


def test_a_reward_that_is_not_finite_names_the_sample(launcher, new_place, uninterrupted):  # noqa: F811
    place = new_place()
    done = launcher.run(place, tiny(), stop=Stop(READ, call=2, after=True, then="result['score'][4] = float('nan')"))
    assert_says(done, "RewardError", "reward 'ocr': sample 4 (prompt", "scored nan; rewards must be finite")
    fix_and_finish(launcher, place, uninterrupted, drawn=[2, 3])


def nan_losses(*calls: int) -> list[Stop]:
    return [Stop("tasks.algorithms.flow_grpo:loss", call=call, then="args[2]['policy'].data.fill_(float('nan'))")
            for call in calls]


def test_too_many_nan_losses_stop_the_run_and_keep_the_policy_before(launcher, new_place, uninterrupted):  # noqa: F811
    place, strict = new_place(), tiny(optimizer__max_skipped_updates=0)
    done = launcher.run(place, strict, stop=nan_losses(5))  # four micro-batches an iteration: the second one's first
    assert_says(done, "NumericsError", "update of iteration 2: 1 optimiser steps had a non-finite loss",
                "Lower optimizer.learning_rate", "the policy before this iteration is kept")
    again = launcher.run(place, strict, trace=[DRAW])
    assert again.returncode == 0, again.output
    assert [plain for _, plain in again.calls] == [[3]]


def test_a_few_nan_losses_are_skipped_and_shown(launcher, new_place):  # noqa: F811
    place = new_place()
    done = launcher.run(place, tiny(), stop=nan_losses(5))
    assert done.returncode == 0, done.output
    (run,) = place.runs()
    assert [item.value for item in place.mlflow().get_metric_history(run.info.run_id, "update/skipped")] == [0, 1, 0]


def test_a_full_disk_says_so_and_the_run_continues_with_more_space(launcher, new_place, uninterrupted, tmp_path):  # noqa: F811
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)], capture_output=True,
                             text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    try:
        place = new_place(FLOWMILL_STORE=str(disk / "store"))
        done = launcher.run(place, tiny())
        assert_says(done, "StoreError", "the disk is full", "are free in", "lower retention.keep_iterations",
                    "everything stored before is kept")
        assert not [path for path in (disk / "store").rglob(".tmp-*") if path.is_file()]
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        fix_and_finish(launcher, place, uninterrupted, drawn=[3])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_s3_that_goes_down_in_mid_run(launcher, new_place, uninterrupted, s3_server, monkeypatch):  # noqa: F811
    s3_server.client().make_bucket("outage")
    place = new_place(**s3_server.env, FLOWMILL_STORE="s3://outage")
    attempt = launcher.start(place, tiny(), stop=Stop(TRAIN, having=2, then="wait"))
    attempt.wait_until_stopped()
    s3_server.stop()
    try:
        attempt.go()
        done = attempt.wait()
        assert_says(done, "StoreUnavailableError", "s3://outage/", "After 5 attempt(s): check that the endpoint is up",
                    "everything stored before is kept")
        refused = launcher.run(place, tiny())
        assert_says(refused, "StoreUnavailableError", "opening the store s3://outage", "check that the endpoint is up")
    finally:
        s3_server.start()
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    fix_and_finish(launcher, place, uninterrupted, drawn=[3])


def test_a_bug_keeps_its_traceback_and_marks_the_run(launcher, new_place):  # noqa: F811
    place = new_place()
    done = launcher.run(place, tiny(), stop=Stop(TRAIN, then="raise KeyError('a bug')"))
    assert done.returncode == 1
    assert "Traceback" in done.output
    assert "a bug" in done.output
    assert [run.info.status for run in place.runs()] == ["FAILED"]


def test_verbose_shows_where_a_refusal_was_raised(launcher, half_done):  # noqa: F811
    done = launcher.run(half_done, argv=["-v", "run", "workflows/flowgrpo.py", "flowgrpo", "--recipe", "base",
                                         "--overrides", "sampling.group_siz=4"])
    assert done.returncode == 1
    assert "load_recipe" in done.output
    assert "did you mean 'group_size'?" in done.output


def test_bad_input_is_not_retried_on_a_cluster():
    """Flyte retries an error of user code only if it is one of its own recoverable ones."""
    from flytekit.exceptions.base import FlyteRecoverableException

    from tasks.contracts import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    assert not [kind for kind in kinds if issubclass(kind, FlyteRecoverableException)]


def test_the_command_itself_says_the_same(half_done):
    """Through `pyflyte` in a process of its own, as a person starts it."""
    import sys

    env = {**os.environ, **half_done.env, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run([Path(sys.executable).with_name("pyflyte"), "run", "workflows/flowgrpo.py", "flowgrpo",
                           "--overrides", "sampling.group_siz=4"], cwd=CHECKPOINT.parents[3], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).splitlines() == [
        "Running Execution on local.", "ConfigError: recipe 'demo' cannot run:",
        "  sampling.group_siz: unknown key (value 4); did you mean 'group_size'?"]
