"""Flow-GRPO: group-relative advantages and PPO's clipped loss on the steps of the sampler's SDE.

In: rewards and the stored SDE steps. Out: an advantage a sample, a loss a (sample, step). Next: update.
Its settings cover the relatives that differ in numbers only: DanceGRPO (std group, ddof 1, eps 1e-8; SDE kind dance),
MixGRPO and Flow-GRPO-Fast (an SDE window, chosen in `sampling`), Dr. GRPO (std none), RLOO (baseline loo).
Left out: RatioNorm (GRPO-Guard) and step weights (TempFlow-GRPO), whose loss differs.

Source: Flow-GRPO, arXiv 2505.05470; reference code yifan123/flow_grpo.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from tasks.algorithms.base import (
    Baseline,
    Normalisation,
    Rows,
    clip_bounds,
    clipped_loss,
    group_advantages,
    groups_with_signal,
    probability_ratio,
)
from tasks.contracts.batches import AdvantageBatch, RewardBatch, TrajectoryBatch, TrajectoryIndex
from tasks.contracts.config import AlgorithmConfig, RunConfig
from tasks.contracts.errors import ContractError
from tasks.sde import gaussian_kl, transition, velocity_kl

if TYPE_CHECKING:
    from torch import Tensor


class Config(AlgorithmConfig):
    """Flow-GRPO's settings; the defaults are the published ones, without the KL term."""

    name: Literal["flow_grpo"] = "flow_grpo"
    clip_range: float | tuple[float, float] = 1e-4
    """Half-width of the band the ratio is kept in, or (low, high). The log-prob is a mean over latent elements, hence
    the small number. It belongs to one SDE kind: a log-ratio of `cps` is 2 std^2 times that of `flow` and `dance`."""
    adv_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantages are limited to +- this, in standard deviations."""
    std: Normalisation = "global"
    """Divide advantages by the standard deviation of all rewards, of the group's, or by nothing."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 0
    """0 = population, 1 = sample standard deviation."""
    eps: Annotated[float, Field(ge=0)] = 1e-4
    """Added to the standard deviation, in units of the reward."""
    baseline: Baseline = "mean"
    """What a reward is compared with: the group's mean, or that of the group's other samples (leave one out)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the KL to the base policy; 0 = none, and no reference forward. About 100x smaller for `velocity`."""
    kl_kind: Literal["exact", "velocity"] = "exact"
    """`exact`: KL of the two Gaussian transitions, nats an element. `velocity`: mean squared velocity difference."""
    aggregate: Literal["sum", "per_reward"] = "sum"
    """Several rewards: advantage of the weighted sum, or weighted sum of each reward's own advantage, so that the
    reward with the largest spread does not decide alone."""

    @field_validator("clip_range")
    @classmethod
    def _check_clip_range(cls, value: float | tuple[float, float]) -> float | tuple[float, float]:
        clip_bounds(value)
        return value


def check(run_config: RunConfig) -> None:
    """Refuse runs that could train nothing, or on another policy's samples.

    Raises:
        ValueError: group_size below 2, no SDE steps, or an `old` policy, which this algorithm does not keep.
    """
    sampling = run_config.sampling
    if sampling.window_size == 0:
        raise ValueError("algorithm 'flow_grpo' trains on SDE steps, but sampling.sde_window.size is 0: nothing would "
                         "be trained. Leave it out for every step but the last")
    if sampling.weights != "raw":
        raise ValueError(f"algorithm 'flow_grpo' keeps no {sampling.weights!r} policy; set sampling.weights: raw")
    group_size = sampling.group_size
    if group_size < 2:
        raise ValueError(f"algorithm 'flow_grpo' needs group_size >= 2, got {group_size}: with one sample a prompt "
                         "every advantage is 0")


def needs(config: Config) -> frozenset[str]:
    """``reference`` if there is a KL term."""
    return frozenset({"reference"} if config.kl_coef > 0 else ())


def advantages(config: Config, rewards: RewardBatch, trajectories: TrajectoryIndex,
               reward_weights: Mapping[str, float]) -> AdvantageBatch:
    """Advantages [N] within each group, by id. Not valid: failed samples, and groups whose rewards do not differ.

    Raises:
        ContractError: rewards of other samples, or no weight for a reward.
    """
    import torch

    _require_same_samples("RewardBatch", rewards.sample_ids, trajectories)
    group_ids, succeeded = trajectories.group_ids, ~rewards.failed
    if config.aggregate == "sum":
        weighted = [(1.0, rewards.total)]
    else:
        if set(reward_weights) != set(rewards.scores):
            raise ContractError(f"RewardBatch.scores holds {sorted(rewards.scores)}, but the recipe weighs "
                                f"{sorted(reward_weights)}; rerun the reward stage with this recipe.")
        weighted = [(reward_weights[name], rewards.scores[name]) for name in sorted(rewards.scores)]
    total = torch.zeros(len(trajectories), dtype=torch.float64)
    valid = torch.zeros(len(trajectories), dtype=torch.bool)
    for weight, scores in weighted:
        if weight == 0:
            continue
        total += weight * group_advantages(scores, group_ids, std=config.std, ddof=config.ddof, eps=config.eps,
                                           baseline=config.baseline, valid=succeeded)
        valid |= groups_with_signal(scores, group_ids, succeeded)
    return AdvantageBatch(
        sample_ids=trajectories.sample_ids, advantages=total, valid=valid,
        weights=torch.ones(len(trajectories), trajectories.num_sde_steps, dtype=torch.float64),
        stats=_stats(config, rewards, group_ids, total, valid))


def pairs(config: Config, trajectories: TrajectoryBatch, advantages: AdvantageBatch) -> "Tensor":
    """int64 [R, 2]: (sample, stored SDE step) of every valid sample and step that has a density, in sample order."""
    import torch

    _require_same_samples("AdvantageBatch", advantages.sample_ids, trajectories)
    trained = trajectories.step_mask & advantages.valid[:, None]
    if trajectories.contract.sde_kind == "cps":
        # The last step of cps has no noise.
        trained = trained & (trajectories.sigmas[trajectories.sde_indices + 1] > 0)
    return torch.nonzero(trained)


def rows(config: Config, trajectories: TrajectoryBatch, advantages: AdvantageBatch, pairs: "Tensor",
         seed: int) -> Rows:
    """The stored steps of some pairs [M, 2], exactly as they were scored. `seed` is not used: nothing is drawn."""
    sample, draw = pairs.unbind(1)
    step = trajectories.sde_indices[sample, draw]
    per_step = advantages.advantages.ndim == 2
    return Rows(
        latents=trajectories.step_latents[sample, draw, 0],
        sigma=trajectories.sigmas[step],
        extra={
            "step": step,
            "sigma_next": trajectories.sigmas[step + 1],
            "next_latents": trajectories.step_latents[sample, draw, 1],
            "old_log_prob": trajectories.log_probs[sample, draw],
            "advantage": advantages.advantages[sample, draw] if per_step else advantages.advantages[sample],
            "weight": advantages.weights[sample, draw],
        })


def loss(config: Config, rows: Rows, velocities: Mapping[str, "Tensor"],
         trajectories: TrajectoryBatch) -> tuple["Tensor", Mapping[str, "Tensor"]]:
    """``weight * clipped loss + kl_coef * KL``, fp32 [M], and what the metrics show of each row.

    Metrics, [M]: ``ratio``; ``log_prob_gap``, |new - rollout log-prob|; ``clipped_low`` and ``clipped_high``, 1 where
    the band's lower or upper end stops the gradient; ``policy_loss``; ``kl``, if a reference velocity is given.
    """
    contract = trajectories.contract

    def step(velocity: "Tensor"):
        return transition(contract.sde_kind, rows.latents, velocity, rows.sigma, rows.extra["sigma_next"],
                          noise_level=contract.noise_level, sigma_max=float(trajectories.sigmas[1]))

    new = step(velocities["policy"])
    log_prob = new.log_prob(rows.extra["next_latents"])
    old_log_prob, advantage = rows.extra["old_log_prob"], rows.extra["advantage"]
    policy_loss = clipped_loss(log_prob, old_log_prob, advantage, clip_range=config.clip_range,
                               adv_clip=config.adv_clip)
    total = policy_loss * rows.extra["weight"].to(policy_loss)

    ratio = probability_ratio(log_prob.detach(), old_log_prob)
    low, high = clip_bounds(config.clip_range)
    metrics = {
        "ratio": ratio,
        "log_prob_gap": (log_prob.detach() - old_log_prob).abs(),
        "clipped_low": ((ratio < 1 - low) & (advantage < 0)).to(ratio),
        "clipped_high": ((ratio > 1 + high) & (advantage > 0)).to(ratio),
        "policy_loss": policy_loss.detach(),
    }
    if "reference" in velocities:
        reference = velocities["reference"].detach()
        kl = (gaussian_kl(new.mean, step(reference).mean, new.std) if config.kl_kind == "exact"
              else velocity_kl(velocities["policy"], reference))
        metrics["kl"] = kl.detach()
        if config.kl_coef:
            total = total + config.kl_coef * kl
    return total, metrics


def _require_same_samples(name: str, sample_ids: "Tensor", trajectories: TrajectoryIndex) -> None:
    if sample_ids.tolist() != trajectories.sample_ids.tolist():
        raise ContractError(f"{name}.sample_ids are not those of the trajectories, in their order; the two artifacts "
                            "come from different rollouts. Rerun the stage on this rollout.")


def _stats(config: Config, rewards: RewardBatch, group_ids: "Tensor", total: "Tensor",
           valid: "Tensor") -> dict[str, float]:
    succeeded = ~rewards.failed
    scores = rewards.total[succeeded]
    groups = group_ids.unique().tolist()
    silent = sum(not bool(valid[group_ids == group].any()) for group in groups)
    enough = len(scores) > config.ddof
    return {
        "num_groups": float(len(groups)),
        "num_valid": float(valid.sum()),
        "zero_variance_fraction": silent / len(groups) if groups else 0.0,
        "failed_fraction": float(rewards.failed.double().mean()) if len(rewards) else 0.0,
        "reward_mean": float(scores.mean()) if len(scores) else 0.0,
        "reward_std": float(scores.std(correction=config.ddof)) if enough else 0.0,
        "advantage_clipped_fraction": float((total[valid].abs() > config.adv_clip).double().mean())
        if valid.any() else 0.0,
    }
