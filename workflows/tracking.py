"""The tasks around the stages: plan a run, record its iterations and evaluations, finish or fail it.

They are never cached: their effect is their purpose. Each can run twice without harm.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flytekit import task
from flytekit.loggers import logger
from flytekit.types.error import FlyteError

from tasks import metrics, pictures
from tasks.contracts.config import RunConfig, load_recipe
from tasks.contracts.errors import ConfigError, FlowmillError
from tasks.contracts.refs import AdvantageRef, EvaluationRef, PolicyRef, RewardRef, TrajectoryRef
from tasks.contracts.run import RunPlan, RunSummary, report_key_of, run_key_of
from tasks.eval import headline, load_media
from tasks.prompts import read_prompts
from tasks.resources import check_registered, registered_topology, retried, uncached_task_options
from tasks.runtime import load_policy, session
from tasks.store import Store, open_store

Series = dict[str, list[tuple[float, float]]]
"""Curve name -> (iteration, value) points."""
UNSCHEDULED = datetime(1970, 1, 1, tzinfo=UTC)
"""`kickoff_time` of a run that no schedule started."""
OPTIONS = uncached_task_options(registered_topology().control)
"""Arguments of every task around the stages."""


def configure(recipe: str, overrides: str, kickoff_time: datetime) -> RunConfig:
    """The run's config. A scheduled run draws its seed from its kickoff time: fixed inputs, yet a new run."""
    config = load_recipe(recipe, overrides)
    if kickoff_time.timestamp() > 0:
        from tasks.sde import derive_seed

        seed = derive_seed(config.seed, int(kickoff_time.timestamp()), 0, "kickoff")
        config = config.model_copy(update={"seed": seed, "name": f"{config.name} {kickoff_time:%Y-%m-%d %H:%M}"})
    return config


def identify(config: RunConfig) -> tuple[str, str, str]:
    """(run key, report key, execution id). The id is the cluster's own; locally the same inputs are the same run."""
    base = load_policy(config.policy, config.seed, config.topology.update.dtype, config.runtime.kernels).policy
    run_key = run_key_of(config, read_prompts(config.prompts.train).digest, base.base_digest)
    report_key = report_key_of(config, run_key, read_prompts(config.prompts.evaluate).digest)
    return run_key, report_key, os.environ.get("FLYTE_INTERNAL_EXECUTION_ID") or f"local-{report_key[:16]}"


@task(**OPTIONS)
@retried
def plan(recipe: str, overrides: str, kickoff_time: datetime) -> RunPlan:
    """Validate everything a run needs before it costs time: recipe, prompts, checkpoint, store, MLflow."""
    config = configure(recipe, overrides, kickoff_time)
    check_registered(config.topology)
    prompts = {path: read_prompts(path) for path in (config.prompts.train, config.prompts.evaluate)}
    # In a session, because what is encoded here may be kept for the stages: it must be their arithmetic.
    with session(config.runtime, config.topology.update):
        policy = load_policy(config.policy, config.seed, config.topology.update.dtype, config.runtime.kernels).policy
        for file in prompts.values():
            policy.encode(file.texts)  # a prompt the policy cannot paint is found here, not at iteration 40
    seen = set(prompts[config.prompts.train].texts) & set(prompts[config.prompts.evaluate].texts)
    if seen:
        raise ConfigError(f"{len(seen)} prompts of {config.prompts.evaluate} are also trained on, such as "
                          f"{min(seen)!r}; evaluation needs prompts never seen in training. Remove them from one file.")
    store = open_store()
    store.preflight()
    store.ensure_lifecycle(config.retention.trajectory_days)
    run_key, report_key, execution_id = identify(config)
    run_id = metrics.ensure_run(config, execution_id, run_key, report_key)
    sampling, points = config.sampling, config.evaluation_iterations()
    print(f"{config.name}: {config.iterations} iterations of {sampling.num_groups} prompts x {sampling.group_size} "
          f"samples, {sampling.window_size} trained steps of {sampling.num_inference_steps}, "
          f"{config.optimizer.updates_per_rollout} optimiser steps each; evaluations after {points}\n"
          f"store {store.uri}, MLflow {metrics.tracking_uri()} run {run_id}", flush=True)
    return RunPlan(
        name=config.name, run_key=run_key, report_key=report_key, run_id=run_id,
        scope=f"{store.id}-{run_key[:16]}", store_uri=store.uri,
        iterations=config.iterations, evaluation_iterations=points, rollout=config.rollout_spec(),
        reward=config.reward_spec(), advantage=config.advantage_spec(), update=config.update_spec(),
        evaluate=config.evaluate_spec(), topology=config.topology, retention=config.retention,
        tracking=config.tracking)


def base_policy(run: RunPlan) -> PolicyRef:
    """The policy before training."""
    policy = load_policy(run.update.policy, run.update.seed, run.update.dtype, run.update.runtime.kernels).policy
    return PolicyRef(base_digest=policy.base_digest)


def _record_path(run_key: str, number: int) -> str:
    return f"runs/{run_key}/iterations/{number:06d}.json"


def recorded_policies(store: Store, run: RunPlan) -> dict[int, PolicyRef]:
    """Iteration -> policy of the iterations this run has finished and recorded, in an earlier try."""
    found = {}
    for path in store.list(f"runs/{run.run_key}/iterations"):
        number, data = int(path.rsplit("/", 1)[-1].removesuffix(".json")), store.read_bytes(path)
        if data is not None and number <= run.iterations:
            found[number] = PolicyRef.model_validate(json.loads(data)["policy"])
    return found


@task(**OPTIONS)
@retried
def record(run: RunPlan, number: int, trajectories: TrajectoryRef, rewards: RewardRef, advantages: AdvantageRef,
           policy: PolicyRef, previous: int) -> int:
    """Write an iteration's numbers to MLflow, note it as finished, and drop data that is no longer needed.

    Args:
        previous: The iteration recorded before it; on a cluster, what makes this task wait for that one.
    """
    assert policy.weights is not None
    assert policy.state is not None
    store = open_store(run.store_uri)
    manifests = {name: store.manifest(ref) for name, ref in (
        ("rollout", trajectories), ("reward", rewards), ("advantage", advantages), ("update", policy.weights))}
    numbers: dict[str, float] = {}
    for name, manifest in manifests.items():
        # The store keeps a number that is not finite as null.
        numbers |= {key: value for key, value in manifest.stats.get("metrics", {}).items() if value is not None}
        numbers[f"time/{name}_s"] = manifest.stats["seconds"]
    busy = sum(manifest.stats["seconds"] for manifest in manifests.values())
    computing = sum(manifest.stats.get("compute_seconds", 0.0) for manifest in manifests.values())
    ended = manifests["update"].created_s
    numbers["time/samples_per_s"] = trajectories.count / busy
    earlier = store.read_bytes(_record_path(run.run_key, number - 1))
    if earlier is not None:
        wall = ended - json.loads(earlier)["ended_s"]
        # An iteration between two tries of a run, or with an evaluation in it, says nothing about overhead.
        if busy <= wall < 2 * busy + 1:
            numbers |= {"time/iteration_s": wall, "time/overhead_fraction": 1 - computing / wall}
    metrics.Recorder(run.run_id, store).log(numbers, number, int(ended * 1000))
    artifacts = [(ref.kind, ref.key) for ref in (trajectories, rewards, advantages, policy.weights, policy.state)]
    if "time/iteration_s" in numbers:
        timing = {"wall_s": numbers["time/iteration_s"], "computing_s": computing}
    else:
        timing = {}
    rewards_seen = {key: value for key, value in numbers.items() if key.startswith("reward/")}
    store.write_bytes(_record_path(run.run_key, number), json.dumps({
        "policy": policy.model_dump(mode="json"), "ended_s": ended, "artifacts": artifacts,
        "rewards": rewards_seen, **timing}).encode())
    prune(store, run, number - run.retention.keep_iterations)
    reward_mean = numbers.get("reward/total/mean", float("nan"))
    print(f"iteration {number}/{run.iterations}  reward {reward_mean:.4f}  "
          + "  ".join(f"{key.split('/')[-2]} {numbers[key]:.3f}" for key in sorted(numbers)
                      if key.startswith("reward/") and key.endswith("exact_match/mean"))
          + f"  gap {numbers.get('update/first/log_prob_gap/max', float('nan')):.1e}"
          + (f"  skipped {numbers['update/skipped']:.0f}" if numbers.get("update/skipped") else "")
          + f"  {busy:.1f} s", flush=True)
    return number


def is_kept(store: Store, policy: PolicyRef) -> bool:
    """Whether a policy's weights are still there."""
    return policy.weights is None or store.has_data(policy.weights)


def is_resumable(store: Store, policy: PolicyRef) -> bool:
    """Whether training can go on from a policy: its weights and its optimiser state are there."""
    return is_kept(store, policy) and policy.state is not None and store.has_data(policy.state)


def prune(store: Store, run: RunPlan, number: int) -> None:
    """Drop the data of iteration `number`; its manifests and record stay. Evaluated policies keep their weights."""
    data = store.read_bytes(_record_path(run.run_key, number)) if number >= 1 else None
    if data is None:
        return
    for kind, key in json.loads(data)["artifacts"]:
        if kind != "policies" or number not in run.evaluation_iterations:
            store.drop_data(kind, key)


@task(**OPTIONS)
@retried
def record_evaluation(run: RunPlan, evaluation: EvaluationRef) -> int:
    """Write an evaluation's numbers and its image grid to MLflow."""
    store = open_store(run.store_uri)
    manifest = store.manifest(evaluation)
    step, timestamp = manifest.meta["step"], int(manifest.created_s * 1000)
    numbers = {f"eval/{variant}/{name}": value for variant, values in manifest.meta["numbers"].items()
               for name, value in values.items()}
    recorder = metrics.Recorder(run.run_id, store)
    recorder.log(numbers, step, timestamp)
    if "grid.png" in manifest.files:
        recorder.log_picture("samples", step, timestamp, store.load_bytes(evaluation, "grid.png"))
    shown = {name: value for name, value in headline(manifest.meta).items() if name.endswith("exact_match")}
    print(f"evaluation after {step} iterations: "
          + ", ".join(f"{name} {value:.3f}" for name, value in shown.items()), flush=True)
    return step


def learning_curve(store: Store, run: RunPlan, metas: Sequence[Mapping[str, Any]]) -> Series:
    """Training reward of every iteration, and each reader's exact match at the evaluations."""
    series: Series = {"training reward": []}
    for path in store.list(f"runs/{run.run_key}/iterations"):
        data = store.read_bytes(path)
        if data is not None:
            reward_mean = json.loads(data)["rewards"].get("reward/total/mean")
            series["training reward"].append((int(path.rsplit("/", 1)[-1].removesuffix(".json")), reward_mean))
    for meta in metas:
        for name, value in headline(meta).items():
            if name.endswith("/exact_match"):
                series.setdefault(f"{name}, unseen prompts", []).append((meta["step"], value))
    return series


def _overhead(store: Store, run: RunPlan) -> float | None:
    """Share of the iterations' wall time that was neither model, nor reward, nor optimiser; None = not measured."""
    records = [json.loads(store.read_bytes(path) or b"{}") for path in store.list(f"runs/{run.run_key}/iterations")]
    timed = [record for record in records if "wall_s" in record]
    wall = sum(record["wall_s"] for record in timed)
    return 1 - sum(record["computing_s"] for record in timed) / wall if wall else None


@task(**OPTIONS)
@retried
def finish(run: RunPlan, policy: PolicyRef, evaluations: list[EvaluationRef], recorded: list[int]) -> RunSummary:
    """End the run: before/after picture, the policy as an artifact, a registered version, status FINISHED.

    Args:
        recorded: What the tasks that record gave; on a cluster, what makes this task wait for them.
    """
    store = open_store(run.store_uri)
    metas = [store.manifest(ref).meta for ref in evaluations]
    before, after = headline(metas[0]), headline(metas[-1])
    summary = RunSummary(name=run.name, run_id=run.run_id, policy=policy, before=before, after=after, report="")
    media = [load_media(store, ref) for ref in (evaluations[0], evaluations[-1])]
    folder = f"reports/{run.report_key}"
    path = f"{folder}/before_after.png"
    if all(item.kind == "image" for item in media):
        every = max(1, len(media[0]) // 32)
        store.write_bytes(path, pictures.before_after(
            media[0].pixels[::every], media[1].pixels[::every], "before", f"after {policy.step} iterations"))
        summary = summary.model_copy(update={"report": f"{store.uri}/{path}"})
    curve = pictures.curve(learning_curve(store, run, metas), run.name, "fraction, or reward")
    store.write_bytes(f"{folder}/curve.png", curve)
    recorder = metrics.Recorder(run.run_id, store)

    def send_results() -> None:
        metrics.log_file(run.run_id, "curve.png", curve)
        picture = store.read_bytes(path)
        if picture is not None:
            metrics.log_file(run.run_id, "before_after.png", picture)
        if policy.weights is not None:
            metrics.log_policy(run.run_id, policy, store, run.tracking.register_as, after)
        metrics.finish(run.run_id, "FINISHED")

    if not (recorder.flush() and recorder.attempt(send_results)):
        print(f"MLflow at {metrics.tracking_uri()} is down. The training is finished and kept; once MLflow is up, run "
              "the same command again: it trains nothing and sends the numbers that wait.", flush=True)
    store.write_bytes(f"{folder}/summary.json", summary.model_dump_json(indent=1).encode())
    print(f"{'measure':32s} {'before':>9s} {'after':>9s} {'change':>9s}")
    for name in sorted(set(before) & set(after)):
        print(f"{name:32s} {before[name]:9.4f} {after[name]:9.4f} {after[name] - before[name]:+9.4f}")
    overhead = _overhead(store, run)
    if overhead is not None:
        print(f"framework overhead {overhead:.1%} of an iteration (all but model, reward and optimiser)")
    print(f"picture  {summary.report}\nrun      {run.run_id} at {metrics.tracking_uri()} (`make ui` opens MLflow)",
          flush=True)
    return summary


@task(**OPTIONS)
def fail(recipe: str, overrides: str, kickoff_time: datetime, err: FlyteError | None = None) -> None:
    """Mark the run FAILED in MLflow; called by Flyte when any task of the workflow has failed for good."""
    error = sys.exception()
    _shorten(error)
    if isinstance(error, metrics.TrackingError):
        return  # MLflow itself is what failed
    try:
        config = configure(recipe, overrides, kickoff_time)
        metrics.fail(config.tracking.experiment, identify(config)[-1])
    except Exception as other:  # the run's own error is on its way to the user: never put another in its place
        if not isinstance(other, FlowmillError | OSError):
            logger.warning("the MLflow run could not be marked FAILED: %s: %s", type(other).__name__, other)


def _shorten(error: BaseException | None) -> None:
    """In a local run, leave of an error that was raised on purpose its message only; `pyflyte -v run` shows all.

    Flyte calls `fail` while it handles the error, then raises it again and prints whatever traceback it has.
    """
    if isinstance(error, FlowmillError) and not logger.isEnabledFor(logging.WARNING):
        error.args = (re.sub(r"^(Error encountered while executing '[^']*':\n  )+", "", str(error)),)
        error.__traceback__ = error.__cause__ = None
