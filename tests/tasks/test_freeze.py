"""The contracts hold what is not written yet: three throw-away plugins run every stage without an edit to a contract.

A forward-process algorithm without SDE steps, a video policy of two experts, and a packed-token audio policy.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tasks import runtime, sde
from tasks.advantage import compute_advantages, load_advantages
from tasks.contracts.config import RunConfig, load_recipe
from tasks.contracts.errors import ConfigError, RewardError
from tasks.contracts.media import Audio, Video
from tasks.contracts.refs import PolicyRef
from tasks.eval import evaluate_policy, headline, load_media
from tasks.plugins import AXES, names
from tasks.policies import base
from tasks.reward import _warm as warm_rewards
from tasks.reward import load_rewards, score_trajectories
from tasks.rollout import load_trajectories, roll_out
from tasks.store import open_store
from tasks.update import load_state, update_policy

PLUGINS = Path(__file__).parents[1] / "plugins"
ONE = {"algorithm": {"name": "flow_grpo"}}
NFT = {"algorithm": {"name": "nft_like"}, "sampling": {"sde_window": {"size": 0}, "weights": "old"}}
VIDEO = {"policy": {"name": "video_experts"}, "rewards": [{"name": "video_brightness"}]}
AUDIO = {"policy": {"name": "packed_audio"}, "rewards": [{"name": "audio_loudness"}]}


@pytest.fixture(autouse=True)
def throw_away_plugins():
    """Show tests/plugins to the project, and leave no trace of it."""
    for axis in AXES:
        importlib.import_module(f"tasks.{axis}").__path__.append(str(PLUGINS / axis))
    importlib.invalidate_caches()
    yield
    for axis in AXES:
        package = sys.modules[f"tasks.{axis}"]
        package.__path__.remove(str(PLUGINS / axis))
        for file in (PLUGINS / axis).glob("*.py"):
            sys.modules.pop(f"tasks.{axis}.{file.stem}", None)
            with contextlib.suppress(AttributeError):
                delattr(package, file.stem)
    runtime._warm.clear()
    warm_rewards.clear()


@pytest.fixture
def config_of(tmp_path):
    """Function: a small run of the throw-away plugins."""
    for name in ("train", "evaluate"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(4)))

    def make(*parts, **sampling) -> RunConfig:
        recipe = {
            "prompts": {name: str(tmp_path / f"{name}.txt") for name in ("train", "evaluate")},
            "sampling": {"num_inference_steps": 4, "num_groups": 2, "group_size": 3, **sampling},
            "optimizer": {"learning_rate": 1e-2, "updates_per_rollout": 2},
            "runtime": {"micro_batch_size": 4},
            "topology": {role: {"parallelism": 2} for role in ("rollout", "reward", "update", "evaluate")},
        }
        for part in parts:
            for key, value in part.items():
                recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return load_recipe(str(path))

    return make


def run(config: RunConfig, store, iterations: int = 2) -> list[SimpleNamespace]:
    """Each iteration's refs, batches and metrics, through the plain stage functions."""
    roles, found = config.topology, []
    policy = PolicyRef(base_digest=runtime.load_policy(config.policy, config.seed, "fp32").policy.base_digest)
    for number in range(1, iterations + 1):
        trajectories = roll_out(config.rollout_spec(), policy, number, store, roles.rollout)
        rewards = score_trajectories(config.reward_spec(), trajectories, store, roles.reward)
        advantages = compute_advantages(config.advantage_spec(), trajectories, rewards, store)
        before = policy
        policy = update_policy(config.update_spec(), policy, trajectories, advantages, number, store, roles.update)
        found.append(SimpleNamespace(
            before=before, policy=policy, batch=load_trajectories(store, trajectories),
            rewards=load_rewards(store, rewards), advantages=load_advantages(store, advantages),
            metrics=store.manifest(policy.weights).stats["metrics"]))
    return found


def weights_of(config: RunConfig, store, policy: PolicyRef, variant: str = "raw") -> dict[str, torch.Tensor]:
    loaded = runtime.load_policy(config.policy, config.seed, "fp32")
    weights = runtime.load_weights(store, policy, variant) if policy.weights else loaded.initial
    return runtime.flatten(weights)


def test_the_plugins_are_found_by_name_like_any_other():
    assert {"video_experts", "packed_audio"} < set(names("policies"))
    assert "nft_like" in names("algorithms")
    assert {"video_brightness", "audio_loudness"} < set(names("rewards"))


@pytest.mark.parametrize(("parts", "media", "shape"), [
    pytest.param(VIDEO, Video, (2, 3, 4, 4), id="video with two experts"),
    pytest.param(AUDIO, Audio, (6, 4), id="packed-token audio"),
])
@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_a_policy_gradient_run_replays_exactly_and_trains_every_component(
        tmp_path, config_of, parts, media, shape, kind):
    config, store = config_of(ONE, parts, sde_kind=kind), open_store(str(tmp_path / "store"))
    for done in run(config, store):
        assert isinstance(done.batch.media, media)
        assert done.batch.final_latents.shape == (6, *shape)
        assert done.batch.step_latents.shape == (6, 3, 2, *shape)
        assert done.advantages.valid.all()
        assert done.metrics["update/rows"] == 6 * 3
        assert done.metrics["update/optimizer_steps"] == 2
        assert done.metrics["update/first/ratio/mean"] == 1.0
        assert done.metrics["update/first/ratio/max"] == 1.0
        assert done.metrics["update/first/log_prob_gap/max"] == 0.0
        old, new = weights_of(config, store, done.before), weights_of(config, store, done.policy)
        for part in done.policy.components:
            changed = [name for name in old if name.startswith(f"{part}/") and not old[name].equal(new[name])]
            assert changed, f"{part} was not trained"


def test_both_experts_denoise_and_are_trained(tmp_path, config_of):
    config = config_of(ONE, VIDEO)
    done = run(config, open_store(str(tmp_path / "store")), 1)[0]
    policy = runtime.load_policy(config.policy, config.seed, "fp32").policy
    trained = {policy.component_at(sigma) for sigma in done.batch.sigmas[done.batch.sde_indices[0]].tolist()}
    assert trained == set(done.policy.components) == {"transformer", "transformer_2"}
    # Worked by hand: convolutions 3->4 and 4->2 of 27 taps, with biases.
    assert done.policy.components["transformer_2"].num_parameters == 3 * 4 * 27 + 4 + 4 * 2 * 27 + 2


def test_an_update_of_one_expert_leaves_the_other_as_it_was(tmp_path, config_of):
    # Sigmas 1, 0.75, 0.5, 0.25: a window on the first step is the first expert's alone.
    config = config_of(ONE, VIDEO, {"optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0}}, sde_window={"size": 1})
    store = open_store(str(tmp_path / "store"))
    done = run(config, store, 1)[0]
    old, new = weights_of(config, store, done.before), weights_of(config, store, done.policy)
    assert {name.split("/")[0] for name in old if not old[name].equal(new[name])} == {"transformer"}


def test_lanes_change_no_bit_of_a_two_expert_run(tmp_path, config_of):
    digests = []
    for lanes in (1, 3):
        topology = {role: {"parallelism": lanes} for role in ("rollout", "reward", "update", "evaluate")}
        config = config_of(ONE, VIDEO, {"topology": topology})
        runtime._warm.clear()
        digests.append(run(config, open_store(str(tmp_path / f"store{lanes}")))[-1].policy.weights.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("parts", "kind"), [(VIDEO, "video"), (AUDIO, "audio")])
def test_media_other_than_images_are_evaluated(tmp_path, config_of, parts, kind):
    evaluation = {"num_inference_steps": 3, "readers": parts["rewards"], "diversity_prompts": 2, "diversity_draws": 2}
    config, store = config_of(ONE, parts, {"evaluation": evaluation}), open_store(str(tmp_path / "store"))
    done = run(config, store, 1)[0]
    ref = evaluate_policy(config.evaluate_spec(), done.policy, store, config.topology.evaluate)
    numbers = headline(store.manifest(ref).meta)
    assert load_media(store, ref).kind == kind
    assert 0 < numbers[f"{parts['rewards'][0]['name']}/score"] < 1
    assert numbers["diversity"] > 0


def test_a_reward_of_another_medium_is_refused_and_named(tmp_path, config_of):
    config, store = config_of(ONE, VIDEO, {"rewards": AUDIO["rewards"]}), open_store(str(tmp_path / "store"))
    with pytest.raises(RewardError, match=r"reward 'audio_loudness': samples 0\.\.5: .* got video"):
        run(config, store)


@pytest.mark.parametrize("parts", [VIDEO, AUDIO], ids=["video", "audio"])
def test_a_forward_process_algorithm_runs_without_sde_steps(tmp_path, config_of, parts):
    config, store = config_of(NFT, parts), open_store(str(tmp_path / "store"))
    first, second = run(config, store)
    for done in (first, second):
        assert done.batch.log_probs.shape == (6, 0)
        assert done.batch.step_latents.shape[:3] == (6, 0, 2)
        assert done.metrics["update/rows"] == 6 * 2
        assert done.metrics["update/optimizer_steps"] == 2
        old, new = weights_of(config, store, done.before), weights_of(config, store, done.policy)
        assert any(not old[name].equal(new[name]) for name in old)
    # Before the first update policy and old policy are one, so both directions are equally far.
    assert first.metrics["update/first/loss_positive/mean"] == first.metrics["update/first/loss_negative/mean"]
    assert second.metrics["update/first/loss_positive/mean"] != second.metrics["update/first/loss_negative/mean"]


def test_the_old_policy_follows_by_the_algorithms_decay_and_draws_the_next_rollout(tmp_path, config_of):
    config, store = config_of(NFT, AUDIO), open_store(str(tmp_path / "store"))
    first, second = run(config, store)
    raw = [weights_of(config, store, done.policy) for done in (first, second)]
    old = weights_of(config, store, first.before)
    loaded = runtime.load_policy(config.policy, config.seed, "fp32")
    for number, done in enumerate((first, second)):
        decay = (0.3, 0.5)[number]
        after = runtime.flatten(load_state(store, done.policy, loaded).old)
        for name, value in old.items():
            expected = decay * value.double() + (1 - decay) * raw[number][name].double()
            torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-7)
        old = after

    def final_latents(weights) -> torch.Tensor:
        """Sample 6 (the first of iteration 2) by Euler's rule, in the rollout's micro-batch of samples 0..3."""
        base.set_weights(loaded.policy, runtime.unflatten(weights))
        batch = second.batch
        latents = torch.stack([sde.noise((6, 4), sde.derive_seed(config.seed, 2, row, "initial")) for row in range(4)])
        with torch.no_grad():
            for sigma, sigma_next in zip(batch.sigmas[:-1].tolist(), batch.sigmas[1:].tolist(), strict=True):
                conditions = loaded.policy.encode(batch.prompts[:4])
                velocity = loaded.policy.velocity(latents, torch.full((4,), sigma), conditions)
                latents = latents + velocity * (sigma_next - sigma)
        return latents[0]

    drawn, old = second.batch.final_latents[0], weights_of(config, store, first.policy, "old")
    torch.testing.assert_close(final_latents(old), drawn, rtol=1e-5, atol=1e-6)
    assert (final_latents(raw[0]) - drawn).abs().max() > 1e-4


def test_a_run_of_the_old_policy_resumes_from_the_store_with_the_same_bits(tmp_path, config_of):
    config = config_of(NFT, AUDIO)
    whole = run(config, open_store(str(tmp_path / "whole")))[-1].policy
    run(config, open_store(str(tmp_path / "halves")), 1)
    runtime._warm.clear()
    importlib.import_module("tasks.update")._warm_state.clear()
    resumed = run(config, open_store(str(tmp_path / "halves")))[-1].policy
    assert (resumed.weights.digest, resumed.state.digest) == (whole.weights.digest, whole.state.digest)


@pytest.mark.parametrize(("beta", "r", "plus", "minus", "expected"), [
    (1.0, 0.5, 1.65107142857, 1.63247191011, 8.20885834671),
    (1.0, 1.0, 1.65107142857, 1.63247191011, 8.25535714286),
    (1.0, 0.0, 1.65107142857, 1.63247191011, 8.16235955056),
    (0.1, 0.75, 1.63881913043, 1.6369815562, 81.9179868438),
    (0.1, 0.0, 1.63881913043, 1.6369815562, 81.8490778098),
], ids=["N1", "N2", "N3", "N4", "N5"])
def test_nft_loss_equals_the_reference_vectors(beta, r, plus, minus, expected):
    nft = importlib.import_module("tasks.algorithms.nft_like")

    def row(*values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    clean, noise, old = row(0.2, -0.4, 1.0, 0.0), row(1.0, -1.0, 0.5, 2.0), row(-0.75, 0.5, 1.5, -2.0)
    rows = nft.Rows(latents=0.4 * clean + 0.6 * noise, sigma=row(0.6)[0], extra={"clean": clean, "r": row(r)[0]})
    velocities = {"policy": old + row(0.1, -0.2, 0.05, 0.0), "old": old}
    loss, parts = nft.loss(nft.Config(beta=beta), rows, velocities, None)
    assert parts["loss_positive"].item() == pytest.approx(plus, rel=1e-11)
    assert parts["loss_negative"].item() == pytest.approx(minus, rel=1e-11)
    assert loss.item() == pytest.approx(expected, rel=1e-11)


def test_nft_optimality_and_zero_gradient_where_it_says_nothing():
    nft = importlib.import_module("tasks.algorithms.nft_like")
    advantages = torch.tensor([-7.0, -5.0, -1.0, 0.0, 2.5, 5.0, 9.0]).double()
    assert nft.optimality(advantages, 5.0).tolist() == [0.0, 0.0, 0.4, 0.5, 0.75, 1.0, 1.0]
    policy = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    rows = nft.Rows(latents=torch.ones(1, 4).double(), sigma=torch.tensor([0.6]).double(),
                    extra={"clean": torch.zeros(1, 4).double(), "r": torch.tensor([0.5]).double()})
    loss, _ = nft.loss(nft.Config(), rows, {"policy": policy, "old": policy.detach().clone()}, None)
    assert torch.autograd.grad(loss.sum(), policy)[0].abs().max() == 0


def test_nft_rows_depend_on_their_own_pair_only(tmp_path, config_of):
    config, store = config_of(NFT, AUDIO), open_store(str(tmp_path / "store"))
    done = run(config, store, 1)[0]
    nft = importlib.import_module("tasks.algorithms.nft_like")
    pairs = nft.pairs(config.algorithm, done.batch, done.advantages)
    every = nft.rows(config.algorithm, done.batch, done.advantages, pairs, 3)
    some = nft.rows(config.algorithm, done.batch, done.advantages, pairs[[7, 2]], 3)
    assert some.latents.equal(every.latents[[7, 2]])
    assert some.sigma.equal(every.sigma[[7, 2]])
    assert len(every.latents.flatten(1).unique(dim=0)) == len(pairs), "no two rows share their noise"
    other = nft.rows(config.algorithm, done.batch, done.advantages, pairs, 4)
    assert not other.latents.equal(every.latents)


def test_an_algorithm_and_a_sampler_that_do_not_fit_are_refused(config_of):
    with pytest.raises(ConfigError, match=r"nft_like.*sampling\.sde_window\.size: 0"):
        config_of({"algorithm": {"name": "nft_like"}}, AUDIO)
    with pytest.raises(ConfigError, match=r"flow_grpo.*nothing would be trained"):
        config_of(ONE, AUDIO, sde_window={"size": 0})
    for algorithm in ("flow_grpo", "sft"):
        with pytest.raises(ConfigError, match=f"'{algorithm}' keeps no 'old' policy"):
            config_of({"algorithm": {"name": algorithm}}, AUDIO, weights="old")
