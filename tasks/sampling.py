"""Denoising in micro-batches: the one sampler that rollout and evaluation share.

In: a loaded policy, prompts, noise. Out: final latents and, for rollouts, the SDE steps as they were scored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks import sde
from tasks.contracts.config import SDEKind
from tasks.policies.base import Policy, guided_velocity

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Denoised:
    """One micro-batch of M samples.

    Attributes:
        final_latents: float32 [M, *latent].
        step_latents: float32 [M, S, 2, *latent], before and after each SDE step. log_probs: float32 [M, S].
    """

    final_latents: "Tensor"
    step_latents: "Tensor"
    log_probs: "Tensor"


def denoise(
    policy: Policy, prompts: Sequence[str], latents: "Tensor", sigmas: "Tensor", *, guidance_scale: float = 1.0,
    sde_steps: Sequence[int] = (), sde_kind: SDEKind = "flow", noise_level: float = 0.0,
    noise: Callable[[int], "Tensor"] | None = None,
) -> Denoised:
    """Denoise one micro-batch from sigma = sigmas[0] to 0: SDE transitions at `sde_steps`, Euler steps elsewhere.

    Args:
        prompts: M texts. latents: float32 [M, *latent], the initial noise. sigmas: float64 [T+1].
        sde_steps: Increasing step numbers. noise: step number -> standard normal [M, *latent].
    """
    import torch

    num_rows = len(prompts)
    conditions = policy.encode(prompts)
    negative = policy.encode([""] * num_rows) if guidance_scale != 1.0 else None
    befores, afters, log_probs = [], [], []
    with torch.no_grad():
        for step in range(len(sigmas) - 1):
            # Tensors [M], never floats: the update replays with one sigma a row and must do the same arithmetic.
            sigma, sigma_next = sigmas[step].expand(num_rows), sigmas[step + 1].expand(num_rows)
            velocity = guided_velocity(policy, latents, sigma, conditions, negative, guidance_scale)
            if step in sde_steps:
                assert noise is not None
                move = sde.transition(sde_kind, latents, velocity, sigma, sigma_next, noise_level=noise_level,
                                      sigma_max=sigmas[1].expand(num_rows))
                after = move.sample(noise(step))
                befores.append(latents)
                afters.append(after)
                log_probs.append(move.log_prob(after))
                latents = after
            else:
                latents = sde.ode_step(latents, velocity, sigma, sigma_next)
    if befores:
        pairs = torch.stack([torch.stack(befores, 1), torch.stack(afters, 1)], 2)
        return Denoised(latents, pairs, torch.stack(log_probs, 1))
    return Denoised(latents, latents.new_zeros(num_rows, 0, 2, *latents.shape[1:]), latents.new_zeros(num_rows, 0))
