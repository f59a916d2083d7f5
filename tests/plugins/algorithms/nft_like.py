"""Throw-away algorithm: a forward process without log-probs, as DiffusionNFT's code has it (arXiv 2509.16117).

Trains on the clean latents of any sampler: at a time and noise of its own it pulls the velocity towards samples that
did well and away from those that did not, relative to the `old` policy that drew them.
"""

from typing import Literal

from tasks import sde
from tasks.algorithms.base import Rows, group_advantages, groups_with_signal
from tasks.contracts.batches import AdvantageBatch
from tasks.contracts.config import AlgorithmConfig


class Config(AlgorithmConfig):
    """Its settings."""

    name: Literal["nft_like"] = "nft_like"
    beta: float = 1.0
    """Step from the old to the implicit positive policy."""
    adv_clip: float = 5.0
    """Advantages are limited to +- this."""
    draws: int = 2
    """Times drawn a sample."""


def check(run_config):
    if run_config.sampling.window_size != 0:
        raise ValueError("algorithm 'nft_like' trains on final latents; set sampling.sde_window.size: 0")


def needs(config):
    return frozenset({"old"})


def old_policy_decay(config, iteration):
    return min(0.3 * iteration, 0.5)


def advantages(config, rewards, trajectories, reward_weights):
    import torch

    values = group_advantages(rewards.total, trajectories.group_ids, valid=~rewards.failed)
    valid = groups_with_signal(rewards.total, trajectories.group_ids, ~rewards.failed)
    return AdvantageBatch(trajectories.sample_ids, values, torch.ones(len(values), 0, dtype=torch.float64), valid, {})


def pairs(config, trajectories, advantages):
    import torch

    return torch.cartesian_prod(advantages.valid.nonzero()[:, 0], torch.arange(config.draws))


def optimality(advantage, adv_clip):
    """Advantage -> r in 0..1."""
    return (advantage / adv_clip).clamp(-1, 1) / 2 + 0.5


def rows(config, trajectories, advantages, pairs, seed):
    import torch

    sample = pairs[:, 0]
    seeds = [sde.derive_seed(seed, 0, position, f"draw/{draw}") for position, draw in pairs.tolist()]
    times = trajectories.sigmas[torch.tensor([value % (len(trajectories.sigmas) - 1) for value in seeds])]
    clean = trajectories.final_latents[sample]
    noise = torch.stack([sde.noise(clean.shape[1:], value) for value in seeds])
    weight = times.reshape(-1, *[1] * (clean.ndim - 1))
    return Rows(latents=((1 - weight) * clean + weight * noise).float(), sigma=times,
                extra={"clean": clean, "r": optimality(advantages.advantages[sample], config.adv_clip)})


def loss(config, rows, velocities, trajectories):
    velocity, old = velocities["policy"], velocities["old"].detach()
    positive = config.beta * velocity + (1 - config.beta) * old
    negative = (1 + config.beta) * old - config.beta * velocity
    time = rows.sigma.reshape(-1, *[1] * (velocity.ndim - 1))

    def distance(of):
        residual = (rows.latents.double() - time.double() * of.double() - rows.extra["clean"].double()).flatten(1)
        return residual.square().mean(1) / residual.abs().mean(1).detach().clamp(min=1e-5)

    plus, minus = distance(positive), distance(negative)
    r = rows.extra["r"].double()
    total = config.adv_clip * (r * plus + (1 - r) * minus) / config.beta
    return total.to(velocity), {"loss_positive": plus.detach(), "loss_negative": minus.detach()}
