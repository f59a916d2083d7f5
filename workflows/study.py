"""The demo on several seeds beside its controls, at equal CPU-seconds: `make demo-study`.

Arms: `rl` (the demo), `permuted` (its rewards shuffled within each group), `sft` (fine-tuning on the best of each
group), `pretraining` (the pretraining loss goes on), `frozen` (learning rate 0). Each arm is judged on the same prompts
and noise by both readers; a finished arm is kept and not run again. Calls the stage functions directly, without Flyte:
the `rl` arm ends with the same weights, bit for bit, as `make demo` with that seed.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.advantage import compute_advantages
from tasks.contracts.config import ROOT, RunConfig, load_recipe
from tasks.contracts.refs import PolicyRef, RewardRef
from tasks.eval import evaluate_policy
from tasks.reward import load_rewards, save_rewards, score_trajectories
from tasks.rollout import roll_out
from tasks.runtime import load_policy
from tasks.store import Store, open_store
from tasks.update import update_policy

ARMS = ("rl", "permuted", "sft", "pretraining", "frozen")
# At the demo's learning rate (2e-3) and three steps an iteration, sft ends at 0.000: it has a tenth of RL's rows.
_OVERRIDES = {"sft": {"algorithm": {"name": "sft"}, "sampling.sde_window": {"size": 0},
                      "optimizer.learning_rate": 3e-4, "optimizer.updates_per_rollout": 1,
                      "optimizer.decay": "none"},
              "pretraining": {"policy.trainable": "full"},
              # Its weights are the base's, bit for bit, after any number of iterations: three show it.
              "frozen": {"optimizer.learning_rate": 0.0, "iterations": 3}}


def permuted(store: Store, ref: RewardRef, seed: int, iteration: int, group_size: int) -> RewardRef:
    """The same scores, shuffled within each group: everything RL has, except the information."""
    import torch

    from tasks.contracts.batches import RewardBatch
    from tasks.sde import derive_seed

    batch = load_rewards(store, ref)
    order = torch.cat([start + torch.randperm(group_size, generator=torch.Generator().manual_seed(
        derive_seed(seed, iteration, start, "permuted"))) for start in range(0, len(batch), group_size)])
    shuffled = RewardBatch(batch.sample_ids, {name: value[order] for name, value in batch.scores.items()},
                           batch.total[order], batch.failed[order])
    return save_rewards(store, f"{ref.key}-permuted-{seed}", shuffled, {"seconds": 0.0})


def train(config: RunConfig, store: Store, stop: Callable[[], bool], shuffle: bool) -> PolicyRef:
    """The RL loop as plain calls; ends when `stop` says so or the recipe's iterations are done."""
    topology = config.topology
    base = load_policy(config.policy, config.seed, topology.update.dtype).policy
    policy = PolicyRef(base_digest=base.base_digest)
    for number in range(1, config.iterations + 1):
        if stop():
            break
        trajectories = roll_out(config.rollout_spec(), policy, number, store, topology.rollout)
        rewards = score_trajectories(config.reward_spec(), trajectories, store, topology.reward)
        if shuffle:
            rewards = permuted(store, rewards, config.seed, number, config.sampling.group_size)
        advantages = compute_advantages(config.advantage_spec(), trajectories, rewards, store)
        before, policy = policy, update_policy(config.update_spec(), policy, trajectories, advantages, number, store,
                                               topology.update)
        for ref in (trajectories, rewards, advantages, before.weights, before.state):
            if ref is not None:
                store.drop_data(ref.kind, ref.key)
    return policy


def pretrain_on(config: RunConfig, store: Store, budget_cpu_s: float) -> PolicyRef:
    """Continue the pretraining from the shipped checkpoint for so many CPU-seconds, and store its averaged weights."""
    from tasks.contracts.batches import TrainState
    from tasks.policies import _pretrain_tiny_text as pretraining
    from tasks.policies import base
    from tasks.runtime import session
    from tasks.update import initial_state, save_state

    loaded = load_policy(config.policy, config.seed, config.topology.update.dtype)
    started = time.process_time()
    with session(config.runtime, config.topology.update):
        steps = pretraining.pretrain(10**9, config.seed + 1, start=pretraining.tiny_text.CHECKPOINT)
        step, average, _ = next(item for item in steps if time.process_time() - started > budget_cpu_s)
        names = base.trainable_parameters(loaded.policy)["transformer"]
        state = dict(average["transformer"].named_parameters())
        weights = {"transformer": {name: state[name].detach().clone() for name in names}}
    zero = initial_state(loaded)
    done = TrainState(step, step, weights, weights, zero.exp_avg, zero.exp_avg_sq)
    key = f"pretraining-{config.seed}-{step}"
    return save_state(store, key, done, config.update_spec(), loaded.policy.base_digest, {})


def run_arm(arm: str, seed: int, recipe: str, overrides: str, folder: Path,
            budget_cpu_s: float | None) -> dict[str, Any]:
    """Run one arm, or read its result; the result holds every sample's reading before and after."""
    result_file = folder / f"{arm}-{seed}.json"
    changes: dict[str, Any] = {"seed": seed, **_OVERRIDES.get(arm, {})}
    if arm == "sft":
        changes["iterations"] = 5000  # its CPU-seconds end it
    config = load_recipe(recipe, [*shlex.split(overrides),
                                  *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
    if result_file.exists():
        result = json.loads(result_file.read_text())
        if result["recipe"] != config.model_dump(mode="json"):
            raise SystemExit(f"{result_file} was made with another recipe. Name another --folder, or delete the file.")
        return result
    store = open_store(str(folder / "store"))
    base = PolicyRef(base_digest=load_policy(config.policy, seed, config.topology.update.dtype).policy.base_digest)
    before = evaluate_policy(config.evaluate_spec(), base, store, config.topology.evaluate)
    cpu, wall = time.process_time(), time.perf_counter()

    def stop() -> bool:
        return arm == "sft" and budget_cpu_s is not None and time.process_time() - cpu > budget_cpu_s

    if arm == "pretraining":
        assert budget_cpu_s is not None
        policy = pretrain_on(config, store, budget_cpu_s)
    else:
        policy = train(config, store, stop, shuffle=arm == "permuted")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = evaluate_policy(config.evaluate_spec(), policy, store, config.topology.evaluate)
    result: dict[str, Any] = {"arm": arm, "seed": seed, "cpu_s": cpu, "wall_s": wall, "iterations": policy.step,
                              "recipe": config.model_dump(mode="json"),
                              "weights": policy.weights.digest if policy.weights else ""}
    for label, ref in (("before", before), ("after", after)):
        meta = store.manifest(ref).meta
        variant = meta["protocol"]["weights"][0]
        result[label] = meta["numbers"][variant]
        result[f"{label}_samples"] = {name: value.tolist() for name, value in
                                      store.load(ref, f"samples_{variant}").items() if name.endswith("exact_match")}
        result["prompts"] = meta["prompts"]
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(result))
    return result


def gain_interval(results: Sequence[dict[str, Any]], reader: str, draws: int = 10_000) -> tuple[float, float, float]:
    """Paired gain in exact match, mean over seeds, and its 95 % interval by a bootstrap clustered by painted string."""
    import numpy as np

    name = f"{reader}/exact_match"
    gains = np.mean([np.subtract(r["after_samples"][name], r["before_samples"][name]) for r in results], axis=0)
    texts = [prompt.split('"')[1] for prompt in results[0]["prompts"]]
    clusters = np.array([[gain for gain, text in zip(gains, texts, strict=True) if text == chosen]
                         for chosen in sorted(set(texts))])
    picks = np.random.default_rng(0).integers(len(clusters), size=(draws, len(clusters)))
    low, high = np.quantile(clusters.mean(1)[picks].mean(1), [0.025, 0.975])
    return float(gains.mean()), float(low), float(high)


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table: one line an arm, means over seeds."""
    lines = [f"{'arm':12s} {'seeds':>5s} {'CPU-s':>6s} {'iter':>5s} {'before':>7s} {'after':>7s} {'gain':>7s} "
             f"{'95 % interval':>18s} {'second reader':>14s} {'diversity':>14s}"]
    for arm, runs in results.items():
        if not runs:
            continue

        def mean(label: str, name: str, runs: list[dict[str, Any]] = runs) -> float:
            return sum(run[label][name] for run in runs) / len(runs)

        gain, low, high = gain_interval(runs, "ocr")
        second, _, _ = gain_interval(runs, "tesseract")
        cpu_s = sum(run["cpu_s"] for run in runs) / len(runs)
        diversity = f"{mean('before', 'diversity'):.3f}->{mean('after', 'diversity'):.3f}"
        lines.append(
            f"{arm:12s} {len(runs):5d} {cpu_s:6.0f} {runs[0]['iterations']:5d} "
            f"{mean('before', 'ocr/exact_match'):7.3f} {mean('after', 'ocr/exact_match'):7.3f} {gain:+7.3f} "
            f"{f'[{low:+.3f}, {high:+.3f}]':>18s} {second:+14.3f} {diversity:>14s}")
    return "\n".join(lines)


def _budget(folder: Path) -> float | None:
    """Mean CPU-seconds of the finished `rl` arms: what every other arm may spend."""
    spent = [json.loads(file.read_text())["cpu_s"] for file in sorted(folder.glob("rl-*.json"))]
    return sum(spent) / len(spent) if spent else None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--overrides", default="", help="changes to the recipe, such as 'iterations=60'")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / ".flowmill" / "study")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    for arm in options.arms:
        for seed in options.seeds:
            budget = _budget(options.folder)
            if arm in ("sft", "pretraining") and budget is None:
                parser.error(f"arm {arm!r} gets the CPU-seconds of arm 'rl', of which {options.folder} has no result "
                             "yet; run 'rl' first.")
            result = run_arm(arm, seed, options.recipe, options.overrides, options.folder, budget)
            results[arm].append(result)
            print(f"{arm} seed {seed}: {result['before']['ocr/exact_match']:.3f} -> "
                  f"{result['after']['ocr/exact_match']:.3f} in {result['cpu_s']:.0f} CPU-s, {result['wall_s']:.0f} s",
                  flush=True)
    print(report(results))


if __name__ == "__main__":
    main()
