"""Killed with SIGKILL anywhere and started again, a run ends with the bits of a run that was left alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.fixtures_s3 import s3_server  # noqa: F401
from tests.runs import (
    ROOT,
    Place,
    Stop,
    assert_same_training,
    assert_tracked_once,
    launcher,  # noqa: F401
    new_place,  # noqa: F401
    tiny,
    trained,
)

STAGES = ("tasks.rollout:draw_trajectories", "tasks.reward:score_media", "tasks.advantage:save_advantages",
          "tasks.update:train", "tasks.eval:measure")
KILLED = -signal.SIGKILL
ONE_KEPT = tiny(retention__keep_iterations=1)
DRAW, SCORE, ADVANTAGE, TRAIN, MEASURE = STAGES
CHAIN = {
    "plan, run created": (Stop("tasks.metrics:_log_parameters"), {}),
    "evaluate, samples drawn": (Stop("tasks.eval:sample_ode", after=True), {(MEASURE, None): 1}),
    "evaluation recorded but for its picture": (Stop("tasks.metrics:Recorder.log_picture"), {}),
    "rollout, second micro-batch": (Stop("tasks.sampling:denoise", call=2, after=True), {(DRAW, 1): 1}),
    "rollout, files staged": (Stop("os:replace", having="trajectories"), {(DRAW, 1): 1}),
    "rollout, two of four files in place": (Stop("os:replace", call=3, having="trajectories"), {(DRAW, 1): 1}),
    "reward": (Stop(SCORE, after=True), {}),
    "advantage": (Stop(ADVANTAGE), {(ADVANTAGE, None): 1}),
    "update, second optimiser step": (Stop("tasks.update:Replay.gradients", call=2), {(TRAIN, 1): 1}),
    "update, between its two store writes": (Stop("tasks.store:Store.put", having="policies"), {(TRAIN, 1): 1}),
    "update, done": (Stop("tasks.update:save_state", after=True), {}),
    "record, numbers sent and not noted": (Stop("tasks.metrics:Recorder.log", having=1, after=True), {}),
    "pruning the first iteration": (Stop("tasks.store:Store.drop_data", call=2), {}),
    "update of the last iteration": (Stop(TRAIN, having=3), {(TRAIN, 3): 1}),
    "evaluate, before it is stored": (Stop("tasks.store:Store.put", having="evaluations"), {(MEASURE, None): 2}),
    "finish, picture sent": (Stop("tasks.metrics:log_policy"), {}),
    "finish, everything sent": (Stop("tasks.metrics:finish"), {}),
    "finished, no summary yet": (Stop("tasks.metrics:finish", after=True), {}),
}
"""Where one run is killed again and again, in the order in which it gets there, and what it must then do twice."""
SHORT_CHAIN = ("evaluation recorded but for its picture", "rollout, two of four files in place", "reward", "advantage",
               "update, between its two store writes", "record, numbers sent and not noted",
               "pruning the first iteration", "evaluate, before it is stored", "finish, picture sent")


@pytest.fixture(scope="module")
def uninterrupted(launcher, new_place):  # noqa: F811
    """Function: the place of a run that was left alone, with everything kept."""
    made: dict[str, Place] = {}

    def get(overrides: str) -> Place:
        if overrides not in made:
            made[overrides] = new_place()
            done = launcher.run(made[overrides], f"{overrides} retention.keep_iterations=100")
            assert done.returncode == 0, done.output
        return made[overrides]

    return get


def finish(launcher, place, overrides, **options):  # noqa: F811
    done = launcher.run(place, overrides, **options)
    assert done.returncode == 0, done.output
    return done


def killed(launcher, place, overrides, stop, **options):  # noqa: F811
    done = launcher.run(place, overrides, stop=stop, **options)
    assert done.returncode == KILLED, f"{stop} was never reached:\n{done.output}"
    return done


def worked(done) -> Counter:
    """(stage, iteration or None) -> calls."""
    return Counter((name, next((value for value in plain if type(value) is int), None)) for name, plain in done.calls)


@pytest.mark.parametrize("points", [SHORT_CHAIN, pytest.param(tuple(CHAIN), marks=pytest.mark.slow)],
                         ids=["every stage", "many points"])
def test_killed_again_and_again_it_ends_with_the_same_bits(launcher, new_place, uninterrupted, points):  # noqa: F811
    place, total = new_place(), Counter()
    # Nothing is computed twice but what a kill destroyed before it was stored. A stage is called with the number of
    # its iteration only where that decides its result.
    expected = Counter({(stage, number): 1 for stage in (DRAW, TRAIN) for number in (1, 2, 3)})
    expected += Counter({(ADVANTAGE, None): 3, (MEASURE, None): 1 + 2})  # the base has no average of its own
    for stop, again in (CHAIN[point] for point in points):
        total += worked(killed(launcher, place, ONE_KEPT, stop, trace=STAGES))
        expected += Counter(again)
    total += worked(finish(launcher, place, ONE_KEPT, trace=STAGES))
    assert {key: count for key, count in total.items() if key[0] != SCORE} == expected
    assert_same_training(place, uninterrupted(tiny()))
    assert_tracked_once(place, iterations=3, evaluations=[0, 3])
    # Only the newest iteration's data and the evaluated policy are left, although pruning was killed in its middle.
    store = place.store()
    left = {kind: [key for key in store.keys(kind) if store.has_data(store.find(kind, key))]
            for kind in ("trajectories", "rewards", "advantages", "train_states", "policies")}
    assert {kind: len(keys) for kind, keys in left.items()} == dict.fromkeys(left, 1)


def test_a_finished_run_computes_nothing_when_run_again(launcher, new_place, uninterrupted):  # noqa: F811
    place = uninterrupted(tiny())
    before = assert_tracked_once(place, 3, [0, 3])
    done = finish(launcher, place, f"{tiny()} retention.keep_iterations=100", trace=STAGES)
    assert done.calls == []
    assert assert_tracked_once(place, 3, [0, 3]) == before


def test_the_command_itself_killed_at_a_random_time_resumes(launcher, new_place, uninterrupted):  # noqa: F811
    place = new_place()
    command = [str(Path(sys.executable).with_name("pyflyte")), "run", "workflows/flowgrpo.py", "flowgrpo", "--recipe",
               "base", "--overrides", tiny()]
    env = {**os.environ, **place.env, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONUNBUFFERED": "1"}
    delay = random.uniform(0, 2)
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:  # the interpreter's own start is of no interest
            if line.startswith("store "):
                break
        time.sleep(delay)
        process.kill()
        assert process.wait() in (KILLED, 0), f"killed after {delay:.3f} s"
    finish(launcher, place, tiny())
    assert_same_training(place, uninterrupted(tiny()))
    assert_tracked_once(place, 3, [0, 3])


RANDOM_POINTS = ("tasks.sampling:denoise", "tasks.reward:score_media", "tasks.update:Replay.velocity", "os:replace",
                 "tasks.store:Store.put", "tasks.store:Store.find", "tasks.store:Store.write_bytes",
                 "tasks.store:Store.drop_data", "tasks.metrics:Recorder._send", "tasks.metrics:client")


def run_killed_at_random(launcher, place, overrides, seed, attempts):  # noqa: F811
    generator, kills = random.Random(seed), 0
    for _ in range(attempts):
        # Early calls, because a point that a try never reaches kills nothing and ends the run.
        at, call = generator.choice(RANDOM_POINTS), generator.randint(1, 3)
        done = launcher.run(place, overrides, stop=Stop(at, call, after=generator.random() < 0.5))
        assert done.returncode in (KILLED, 0), done.output
        kills += done.returncode == KILLED
    assert kills, "no try was killed, so this shows nothing; choose earlier calls"
    return finish(launcher, place, overrides)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_killed_at_random_calls(launcher, new_place, uninterrupted, seed):  # noqa: F811
    place = new_place()
    run_killed_at_random(launcher, place, ONE_KEPT, seed, attempts=3)
    assert_same_training(place, uninterrupted(tiny()))
    assert_tracked_once(place, 3, [0, 3])


LORA = tiny(policy__trainable="lora", policy__lora_rank=4, topology__rollout__parallelism=2,
            topology__update__parallelism=2, topology__evaluate__parallelism=2, topology__reward__parallelism=2)


def test_adapters_on_two_lanes_killed_in_rollout_and_update(launcher, new_place, uninterrupted):  # noqa: F811
    place = new_place()
    killed(launcher, place, LORA, Stop("tasks.rollout:draw_trajectories", having=2, after=True))
    killed(launcher, place, LORA, Stop("tasks.update:Replay.gradients", call=2))
    # The resumed part runs on one lane: lanes are no input of any stage.
    finish(launcher, place, LORA.replace("parallelism=2", "parallelism=1"))
    assert_same_training(place, uninterrupted(LORA))
    assert_tracked_once(place, 3, [0, 3])
    _, tensors = trained(place)
    assert any("lora_B" in name and value.any() for name, value in tensors.items())


@pytest.mark.slow  # by default test_update compares the gradients, and the adapters' run changes its lanes midway
def test_two_lanes_give_the_bits_of_one(uninterrupted):
    two = tiny(**{f"topology__{role}__parallelism": 2 for role in ("rollout", "reward", "update", "evaluate")})
    assert_same_training(uninterrupted(two), uninterrupted(tiny()))


def test_a_lengthened_run_continues(launcher, new_place, uninterrupted):  # noqa: F811
    place = new_place()
    finish(launcher, place, tiny(iterations=2))
    done = finish(launcher, place, tiny(iterations=3), trace=STAGES)
    assert worked(done)[TRAIN, 3] == 1
    assert not {number for _, number in worked(done)} & {1, 2}
    (facts, tensors), (want, want_tensors) = trained(place), trained(uninterrupted(tiny()))
    assert facts["evaluations"].pop(2)
    assert facts == want
    assert all(tensors[name].equal(value) for name, value in want_tensors.items())
    assert_tracked_once(place, 3, [0, 2, 3])
    run = place.runs()[0]
    assert run.data.params["iterations"] == "2"
    assert run.data.tags["changed.iterations"] == "3"


def test_a_lengthened_run_skips_the_evaluation_of_a_policy_that_was_dropped(launcher, new_place):  # noqa: F811
    place, options = new_place(), {"retention__keep_iterations": 1, "evaluation__num_points": 3}
    finish(launcher, place, tiny(iterations=3, **{**options, "evaluation__num_points": 2}))
    finish(launcher, place, tiny(iterations=4, **options))  # evaluates after 0, 2 (dropped), 4
    facts, _ = trained(place)
    assert sorted(facts["evaluations"]) == [0, 3, 4]


@pytest.mark.slow
def test_another_learning_rate_does_not_continue_a_run(launcher, new_place):  # noqa: F811
    place = new_place()
    finish(launcher, place, tiny(iterations=1))
    done = finish(launcher, place, tiny(iterations=1, optimizer__learning_rate=1e-4), trace=STAGES)
    assert worked(done)[TRAIN, 1] == 1
    assert worked(done)[DRAW, 1] == 0  # the first rollout does not depend on the learning rate
    assert len(place.runs()) == 2


def test_resumes_from_s3_after_the_local_disk_is_wiped(launcher, new_place, uninterrupted, s3_server):  # noqa: F811
    s3_server.client().make_bucket("resume")
    place = new_place(**s3_server.env, FLOWMILL_STORE="s3://resume/here")
    killed(launcher, place, ONE_KEPT, Stop("tasks.update:train", having=2, after=True), trace=STAGES)
    shutil.rmtree(place.folder / "home")  # MLflow's file is the server's, not this machine's
    (place.folder / "home").mkdir()
    done = finish(launcher, place, ONE_KEPT, trace=STAGES)
    calls = worked(done)
    assert calls[DRAW, 1] == calls[DRAW, 2] == 0
    assert calls[DRAW, 3] == 1
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.env.items():
            patch.setenv(name, value)
        assert_same_training(place, uninterrupted(tiny()))
        assert_tracked_once(place, 3, [0, 3])


@pytest.mark.slow
def test_a_dropped_cached_artifact_is_made_again(launcher, new_place, uninterrupted):  # noqa: F811
    """Flyte's cache still knows the rollout whose data somebody deleted."""
    place = new_place()
    killed(launcher, place, tiny(), Stop("tasks.advantage:save_advantages"))
    store = place.store()
    (key,) = store.keys("trajectories")
    shutil.rmtree(place.folder / "store" / "trajectories" / key)
    done = launcher.run(place, tiny())
    if done.returncode:
        assert "--overwrite-cache" in done.text, done.output
        done = launcher.run(place, argv=["run", "--overwrite-cache", "workflows/flowgrpo.py", "flowgrpo", "--recipe",
                                         "base", "--overrides", tiny()])
    assert done.returncode == 0, done.output
    assert_same_training(place, uninterrupted(tiny()))
