"""Stage 4: trajectories + advantages -> the next policy. Next: the following iteration's rollout, or evaluate.

Replays the stored steps under the stored sampling contract, in micro-batches of the rollout's size, so the ratio before
the first optimiser step is exactly 1. Gradients are summed micro-batch by micro-batch in a fixed order: the number of
lanes never changes a bit. Blind to the algorithm: it asks for rows and a loss, and knows no ratio or clip.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flytekit import task

from tasks import resources
from tasks.advantage import load_advantages
from tasks.contracts.batches import AdvantageBatch, TrainState, TrajectoryBatch
from tasks.contracts.config import OptimizerConfig, RoleConfig, UpdateSpec, digest_of
from tasks.contracts.errors import ContractError, NumericsError
from tasks.contracts.refs import AdvantageRef, ComponentRef, PolicyRef, TrainStateRef, TrajectoryRef, WeightsRef
from tasks.policies import base
from tasks.rollout import load_trajectories
from tasks.runtime import LoadedPolicy, Session, flatten, micro_batches, progress, session, unflatten
from tasks.store import Store, open_store

VERSION = "1"
"""Raised when the same inputs would give other weights."""

_warm_state: dict[str, TrainState] = {}
"""The newest state, by its and the weights' digests: the next update of this process need not read it back."""


def learning_rate_at(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """Learning rate of an iteration (from 1): linear warm-up, then constant or cosine to ``final_fraction``."""
    rate = config.learning_rate
    if iteration <= config.warmup_iterations:
        return rate * iteration / config.warmup_iterations
    if config.decay == "none":
        return rate
    done = (iteration - 1 - config.warmup_iterations) / max(1, iterations - config.warmup_iterations)
    return rate * (config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * done)))


def initial_state(loaded: LoadedPolicy) -> TrainState:
    """The state before the first update."""
    import torch

    def clone() -> dict[str, dict[str, Any]]:
        return _clone(loaded.initial)

    def zeros() -> dict[str, dict[str, Any]]:
        return {part: {name: torch.zeros_like(value) for name, value in values.items()}
                for part, values in loaded.initial.items()}

    return TrainState(iteration=0, optimizer_steps=0, weights=clone(), ema=clone(), exp_avg=zeros(), exp_avg_sq=zeros(),
                      old=clone())


def load_state(store: Store, ref: PolicyRef, loaded: LoadedPolicy) -> TrainState:
    """The state to continue from."""
    if ref.state is None or ref.weights is None:
        return initial_state(loaded)
    # Both digests: two learning rates give the same first moments and other weights.
    key = ref.state.digest + ref.weights.digest
    if key in _warm_state:
        return _warm_state[key]
    meta, moments = store.manifest(ref.state).meta, unflatten(store.load(ref.state, "moments"))
    weights = {name: unflatten(store.load(ref.weights, name)) for name in ("raw", "ema")}
    old = unflatten(store.load(ref.state, "old")) if meta["old"] else {}
    return TrainState(iteration=meta["iteration"], optimizer_steps=meta["optimizer_steps"], weights=weights["raw"],
                      ema=weights["ema"], exp_avg=unflatten(moments["exp_avg"]),
                      exp_avg_sq=unflatten(moments["exp_avg_sq"]), old=old)


class Replay:
    """The rows of one update, evaluated in the rollout's micro-batches."""

    def __init__(self, spec: UpdateSpec, loaded: LoadedPolicy, trajectories: TrajectoryBatch,
                 advantages: AdvantageBatch, iteration: int, run: Session) -> None:
        from tasks.plugins import load
        from tasks.sde import derive_seed

        self.algorithm = load("algorithms", spec.algorithm.name)
        self.config, self.loaded, self.run = spec.algorithm, loaded, run
        self.trajectories, self.advantages = trajectories, advantages
        self.size = run.micro_batch_size
        self.seed = derive_seed(spec.seed, iteration, 0, "rows")
        named = base.trainable_parameters(loaded.policy)
        self.parameters = {part: list(values.values()) for part, values in named.items()}

    def batches(self, pairs: Any) -> list[tuple[str, Any, int]]:
        """Split pairs [R, 2] into padded micro-batches of one component each: (component, pairs [M, 2], real rows)."""
        import torch

        parts: dict[str, list[Any]] = {}
        if len(self.parameters) == 1:
            parts[next(iter(self.parameters))] = [pairs]
        else:
            sigma = self.algorithm.rows(self.config, self.trajectories, self.advantages, pairs, self.seed).sigma
            for row, value in enumerate(sigma.tolist()):
                parts.setdefault(self.loaded.policy.component_at(value), []).append(pairs[row : row + 1])
        found = []
        for part in sorted(parts):
            chosen = torch.cat(parts[part])
            found += [(part, chosen[rows], real) for rows, real in micro_batches(len(chosen), self.size)]
        return found

    def velocity(self, pairs: Any, rows: Any = None) -> Any:
        """Velocity [M, *latent] of the weights that are loaded now."""
        if rows is None:
            rows = self.algorithm.rows(self.config, self.trajectories, self.advantages, pairs, self.seed)
        prompts = [self.trajectories.prompts[position] for position in pairs[:, 0].tolist()]
        policy, scale = self.loaded.policy, self.trajectories.contract.guidance_scale
        negative = policy.encode([""] * len(prompts)) if scale != 1.0 else None
        return base.guided_velocity(policy, rows.latents, rows.sigma, policy.encode(prompts), negative, scale)

    def fixed_velocities(self, pairs: Any, weights: base.Weights) -> list[Any]:
        """Velocities of other weights, one tensor a micro-batch, without a graph."""
        import torch

        def work(batch: tuple[str, Any, int]) -> Any:
            with torch.no_grad():
                return self.velocity(batch[1])

        with base.using_weights(self.loaded.policy, weights):
            return list(self.run.map(work, self.batches(pairs)))

    def gradients(self, pairs: Any, fixed: Mapping[str, Sequence[Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Gradient of the mean loss over `pairs`, component -> one tensor a parameter, and metrics a row [R].

        Each micro-batch's gradient is computed whole by one lane; they are added one after the other in order.
        """
        import torch

        scale = 1.0 / len(pairs)

        def work(job: tuple[int, tuple[str, Any, int]]) -> tuple[str, Any, dict[str, Any]]:
            number, (part, chosen, real) = job
            rows = self.algorithm.rows(self.config, self.trajectories, self.advantages, chosen, self.seed)
            velocities = {"policy": self.velocity(chosen, rows), **{name: all_[number] for name, all_ in fixed.items()}}
            loss, metrics = self.algorithm.loss(self.config, rows, velocities, self.trajectories)
            weight = torch.zeros(len(chosen), dtype=loss.dtype)
            weight[:real] = scale
            total = (loss * weight).sum()
            gradients = torch.autograd.grad(total, self.parameters[part], allow_unused=True, materialize_grads=True)
            rows_metrics = {"loss": loss.detach(), **metrics}
            if "step" in rows.extra:
                rows_metrics["step"] = rows.extra["step"]
            return part, gradients, {name: value[:real].detach().double() for name, value in rows_metrics.items()}

        batches = self.batches(pairs)
        sums = {part: [torch.zeros_like(value) for value in values] for part, values in self.parameters.items()}
        collected: dict[str, list[Any]] = {}
        for part, gradients, metrics in progress(self.run.map(work, enumerate(batches)), len(batches), "update"):
            for total, value in zip(sums[part], gradients, strict=True):
                total.add_(value)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
        return sums, {name: torch.cat(values) for name, values in collected.items()}


def train(spec: UpdateSpec, loaded: LoadedPolicy, state: TrainState, trajectories: TrajectoryBatch,
          advantages: AdvantageBatch, iteration: int, run: Session) -> tuple[TrainState, dict[str, float]]:
    """Take the iteration's optimiser steps from `state` and return the next state and the metrics.

    Raises:
        NumericsError: more non-finite optimiser steps than the recipe allows.
    """
    import torch

    from tasks.sde import derive_seed

    config = spec.optimizer
    replay = Replay(spec, loaded, trajectories, advantages, iteration, run)
    base.set_weights(loaded.policy, state.weights)
    loaded.holds = "in training"
    pairs = replay.algorithm.pairs(spec.algorithm, trajectories, advantages)
    rate = learning_rate_at(config, iteration, spec.iterations)
    exp_avg, exp_avg_sq = _clone(state.exp_avg), _clone(state.exp_avg_sq)
    named = base.trainable_parameters(loaded.policy)
    parameters = [value for values in named.values() for value in values.values()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(config.betas[0], config.betas[1]), eps=config.eps,
                                  weight_decay=config.weight_decay, foreach=False)
    taken, skipped = state.optimizer_steps, 0
    for part, values in named.items():
        for name, value in values.items():
            optimizer.state[value] = {"step": torch.tensor(float(taken)), "exp_avg": exp_avg[part][name],
                                      "exp_avg_sq": exp_avg_sq[part][name]}
    metrics: dict[str, float] = {"update/rows": float(len(pairs)), "update/learning_rate": rate}
    seen: dict[str, list[Any]] = {}
    norms: list[float] = []
    for number, chosen in enumerate(_minibatches(pairs, config.updates_per_rollout,
                                                 derive_seed(spec.seed, iteration, 0, "minibatches"))):
        needed = {"reference": loaded.initial, "old": state.old}
        fixed = {name: replay.fixed_velocities(chosen, needed[name])
                 for name in sorted(replay.algorithm.needs(spec.algorithm))}
        gradients, rows = replay.gradients(chosen, fixed)
        flat = [value for values in gradients.values() for value in values]
        norm = torch.sqrt(sum((value.double().square().sum() for value in flat), torch.zeros((), dtype=torch.float64)))
        step = rows.pop("step", None)
        for name, value in rows.items():
            seen.setdefault(name, []).append(value)
            if number == 0:
                metrics[f"update/first/{name}/mean"] = value.mean().item()
                metrics[f"update/first/{name}/max"] = value.max().item()
        if number == 0 and step is not None and "log_prob_gap" in rows:
            # Before the first optimiser step this is the whole difference between rollout and training numerics.
            for place in step.unique().tolist():
                gap = rows["log_prob_gap"][step == place].max().item()
                metrics[f"update/first/log_prob_gap/step_{int(place)}"] = gap
        if not (norm.isfinite() and rows["loss"].isfinite().all()):
            skipped += 1
            continue
        norms.append(norm.item())
        shrink = min(1.0, config.max_grad_norm / (norm.item() + 1e-12))
        for parameter, value in zip(parameters, flat, strict=True):
            parameter.grad = value.mul_(shrink)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken += 1
    nothing_learned = skipped > 0 and taken == state.optimizer_steps
    if skipped > config.max_skipped_updates or nothing_learned:
        raise NumericsError(f"update of iteration {iteration}: {skipped} optimiser steps had a non-finite loss or "
                            f"gradient, {taken - state.optimizer_steps} were taken (allowed to skip: "
                            f"optimizer.max_skipped_updates = {config.max_skipped_updates}, but never all). Lower "
                            "optimizer.learning_rate or max_grad_norm; the policy before this iteration is kept.")
    for name, values in seen.items():
        value = torch.cat(values)
        known = value[value.isfinite()]
        metrics[f"update/{name}/mean"] = known.mean().item() if len(known) else math.nan
        metrics[f"update/{name}/max"] = known.max().item() if len(known) else math.nan
    metrics |= {"update/skipped": float(skipped), "update/optimizer_steps": float(taken - state.optimizer_steps),
                "update/grad_norm": max(norms) if norms else 0.0}
    weights = base.copy_weights(loaded.policy)
    ema = _clone(state.ema)
    for part, values in ema.items():
        for name, value in values.items():
            value.lerp_(weights[part][name], 1.0 - config.ema_decay)
    old = _next_old(replay.algorithm, spec, state, weights, iteration)
    return TrainState(iteration, taken, weights, ema, exp_avg, exp_avg_sq, old), metrics


def _clone(weights: base.Weights) -> dict[str, dict[str, Any]]:
    return {part: {name: value.clone() for name, value in values.items()} for part, values in weights.items()}


def _next_old(algorithm: Any, spec: UpdateSpec, state: TrainState, weights: base.Weights, iteration: int) -> Any:
    """The behaviour policy: a moving average whose decay the algorithm sets; absent when it keeps none."""
    decay_of = getattr(algorithm, "old_policy_decay", None)
    if decay_of is None:
        return {}
    decay, old = decay_of(spec.algorithm, iteration), _clone(state.old or weights)
    for part, values in old.items():
        for name, value in values.items():
            value.lerp_(weights[part][name], 1.0 - decay)
    return old


def _minibatches(pairs: Any, count: int, seed: int) -> list[Any]:
    """Shuffle the samples and split them into `count` parts of nearly equal size; a sample's draws stay together."""
    import torch

    if not len(pairs):
        return []
    samples = pairs[:, 0].unique()
    order = samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))]
    return [pairs[torch.isin(pairs[:, 0], part)] for part in order.tensor_split(count) if len(part)]


def update_policy(spec: UpdateSpec, policy: PolicyRef, trajectories: TrajectoryRef, advantages: AdvantageRef,
                  iteration: int, store: Store, role: RoleConfig) -> PolicyRef:
    """Train one iteration from stored batches, or find the policy already made.

    Raises:
        ContractError: the batches do not belong together, or were drawn under another sampling contract.
        MemoryLimitError: memory ran out, and a smaller micro-batch would change the ratio.
    """
    key = digest_of({"stage": f"update/{VERSION}", "spec": spec.model_dump(mode="json"), "iteration": iteration,
                     "trajectories": trajectories.digest, "advantages": advantages.digest,
                     "base": policy.base_digest, "weights": policy.weights.digest if policy.weights else "",
                     "state": policy.state.digest if policy.state else ""})
    weights, state = store.find("policies", key), store.find("train_states", key)
    if weights and state and store.has_data(weights) and store.has_data(state):
        return _policy_ref(policy.base_digest, iteration, spec, weights, state)
    started = time.perf_counter()
    with session(spec.runtime, role) as run:
        loaded = run.policy(spec.policy, policy, store, spec.seed, spec.dtype)
        batch, signal = load_trajectories(store, trajectories), load_advantages(store, advantages)
        if not batch.sample_ids.equal(signal.sample_ids):
            raise ContractError(f"update: advantages {advantages.key[:12]} are of other samples than trajectories "
                                f"{trajectories.key[:12]}; rerun the advantage stage on these trajectories.")
        _require_contract(spec, loaded, batch)
        before = load_state(store, policy, loaded)
        computing = time.perf_counter()
        run.micro_batch_size = batch.contract.micro_batch_size
        after, metrics = run.shrinking(
            lambda: train(spec, loaded, before, batch, signal, iteration, run), f"update {iteration}",
            refuse_because="" if spec.runtime.kernels == "consistent" else _why_not_smaller(run.micro_batch_size))
        metrics["update/micro_batch_size"] = float(run.micro_batch_size)
        stats = {"metrics": metrics, "compute_seconds": time.perf_counter() - computing,
                 "seconds": time.perf_counter() - started}
        saved = save_state(store, key, after, spec, policy.base_digest, stats)
        assert saved.weights is not None
        loaded.holds = f"{saved.weights.digest}/raw"
    return saved


def _why_not_smaller(size: int) -> str:
    return ("The rollout was drawn with that size, and with runtime.kernels: reference a row's bits depend on it, so "
            f"the ratio before the first step would not be 1. Set runtime.micro_batch_size: {max(1, size // 2)} and "
            "run again (the rollout is then drawn again); or runtime.kernels: consistent, with which the update "
            "shrinks by itself.")


def _require_contract(spec: UpdateSpec, loaded: LoadedPolicy, batch: TrajectoryBatch) -> None:
    """The update runs the policy as the rollout did, or not at all."""
    from tasks.sde import sigma_schedule

    stored = batch.contract
    sigmas = sigma_schedule(stored.schedule, stored.num_inference_steps, stored.shift)
    if not batch.sigmas.equal(sigmas):
        raise ContractError(f"update: the stored sigmas are not those of schedule {stored.schedule!r}, "
                            f"{stored.num_inference_steps} steps, shift {stored.shift}; rerun the rollout.")
    here = stored.model_copy(update={
        "sigmas_digest": hashlib.sha256(sigmas.numpy().tobytes()).hexdigest(),
        "policy": spec.policy.name, "base_digest": loaded.policy.base_digest,
        "latent_shape": tuple(loaded.policy.latent_shape), "dtype": spec.dtype, "kernels": spec.runtime.kernels,
        "micro_batch_size": _halved(spec.runtime.micro_batch_size, stored.micro_batch_size)})
    stored.require(here, "update")


def _halved(size: int, stored: int) -> int:
    """`stored` if a rollout of the recipe's `size` may have shrunk to it when memory ran out, else `size`."""
    shrunk = size
    while shrunk > stored:
        shrunk //= 2
    return stored if shrunk == stored else size


def save_state(store: Store, key: str, state: TrainState, spec: UpdateSpec, base_digest: str,
               stats: Mapping[str, Any]) -> PolicyRef:
    """Store weights and optimiser state; the state first, so a policy that exists can always be continued."""
    moments = flatten({"exp_avg": flatten(state.exp_avg), "exp_avg_sq": flatten(state.exp_avg_sq)})
    files = {"moments": moments, **({"old": flatten(state.old)} if state.old else {})}
    saved = store.put("train_states", key, files=files, count=len(moments),
                      meta={"iteration": state.iteration, "optimizer_steps": state.optimizer_steps,
                            "seed": spec.seed, "old": bool(state.old)}, stats={})
    components = {part: {"format": spec.policy.trainable, "num_parameters": sum(v.numel() for v in values.values())}
                  for part, values in state.weights.items()}
    weights = store.put("policies", key, files={"raw": flatten(state.weights), "ema": flatten(state.ema)},
                        count=sum(len(values) for values in state.weights.values()),
                        meta={"iteration": state.iteration, "base_digest": base_digest, "components": components,
                              "policy": spec.policy.model_dump(mode="json")}, stats=stats)
    _warm_state.clear()
    _warm_state[saved.digest + weights.digest] = state
    return _policy_ref(base_digest, state.iteration, spec, weights, saved)


def _policy_ref(base_digest: str, iteration: int, spec: UpdateSpec, weights: Any, state: Any) -> PolicyRef:
    components = {part: ComponentRef.model_validate(value) for part, value in weights.meta["components"].items()}
    return PolicyRef(base_digest=base_digest, step=iteration, components=components,
                     weights=weights.ref(WeightsRef), state=state.ref(TrainStateRef))


@task(**resources.task_options("update", version=VERSION, ignore=("store_uri", "role")))
@resources.retried
def update(spec: UpdateSpec, policy: PolicyRef, trajectories: TrajectoryRef, advantages: AdvantageRef, iteration: int,
           scope: str, store_uri: str, role: RoleConfig) -> PolicyRef:
    """Train the policy on an iteration's samples."""
    return update_policy(spec, policy, trajectories, advantages, iteration, open_store(store_uri), role)
