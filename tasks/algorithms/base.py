"""What an algorithm is: the protocol every file of this axis meets, and the rules they share.

In: rewards, trajectories, velocities. Out: advantages and a loss a row. Next: the update stage sums and steps.
An algorithm never names a rank, a device or a resource.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tasks.contracts.batches import AdvantageBatch, RewardBatch, TrajectoryBatch, TrajectoryIndex
from tasks.contracts.config import AlgorithmConfig
from tasks.contracts.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """M rows to train on, as the loss needs them.

    Attributes:
        latents: float32 [M, *latent], the denoiser's input. sigma: float64 [M].
        extra: whatever the algorithm's loss needs, name -> [M, ...].
    """

    latents: "Tensor"
    sigma: "Tensor"
    extra: Mapping[str, "Tensor"] = field(default_factory=dict)


class Algorithm(Protocol):
    """An algorithm module has ``Config`` (an `AlgorithmConfig`) and these functions.

    It may also have ``check(run_config)``, which raises ValueError for combinations that cannot work, and
    ``old_policy_decay(config, iteration) -> float``: the update then keeps an ``old`` policy and after each iteration
    sets it to ``decay * old + (1 - decay) * weights``. A recipe lets it draw the rollouts: ``sampling.weights: old``.
    """

    Config: type[AlgorithmConfig]

    def needs(self, config: AlgorithmConfig) -> frozenset[str]:
        """Further velocities the loss wants: ``reference`` (the base policy), ``old`` (the behaviour policy)."""
        ...

    def advantages(self, config: AlgorithmConfig, rewards: RewardBatch, trajectories: TrajectoryIndex,
                   reward_weights: Mapping[str, float]) -> AdvantageBatch:
        """Advantages of the batch."""
        ...

    def pairs(self, config: AlgorithmConfig, trajectories: TrajectoryBatch, advantages: AdvantageBatch) -> "Tensor":
        """What there is to train on: int64 [R, 2] of (position of the sample, draw), in sample order.

        A draw is an SDE step for policy-gradient algorithms, a random time for forward-process ones.
        """
        ...

    def rows(self, config: AlgorithmConfig, trajectories: TrajectoryBatch, advantages: AdvantageBatch,
             pairs: "Tensor", seed: int) -> Rows:
        """The rows of some pairs [M, 2]. A row depends on its own pair and `seed` only."""
        ...

    def loss(self, config: AlgorithmConfig, rows: Rows, velocities: Mapping[str, "Tensor"],
             trajectories: TrajectoryBatch) -> tuple["Tensor", Mapping[str, "Tensor"]]:
        """Loss fp32 [M] (differentiable in ``velocities["policy"]``) and numbers a row, [M], for the metrics."""
        ...


Normalisation = Literal["global", "group", "none"]
Baseline = Literal["mean", "loo"]

_LARGEST_REWARD = 1e100
"""Above this the square of a reward overflows."""
_MAX_LOG_RATIO = 30.0
"""Log-ratios are cut here, at a ratio of 1e13: exp() of more overflows fp32, or the gradient's norm does."""


def group_advantages(
    rewards: "Tensor", group_ids: "Tensor", *, std: Normalisation = "global", ddof: int = 0, eps: float = 1e-4,
    baseline: Baseline = "mean", valid: "Tensor | None" = None,
) -> "Tensor":
    """How much better each sample is than its group: ``(reward - baseline) / (std + eps)``, float64 [N].

    A group whose valid rewards are all equal, and one with fewer than 2 valid samples, gives exactly 0. So does an
    invalid sample, which also takes no part in any statistic. Sums are exact, so the order of the samples (or how
    they were spread over machines) changes no bit.

    Args:
        rewards: [N], any real or integer dtype; computed in float64.
        group_ids: Integers [N]; equal id = same group, in any order.
        std: What to divide by: the standard deviation of all valid rewards, of the group's, or ``none``: nothing.
        ddof: 0 = population, 1 = sample standard deviation.
        eps: Added to the standard deviation, in units of the reward, >= 0.
        baseline: The group's mean, or ``loo``: the mean of the group's other samples.
        valid: bool [N], default all.

    Raises:
        ContractError: shapes that differ, or a valid reward that is not finite.
        ValueError: an unknown rule, or `ddof` or `eps` out of range.

    Source: Flow-GRPO, arXiv 2505.05470 (``std="global"``); DanceGRPO, arXiv 2505.07818 (``group``, ddof 1, eps 1e-8).
    """
    import torch

    if std not in ("global", "group", "none") or baseline not in ("mean", "loo"):
        raise ValueError(f"got std {std!r} and baseline {baseline!r}; expected global, group or none, and mean or loo")
    if ddof not in (0, 1) or not 0 <= eps < math.inf:
        raise ValueError(f"got ddof {ddof} and eps {eps}; expected 0 or 1, and a finite eps >= 0")
    groups = _valid_groups(rewards, group_ids, valid)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    everything = [value for members in groups.values() for value in members.values()]
    for members in groups.values():
        values = list(members.values())
        if not _varies(values):
            continue
        mean = math.fsum(values) / len(values)
        # reward - mean of the others = G / (G - 1) (reward - mean of all)
        scale = len(values) / (len(values) - 1) if baseline == "loo" else 1.0
        if std != "none":
            scale /= _std(everything if std == "global" else values, ddof) + eps
        for position, value in members.items():
            advantages[position] = (value - mean) * scale
    return advantages


def groups_with_signal(rewards: "Tensor", group_ids: "Tensor", valid: "Tensor | None" = None) -> "Tensor":
    """bool [N]: the valid samples whose group has at least 2 valid samples and rewards that are not all equal.

    Raises:
        ContractError: as `group_advantages`.
    """
    import torch

    signal = torch.zeros(len(rewards), dtype=torch.bool)
    for members in _valid_groups(rewards, group_ids, valid).values():
        signal[list(members)] = _varies(list(members.values()))
    return signal


def clipped_loss(
    log_prob: "Tensor", old_log_prob: "Tensor", advantages: "Tensor", *, clip_range: float | tuple[float, float],
    adv_clip: float = 5.0,
) -> "Tensor":
    """PPO's clipped loss a sample, [N]: ``max(-A r, -A clip(r, 1 - low, 1 + high))``, ``r = exp(log_prob - old)``.

    Advantages are first limited to ``[-adv_clip, adv_clip]``, and the log-ratio to +-30, so that the loss of finite
    inputs is finite; beyond 30 the gradient is 0. Differentiable in `log_prob` only. fp64 stays, the rest is fp32.

    Args:
        log_prob, old_log_prob: [N], mean over latent elements, new and rollout policy.
        advantages: [N].
        clip_range: One number for both sides, or (low, high); ``0 < low <= 1``, ``high > 0``.
        adv_clip: Largest size of an advantage, > 0.

    Raises:
        ValueError: shapes that differ or limits out of range.

    Source: PPO, arXiv 1707.06347; as in Flow-GRPO, arXiv 2505.05470.
    """
    import torch

    if not log_prob.shape == old_log_prob.shape == advantages.shape:
        # Broadcasting [N] against [N, 1] would quietly average an N x N table.
        raise ValueError(f"log_prob {list(log_prob.shape)}, old_log_prob {list(old_log_prob.shape)} and advantages "
                         f"{list(advantages.shape)} must have one shape")
    low, high = clip_bounds(clip_range)
    if not 0 < adv_clip < math.inf:
        raise ValueError(f"adv_clip must be finite and positive, got {adv_clip}")
    log_prob = log_prob if log_prob.dtype == torch.float64 else log_prob.float()
    limited = advantages.detach().clamp(-adv_clip, adv_clip).to(log_prob)
    ratio = probability_ratio(log_prob, old_log_prob)
    return torch.maximum(-limited * ratio, -limited * ratio.clamp(1 - low, 1 + high))


def probability_ratio(log_prob: "Tensor", old_log_prob: "Tensor") -> "Tensor":
    """``exp(log_prob - old_log_prob)`` with the log-ratio limited to +-30; the old side is a constant."""
    return (log_prob - old_log_prob.detach().to(log_prob)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clip_bounds(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of a clip range.

    Raises:
        ValueError: out of range.
    """
    low, high = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    if not (0 < low <= 1 and 0 < high < math.inf):
        raise ValueError(f"clip_range must be 0 < low <= 1 and 0 < high, got {clip_range}: the ratio is kept within "
                         "[1 - low, 1 + high]")
    return low, high


def _valid_groups(rewards: "Tensor", group_ids: "Tensor", valid: "Tensor | None") -> dict[int, dict[int, float]]:
    """Group id -> position of the sample -> reward, valid samples only."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or (valid is not None and valid.shape != rewards.shape):
        raise ContractError(f"rewards {list(rewards.shape)}, group_ids {list(group_ids.shape)} and valid "
                            f"{None if valid is None else list(valid.shape)} must all be [N].")
    if rewards.is_complex() or group_ids.is_floating_point():
        raise ContractError(f"rewards are {rewards.dtype} and group_ids {group_ids.dtype}; expected real numbers and "
                            "integers.")
    keep = [True] * len(rewards) if valid is None else valid.tolist()
    groups: dict[int, dict[int, float]] = {}
    for position, (reward, group, kept) in enumerate(zip(rewards.tolist(), group_ids.tolist(), keep, strict=True)):
        if not kept:
            continue
        if not abs(reward) <= _LARGEST_REWARD:
            raise ContractError(f"the reward at position {position} (group {group}) is {reward}; a valid reward must "
                                f"be finite and at most {_LARGEST_REWARD:g} in size. Mark a failed sample as failed "
                                "instead.")
        groups.setdefault(group, {})[position] = float(reward)
    return groups


def _varies(values: list[float]) -> bool:
    # Not std == 0: the mean of equal floats can be one unit in the last place off, and a small eps then blows it up.
    return len(values) >= 2 and max(values) != min(values)


def _std(values: list[float], ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - ddof))
