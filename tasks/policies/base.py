"""What a policy is: the protocol every file of this axis meets, and the few functions they share.

In: prompts and latents. Out: velocities and media. Rollout and update call `velocity` in micro-batches of one fixed
size, so a policy never sees how samples are spread over lanes or machines.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tasks.contracts.config import PolicyConfig
from tasks.contracts.errors import CheckpointError
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

        All rows belong to one component. Differentiable in the trainable parameters. A row's bits may depend on the
        number of rows, never on its place among them: MKL breaks that for odd sizes, such as a linear of 5 inputs.
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


Weights = Mapping[str, Mapping[str, "Tensor"]]
"""Component -> parameter name -> tensor."""


def prepare_trainable(policy: Policy, seed: int) -> None:
    """Freeze everything but what the recipe trains: the components' own weights, or new low-rank adapters.

    Adapters start as exact zeros (B = 0, A drawn from `seed`), so the initial trainable weights are the base policy
    in both modes, and "reference policy" means "these initial weights" whatever is trained.

    Raises:
        CheckpointError: no module of a component matches the adapter's target names.
    """
    import torch

    for name, module in policy.components.items():
        module.requires_grad_(policy.config.trainable == "full")
        if policy.config.trainable == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            targets: list[str] = [*getattr(policy.config, "lora_targets", ("to_q", "to_k", "to_v", "to_out.0"))]
            lora = LoraConfig(r=policy.config.lora_rank, lora_alpha=policy.config.lora_alpha,
                              init_lora_weights="gaussian", target_modules=targets)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                try:
                    inject_adapter_in_model(lora, module)
                except ValueError as error:
                    raise CheckpointError(f"policy {policy.config.name!r}: no adapter fits component {name!r} with "
                                          f"lora_targets {targets}: {error}") from None
        module.train(False)


def trainable_parameters(policy: Policy) -> dict[str, dict[str, "nn.Parameter"]]:
    """Component -> name -> parameter, for every parameter that is trained."""
    return {part: {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
            for part, module in policy.components.items()}


def copy_weights(policy: Policy) -> dict[str, dict[str, "Tensor"]]:
    """A detached clone of the trainable weights. Cloned, never aliased: on CPU `.cpu()` would share memory."""
    return {part: {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for part, parameters in trainable_parameters(policy).items()}


def set_weights(policy: Policy, weights: Weights) -> None:
    """Copy `weights` into the trainable parameters.

    Raises:
        CheckpointError: other components, names or shapes than the policy trains (an adapter given to a fully
            trained policy, or the reverse).
    """
    import torch

    expected = {part: {name: tuple(value.shape) for name, value in parameters.items()}
                for part, parameters in trainable_parameters(policy).items()}
    found = {part: {name: tuple(value.shape) for name, value in values.items()} for part, values in weights.items()}
    if found != expected:
        wrong = sorted({f"{part}.{name}" for one, other in ((expected, found), (found, expected))
                        for part, values in one.items() for name, shape in values.items()
                        if other.get(part, {}).get(name) != shape})
        raise CheckpointError(f"policy {policy.config.name!r} (trainable: {policy.config.trainable}): {len(wrong)} "
                              f"parameters differ from the stored weights, first {wrong[:2]}. They were written by "
                              "another model, or with another `policy.trainable` or `lora_rank`.")
    with torch.no_grad():
        for part, parameters in trainable_parameters(policy).items():
            for name, parameter in parameters.items():
                parameter.copy_(weights[part][name])


@contextmanager
def using_weights(policy: Policy, weights: Weights) -> Iterator[None]:
    """Run the block with other trainable weights and put the present ones back, also after an error."""
    present = copy_weights(policy)
    set_weights(policy, weights)
    try:
        yield
    finally:
        set_weights(policy, present)
