"""Stage 1: prompts + policy -> trajectories. Next: reward.

Draws N = P x G samples and keeps the SDE steps exactly as they were scored. Where the samples run never matters:
their noise derives from (seed, iteration, sample, step) and every forward has the recipe's micro-batch size.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from flytekit import task

from tasks import resources
from tasks.contracts.batches import SamplingContract, TrajectoryBatch, TrajectoryIndex
from tasks.contracts.config import RoleConfig, RolloutSpec, digest_of
from tasks.contracts.media import media_from_parts, media_parts
from tasks.contracts.refs import PolicyRef, TrajectoryRef
from tasks.prompts import draw_positions, read_prompts
from tasks.runtime import LoadedPolicy, Session, micro_batches, progress, session
from tasks.store import Store, open_store

VERSION = "1"
"""Raised when the same inputs would give other trajectories."""


def sampling_contract(spec: RolloutSpec, loaded: LoadedPolicy, micro_batch_size: int) -> SamplingContract:
    """The Markov chain that `spec` draws from, as it is stored with the trajectories."""
    sampling = spec.sampling
    sigmas = schedule_of(spec)
    return SamplingContract(
        policy=spec.policy.name, base_digest=loaded.policy.base_digest, latent_shape=tuple(loaded.policy.latent_shape),
        schedule=sampling.schedule, shift=sampling.shift, num_inference_steps=sampling.num_inference_steps,
        sigmas_digest=hashlib.sha256(sigmas.numpy().tobytes()).hexdigest(), guidance_scale=sampling.guidance_scale,
        sde_kind=sampling.sde_kind, noise_level=sampling.noise_level, dtype=spec.dtype, kernels=spec.runtime.kernels,
        micro_batch_size=micro_batch_size)


def schedule_of(spec: RolloutSpec) -> Any:
    """Sigmas of the rollout, float64 [T+1]."""
    from tasks import sde

    return sde.sigma_schedule(spec.sampling.schedule, spec.sampling.num_inference_steps, spec.sampling.shift)


def sde_steps_of(spec: RolloutSpec, iteration: int) -> list[int]:
    """The iteration's SDE steps: `window_size` consecutive ones inside the window's range."""
    from tasks import sde

    sampling = spec.sampling
    low, high = sampling.window_range
    start = low
    if sampling.sde_window.placement == "random":
        start += sde.derive_seed(spec.seed, iteration, 0, "sde_window") % (high - low - sampling.window_size + 1)
    return list(range(start, start + sampling.window_size))


def draw_trajectories(spec: RolloutSpec, loaded: LoadedPolicy, iteration: int, run: Session) -> TrajectoryBatch:
    """Draw one iteration's samples.

    Raises:
        ContractError: the policy produced latents that are not finite.
    """
    import torch

    from tasks import sde
    from tasks.sampling import denoise

    sampling, latent_shape = spec.sampling, tuple(loaded.policy.latent_shape)
    prompts = read_prompts(spec.prompts)
    positions = draw_positions(len(prompts), sampling.num_groups, spec.seed, iteration - 1)
    of_sample = [position for position in positions for _ in range(sampling.group_size)]
    texts = [prompts.texts[position] for position in of_sample]
    sigmas, steps = schedule_of(spec), sde_steps_of(spec, iteration)

    def initial_noise(sample: int) -> Any:
        owner = sample - sample % sampling.group_size if sampling.share_initial_noise else sample
        return sde.noise(latent_shape, sde.derive_seed(spec.seed, iteration, owner, "initial"))

    def work(batch: tuple[list[int], int]) -> Any:
        rows, num_real = batch
        done = denoise(
            loaded.policy, [texts[row] for row in rows], torch.stack([initial_noise(row) for row in rows]), sigmas,
            guidance_scale=sampling.guidance_scale, sde_steps=steps, sde_kind=sampling.sde_kind,
            noise_level=sampling.noise_level,
            noise=lambda step: torch.stack([
                sde.noise(latent_shape, sde.derive_seed(spec.seed, iteration, row, f"step/{step}")) for row in rows]))
        return done.final_latents[:num_real], done.step_latents[:num_real], done.log_probs[:num_real]

    num_samples, size = sampling.num_samples, run.micro_batch_size
    parts = list(progress(run.map(work, micro_batches(num_samples, size)), -(-num_samples // size), "rollout"))
    final, pairs, log_probs = (torch.cat(column) for column in zip(*parts, strict=True))
    ids = torch.arange(num_samples)
    prompt_refs = {text: hashlib.sha256(text.encode()).hexdigest() for text in set(texts)}
    return TrajectoryBatch(
        sample_ids=ids + (iteration - 1) * num_samples,
        group_ids=ids // sampling.group_size + (iteration - 1) * sampling.num_groups,
        parent_ids=torch.full((num_samples,), -1), prompts=tuple(texts),
        metadata=tuple(prompts.metadata[position] for position in of_sample),
        condition_refs={"prompt": tuple(prompt_refs[text] for text in texts)}, sigmas=sigmas,
        sde_indices=torch.tensor(steps, dtype=torch.int64).expand(num_samples, -1).contiguous(),
        step_mask=torch.ones(num_samples, len(steps), dtype=torch.bool), step_latents=pairs, log_probs=log_probs,
        final_latents=final, media=loaded.policy.decode(final), contract=sampling_contract(spec, loaded, size))


_INDEX = ("sample_ids", "group_ids", "parent_ids", "sigmas", "sde_indices", "step_mask", "log_probs")
_LATENTS = ("step_latents", "final_latents")
_warm: dict[str, TrajectoryBatch] = {}
"""The newest batch, by digest: this process' update need not read it back (1 % of an iteration of the demo)."""


def save_trajectories(store: Store, key: str, batch: TrajectoryBatch, stats: Mapping[str, Any]) -> TrajectoryRef:
    """Store a batch in three files, because reward reads only media, and advantage only the index."""
    media, media_meta = media_parts(batch.media)
    manifest = store.put(
        "trajectories", key, count=len(batch),
        files={"index": {name: getattr(batch, name) for name in _INDEX},
               "latents": {name: getattr(batch, name) for name in _LATENTS}, "media": media},
        meta={"prompts": batch.prompts, "metadata": batch.metadata, "condition_refs": batch.condition_refs,
              "media": media_meta, "contract": batch.contract.model_dump(mode="json")},
        stats=stats)
    _warm.clear()
    _warm[manifest.digest] = batch
    return manifest.ref(TrajectoryRef)


def load_index(store: Store, ref: TrajectoryRef) -> TrajectoryIndex:
    """Read the small part of a stored batch."""
    contract = SamplingContract.model_validate(store.manifest(ref).meta["contract"])
    return TrajectoryIndex(**store.load(ref, "index"), contract=contract)


def load_trajectories(store: Store, ref: TrajectoryRef) -> TrajectoryBatch:
    """Read a stored batch back and check it again; the one this process has just stored is still at hand."""
    meta = store.manifest(ref).meta
    if ref.digest in _warm and store.has_data(ref):
        return _warm[ref.digest]
    return TrajectoryBatch(
        **store.load(ref, "index"), **store.load(ref, "latents"),
        media=media_from_parts(store.load(ref, "media"), meta["media"]), prompts=tuple(meta["prompts"]),
        metadata=tuple(meta["metadata"]),
        condition_refs={name: tuple(values) for name, values in meta["condition_refs"].items()},
        contract=SamplingContract.model_validate(meta["contract"]))


def rollout_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """Sample diversity (root mean square distance between members of a group, in latent units), micro-batch size."""
    groups = [batch.final_latents[batch.group_ids == group] for group in batch.group_ids.unique()]
    distances = [pairwise_distance(members) for members in groups if len(members) > 1]
    return {"rollout/micro_batch_size": float(batch.contract.micro_batch_size),
            **({"rollout/diversity": sum(distances) / len(distances)} if distances else {})}


def pairwise_distance(members: Any) -> float:
    """Root mean square distance, an element, over all pairs of [G, *latent]: twice the unbiased variance, rooted."""
    return members.flatten(1).var(0, correction=1).mean().mul(2).sqrt().item()


def roll_out(spec: RolloutSpec, policy: PolicyRef, iteration: int, store: Store, role: RoleConfig) -> TrajectoryRef:
    """Draw the trajectories of an iteration (from 1), or find them already made."""
    drawing = policy.state if spec.sampling.weights == "old" else policy.weights
    key = digest_of({"stage": f"rollout/{VERSION}", "spec": spec.model_dump(mode="json"), "iteration": iteration,
                     "prompts": read_prompts(spec.prompts).digest, "base": policy.base_digest,
                     "weights": drawing.digest if drawing else ""})
    if (made := store.find("trajectories", key)) and store.has_data(made):
        return made.ref(TrajectoryRef)
    started = time.perf_counter()
    with session(spec.runtime, role) as run:
        loaded = run.policy(spec.policy, policy, store, spec.seed, spec.dtype, spec.sampling.weights)
        computing = time.perf_counter()
        batch = run.shrinking(lambda: draw_trajectories(spec, loaded, iteration, run), f"rollout {iteration}")
        computed = time.perf_counter() - computing
    stats = {"seconds": time.perf_counter() - started, "compute_seconds": computed, "metrics": rollout_metrics(batch)}
    return save_trajectories(store, key, batch, stats)


@task(**resources.task_options("rollout", version=VERSION, ignore=("store_uri", "role")))
@resources.retried
def rollout(
    spec: RolloutSpec, policy: PolicyRef, iteration: int, scope: str, store_uri: str, role: RoleConfig,
) -> TrajectoryRef:
    """Draw an iteration's samples with the present policy."""
    return roll_out(spec, policy, iteration, open_store(store_uri), role)
