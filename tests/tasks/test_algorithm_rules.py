"""Advantages, the clipped loss and Flow-GRPO, against vectors worked out in numpy float64 by independent code."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks import sde
from tasks.algorithms import flow_grpo
from tasks.algorithms.base import clipped_loss, group_advantages, groups_with_signal
from tasks.contracts.batches import AdvantageBatch, RewardBatch, SamplingContract, TrajectoryBatch
from tasks.contracts.config import SamplingConfig
from tasks.contracts.errors import ContractError
from tasks.contracts.media import Images

REWARDS = [0.1, 0.4, 0.4, 0.9, 0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0]
GROUPS = [0] * 4 + [1] * 4 + [2] * 4
# id, rule, advantages of REWARDS
ADVANTAGE_VECTORS = [
    ("A1", {"std": "global", "ddof": 0, "eps": 1e-4},
     [-1.09734342997, -0.156763347138, -0.156763347138, 1.41087012424, 0, 0, 0, 0, 2.35145020707, -0.783816735691,
      -0.783816735691, -0.783816735691]),
    ("A2", {"std": "group", "ddof": 0, "eps": 1e-4},
     [-1.21811949692, -0.174017070988, -0.174017070988, 1.56615363889, 0, 0, 0, 0, 1.73165089992, -0.577216966641,
      -0.577216966641, -0.577216966641]),
    ("A3", {"std": "group", "ddof": 1, "eps": 1e-8},
     [-1.0552896742, -0.150755667743, -0.150755667743, 1.35680100969, 0, 0, 0, 0, 1.49999997, -0.49999999,
      -0.49999999, -0.49999999]),
    ("A4", {"std": "global", "ddof": 1, "eps": 1e-4},
     [-1.05064037004, -0.150091481435, -0.150091481435, 1.35082333291, 0, 0, 0, 0, 2.25137222152, -0.750457407173,
      -0.750457407173, -0.750457407173]),
    ("A5", {"std": "group", "ddof": 1, "eps": 1e-4},
     [-1.05497162011, -0.150710231444, -0.150710231444, 1.356392083, 0, 0, 0, 0, 1.49970005999, -0.499900019996,
      -0.499900019996, -0.499900019996]),
    ("A6", {"std": "global", "ddof": 0, "eps": 1e-4, "one_group": True},
     [-0.94058008283, 0, 0, 1.56763347138, 0.313526694277, 0.313526694277, 0.313526694277, 0.313526694277,
      1.88116016566, -1.25410677711, -1.25410677711, -1.25410677711]),
]
# id, log-prob, old log-prob, advantage, clip range, loss, d loss / d log-prob
LOSS_VECTORS = [
    ("L1", -1.0, -1.0, 1.5, 1e-4, -1.5, -1.5),
    ("L2", -0.99, -1.0, 1.5, 1e-4, -1.50015, 0.0),
    ("L3", -1.01, -1.0, 1.5, 1e-4, -1.48507475062, -1.48507475062),
    ("L4", -0.99, -1.0, -1.5, 1e-4, 1.51507525063, 1.51507525063),
    ("L5", -1.01, -1.0, -1.5, 1e-4, 1.49985, 0.0),
    ("L6", -0.99995, -1.0, 2.0, 1e-4, -2.0001000025, -2.0001000025),
    ("L7", -0.9, -1.0, 7.5, 0.2, -5.52585459038, -5.52585459038),
    ("L8", -1.3, -1.0, -9.0, 0.2, 4.0, 0.0),
    ("L9", 3.0, -20.0, -1.0, 1e-4, 9744803446.25, 9744803446.25),
]


def f64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", ADVANTAGE_VECTORS, ids=lambda vector: vector[0])
def test_advantages_match_the_vectors_to_1e_11(vector: tuple) -> None:
    _, rule, expected = vector
    rule = dict(rule)
    groups = torch.zeros(12, dtype=torch.int64) if rule.pop("one_group", False) else torch.tensor(GROUPS)
    found = group_advantages(f64(REWARDS), groups, **rule)
    # In A6 two rewards equal the mean but for its rounding; a dozen doubles of size 1 allow 1e-15 there.
    torch.testing.assert_close(found, f64(expected), rtol=1e-11, atol=1e-15)
    if "one_group" not in vector[1]:
        assert found[4:8].tolist() == [0, 0, 0, 0]


def test_global_std_is_numpys() -> None:
    found = group_advantages(f64(REWARDS), torch.tensor(GROUPS), eps=0.0)
    assert 0.75 / found[8].item() == pytest.approx(np.std(REWARDS), rel=1e-14)
    assert np.std(REWARDS) == pytest.approx(0.318852107828, rel=1e-11)
    assert np.std(REWARDS, ddof=1) == pytest.approx(0.333030165164, rel=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1 / 3])
def test_constant_groups_give_exactly_0(value: float, std: str, dtype: torch.dtype) -> None:
    for size in range(2, 33):
        for ddof, eps in ((0, 1e-4), (1, 1e-8), (0, 0.0)):
            # beside a group with signal, so that the global std is not 0 either
            rewards = torch.cat([torch.full((size,), value, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])
            groups = torch.cat([torch.zeros(size, dtype=torch.int64), torch.ones(2, dtype=torch.int64)])
            for baseline in ("mean", "loo"):
                found = group_advantages(rewards, groups, std=std, ddof=ddof, eps=eps, baseline=baseline)
                assert (found[:size] == 0).all()
                assert (found[size:] != 0).all()
            alone = group_advantages(rewards[:size], groups[:size], std=std, ddof=ddof, eps=eps)
            assert (alone == 0).all()


@pytest.mark.parametrize("ddof", [0, 1])
def test_groups_with_fewer_than_2_valid_samples_give_0_never_nan(ddof: int) -> None:
    for std in ("global", "group", "none"):
        assert group_advantages(f64([0.3]), torch.tensor([0]), std=std, ddof=ddof).tolist() == [0]
        found = group_advantages(f64([0.3, 1.0, 0.0, 0.7]), torch.tensor([4, 5, 5, 6]), std=std, ddof=ddof)
        assert found[[0, 3]].tolist() == [0, 0]
        lonely = group_advantages(f64([0.3, 0.9]), torch.tensor([0, 0]), std=std, ddof=ddof,
                                  valid=torch.tensor([True, False]))
        assert lonely.tolist() == [0, 0]
    assert group_advantages(f64([]), torch.tensor([], dtype=torch.int64)).shape == (0,)


def test_integer_rewards_are_the_same_as_floats() -> None:
    groups = torch.tensor(GROUPS)
    whole = torch.tensor([3, 1, 2, 2, 0, 0, 0, 0, 1, 0, 0, 7])
    assert torch.equal(group_advantages(whole, groups), group_advantages(whole.double(), groups))
    switched = whole > 1
    assert torch.equal(group_advantages(switched, groups), group_advantages(switched.double(), groups))


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
def test_invalid_samples_are_0_and_leave_every_statistic_alone(std: str, poison: float) -> None:
    valid = torch.ones(12, dtype=torch.bool)
    valid[[1, 6, 10]] = False
    rewards = f64(REWARDS)
    rewards[~valid] = poison
    found = group_advantages(rewards, torch.tensor(GROUPS), std=std, valid=valid)
    assert found[~valid].tolist() == [0, 0, 0]
    without = group_advantages(f64(REWARDS)[valid], torch.tensor(GROUPS)[valid], std=std)
    assert torch.equal(found[valid], without)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_valid_reward_that_is_not_finite_raises_and_is_named(reward: float) -> None:
    with pytest.raises(ContractError, match=rf"position 2 \(group 7\) is {reward}"):
        group_advantages(f64([0, 1, reward]), torch.tensor([7, 7, 7]))


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    found = group_advantages(f64([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0]), std="none", baseline="loo")
    torch.testing.assert_close(found, f64([1 - 4, 2 - 3.5, 6 - 1.5]), rtol=1e-14, atol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), std=st.sampled_from(["global", "group", "none"]), baseline=st.sampled_from(["mean", "loo"]),
       ddof=st.integers(0, 1))
def test_advantages_go_with_the_sample_bit_for_bit_however_samples_are_spread(data: st.DataObject, std: str,
                                                                              baseline: str, ddof: int) -> None:
    num_samples = data.draw(st.integers(1, 24))
    rewards = f64(data.draw(st.lists(st.floats(-1e3, 1e3), min_size=num_samples, max_size=num_samples)))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=num_samples, max_size=num_samples)))
    order = torch.tensor(data.draw(st.permutations(range(num_samples))))
    rule = {"std": std, "baseline": baseline, "ddof": ddof}
    found = group_advantages(rewards, groups, **rule)
    assert torch.equal(group_advantages(rewards[order], groups[order], **rule), found[order])
    assert torch.equal(group_advantages(rewards, 1000 - 3 * groups, **rule), found)
    assert found.isfinite().all()
    for group in groups.unique():
        members = found[groups == group]
        assert abs(members.sum().item()) <= 1e-9 * max(1.0, members.abs().max().item()) * len(members)


@pytest.mark.parametrize("std", ["global", "group"])
def test_sums_over_a_group_are_exact_so_their_order_changes_no_bit(std: str) -> None:
    generator = np.random.default_rng(0)
    groups = torch.arange(48) // 24
    for _ in range(50):
        rewards, order = f64(generator.random(48)), torch.tensor(generator.permutation(48))
        found = group_advantages(rewards, groups, std=std)
        assert torch.equal(group_advantages(rewards[order], groups[order], std=std), found[order])


def test_a_second_call_does_not_remember_the_first() -> None:
    first = group_advantages(f64(REWARDS), torch.tensor(GROUPS))
    group_advantages(f64(REWARDS) * 100 + 7, torch.tensor(GROUPS))
    assert torch.equal(group_advantages(f64(REWARDS), torch.tensor(GROUPS)), first)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"std": "batch"}, ValueError, "std 'batch'"), ({"baseline": "max"}, ValueError, "baseline 'max'"),
    ({"ddof": 2}, ValueError, "ddof 2"), ({"eps": -1e-4}, ValueError, "eps -0.0001"),
    ({"group_ids": torch.zeros(3, dtype=torch.int64)}, ContractError, r"\[N\]"),
    ({"group_ids": torch.zeros(2)}, ContractError, "integers"),
    ({"rewards": torch.zeros(2, 1)}, ContractError, r"\[N\]"),
    ({"valid": torch.ones(1, dtype=torch.bool)}, ContractError, r"\[N\]")])
def test_group_advantages_refuses_what_it_cannot_do(change: dict, error: type, message: str) -> None:
    arguments = {"rewards": torch.zeros(2), "group_ids": torch.zeros(2, dtype=torch.int64), **change}
    with pytest.raises(error, match=message):
        group_advantages(**arguments)


def test_groups_with_signal_are_those_whose_valid_rewards_differ() -> None:
    rewards, groups = f64([1, 1, 2, 3, 5, 5, 9]), torch.tensor([0, 0, 1, 1, 2, 2, 2])
    assert groups_with_signal(rewards, groups).tolist() == [False, False, True, True, True, True, True]
    valid = torch.tensor([True, True, True, False, True, True, False])
    assert not groups_with_signal(rewards, groups, valid).any()


# --- clipped loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vector", LOSS_VECTORS, ids=lambda vector: vector[0])
def test_clipped_loss_and_its_gradient_match_the_vectors(vector: tuple, dtype: torch.dtype) -> None:
    _, log_prob, old, advantage, clip_range, expected, slope = vector
    log_prob = torch.tensor([log_prob], dtype=dtype, requires_grad=True)
    loss = clipped_loss(log_prob, torch.tensor([old], dtype=dtype), f64([advantage]), clip_range=clip_range)
    # fp32 rounds log-probs of size 1 (23 in L9), and the exponential passes that on to the ratio.
    bound = 1e-11 if dtype == torch.float64 else 1e-6 if vector[0] != "L9" else 3e-6
    torch.testing.assert_close(loss.detach().double(), f64([expected]), rtol=bound, atol=0)
    gradient = torch.autograd.grad(loss.sum(), log_prob)[0]
    torch.testing.assert_close(gradient.double(), f64([slope]), rtol=bound, atol=0)


def test_mean_of_the_first_five_losses_matches_the_vector() -> None:
    columns = zip(*(vector[1:4] for vector in LOSS_VECTORS[:5]), strict=True)
    loss = clipped_loss(*(f64(column) for column in columns), clip_range=1e-4)
    assert loss.mean().item() == pytest.approx(-0.2940598999995, rel=1e-12)


def test_at_ratio_1_the_gradient_is_minus_the_advantage() -> None:
    advantages = f64([2.0, -0.5, 0.0, 7.0, -7.0])
    log_prob = f64([-1.3] * 5).requires_grad_()
    loss = clipped_loss(log_prob, log_prob.detach(), advantages, clip_range=1e-5)
    assert torch.autograd.grad(loss.sum(), log_prob)[0].tolist() == [-2.0, 0.5, 0.0, -5.0, 5.0]


def test_the_two_sides_of_the_clip_range_are_separate() -> None:
    log_prob = torch.tensor([1.25, 0.85], dtype=torch.float64).log()
    loss = clipped_loss(log_prob, f64([0, 0]), f64([1.0, -1.0]), clip_range=(0.1, 0.3))
    torch.testing.assert_close(loss, f64([-1.25, 0.9]))


@settings(max_examples=200, deadline=None)
@given(new=st.floats(-1e30, 1e30), old=st.floats(-1e30, 1e30), advantage=st.floats(-1e6, 1e6),
       clip_range=st.floats(1e-6, 1.0), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_loss_and_gradient_of_finite_inputs_are_finite(new: float, old: float, advantage: float, clip_range: float,
                                                       dtype: torch.dtype) -> None:
    log_prob = torch.tensor([new], dtype=dtype, requires_grad=True)
    loss = clipped_loss(log_prob, torch.tensor([old], dtype=dtype), f64([advantage]), clip_range=clip_range)
    gradient = torch.autograd.grad(loss.sum(), log_prob)[0]
    assert loss.isfinite().all()
    assert gradient.square().isfinite().all()  # its norm must not overflow either


def test_only_the_new_log_prob_gets_a_gradient_and_half_precision_is_raised() -> None:
    new, old, advantage = (torch.tensor([value], requires_grad=True) for value in (-1.0, -1.1, 0.5))
    loss = clipped_loss(new, old, advantage, clip_range=0.5)
    gradients = torch.autograd.grad(loss.sum(), [new, old, advantage], allow_unused=True)
    assert [gradient is None for gradient in gradients] == [False, True, True]
    assert clipped_loss(new.bfloat16(), old.bfloat16(), advantage, clip_range=0.5).dtype == torch.float32


@pytest.mark.parametrize(("change", "message"), [
    ({"clip_range": 0.0}, "clip_range"), ({"clip_range": -0.1}, "clip_range"),
    ({"clip_range": (1.1, 0.1)}, "clip_range"), ({"clip_range": (0.1, 0.0)}, "clip_range"),
    ({"clip_range": math.nan}, "clip_range"), ({"adv_clip": 0.0}, "adv_clip"), ({"adv_clip": math.inf}, "adv_clip"),
    ({"advantages": torch.zeros(3, 1)}, "one shape"),
    ({"old_log_prob": torch.zeros(1)}, "one shape")])
def test_clipped_loss_refuses_what_it_cannot_do(change: dict, message: str) -> None:
    arguments: dict[str, Any] = {"log_prob": torch.zeros(3), "old_log_prob": torch.zeros(3),
                                 "advantages": torch.zeros(3), "clip_range": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        clipped_loss(**arguments)


# --- Flow-GRPO -------------------------------------------------------------------------------------------------------

LATENT = (2, 3)


def velocity_of(weight: torch.Tensor, latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """A toy policy; elementwise, so a row never depends on its neighbours."""
    return weight[0] * latents + weight[1] * torch.sin(3 * latents) + weight[2] * sigma.reshape(-1, 1, 1).float()


WEIGHT = torch.tensor([0.6, -0.3, 0.2])


def rolled_out(kind: str = "flow", num_groups: int = 3, group_size: int = 4, num_steps: int = 6, *,
               noise_level: float = 0.7, every_step: bool = False) -> TrajectoryBatch:
    """Draw a batch from the toy policy, as a rollout would."""
    num_samples, sigmas = num_groups * group_size, sde.sigma_schedule("linear", num_steps, 3.0)
    num_sde_steps = num_steps if every_step else num_steps - 1
    latents = torch.stack([sde.noise(LATENT, sde.derive_seed(0, 1, sample, "initial"))
                           for sample in range(num_samples)])
    pairs, log_probs = [], []
    for step in range(num_steps):
        sigma = sigmas[step].expand(num_samples)
        velocity = velocity_of(WEIGHT, latents, sigma)
        if step >= num_sde_steps:
            latents = sde.ode_step(latents, velocity, sigma, sigmas[step + 1])
            continue
        noise = torch.stack([sde.noise(LATENT, sde.derive_seed(0, 1, sample, f"step/{step}"))
                             for sample in range(num_samples)])
        moved = sde.transition(kind, latents, velocity, sigma, sigmas[step + 1], noise_level=noise_level,
                               sigma_max=sigmas[1])
        after = moved.sample(noise)
        pairs.append(torch.stack([latents, after], 1))
        log_probs.append(moved.log_prob(after))
        latents = after
    contract = SamplingContract(
        policy="toy", base_digest="0", latent_shape=LATENT, schedule="linear", shift=3.0, num_inference_steps=num_steps,
        sigmas_digest="0", guidance_scale=1.0, sde_kind=kind, noise_level=noise_level, dtype="fp32",
        kernels="reference", micro_batch_size=num_samples)
    return TrajectoryBatch(
        sample_ids=torch.arange(num_samples) + 100, group_ids=torch.arange(num_samples) // group_size + 7,
        parent_ids=torch.full((num_samples,), -1), prompts=("p",) * num_samples, metadata=({},) * num_samples,
        condition_refs={}, sigmas=sigmas, sde_indices=torch.arange(num_sde_steps).repeat(num_samples, 1),
        step_mask=torch.ones(num_samples, num_sde_steps, dtype=torch.bool), step_latents=torch.stack(pairs, 1),
        log_probs=torch.stack(log_probs, 1), final_latents=latents,
        media=Images(torch.zeros(num_samples, 3, 2, 2, dtype=torch.uint8)), contract=contract)


def scored(trajectories: TrajectoryBatch, total: Sequence[float], failed: Sequence[int] = (),
           scores: dict[str, Sequence[float]] | None = None) -> RewardBatch:
    mask = torch.zeros(len(trajectories), dtype=torch.bool)
    mask[list(failed)] = True
    parts = {"only": total} if scores is None else scores
    return RewardBatch(sample_ids=trajectories.sample_ids, scores={name: f64(part) for name, part in parts.items()},
                       total=f64(total), failed=mask)


def signal_of(trajectories: TrajectoryBatch, advantages: torch.Tensor | None = None) -> AdvantageBatch:
    num_samples, num_steps = trajectories.step_mask.shape
    chosen = torch.linspace(-1, 1, num_samples, dtype=torch.float64) if advantages is None else advantages
    return AdvantageBatch(sample_ids=trajectories.sample_ids, advantages=chosen,
                          weights=torch.ones(num_samples, num_steps, dtype=torch.float64),
                          valid=torch.ones(num_samples, dtype=torch.bool), stats={})


def losses(config: flow_grpo.Config, trajectories: TrajectoryBatch, signal: AdvantageBatch, weight: torch.Tensor,
           order: torch.Tensor | None = None, reference: torch.Tensor | None = None) -> tuple[torch.Tensor, dict]:
    pairs = flow_grpo.pairs(config, trajectories, signal)
    rows = flow_grpo.rows(config, trajectories, signal, pairs if order is None else pairs[order], seed=0)
    velocities = {"policy": velocity_of(weight, rows.latents, rows.sigma)}
    if reference is not None:
        velocities["reference"] = velocity_of(reference, rows.latents, rows.sigma)
    return flow_grpo.loss(config, rows, velocities, trajectories)


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_replay_under_unchanged_weights_gives_ratio_1_exactly_at_any_number_of_rows(kind: str) -> None:
    trajectories = rolled_out(kind, noise_level=0.6)
    signal, config = signal_of(trajectories), flow_grpo.Config()
    order = torch.randperm(12 * 5, generator=torch.Generator().manual_seed(0))
    for chosen in (None, order, order[:7], order[:1]):
        loss, metrics = losses(config, trajectories, signal, WEIGHT, chosen)
        assert (metrics["ratio"] == 1).all()
        assert (metrics["log_prob_gap"] == 0).all()
        assert not (metrics["clipped_low"] + metrics["clipped_high"]).any()
        assert loss.dtype == torch.float32


def test_on_policy_gradient_is_not_zero_and_follows_the_advantages() -> None:
    trajectories = rolled_out()
    weight = WEIGHT.clone().requires_grad_()
    loss, _ = losses(flow_grpo.Config(), trajectories, signal_of(trajectories), weight)
    gradient = torch.autograd.grad(loss.sum(), weight)[0]
    assert gradient.abs().max() > 1e-3
    # REINFORCE by finite differences in fp64: d loss / d theta = - sum A d log p / d theta at ratio 1
    epsilon = 1e-3

    def objective(at: torch.Tensor) -> float:
        pairs = flow_grpo.pairs(flow_grpo.Config(), trajectories, signal_of(trajectories))
        rows = flow_grpo.rows(flow_grpo.Config(), trajectories, signal_of(trajectories), pairs, 0)
        moved = sde.transition("flow", rows.latents.double(), velocity_of(at, rows.latents.double(), rows.sigma),
                               rows.sigma, rows.extra["sigma_next"], noise_level=0.7,
                               sigma_max=trajectories.sigmas[1])
        return -(rows.extra["advantage"] * moved.log_prob(rows.extra["next_latents"])).sum().item()

    for index in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[index] = epsilon
        numeric = (objective(WEIGHT.double() + shift) - objective(WEIGHT.double() - shift)) / (2 * epsilon)
        assert gradient[index].item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_with_positive_advantages_one_gradient_step_raises_the_log_prob() -> None:
    for kind in ("flow", "dance", "cps"):
        trajectories = rolled_out(kind)
        signal, weight = signal_of(trajectories, torch.ones(12, dtype=torch.float64)), WEIGHT.clone().requires_grad_()
        loss, before = losses(flow_grpo.Config(clip_range=0.5), trajectories, signal, weight)
        gradient = torch.autograd.grad(loss.mean(), weight)[0]
        _, after = losses(flow_grpo.Config(clip_range=0.5), trajectories, signal, weight.detach() - 1e-3 * gradient)
        assert after["ratio"].log().sum() > before["ratio"].log().sum()


def test_equal_rewards_train_nothing() -> None:
    trajectories = rolled_out()
    for value in (0.0, 0.9, 1 / 3):
        rewards = scored(trajectories, [value] * 12)
        found = flow_grpo.advantages(flow_grpo.Config(), rewards, trajectories, {"only": 1.0})
        assert found.advantages.tolist() == [0] * 12
        assert not found.valid.any()
        assert found.stats["zero_variance_fraction"] == 1
        pairs = flow_grpo.pairs(flow_grpo.Config(), trajectories, found)
        assert pairs.shape == (0, 2)
        assert pairs.dtype == torch.int64
    weight = WEIGHT.clone().requires_grad_()
    silent = signal_of(trajectories, torch.zeros(12, dtype=torch.float64))
    loss, _ = losses(flow_grpo.Config(), trajectories, silent, weight)
    assert torch.autograd.grad(loss.sum(), weight)[0].tolist() == [0, 0, 0]


def test_advantages_follow_the_configured_rule_and_count_failures_apart() -> None:
    trajectories = rolled_out()
    rewards = scored(trajectories, [*REWARDS[:11], math.nan], failed=[11])
    found = flow_grpo.advantages(flow_grpo.Config(), rewards, trajectories, {"only": 1.0})
    kept = group_advantages(f64(REWARDS[:11]), torch.tensor(GROUPS[:11]))
    assert torch.equal(found.advantages, torch.cat([kept, f64([0])]))
    assert found.valid.tolist() == [True] * 4 + [False] * 4 + [True] * 3 + [False]
    assert found.weights.shape == (12, 5)
    assert (found.weights == 1).all()
    assert found.stats == pytest.approx({
        "num_groups": 3, "num_valid": 7, "zero_variance_fraction": 1 / 3, "failed_fraction": 1 / 12,
        "reward_mean": np.mean(REWARDS[:11]), "reward_std": np.std(REWARDS[:11]), "advantage_clipped_fraction": 0})
    everything_failed = scored(trajectories, [math.nan] * 12, failed=range(12))
    nothing = flow_grpo.advantages(flow_grpo.Config(ddof=1), everything_failed, trajectories, {"only": 1.0})
    assert not nothing.valid.any()
    assert all(math.isfinite(value) for value in nothing.stats.values())


def test_per_reward_normalisation_gives_rewards_of_scale_1_and_1000_the_same_say() -> None:
    trajectories = rolled_out()
    small = [0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    large = [1000 * value for value in reversed(small)]
    rewards = scored(trajectories, [a + b for a, b in zip(small, large, strict=True)], scores={"a": small, "b": large})

    def found(weights: dict[str, float], aggregate: str = "per_reward") -> AdvantageBatch:
        return flow_grpo.advantages(flow_grpo.Config(aggregate=aggregate), rewards, trajectories, weights)

    both, only_a, only_b = found({"a": 1, "b": 1}), found({"a": 1, "b": 0}), found({"a": 0, "b": 1})
    torch.testing.assert_close(both.advantages, only_a.advantages + only_b.advantages)
    assert only_a.advantages.abs().sum().item() == pytest.approx(only_b.advantages.abs().sum().item(), rel=1e-3)
    torch.testing.assert_close(found({"a": 3, "b": 1}).advantages, 3 * only_a.advantages + only_b.advantages)
    # summed first, the large one decides alone
    summed = found({"a": 1, "b": 1}, "sum").advantages
    assert torch.corrcoef(torch.stack([summed, only_b.advantages]))[0, 1] > 0.999
    # a group is silent only if every reward of weight is: group 1 of `a` is, of `b` is not
    constant = scored(trajectories, [0.0] * 12, scores={"a": [1.0] * 12, "b": [*[1.0] * 8, 0.0, 1.0, 0.0, 0.0]})
    part = flow_grpo.advantages(flow_grpo.Config(aggregate="per_reward"), constant, trajectories, {"a": 1, "b": 1})
    assert part.valid.tolist() == [False] * 8 + [True] * 4
    with pytest.raises(ContractError, match=r"\['a', 'b'\].*\['a'\]"):
        found({"a": 1.0})


def test_batches_of_other_samples_are_refused() -> None:
    trajectories = rolled_out()
    rewards = scored(trajectories, REWARDS)
    other = RewardBatch(rewards.sample_ids.flip(0), rewards.scores, rewards.total, rewards.failed)
    with pytest.raises(ContractError, match=r"RewardBatch.sample_ids"):
        flow_grpo.advantages(flow_grpo.Config(), other, trajectories, {"only": 1.0})
    signal = signal_of(trajectories)
    moved = AdvantageBatch(signal.sample_ids + 1, signal.advantages, signal.weights, signal.valid, {})
    with pytest.raises(ContractError, match=r"AdvantageBatch.sample_ids"):
        flow_grpo.pairs(flow_grpo.Config(), trajectories, moved)


def test_pairs_are_the_valid_samples_unmasked_steps_in_order_without_steps_that_have_no_density() -> None:
    trajectories, config = rolled_out(), flow_grpo.Config()
    trajectories.step_mask[3, 2:] = False
    signal = signal_of(trajectories)
    signal.valid[[0, 5]] = False
    expected = [[sample, step] for sample in range(12) for step in range(5)
                if sample not in (0, 5) and not (sample == 3 and step >= 2)]
    assert flow_grpo.pairs(config, trajectories, signal).tolist() == expected
    for kind, num_steps in (("flow", 6), ("cps", 5)):
        every = rolled_out(kind, every_step=True)
        assert flow_grpo.pairs(config, every, signal_of(every))[:, 1].max() == num_steps - 1


def test_rows_hold_the_stored_steps_and_their_own_sigmas() -> None:
    trajectories = rolled_out()
    trajectories.sde_indices[4] = torch.tensor([1, 3, 0, 2, 4])
    signal = signal_of(trajectories)
    rows = flow_grpo.rows(flow_grpo.Config(), trajectories, signal, torch.tensor([[4, 1], [0, 4]]), seed=3)
    assert torch.equal(rows.latents[0], trajectories.step_latents[4, 1, 0])
    assert torch.equal(rows.latents[1], trajectories.step_latents[0, 4, 0])
    assert torch.equal(rows.extra["next_latents"][0], trajectories.step_latents[4, 1, 1])
    assert rows.extra["step"].tolist() == [3, 4]
    assert rows.sigma.dtype == torch.float64
    assert torch.equal(rows.sigma, trajectories.sigmas[[3, 4]])
    assert torch.equal(rows.extra["sigma_next"], trajectories.sigmas[[4, 5]])
    assert torch.equal(rows.extra["old_log_prob"], trajectories.log_probs[[4, 0], [1, 4]])
    assert torch.equal(rows.extra["advantage"], signal.advantages[[4, 0]])
    per_step = AdvantageBatch(signal.sample_ids, torch.arange(60.0, dtype=torch.float64).reshape(12, 5),
                              signal.weights * 2, signal.valid, {})
    rows = flow_grpo.rows(flow_grpo.Config(), trajectories, per_step, torch.tensor([[4, 1], [0, 4]]), seed=3)
    assert rows.extra["advantage"].tolist() == [21, 4]
    assert rows.extra["weight"].tolist() == [2, 2]


def test_step_weights_scale_the_policy_loss_and_not_the_kl() -> None:
    trajectories, config = rolled_out(), flow_grpo.Config(kl_coef=0.5)
    signal = signal_of(trajectories)
    double = AdvantageBatch(signal.sample_ids, signal.advantages, signal.weights * 2, signal.valid, {})
    once, metrics = losses(config, trajectories, signal, WEIGHT + 0.01, reference=WEIGHT)
    twice, _ = losses(config, trajectories, double, WEIGHT + 0.01, reference=WEIGHT)
    torch.testing.assert_close(once, metrics["policy_loss"] + 0.5 * metrics["kl"])
    torch.testing.assert_close(twice, 2 * metrics["policy_loss"] + 0.5 * metrics["kl"])


@pytest.mark.parametrize("kl_kind", ["exact", "velocity"])
@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_kl_is_of_the_real_transitions_and_carries_gradient(kind: str, kl_kind: str) -> None:
    trajectories, config = rolled_out(kind), flow_grpo.Config(kl_coef=0.3, kl_kind=kl_kind)
    zero = signal_of(trajectories, torch.zeros(12, dtype=torch.float64))
    weight = (WEIGHT + 0.02).requires_grad_()
    loss, metrics = losses(config, trajectories, zero, weight, reference=WEIGHT)
    assert torch.autograd.grad(loss.sum(), weight)[0].abs().max() > 1e-4
    pairs = flow_grpo.pairs(config, trajectories, zero)
    rows = flow_grpo.rows(config, trajectories, zero, pairs, 0)
    here, after = rows.sigma, rows.extra["sigma_next"]
    gap = velocity_of(weight.detach(), rows.latents, here) - velocity_of(WEIGHT, rows.latents, here)
    if kl_kind == "velocity":
        expected = gap.double().square().flatten(1).mean(1)
    else:
        # By the formulas of the papers, written another way: mean = ... + c_v v, and the full std.
        level, dt = 0.7, after - here
        clean = torch.where(here == 1, 1 - trajectories.sigmas[1], 1 - here)
        if kind == "cps":
            std = after * math.sin(level * math.pi / 2)
            c_v = -(1 - after) * here + (after**2 - std**2).sqrt() * (1 - here)
        else:
            diffusion = level * (here / clean).sqrt() if kind == "flow" else torch.full_like(here, level)
            std = diffusion * (-dt).sqrt()
            c_v = dt * (1 + diffusion**2 * (1 - here) / (2 * here))
        expected = (c_v.reshape(-1, 1, 1) * gap.double()).square().flatten(1).mean(1) / (2 * std**2)
    # fp32 means of size 3 that differ by 1e-3 agree to about 1e-3 of their difference
    torch.testing.assert_close(metrics["kl"].double(), expected, rtol=5e-3, atol=1e-9)
    torch.testing.assert_close(loss.detach(), 0.3 * metrics["kl"])


def test_reference_is_needed_only_with_a_kl_term() -> None:
    assert flow_grpo.needs(flow_grpo.Config()) == frozenset()
    assert flow_grpo.needs(flow_grpo.Config(kl_coef=0.04)) == {"reference"}


def test_a_batch_of_mixed_steps_equals_a_loop_over_its_rows_bit_for_bit() -> None:
    trajectories, config = rolled_out(), flow_grpo.Config(kl_coef=0.1)
    signal = signal_of(trajectories)
    whole, metrics = losses(config, trajectories, signal, WEIGHT * 1.01, reference=WEIGHT)
    for row in range(0, 60, 7):
        one, its_metrics = losses(config, trajectories, signal, WEIGHT * 1.01, torch.tensor([row]), reference=WEIGHT)
        assert torch.equal(one, whole[row : row + 1])
        for name, value in metrics.items():
            assert torch.equal(its_metrics[name], value[row : row + 1]), name


def test_clip_metrics_count_the_side_that_stops_the_gradient() -> None:
    trajectories = rolled_out(num_groups=1)
    config = flow_grpo.Config(clip_range=(1e-4, 2e-4))
    signs = f64([1.0, 1.0, -1.0, -1.0])
    loss_weight = (WEIGHT * 1.05).requires_grad_()
    _, metrics = losses(config, trajectories, signal_of(trajectories, signs), loss_weight)
    ratio, sign = metrics["ratio"], signs.repeat_interleave(5)
    assert torch.equal(metrics["clipped_high"] == 1, (ratio > 1.0002) & (sign > 0))
    assert torch.equal(metrics["clipped_low"] == 1, (ratio < 0.9999) & (sign < 0))
    assert metrics["clipped_high"].sum() > 0
    assert metrics["clipped_low"].sum() > 0
    stopped = torch.nonzero(metrics["clipped_high"] + metrics["clipped_low"])[:, 0]
    loss, _ = losses(config, trajectories, signal_of(trajectories, signs), loss_weight, stopped)
    assert torch.autograd.grad(loss.sum(), loss_weight)[0].tolist() == [0, 0, 0]


def test_metrics_of_one_row_are_finite() -> None:
    trajectories = rolled_out()
    loss, metrics = losses(flow_grpo.Config(kl_coef=0.1), trajectories, signal_of(trajectories), WEIGHT + 0.1,
                           torch.tensor([3]), reference=WEIGHT)
    assert loss.shape == (1,)
    assert all(value.shape == (1,) and value.isfinite().all() for value in (loss, *metrics.values()))


@pytest.mark.parametrize("bad", [
    {"clip_range": 0}, {"clip_range": [0.1, 0.1, 0.1]}, {"clip_range": 1.5}, {"adv_clip": 0}, {"std": "batch"},
    {"ddof": 2}, {"eps": -1}, {"kl_coef": -0.1}, {"kl_kind": "k3"}, {"aggregate": "max"},
    {"clip_rnage": 0.1}, {"name": "dpo"}])
def test_config_refuses_what_cannot_work(bad: dict) -> None:
    with pytest.raises(ValidationError):
        flow_grpo.Config.model_validate(bad)


def test_config_takes_one_clip_range_or_two() -> None:
    assert flow_grpo.Config.model_validate({"clip_range": 1e-3}).clip_range == 1e-3
    both = flow_grpo.Config.model_validate({"clip_range": [1e-4, 2e-4]})
    assert both.clip_range == (1e-4, 2e-4)
    assert flow_grpo.Config.model_validate_json(both.model_dump_json()) == both


@pytest.mark.parametrize(("sampling", "message"), [
    ({"group_size": 1}, "needs group_size >= 2, got 1: with one sample a prompt every advantage is 0"),
    ({"sde_window": {"size": 0}}, "sde_window.size is 0"), ({"weights": "old"}, "keeps no 'old' policy")])
def test_runs_that_could_train_nothing_are_refused_with_the_reason(sampling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow_grpo.check(SimpleNamespace(sampling=SamplingConfig(**sampling)))
    flow_grpo.check(SimpleNamespace(sampling=SamplingConfig(group_size=2)))
