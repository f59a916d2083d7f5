"""Best-of-group fine-tuning: the flow-matching loss on the best samples of each group. A baseline for every other one.

In: rewards and final latents; no SDE step is needed. Out: a loss a (sample, draw), each at a fresh time and noise.
Next: update. Every sample that ties for its group's best is trained on; a group whose rewards are all equal is not.

Source: the SFT baseline of yifan123/flow_grpo (reward-ranked fine-tuning).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tasks.algorithms.base import Rows, groups_with_signal
from tasks.contracts.batches import AdvantageBatch, RewardBatch, TrajectoryBatch, TrajectoryIndex
from tasks.contracts.config import AlgorithmConfig
from tasks.sde import derive_seed, noise

if TYPE_CHECKING:
    from torch import Tensor


class Config(AlgorithmConfig):
    """Settings of best-of-group fine-tuning."""

    name: Literal["sft"] = "sft"
    draws: Annotated[int, Field(ge=1)] = 4
    """Times and noises drawn for each trained sample in an iteration."""


def needs(config: Config) -> frozenset[str]:
    """No further velocity."""
    return frozenset()


def advantages(config: Config, rewards: RewardBatch, trajectories: TrajectoryIndex,
               reward_weights: Mapping[str, float]) -> AdvantageBatch:
    """1 for the best samples of each group whose rewards differ, 0 (and not valid) for all others."""
    import torch

    signal = groups_with_signal(rewards.total, trajectories.group_ids, ~rewards.failed)
    best = torch.zeros_like(signal)
    for group in trajectories.group_ids[signal].unique():
        members = signal & (trajectories.group_ids == group)
        best |= members & (rewards.total == rewards.total[members].max())
    groups = len(trajectories.group_ids.unique())
    live = len(trajectories.group_ids[signal].unique())
    return AdvantageBatch(
        sample_ids=trajectories.sample_ids, advantages=best.double(), valid=best,
        weights=torch.ones(len(trajectories), trajectories.num_sde_steps, dtype=torch.float64),
        stats={"num_groups": float(groups), "num_valid": float(best.sum()),
               "zero_variance_fraction": 1 - live / groups if groups else 0.0})


def pairs(config: Config, trajectories: TrajectoryBatch, advantages: AdvantageBatch) -> "Tensor":
    """int64 [R, 2]: each best sample, `draws` times."""
    import torch

    chosen = advantages.valid.nonzero()[:, 0]
    return torch.cartesian_prod(chosen, torch.arange(config.draws)).reshape(-1, 2)


def rows(config: Config, trajectories: TrajectoryBatch, advantages: AdvantageBatch, pairs: "Tensor",
         seed: int) -> Rows:
    """Noised samples ``(1 - t) x0 + t eps`` at t = sigmoid(normal), and the velocity ``eps - x0`` to be learned."""
    import torch

    clean = trajectories.final_latents[pairs[:, 0]]
    seeds = [(int(trajectories.sample_ids[sample]), draw) for sample, draw in pairs.tolist()]
    eps = torch.stack([noise(tuple(clean.shape[1:]), derive_seed(seed, 0, sample, f"noise/{draw}"))
                       for sample, draw in seeds])
    time = torch.stack([noise((1,), derive_seed(seed, 0, sample, f"time/{draw}"))[0] for sample, draw in seeds])
    sigma = time.double().sigmoid()
    mix = sigma.float().reshape(-1, *[1] * (clean.ndim - 1))
    return Rows(latents=(1 - mix) * clean + mix * eps, sigma=sigma, extra={"target": eps - clean})


def loss(config: Config, rows: Rows, velocities: Mapping[str, "Tensor"],
         trajectories: TrajectoryBatch) -> tuple["Tensor", Mapping[str, "Tensor"]]:
    """Mean squared velocity error, fp32 [M]."""
    return (velocities["policy"] - rows.extra["target"]).square().flatten(1).mean(1), {}
