"""Stage 2: trajectories -> one score a sample from every reward. Next: advantage.

Reads media and prompts, never latents. A reward that raises or returns a value that is not finite stops the stage and
names the sample; the rollout is kept, so a rerun begins here.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flytekit import task

from tasks import resources
from tasks.contracts.batches import RewardBatch
from tasks.contracts.config import RewardConfig, RewardSpec, RoleConfig, RuntimeConfig, digest_of
from tasks.contracts.errors import FlowmillError, RewardError
from tasks.contracts.media import Media, media_from_parts
from tasks.contracts.refs import RewardRef, TrajectoryRef
from tasks.rewards.base import Scorer
from tasks.runtime import Session, progress, session
from tasks.store import Store, open_store

VERSION = "1"
"""Raised when the same trajectories would get other scores."""
_BATCH = 24
"""Samples a call of a reward; scores do not depend on it."""
_warm: dict[str, Scorer] = {}


def scorer_of(config: RewardConfig) -> Scorer:
    """The loaded reward, kept for later tasks of this process."""
    from tasks.plugins import load

    key = digest_of(config)
    if key not in _warm:
        _warm[key] = load("rewards", config.name).build(config)
    return _warm[key]


def slice_media(media: Media, rows: slice) -> Media:
    """Some samples of a media batch."""
    from tasks.contracts.media import media_parts

    tensors, meta = media_parts(media)
    return media_from_parts({name: value[rows] for name, value in tensors.items()}, meta)


def score_media(config: RewardConfig, media: Media, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]],
                sample_ids: Sequence[int], run: Session) -> dict[str, Any]:
    """One reward's numbers of N samples: ``score`` and parts, float64 [N].

    Raises:
        RewardError: the reward raised, returned another number of scores, or one that is not finite.
    """
    import torch

    scorer = scorer_of(config)

    def work(start: int) -> dict[str, Any]:
        rows = slice(start, start + _BATCH)
        ids = sample_ids[rows]
        where = f"reward {config.name!r}: samples {ids[0]}..{ids[-1]}"
        try:
            parts = scorer(slice_media(media, rows), prompts[rows], metadata[rows])
        except FlowmillError as error:
            raise RewardError(f"{where}: {error}") from error
        except Exception as error:
            raise RewardError(f"{where}: it raised {type(error).__name__}: {error}. Fix the reward and rerun: the "
                              "rollout is kept.") from error
        values = {name: torch.as_tensor(part, dtype=torch.float64) for name, part in parts.items()}
        for name, value in values.items():
            if value.shape != (len(ids),):
                raise RewardError(f"{where}: part {name!r} has shape {list(value.shape)}, expected [{len(ids)}].")
        bad = (~values["score"].isfinite()).nonzero()
        if len(bad):
            row = int(bad[0])
            raise RewardError(f"reward {config.name!r}: sample {ids[row]} (prompt {prompts[rows][row]!r}) scored "
                              f"{values['score'][row].item()}; rewards must be finite. Fix the reward and rerun: the "
                              "rollout is kept.")
        return values

    starts = range(0, len(prompts), _BATCH)
    parts = list(progress(run.map(work, starts), len(starts), f"reward {config.name}"))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def score_trajectories(spec: RewardSpec, trajectories: TrajectoryRef, store: Store, role: RoleConfig) -> RewardRef:
    """Score stored trajectories, or find the scores already made."""
    import torch

    key = digest_of({"stage": f"reward/{VERSION}", "spec": spec.model_dump(mode="json"),
                     "trajectories": trajectories.digest})
    if (made := store.find("rewards", key)) and store.has_data(made):
        return made.ref(RewardRef)
    started = time.perf_counter()
    meta = store.manifest(trajectories).meta
    media = media_from_parts(store.load(trajectories, "media"), meta["media"])
    sample_ids = store.load(trajectories, "index")["sample_ids"]
    scores, details = {}, {}
    total = torch.zeros(len(sample_ids), dtype=torch.float64)
    computing = time.perf_counter()
    with session(RuntimeConfig(), role) as run:
        for config in spec.rewards:
            parts = score_media(config, media, meta["prompts"], meta["metadata"], sample_ids.tolist(), run)
            scores[config.name] = parts.pop("score")
            details.update({f"{config.name}/{name}": value for name, value in parts.items()})
            total += config.weight * scores[config.name]
    computed = time.perf_counter() - computing
    batch = RewardBatch(sample_ids, scores, total, torch.zeros(len(total), dtype=torch.bool), details)
    stats = {"seconds": time.perf_counter() - started, "compute_seconds": computed, "metrics": reward_metrics(batch)}
    return save_rewards(store, key, batch, stats)


def save_rewards(store: Store, key: str, batch: RewardBatch, stats: Mapping[str, Any]) -> RewardRef:
    """Store a batch of scores."""
    tensors = {"sample_ids": batch.sample_ids, "total": batch.total, "failed": batch.failed,
               **{f"score:{name}": value for name, value in batch.scores.items()},
               **{f"detail:{name}": value for name, value in batch.details.items()}}
    return store.put("rewards", key, files={"scores": tensors}, count=len(batch), meta={}, stats=stats).ref(RewardRef)


def load_rewards(store: Store, ref: RewardRef) -> RewardBatch:
    """Read stored scores back and check them again."""
    tensors = store.load(ref, "scores")

    def having(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    return RewardBatch(tensors["sample_ids"], having("score:"), tensors["total"], tensors["failed"], having("detail:"))


def reward_metrics(batch: RewardBatch) -> dict[str, float]:
    """Mean and standard deviation of every score, for MLflow."""
    metrics = {}
    values = {"total": batch.total, **batch.scores, **batch.details}
    for name, value in values.items():
        known = value[~batch.failed & value.isfinite()]
        if len(known):
            metrics[f"reward/{name}/mean"] = known.mean().item()
            metrics[f"reward/{name}/std"] = known.std(correction=0).item()
    metrics["reward/failed_fraction"] = batch.failed.double().mean().item()
    return metrics


@task(**resources.task_options("reward", version=VERSION, ignore=("store_uri", "role")))
@resources.retried
def reward(spec: RewardSpec, trajectories: TrajectoryRef, scope: str, store_uri: str, role: RoleConfig) -> RewardRef:
    """Score an iteration's samples."""
    return score_trajectories(spec, trajectories, open_store(store_uri), role)
