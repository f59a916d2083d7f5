"""What a policy is: the protocol every file of this axis meets, and the few functions they share.

In: prompts and latents. Out: velocities and media. Rollout and update call `velocity` in micro-batches of one fixed
size, so a policy never sees how samples are spread over lanes or machines.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tasks.contracts.config import PolicyConfig
from tasks.contracts.media import Media

if TYPE_CHECKING:
    from torch import Tensor, nn


class Policy(Protocol):
    """A flow-matching generator. A policy module has ``Config`` (a `PolicyConfig`) and ``build(config, dtype)``.

    ``build`` returns a policy with its base weights loaded, on which `prepare_trainable` can be called.
    It may also have ``check(run_config)``, which raises ValueError for combinations that cannot work.
    """

    config: PolicyConfig
    base_digest: str
    """SHA-256 of the base checkpoint's content."""
    latent_shape: tuple[int, ...]
    """Shape of one sample's latents, any rank."""

    @property
    def components(self) -> Mapping[str, "nn.Module"]:
        """Modules that may be trained, by name: ``transformer``, ``transformer_2``, ``pe``."""
        ...

    def component_at(self, sigma: float) -> str:
        """Name of the component that denoises at `sigma`; one-expert policies always give the same."""
        ...

    def encode(self, prompts: Sequence[str]) -> Mapping[str, "Tensor"]:
        """Conditions of each prompt, name -> [N, ...]; row i depends on prompt i only. ``[""]`` is the negative."""
        ...

    def velocity(self, latents: "Tensor", sigma: "Tensor", conditions: Mapping[str, "Tensor"]) -> "Tensor":
        """The velocity dx/dsigma, fp32 [M, *latent], of latents [M, *latent] at sigma [M], no guidance.

        All rows belong to one component. Differentiable in the trainable parameters.
        """
        ...

    def decode(self, latents: "Tensor") -> Media:
        """Media of final latents [N, *latent]."""
        ...


def guided_velocity(
    policy: Policy, latents: "Tensor", sigma: "Tensor", conditions: Mapping[str, "Tensor"],
    negative: Mapping[str, "Tensor"] | None, guidance_scale: float,
) -> "Tensor":
    """The velocity under classifier-free guidance: ``v_neg + scale * (v - v_neg)``; one forward when the scale is 1.

    Two forwards of the same micro-batch size, never one of twice the size: a row's bits depend on the number of rows.
    """
    velocity = policy.velocity(latents, sigma, conditions)
    if guidance_scale == 1.0:
        return velocity
    if negative is None:
        raise ValueError(f"guidance_scale {guidance_scale} needs the negative conditions")
    unguided = policy.velocity(latents, sigma, negative)
    return unguided + guidance_scale * (velocity - unguided)
