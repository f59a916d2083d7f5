"""Stage 3: rewards -> how much better each sample was than its group. Next: update.

The rule is the algorithm's own; this stage only moves its result.
"""

import time
from collections.abc import Mapping
from typing import Any

from flytekit import task

from tasks import resources
from tasks.contracts.batches import AdvantageBatch
from tasks.contracts.config import AdvantageSpec, RoleConfig, digest_of
from tasks.contracts.errors import ContractError
from tasks.contracts.refs import AdvantageRef, RewardRef, TrajectoryRef
from tasks.reward import load_rewards
from tasks.rollout import load_index
from tasks.store import Store, open_store

VERSION = "1"
"""Raised when the same rewards would give other advantages."""


def compute_advantages(spec: AdvantageSpec, trajectories: TrajectoryRef, rewards: RewardRef,
                       store: Store) -> AdvantageRef:
    """Advantages of stored rewards, or find them already made.

    Raises:
        ContractError: the rewards are of other samples than the trajectories.
    """
    from tasks.plugins import load

    key = digest_of({"stage": f"advantage/{VERSION}", "spec": spec.model_dump(mode="json"),
                     "trajectories": trajectories.digest, "rewards": rewards.digest})
    if (made := store.find("advantages", key)) and store.has_data(made):
        return made.ref(AdvantageRef)
    started = time.perf_counter()
    index, scores = load_index(store, trajectories), load_rewards(store, rewards)
    if not index.sample_ids.equal(scores.sample_ids):
        raise ContractError(f"advantage: rewards {rewards.key[:12]} score other samples than trajectories "
                            f"{trajectories.key[:12]} hold; rerun the reward stage on these trajectories.")
    algorithm = load("algorithms", spec.algorithm.name)
    advantages = algorithm.advantages(spec.algorithm, scores, index, spec.reward_weights)
    stats = {"seconds": time.perf_counter() - started,
             "metrics": {f"advantage/{name}": value for name, value in advantages.stats.items()}}
    return save_advantages(store, key, advantages, stats)


def save_advantages(store: Store, key: str, batch: AdvantageBatch, stats: Mapping[str, Any]) -> AdvantageRef:
    """Store a batch of advantages."""
    tensors: dict[str, Any] = {name: getattr(batch, name) for name in ("sample_ids", "advantages", "weights", "valid")}
    manifest = store.put("advantages", key, files={"advantages": tensors}, count=len(batch),
                         meta={"stats": dict(batch.stats)}, stats=stats)
    return manifest.ref(AdvantageRef)


def load_advantages(store: Store, ref: AdvantageRef) -> AdvantageBatch:
    """Read stored advantages back and check them again."""
    return AdvantageBatch(**store.load(ref, "advantages"), stats=store.manifest(ref).meta["stats"])


@task(**resources.task_options("advantage", version=VERSION, ignore=("store_uri", "role")))
@resources.retried
def advantage(spec: AdvantageSpec, trajectories: TrajectoryRef, rewards: RewardRef, scope: str, store_uri: str,
              role: RoleConfig) -> AdvantageRef:
    """Turn scores into advantages."""
    return compute_advantages(spec, trajectories, rewards, open_store(store_uri))
