"""Memory that runs out in the middle of a stage, and the kernels a run may ask for."""

import sys
from typing import Any

import pytest
import torch

from tasks import update
from tasks.contracts.config import RunConfig, load_recipe
from tasks.contracts.errors import CacheFolderError, ConfigError, ContractError, MemoryLimitError
from tasks.contracts.refs import PolicyRef
from tasks.eval import evaluate_policy
from tasks.rollout import load_trajectories, roll_out
from tasks.runtime import is_out_of_memory, load_policy, session
from tasks.store import Store, open_store
from tests.runs import TINY
from tests.tasks.test_update import draw

BIG = 4
"""Rows of a micro-batch for which the pretended device has no room; the recipe asks for 8."""


def recipe(**changes: Any) -> RunConfig:
    return load_recipe("base", TINY | {"runtime.micro_batch_size": 8, "sampling.num_groups": 3,
                                       **{name.replace("__", "."): value for name, value in changes.items()}})


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(str(tmp_path))


def base_of(config: RunConfig) -> PolicyRef:
    return PolicyRef(base_digest=load_policy(config.policy, config.seed, "fp32", config.runtime.kernels)
                     .policy.base_digest)


def no_room_for(monkeypatch: pytest.MonkeyPatch, config: RunConfig, rows: int,
                error: type[Exception] = torch.OutOfMemoryError, message: str = "CUDA out of memory") -> list[int]:
    """Let forward passes of `rows` rows or more fail; the list gets the rows of each pass."""
    policy = load_policy(config.policy, config.seed, "fp32", config.runtime.kernels).policy
    real, seen = type(policy).velocity, []

    def velocity(self: Any, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(latents))
        if len(latents) >= rows:
            raise error(message)
        return real(self, latents, *rest)

    monkeypatch.setattr(type(policy), "velocity", velocity)
    return seen


@pytest.mark.parametrize(("error", "message"), [
    (torch.OutOfMemoryError, "CUDA out of memory"), (MemoryError, ""),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")])
def test_a_rollout_that_runs_out_of_memory_goes_on_with_smaller_micro_batches_and_says_so(
        store, monkeypatch, caplog, error, message):
    config = recipe()
    with monkeypatch.context() as patch:
        seen = no_room_for(patch, config, BIG, error, message)
        ref = roll_out(config.rollout_spec(), base_of(config), 1, store, config.topology.rollout)
    assert set(seen) == {8, 4, 2}
    assert "rollout 1: out of memory with micro-batches of 8 rows; going on with 4" in caplog.text
    batch = load_trajectories(store, ref)
    assert batch.contract.micro_batch_size == 2
    assert store.manifest(ref).stats["metrics"]["rollout/micro_batch_size"] == 2
    small = recipe(runtime__micro_batch_size=2)
    same = load_trajectories(store, roll_out(small.rollout_spec(), base_of(small), 1, store, small.topology.rollout))
    assert torch.equal(batch.log_probs, same.log_probs)
    assert torch.equal(batch.final_latents, same.final_latents)


def test_the_update_follows_a_rollout_that_shrank_and_the_gap_stays_zero(store, monkeypatch):
    config = recipe()
    with monkeypatch.context() as patch:
        no_room_for(patch, config, BIG)
        iteration = draw(config, store, base_of(config), 1)
    policy = update.update_policy(config.update_spec(), iteration.policy, iteration.trajectories, iteration.advantages,
                                  1, store, config.topology.update)
    metrics = store.manifest(policy.weights).stats["metrics"]
    assert metrics["update/micro_batch_size"] == 2
    assert metrics["update/first/log_prob_gap/max"] == 0


def test_an_update_with_reference_kernels_does_not_shrink_and_names_the_setting(store, monkeypatch):
    config = recipe()
    iteration = draw(config, store, base_of(config), 1)
    no_room_for(monkeypatch, config, BIG)
    with pytest.raises(MemoryLimitError) as caught:
        update.update_policy(config.update_spec(), iteration.policy, iteration.trajectories, iteration.advantages, 1,
                             store, config.topology.update)
    assert "micro-batches of 8 rows" in str(caught.value)
    assert "runtime.micro_batch_size: 4" in str(caught.value)


def test_an_update_with_consistent_kernels_shrinks_and_the_gap_stays_zero(store, monkeypatch):
    config = recipe(runtime__kernels="consistent")
    iteration = draw(config, store, base_of(config), 1)
    with monkeypatch.context() as patch:
        seen = no_room_for(patch, config, BIG)
        policy = update.update_policy(config.update_spec(), iteration.policy, iteration.trajectories,
                                      iteration.advantages, 1, store, config.topology.update)
    assert set(seen) == {8, 4, 2}
    metrics = store.manifest(policy.weights).stats["metrics"]
    assert metrics["update/micro_batch_size"] == 2
    assert load_trajectories(store, iteration.trajectories).contract.micro_batch_size == 8
    assert metrics["update/first/log_prob_gap/max"] == 0


def test_consistent_kernels_draw_the_same_bits_with_any_micro_batch_and_others_than_torch(store):
    batches = [load_trajectories(store, roll_out(config.rollout_spec(), base_of(config), 1, store,
                                                 config.topology.rollout))
               for config in (recipe(runtime__kernels="consistent"),
                              recipe(runtime__kernels="consistent", runtime__micro_batch_size=1), recipe())]
    assert torch.equal(batches[0].log_probs, batches[1].log_probs)
    assert torch.equal(batches[0].final_latents, batches[1].final_latents)
    assert not torch.equal(batches[0].final_latents, batches[2].final_latents)
    assert batches[0].final_latents.allclose(batches[2].final_latents, atol=1e-3)


def test_trajectories_of_other_kernels_are_refused(store):
    iteration = draw(recipe(), store, base_of(recipe()), 1)
    other = recipe(runtime__kernels="consistent")
    with pytest.raises(ContractError, match="kernels 'reference' -> 'consistent'"):
        update.update_policy(other.update_spec(), iteration.policy, iteration.trajectories, iteration.advantages, 1,
                             store, other.topology.update)


@pytest.mark.parametrize("stored", [16, 3, 5])
def test_a_stored_size_that_no_halving_gives_is_refused(stored):
    assert update._halved(8, stored) == 8
    assert [update._halved(8, size) for size in (8, 4, 2, 1)] == [8, 4, 2, 1]
    assert [update._halved(24, size) for size in (12, 6, 3, 1)] == [12, 6, 3, 1]


def test_one_row_that_does_not_fit_is_an_error_that_asks_for_memory(store, monkeypatch):
    config = recipe()
    no_room_for(monkeypatch, config, 1)
    with pytest.raises(MemoryLimitError, match="give the role more memory"):
        roll_out(config.rollout_spec(), base_of(config), 1, store, config.topology.rollout)


def test_an_evaluation_notes_the_size_it_ended_with(store, monkeypatch):
    config = recipe()
    no_room_for(monkeypatch, config, BIG)
    ref = evaluate_policy(config.evaluate_spec(), base_of(config), store, config.topology.evaluate)
    assert store.manifest(ref).meta["protocol"]["micro_batch_size"] == 2


def test_any_other_error_is_not_taken_for_memory():
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("x"))


def test_without_the_kernels_wheel_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "flowmill_kernels", None)
    config = recipe(runtime__kernels="consistent", seed=4711)
    with pytest.raises(ConfigError, match="flowmill-kernels, which is not installed") as caught:
        base_of(config)
    assert "make images" in str(caught.value)
    assert "runtime.kernels: reference" in str(caught.value)


def test_a_cache_folder_that_cannot_be_written_is_named_before_a_stage_begins(monkeypatch, tmp_path):
    config = recipe()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "triton"))
    with session(config.runtime, config.topology.update):
        assert (tmp_path / "new" / "triton").is_dir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "hub"))
    with pytest.raises(CacheFolderError, match=r"HF_HOME=.*hub cannot be written to by user"), session(
            config.runtime, config.topology.update):
        pass
