"""What every policy of the axis must do; a new file in tasks/policies is tested here as soon as it exists."""

import pytest
import torch
from pydantic import ValidationError

from tasks.contracts.config import PolicyConfig
from tasks.contracts.media import Images, Video
from tasks.plugins import load, names

MICRO_BATCH_SIZE = 24
EXAMPLE_PROMPTS = {
    "tiny_text": ('a red sign that says "7K"', 'blue text reading "AF"', 'a black sign that says "3E"', ""),
}
"""Prompts each policy can paint, the negative among them. A new policy adds its line."""
every_policy = pytest.mark.parametrize("name", names("policies"))


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    built = {}

    def get(name, dtype="fp32"):
        if (name, dtype) not in built:
            assert name in EXAMPLE_PROMPTS, f"add example prompts for policy {name!r} to EXAMPLE_PROMPTS"
            module = load("policies", name)
            built[name, dtype] = module.build(module.Config(name=name), dtype)
        return built[name, dtype]

    return get


def micro_batch(policy, name):
    generator = torch.Generator().manual_seed(0)
    prompts = (EXAMPLE_PROMPTS[name] * MICRO_BATCH_SIZE)[:MICRO_BATCH_SIZE]
    latents = torch.randn(MICRO_BATCH_SIZE, *policy.latent_shape, generator=generator)
    sigma = torch.full((MICRO_BATCH_SIZE,), 0.875, dtype=torch.float64)
    return latents, sigma, policy.encode(prompts)


@every_policy
def test_importing_the_module_imports_nothing_heavy(name, heavy_imports_of):
    assert heavy_imports_of(f"tasks.policies.{name}") == set()


@every_policy
def test_config_has_defaults_and_refuses_unknown_keys(name):
    config_type = load("policies", name).Config
    assert issubclass(config_type, PolicyConfig)
    assert config_type(name=name).name == name
    with pytest.raises(ValidationError, match="no_such_key"):
        config_type(name=name, no_such_key=1)


@every_policy
def test_source_reaches_for_no_rank_resource_or_flyte(name, forbidden_names):
    assert forbidden_names(load("policies", name)) == set()


@every_policy
def test_the_built_policy_describes_itself(policies, name):
    policy = policies(name)
    assert len(policy.base_digest) == 64
    assert policy.config.name == name
    assert all(isinstance(module, torch.nn.Module) for module in policy.components.values())
    assert {policy.component_at(sigma) for sigma in (1.0, 0.5, 0.01)} <= policy.components.keys()


@every_policy
def test_building_twice_gives_the_same_weights_and_leaves_the_generator_alone(policies, name):
    module = load("policies", name)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = module.build(module.Config(name=name), "fp32")
    assert torch.equal(before, torch.random.get_rng_state())
    assert again.base_digest == policies(name).base_digest
    for part, component in policies(name).components.items():
        other = again.components[part].state_dict()
        assert all(torch.equal(value, other[key]) for key, value in component.state_dict().items())


@every_policy
def test_encoding_a_prompt_does_not_depend_on_the_others(policies, name):
    module = load("policies", name)
    prompts = EXAMPLE_PROMPTS[name]
    together = module.build(module.Config(name=name), "fp32").encode(prompts)
    backwards = policies(name).encode(prompts[::-1])
    for row, prompt in enumerate(prompts):
        alone = policies(name).encode([prompt])
        assert together.keys() == alone.keys()
        for key, value in together.items():
            assert len(value) == len(prompts)
            assert torch.equal(value[row], alone[key][0])
            assert torch.equal(value[row], backwards[key][len(prompts) - 1 - row])


@every_policy
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_velocity_is_fp32_and_the_same_bits_with_and_without_gradient(policies, name, dtype):
    policy = policies(name, dtype)
    latents, sigma, conditions = micro_batch(policy, name)
    with torch.no_grad():
        rollout = policy.velocity(latents, sigma, conditions)
    update = policy.velocity(latents, sigma, conditions)
    assert rollout.dtype == torch.float32
    assert rollout.shape == latents.shape
    assert rollout.isfinite().all()
    assert update.requires_grad
    assert torch.equal(rollout, update)


@every_policy
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_velocity_of_a_row_does_not_depend_on_its_place_in_the_micro_batch(policies, name, dtype):
    policy = policies(name, dtype)
    latents, sigma, conditions = micro_batch(policy, name)
    with torch.no_grad():
        straight = policy.velocity(latents, sigma, conditions)
        for seed in range(3):
            order = torch.randperm(MICRO_BATCH_SIZE, generator=torch.Generator().manual_seed(seed))
            permuted = policy.velocity(latents[order], sigma[order],
                                       {key: value[order] for key, value in conditions.items()})
            assert torch.equal(permuted, straight[order])


@every_policy
def test_velocity_reads_any_float_type_of_sigma_alike(policies, name):
    policy = policies(name)
    latents, sigma, conditions = micro_batch(policy, name)
    with torch.no_grad():
        assert torch.equal(policy.velocity(latents, sigma, conditions),
                           policy.velocity(latents, sigma.float(), conditions))


@every_policy
def test_velocity_is_differentiable_in_the_component_of_its_sigma(policies, name):
    policy = policies(name)
    latents, sigma, conditions = micro_batch(policy, name)
    component = policy.components[policy.component_at(0.875)]
    parameters = [parameter for parameter in component.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(policy.velocity(latents, sigma, conditions).square().mean(), parameters,
                                    allow_unused=True)
    norms = [gradient.norm().item() for gradient in gradients if gradient is not None]
    assert len(norms) > len(parameters) / 2
    assert all(norm == norm and norm < float("inf") for norm in norms)
    assert max(norms) > 0


@every_policy
def test_decode_gives_one_media_item_a_sample(policies, name):
    policy = policies(name)
    media = policy.decode(torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(1)))
    assert isinstance(media, Images | Video)
    assert len(media) == 3
