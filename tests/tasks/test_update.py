"""The update stage: exact replay, gradients that no number of lanes changes, AdamW, clipping, EMA, refusals."""

import math
import pickle
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tasks import update
from tasks.advantage import compute_advantages, load_advantages, save_advantages
from tasks.algorithms import flow_grpo
from tasks.contracts.batches import AdvantageBatch, RewardBatch
from tasks.contracts.config import OptimizerConfig, RunConfig, load_recipe
from tasks.contracts.errors import ContractError, NumericsError
from tasks.contracts.refs import AdvantageRef, PolicyRef, TrajectoryRef
from tasks.policies import base
from tasks.reward import save_rewards
from tasks.rollout import load_trajectories, roll_out, save_trajectories
from tasks.runtime import load_policy, session
from tasks.store import Store, open_store
from tests.runs import TINY

LORA = {"policy.trainable": "lora", "policy.lora_rank": 4}


def recipe(**changes: Any) -> RunConfig:
    return load_recipe("base", TINY | {name.replace("__", "."): value for name, value in changes.items()})


@dataclass
class Iteration:
    """One iteration's stored batches, ready for the update."""

    config: RunConfig
    store: Store
    policy: PolicyRef
    trajectories: TrajectoryRef
    advantages: AdvantageRef
    number: int = 1

    def update(self, number: int | None = None, **changes: Any) -> PolicyRef:
        spec = self.config.update_spec().model_copy(update=changes)
        return update.update_policy(spec, self.policy, self.trajectories, self.advantages, number or self.number,
                                    self.store, self.config.topology.update)

    def optimizer(self, **changes: Any) -> OptimizerConfig:
        return OptimizerConfig.model_validate({**self.config.optimizer.model_dump(), **changes})

    def metrics(self, policy: PolicyRef) -> dict[str, float]:
        return self.store.manifest(policy.weights).stats["metrics"]

    def next(self, policy: PolicyRef) -> "Iteration":
        return draw(self.config, self.store, policy, self.number + 1)


def draw(config: RunConfig, store: Store, policy: PolicyRef, number: int) -> Iteration:
    """Draw and reward: a reward of brightness needs no OCR and differs within groups."""
    trajectories = roll_out(config.rollout_spec(), policy, number, store, config.topology.rollout)
    batch = load_trajectories(store, trajectories)
    score = batch.final_latents.double().flatten(1).mean(1)
    rewards = save_rewards(store, f"bright-{trajectories.key}", RewardBatch(
        batch.sample_ids, {"ocr": score}, score, torch.zeros(len(batch), dtype=torch.bool)), {"seconds": 0.0})
    return Iteration(config, store, policy, trajectories,
                     compute_advantages(config.advantage_spec(), trajectories, rewards, store), number)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def first(store):
    """Function: the first iteration of a recipe."""
    @cache
    def get(changes: str = "{}") -> Iteration:
        config = recipe(**eval(changes))
        base_digest = load_policy(config.policy, config.seed, "fp32").policy.base_digest
        return draw(config, store, PolicyRef(base_digest=base_digest), 1)

    return lambda **changes: get(repr(changes))


@pytest.fixture
def iteration(first) -> Iteration:
    return first()


@pytest.fixture(autouse=True)
def _forget_warm_states():
    yield
    update._warm_state.clear()


def weights_of(store: Store, policy: PolicyRef, name: str = "raw") -> dict[str, torch.Tensor]:
    return store.load(policy.weights, name)


def assert_bitwise_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert torch.equal(value, other[name]), name


def in_session(iteration: Iteration, work, parallelism: int = 1) -> Any:
    """Call `work(replay, pairs)` with the iteration's policy loaded."""
    config = iteration.config
    spec, role = config.update_spec(), config.topology.update.model_copy(update={"parallelism": parallelism})
    with session(spec.runtime, role) as run:
        loaded = run.policy(spec.policy, iteration.policy, iteration.store, spec.seed, spec.dtype)
        replay = update.Replay(spec, loaded, load_trajectories(iteration.store, iteration.trajectories),
                               load_advantages(iteration.store, iteration.advantages), iteration.number, run)
        return work(replay, replay.algorithm.pairs(spec.algorithm, replay.trajectories, replay.advantages))


# ---- the seam between rollout and update -----------------------------------------------------------------------------

SEAMS = [{}, {"sampling.sde_kind": "dance", "sampling.guidance_scale": 2.0}, {"sampling.sde_kind": "cps", **LORA},
         {"sampling.guidance_scale": 2.0, **LORA}]


@pytest.mark.parametrize("changes", SEAMS, ids=["flow", "dance-guided", "cps-lora", "flow-guided-lora"])
def test_ratio_before_the_first_step_is_exactly_one(first, changes):
    iteration = first(**changes)
    for attempt, (updates, seed) in enumerate([(1, 0), (2, 0), (3, 1), (6, 2)]):
        policy = iteration.update(seed=seed if "policy.trainable" not in changes else 0,
                                  optimizer=iteration.optimizer(updates_per_rollout=updates))
        metrics = iteration.metrics(policy)
        # max 1 and mean 1 in float64: every ratio is 1
        assert (metrics["update/first/ratio/max"], metrics["update/first/ratio/mean"]) == (1.0, 1.0), attempt
        assert metrics["update/first/log_prob_gap/max"] == 0.0
    later = iteration.next(policy)  # weights that were trained, adapters that are not zero
    metrics = later.metrics(later.update())
    assert (metrics["update/first/ratio/max"], metrics["update/first/ratio/mean"]) == (1.0, 1.0)
    assert metrics["update/first/log_prob_gap/max"] == 0.0
    assert metrics["update/log_prob_gap/max"] > 0  # the second minibatch has moved, so the measure can move


@pytest.mark.parametrize("changes", SEAMS[:3], ids=["flow", "dance-guided", "cps-lora"])
def test_ratio_is_exactly_one_for_every_permutation_and_minibatch_size(first, changes):
    def work(replay, pairs):
        for seed, size in ((0, 1), (1, 4), (2, 5), (3, len(pairs))):
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
            for chosen in pairs[order].split(size)[:3]:
                _, rows = replay.gradients(chosen, {})
                assert rows["ratio"].min() == rows["ratio"].max() == 1.0
                assert rows["log_prob_gap"].abs().max() == 0.0

    in_session(first(**changes), work)


def test_another_micro_batch_size_than_the_rollouts_would_not_give_the_ratio_one(iteration):
    """Why the sampling contract holds the size: the rule is not empty."""
    def work(replay, pairs):
        replay.size = 1
        return replay.gradients(pairs, {})[1]["log_prob_gap"].max()

    gap = in_session(iteration, work)
    assert 0 < gap < 1e-5
    with pytest.raises(ContractError, match="micro_batch_size"):
        iteration.update(runtime=iteration.config.runtime.model_copy(update={"micro_batch_size": 1}))


@pytest.mark.parametrize("changes", [{}, {"sampling.guidance_scale": 2.0, **LORA}], ids=["full", "lora-guided"])
def test_gradients_are_bitwise_equal_on_one_two_and_three_lanes(first, changes):
    iteration = first(**changes)
    found = [in_session(iteration, lambda replay, pairs: replay.gradients(pairs, {}), lanes) for lanes in (1, 2, 3)]
    for gradients, rows in found[1:]:
        assert any(value.any() for value in gradients["transformer"])
        assert all(map(torch.equal, gradients["transformer"], found[0][0]["transformer"]))
        assert_bitwise_equal(rows, found[0][1])


# ---- the optimiser ---------------------------------------------------------------------------------------------------


def test_learning_rate_schedule():
    config = OptimizerConfig(learning_rate=1.0, warmup_iterations=2, decay="cosine", final_fraction=0.1)
    rates = [update.learning_rate_at(config, number, 6) for number in range(1, 7)]
    # 0.1 + 0.9 (1 + cos(pi k / 4)) / 2 for k = 0..3 after the warm-up
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.868198051534, 0.55, 0.231801948466], abs=1e-12)
    constant = OptimizerConfig(learning_rate=2.0, warmup_iterations=4)
    assert [update.learning_rate_at(constant, number, 0) for number in (1, 2, 4, 5, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_an_iteration_takes_the_step_of_adamw(iteration):
    """The second step, from moments that are not zero, worked in float64 numpy from the formula (arXiv 1711.05101)."""
    rate, decay, betas, eps, limit = 1e-3, 0.1, (0.8, 0.95), 1e-6, 0.05
    optimizer = iteration.optimizer(learning_rate=rate, weight_decay=decay, betas=list(betas), eps=eps,
                                    max_grad_norm=limit, updates_per_rollout=1)
    one = iteration.update(optimizer=optimizer)
    second = iteration.next(one)
    two = second.update(optimizer=optimizer)
    gradients, _ = in_session(second, lambda replay, pairs: replay.gradients(pairs, {}))
    names = list(base.trainable_parameters(load_policy(iteration.config.policy, 0, "fp32").policy)["transformer"])
    g = {name: value.double().numpy() for name, value in zip(names, gradients["transformer"], strict=True)}
    norm = math.sqrt(sum((value ** 2).sum() for value in g.values()))
    assert norm > limit
    assert second.metrics(two)["update/grad_norm"] == pytest.approx(norm, rel=1e-12)
    moments, weights = iteration.store.load(one.state, "moments"), weights_of(iteration.store, one)
    after = weights_of(iteration.store, two)
    for name in names:
        clipped = g[name] * limit / norm
        m = betas[0] * moments[f"exp_avg/transformer/{name}"].double().numpy() + (1 - betas[0]) * clipped
        v = betas[1] * moments[f"exp_avg_sq/transformer/{name}"].double().numpy() + (1 - betas[1]) * clipped ** 2
        w = weights[f"transformer/{name}"].double().numpy()
        step = rate * (m / (1 - betas[0] ** 2)) / (np.sqrt(v / (1 - betas[1] ** 2)) + eps)
        # fp32 rounds the weight a few times; a step is off by its own fp32 error
        bound = 3 * np.spacing(np.abs(w).astype(np.float32)).astype(np.float64) + 1e-5 * rate
        assert (np.abs(after[f"transformer/{name}"].double().numpy() - (w * (1 - rate * decay) - step)) <= bound).all()


def test_a_huge_gradient_is_clipped_to_the_limit(iteration, monkeypatch):
    real = update.Replay.gradients

    def huge(self, pairs, fixed):
        gradients, rows = real(self, pairs, fixed)
        return {part: [torch.full_like(value, 1e6) for value in values] for part, values in gradients.items()}, rows

    monkeypatch.setattr(update.Replay, "gradients", huge)
    policy = iteration.update(seed=77, optimizer=iteration.optimizer(max_grad_norm=0.5, updates_per_rollout=1))
    moments = iteration.store.load(policy.state, "moments")
    first_moment = [value.double() for name, value in moments.items() if name.startswith("exp_avg/")]
    count = sum(value.numel() for value in first_moment)
    assert iteration.metrics(policy)["update/grad_norm"] == pytest.approx(1e6 * math.sqrt(count))
    norm = math.sqrt(sum(value.square().sum().item() for value in first_moment))
    assert norm == pytest.approx((1 - 0.9) * 0.5, rel=1e-5)
    # and the step itself is bounded: with equal signs AdamW moves every weight by the learning rate
    assert max((weights_of(iteration.store, policy)[f"transformer/{name}"] - value).abs().max().item()
               for name, value in load_policy(iteration.config.policy, 0, "fp32").initial["transformer"].items()
               ) < 1.1 * iteration.config.optimizer.learning_rate


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_learning_rate_zero_changes_no_bit(iteration, weight_decay):
    policy = iteration.update(optimizer=iteration.optimizer(learning_rate=0, weight_decay=weight_decay))
    initial = load_policy(iteration.config.policy, 0, "fp32").initial["transformer"]
    for name in ("raw", "ema"):
        assert_bitwise_equal(weights_of(iteration.store, policy, name),
                             {f"transformer/{key}": value for key, value in initial.items()})
    assert iteration.metrics(policy)["update/grad_norm"] > 0


# ---- non-finite steps ------------------------------------------------------------------------------------------------


def poison(monkeypatch, bad_calls):
    """Make the loss of the chosen calls (from 0) NaN."""
    real, calls = flow_grpo.loss, iter(range(10**6))

    def loss(*args):
        value, metrics = real(*args)
        return (value * math.nan if next(calls) in bad_calls else value), metrics

    monkeypatch.setattr(flow_grpo, "loss", loss)


def test_a_step_with_a_nan_loss_is_skipped_and_counted(iteration, monkeypatch):
    poison(monkeypatch, {0})
    policy = iteration.update(seed=50, optimizer=iteration.optimizer(updates_per_rollout=2, max_skipped_updates=1))
    metrics = iteration.metrics(policy)
    assert (metrics["update/skipped"], metrics["update/optimizer_steps"]) == (1, 1)
    assert iteration.store.manifest(policy.state).meta["optimizer_steps"] == 1
    assert all(value.isfinite().all() for value in weights_of(iteration.store, policy).values())
    assert metrics["update/first/loss/mean"] is None  # the store has no NaN
    assert math.isfinite(metrics["update/loss/mean"])


def test_more_nan_losses_than_allowed_stop_the_run_and_keep_the_policy_before(iteration, monkeypatch):
    strict = iteration.optimizer(max_skipped_updates=0, updates_per_rollout=2)
    with monkeypatch.context() as patch:
        poison(patch, range(2, 100))  # two micro-batches a step: the first step is good, the second is not
        expected = r"iteration 1: 1 optimiser steps.*max_skipped_updates = 0.*Lower"
        with pytest.raises(NumericsError, match=expected) as info:
            iteration.update(seed=51, optimizer=strict)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)
    # half-trained weights must not stay in the warm policy
    config = iteration.config
    with session(config.runtime, config.topology.rollout) as run:
        loaded = run.policy(config.policy, iteration.policy, iteration.store, 51, "fp32")
        assert_bitwise_equal(base.copy_weights(loaded.policy)["transformer"], dict(loaded.initial["transformer"]))
    assert iteration.metrics(iteration.update(seed=51, optimizer=strict))["update/first/ratio/max"] == 1.0


def test_an_iteration_whose_every_step_is_skipped_stops_the_run_under_the_shipped_settings(iteration, monkeypatch):
    poison(monkeypatch, range(100))
    with pytest.raises(NumericsError, match="0 were taken"):
        iteration.update(seed=52, optimizer=load_recipe("demo").optimizer)


# ---- the state -------------------------------------------------------------------------------------------------------


def test_ema_is_an_average_and_no_alias(iteration):
    """T34: an average that shares memory with the weights equals them whatever its decay."""
    policy = iteration.update(optimizer=iteration.optimizer(ema_decay=0.75))
    (state,) = update._warm_state.values()
    loaded = load_policy(iteration.config.policy, 0, "fp32")
    pointers = [{value.data_ptr() for value in values["transformer"].values()}
                for values in (state.weights, state.ema, state.exp_avg, loaded.initial,
                               base.trainable_parameters(loaded.policy))]
    assert sum(map(len, pointers)) == len(set.union(*pointers))
    raw, ema = (weights_of(iteration.store, policy, name) for name in ("raw", "ema"))
    moved = 0
    for name, start in loaded.initial["transformer"].items():
        want = 0.75 * start.double() + 0.25 * raw[f"transformer/{name}"].double()
        assert torch.allclose(ema[f"transformer/{name}"].double(), want, rtol=3e-7, atol=1e-9)
        moved += int((raw[f"transformer/{name}"] != ema[f"transformer/{name}"]).sum())
    assert moved > 1000
    before = {name: value.clone() for name, value in state.ema["transformer"].items()}
    second = iteration.next(policy)
    second.update(optimizer=iteration.optimizer(ema_decay=0.75))
    assert_bitwise_equal(before, state.ema["transformer"])


def test_state_survives_the_store_bit_for_bit(iteration):
    policy = iteration.update(seed=60)
    (kept,) = update._warm_state.values()
    update._warm_state.clear()
    loaded = load_policy(iteration.config.policy, 0, "fp32")
    read = update.load_state(iteration.store, policy, loaded)
    assert read is not kept
    assert (read.iteration, read.optimizer_steps) == (kept.iteration, kept.optimizer_steps) == (1, 2)
    for part in ("weights", "ema", "exp_avg", "exp_avg_sq"):
        assert_bitwise_equal(getattr(read, part)["transformer"], getattr(kept, part)["transformer"])
    second = iteration.next(policy)
    update._warm_state[policy.state.digest + policy.weights.digest] = kept
    warm = second.update()
    update._warm_state.clear()
    iteration.store.delete(f"manifests/policies/{warm.weights.key}.json")
    assert second.update() == warm


def test_the_warm_state_is_not_that_of_another_learning_rate(first):
    """One step from zero moments: both rates give the same moments, so their train states have one digest."""
    iteration = first()
    slow, fast = (iteration.optimizer(learning_rate=rate, updates_per_rollout=1) for rate in (1e-4, 1e-3))
    one, other = iteration.update(optimizer=slow), iteration.update(optimizer=fast)
    assert one.state.digest == other.state.digest
    assert one.weights.digest != other.weights.digest
    loaded = load_policy(iteration.config.policy, 0, "fp32")
    state = update.load_state(iteration.store, one, loaded)
    assert_bitwise_equal({f"transformer/{k}": v for k, v in state.weights["transformer"].items()},
                         weights_of(iteration.store, one))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_another_sampling_contract_is_refused_by_name(iteration):
    contract = load_trajectories(iteration.store, iteration.trajectories).contract
    for field, value in (("guidance_scale", 2.0), ("num_inference_steps", 4), ("dtype", "bf16"), ("sde_kind", "cps"),
                         ("noise_level", 0.5), ("shift", 3.0), ("base_digest", "0" * 64)):
        with pytest.raises(ContractError, match=f"{field} .*rerun the rollout"):
            contract.require(contract.model_copy(update={field: value}), "update")
    contract.require(contract.model_copy(), "update")


def test_the_stage_refuses_another_dtype_and_other_sigmas(iteration):
    with pytest.raises(ContractError, match="dtype 'fp32' -> 'bf16'"):
        iteration.update(dtype="bf16")
    batch = load_trajectories(iteration.store, iteration.trajectories)
    for number, change in enumerate(({"shift": 3.0}, {"schedule": "flux"})):
        other = replace(batch, contract=batch.contract.model_copy(update=change))
        ref = save_trajectories(iteration.store, f"other-{number}", other, {})
        with pytest.raises(ContractError, match="sigmas are not those of schedule"):
            replace(iteration, trajectories=ref).update()
    with pytest.raises(ContractError, match=r"sigmas: got float64 \[4\], expected float64 \[5\]"):
        replace(batch, contract=batch.contract.model_copy(update={"num_inference_steps": 4}))


def test_advantages_of_other_samples_are_refused(iteration):
    signal = load_advantages(iteration.store, iteration.advantages)
    other = AdvantageBatch(signal.sample_ids + 6, signal.advantages, signal.weights, signal.valid, {})
    ref = save_advantages(iteration.store, "other", other, {})
    with pytest.raises(ContractError, match="other samples than trajectories"):
        replace(iteration, advantages=ref).update()


# ---- other algorithms ------------------------------------------------------------------------------------------------


def test_sft_trains(first):
    changes = {"algorithm": {"name": "sft"}, "sampling.sde_window.size": 0, "optimizer.ema_decay": 0.0}
    iteration = first(**changes)

    def loss(replay, pairs):
        assert len(pairs) == 2 * 4  # the best sample of each group, four draws
        return replay.gradients(pairs, {})[1]["loss"].mean().item()

    before = in_session(iteration, loss)
    policy = iteration.update()
    after = in_session(replace(iteration, policy=policy), loss)
    assert after < before
    assert iteration.metrics(policy)["update/rows"] == 8


def test_no_signal_changes_nothing_but_the_count(iteration):
    signal = load_advantages(iteration.store, iteration.advantages)
    silent = AdvantageBatch(signal.sample_ids, signal.advantages * 0, signal.weights, signal.valid & False, {})
    policy = replace(iteration, advantages=save_advantages(iteration.store, "silent", silent, {})).update()
    initial = load_policy(iteration.config.policy, 0, "fp32").initial["transformer"]
    assert_bitwise_equal(weights_of(iteration.store, policy), {f"transformer/{k}": v for k, v in initial.items()})
    assert iteration.metrics(policy)["update/rows"] == 0
