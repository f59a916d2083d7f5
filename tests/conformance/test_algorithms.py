"""What every algorithm found on disk must keep, whatever its mathematics."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError

from tasks import plugins, sde
from tasks.algorithms.base import Algorithm, Rows
from tasks.contracts.batches import AdvantageBatch, RewardBatch, SamplingContract, TrajectoryBatch
from tasks.contracts.config import AlgorithmConfig
from tasks.contracts.media import Images

LATENT = (2, 3)
NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 3, 4, 5
NUM_SAMPLES = NUM_GROUPS * GROUP_SIZE
WEIGHT = torch.tensor([0.6, -0.3, 0.2])

every_algorithm = pytest.mark.parametrize("name", plugins.names("algorithms"))


def velocity_of(weight: torch.Tensor, latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """A toy policy of three weights; elementwise, so a row never depends on its neighbours."""
    return weight[0] * latents + weight[1] * torch.sin(3 * latents) + weight[2] * sigma.reshape(-1, 1, 1).float()


def trajectories_of(kind: str = "flow") -> TrajectoryBatch:
    """A rollout of the toy policy: SDE on all steps but the last."""
    sigmas = sde.sigma_schedule("linear", NUM_STEPS, 3.0)

    def noise(purpose: str) -> torch.Tensor:
        return torch.stack([sde.noise(LATENT, sde.derive_seed(0, 1, sample, purpose)) for sample in range(NUM_SAMPLES)])

    latents, pairs, log_probs = noise("initial"), [], []
    for step in range(NUM_STEPS - 1):
        sigma = sigmas[step].expand(NUM_SAMPLES)
        moved = sde.transition(kind, latents, velocity_of(WEIGHT, latents, sigma), sigma, sigmas[step + 1],
                               noise_level=0.7, sigma_max=sigmas[1])
        after = moved.sample(noise(f"step/{step}"))
        pairs.append(torch.stack([latents, after], 1))
        log_probs.append(moved.log_prob(after))
        latents = after
    velocity = velocity_of(WEIGHT, latents, sigmas[-2].expand(NUM_SAMPLES))
    contract = SamplingContract(
        policy="toy", base_digest="0", latent_shape=LATENT, schedule="linear", shift=3.0,
        num_inference_steps=NUM_STEPS, sigmas_digest="0", guidance_scale=1.0, sde_kind=kind, noise_level=0.7,
        dtype="fp32", kernels="reference", micro_batch_size=NUM_SAMPLES)
    return TrajectoryBatch(
        sample_ids=torch.arange(NUM_SAMPLES), group_ids=torch.arange(NUM_SAMPLES) // GROUP_SIZE,
        parent_ids=torch.full((NUM_SAMPLES,), -1), prompts=("p",) * NUM_SAMPLES, metadata=({},) * NUM_SAMPLES,
        condition_refs={}, sigmas=sigmas, sde_indices=torch.arange(NUM_STEPS - 1).repeat(NUM_SAMPLES, 1),
        step_mask=torch.ones(NUM_SAMPLES, NUM_STEPS - 1, dtype=torch.bool), step_latents=torch.stack(pairs, 1),
        log_probs=torch.stack(log_probs, 1), final_latents=sde.ode_step(latents, velocity, sigmas[-2], sigmas[-1]),
        media=Images(torch.zeros(NUM_SAMPLES, 3, 2, 2, dtype=torch.uint8)), contract=contract)


def rewards_of(trajectories: TrajectoryBatch, total: torch.Tensor) -> RewardBatch:
    return RewardBatch(sample_ids=trajectories.sample_ids, scores={"only": total}, total=total,
                       failed=torch.zeros(NUM_SAMPLES, dtype=torch.bool))


def varied() -> torch.Tensor:
    return torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss_of(algorithm: ModuleType, rows: Rows, trajectories: TrajectoryBatch, policy: torch.Tensor,
            others: torch.Tensor = WEIGHT) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    config = algorithm.Config()
    velocities = {name: velocity_of(others, rows.latents, rows.sigma) for name in algorithm.needs(config)}
    velocities["policy"] = velocity_of(policy, rows.latents, rows.sigma)
    return algorithm.loss(config, rows, velocities, trajectories)


def rows_of(algorithm: ModuleType, trajectories: TrajectoryBatch, advantages: AdvantageBatch,
            order: torch.Tensor | None = None) -> Rows:
    pairs = algorithm.pairs(algorithm.Config(), trajectories, advantages)
    return algorithm.rows(algorithm.Config(), trajectories, advantages, pairs if order is None else pairs[order], 17)


def advantages_of(algorithm: ModuleType, trajectories: TrajectoryBatch, total: torch.Tensor) -> AdvantageBatch:
    return algorithm.advantages(algorithm.Config(), rewards_of(trajectories, total), trajectories, {"only": 1.0})


def test_there_are_algorithms_to_check() -> None:
    assert "flow_grpo" in plugins.names("algorithms")


@every_algorithm
def test_it_has_the_functions_of_the_protocol_with_its_parameters(name: str) -> None:
    algorithm = plugins.load("algorithms", name)
    for function in ("needs", "advantages", "pairs", "rows", "loss"):
        expected = list(inspect.signature(getattr(Algorithm, function)).parameters)[1:]
        assert list(inspect.signature(getattr(algorithm, function)).parameters) == expected, function
        assert getattr(algorithm, function).__doc__, f"{name}.{function} needs a docstring"


@every_algorithm
def test_its_config_has_described_defaults_and_forbids_unknown_keys(name: str) -> None:
    config_type = plugins.load("algorithms", name).Config
    assert issubclass(config_type, AlgorithmConfig)
    assert config_type().name == name
    assert config_type.model_validate(config_type().model_dump(mode="json")) == config_type()
    undescribed = [key for key, field in config_type.model_fields.items() if key != "name" and not field.description]
    assert not undescribed, f"fields without a docstring: {undescribed}"
    with pytest.raises(ValidationError, match="no_such_key"):
        config_type.model_validate({"no_such_key": 1})
    with pytest.raises(ValidationError):
        config_type.model_validate({"name": "another"})


@every_algorithm
def test_it_asks_for_known_velocities_only(name: str) -> None:
    algorithm = plugins.load("algorithms", name)
    assert algorithm.needs(algorithm.Config()) <= {"reference", "old"}


@every_algorithm
def test_constant_rewards_give_zero_advantages_and_nothing_to_train(name: str) -> None:
    algorithm, trajectories = plugins.load("algorithms", name), trajectories_of()
    for value in (0.0, 0.9, 1 / 3):
        found = advantages_of(algorithm, trajectories, torch.full((NUM_SAMPLES,), value, dtype=torch.float64))
        assert (found.advantages == 0).all()
        if len(algorithm.pairs(algorithm.Config(), trajectories, found)) == 0:
            continue
        weight = WEIGHT.clone().requires_grad_()
        loss, _ = loss_of(algorithm, rows_of(algorithm, trajectories, found), trajectories, weight)
        assert torch.autograd.grad(loss.sum(), weight)[0].tolist() == [0, 0, 0]


@every_algorithm
def test_different_rewards_give_a_gradient(name: str) -> None:
    algorithm, trajectories = plugins.load("algorithms", name), trajectories_of()
    weight = WEIGHT.clone().requires_grad_()
    rows = rows_of(algorithm, trajectories, advantages_of(algorithm, trajectories, varied()))
    loss, _ = loss_of(algorithm, rows, trajectories, weight)
    assert torch.autograd.grad(loss.sum(), weight)[0].abs().max() > 1e-4


@every_algorithm
def test_advantages_and_losses_do_not_depend_on_the_order_of_samples_or_rows(name: str) -> None:
    algorithm, trajectories = plugins.load("algorithms", name), trajectories_of()
    signal = advantages_of(algorithm, trajectories, varied())
    pairs = algorithm.pairs(algorithm.Config(), trajectories, signal)
    assert pairs.dtype == torch.int64
    assert pairs.tolist() == sorted(pairs.tolist())
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1))
    weight = WEIGHT * 1.01
    whole, metrics = loss_of(algorithm, rows_of(algorithm, trajectories, signal), trajectories, weight)
    mixed, its_metrics = loss_of(algorithm, rows_of(algorithm, trajectories, signal, order), trajectories, weight)
    assert torch.equal(mixed, whole[order])
    assert metrics.keys() == its_metrics.keys()
    for key, value in metrics.items():
        assert torch.equal(its_metrics[key].nan_to_num(), value[order].nan_to_num()), key
    some, _ = loss_of(algorithm, rows_of(algorithm, trajectories, signal, order[:5]), trajectories, weight)
    # Another number of rows: equal too, because rows are elementwise and their means have a fixed order.
    assert torch.equal(some, whole[order[:5]])


@every_algorithm
@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_loss_and_metrics_of_any_number_of_rows_are_finite_and_detached(name: str, kind: str) -> None:
    algorithm, trajectories = plugins.load("algorithms", name), trajectories_of(kind)
    signal = advantages_of(algorithm, trajectories, varied())
    for order in (torch.tensor([3]), torch.arange(7)):
        weight = (WEIGHT + 0.3).requires_grad_()
        loss, metrics = loss_of(algorithm, rows_of(algorithm, trajectories, signal, order), trajectories, weight)
        assert loss.dtype == torch.float32
        assert loss.shape == order.shape
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), weight)[0].isfinite().all()
        for key, value in metrics.items():
            assert value.shape == order.shape, key
            assert value.isfinite().all(), key
            assert not value.requires_grad, key


@every_algorithm
def test_no_gradient_reaches_a_fixed_velocity(name: str) -> None:
    algorithm, trajectories = plugins.load("algorithms", name), trajectories_of()
    rows = rows_of(algorithm, trajectories, advantages_of(algorithm, trajectories, varied()))
    policy, others = (WEIGHT + 0.01).requires_grad_(), WEIGHT.clone().requires_grad_()
    loss, _ = loss_of(algorithm, rows, trajectories, policy, others)
    gradients = torch.autograd.grad(loss.sum(), [policy, others], allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1] is None


@every_algorithm
def test_importing_the_module_imports_nothing_heavy(name: str, heavy_imports_of: Callable[[str], set[str]]) -> None:
    assert heavy_imports_of(f"tasks.algorithms.{name}") == set()


@every_algorithm
def test_source_reaches_for_no_rank_resource_or_flyte(
    name: str, forbidden_names: Callable[[ModuleType], set[str]],
) -> None:
    algorithm = plugins.load("algorithms", name)
    assert forbidden_names(algorithm) == set()
    source = Path(algorithm.__file__).read_text(encoding="utf-8")
    for forbidden in ("torch.distributed", ".cuda", "tasks.policies", "tasks.rewards"):
        assert forbidden not in source
