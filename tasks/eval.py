"""Stage 5: policy -> numbers a person can compare. Next: nothing; the numbers go to MLflow and the Deck.

Fixed prompts that training never sees, fixed noise, ODE sampling, its own steps and guidance: evaluations of any two
runs are paired sample by sample. Every number is stored with the protocol it was measured under.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flytekit import Deck, task

from tasks import pictures, resources
from tasks.contracts.config import EvaluateSpec, RoleConfig, digest_of
from tasks.contracts.media import Images, media_from_parts, media_parts
from tasks.contracts.refs import EvaluationRef, PolicyRef
from tasks.policies.base import Policy
from tasks.prompts import Prompts, read_prompts
from tasks.reward import score_media
from tasks.rollout import pairwise_distance
from tasks.runtime import Session, micro_batches, progress, session
from tasks.store import Store, open_store

VERSION = "1"
"""Raised when the same policy would get other numbers."""


def sample_ode(spec: EvaluateSpec, policy: Policy, prompts: Sequence[str], purpose: str, run: Session) -> Any:
    """Final latents [N, *latent] of prompts: no noise but the initial one, which depends on (seed, position) only."""
    import torch

    from tasks import sde
    from tasks.sampling import denoise

    config, size = spec.evaluation, run.micro_batch_size
    sigmas = sde.sigma_schedule(spec.schedule, config.num_inference_steps, spec.shift)

    def work(batch: tuple[list[int], int]) -> Any:
        rows, num_real = batch
        noise = [sde.noise(tuple(policy.latent_shape), sde.derive_seed(config.seed, 0, row, purpose)) for row in rows]
        done = denoise(policy, [prompts[row] for row in rows], torch.stack(noise), sigmas,
                       guidance_scale=config.guidance_scale)
        return done.final_latents[:num_real]

    batches = micro_batches(len(prompts), size)
    return torch.cat(list(progress(run.map(work, batches), -(-len(prompts) // size), "evaluate")))


def diversity_of(spec: EvaluateSpec, policy: Policy, prompts: Sequence[str], run: Session) -> float:
    """Root mean square distance, in latent units, between draws of one prompt; the mean over prompts."""
    config = spec.evaluation
    chosen = prompts[:: max(1, len(prompts) // config.diversity_prompts)][: config.diversity_prompts]
    repeated = [prompt for prompt in chosen for _ in range(config.diversity_draws)]
    latents = sample_ode(spec, policy, repeated, "diversity", run)
    distances = [pairwise_distance(draws) for draws in latents.split(config.diversity_draws)]
    return sum(distances) / len(distances)


def measure(spec: EvaluateSpec, policy: Policy, prompts: Prompts, run: Session) -> tuple[dict[str, float], Any, Any]:
    """Numbers, per-sample parts and media of the weights that are loaded."""
    latents = sample_ode(spec, policy, prompts.texts, "evaluate", run)
    media = policy.decode(latents)
    numbers: dict[str, float] = {}
    samples: dict[str, Any] = {}
    for reader in spec.evaluation.readers:
        parts = score_media(reader, media, prompts.texts, prompts.metadata, list(range(len(prompts))), run)
        for name, value in parts.items():
            samples[f"{reader.name}/{name}"] = value
            numbers[f"{reader.name}/{name}"] = value.mean().item()
    if spec.evaluation.diversity_prompts:
        numbers["diversity"] = diversity_of(spec, policy, prompts.texts, run)
    return numbers, samples, media


def evaluate_policy(spec: EvaluateSpec, policy: PolicyRef, store: Store, role: RoleConfig) -> EvaluationRef:
    """Evaluate a stored policy, or find its evaluation already made."""
    config = spec.evaluation
    prompts = read_prompts(spec.prompts)
    if config.num_prompts:
        prompts = Prompts(prompts.texts[: config.num_prompts], prompts.metadata[: config.num_prompts])
    described = spec.model_dump(mode="json")
    del described["evaluation"]["num_points"]  # how often a run is evaluated says nothing about one evaluation
    key = digest_of({"stage": f"evaluate/{VERSION}", "spec": described, "prompts": prompts.digest,
                     "base": policy.base_digest, "weights": policy.weights.digest if policy.weights else ""})
    if (made := store.find("evaluations", key)) and store.has_data(made):
        return made.ref(EvaluationRef)
    started = time.perf_counter()
    numbers: dict[str, dict[str, float]] = {}
    files: dict[str, Any] = {}
    sizes: list[int] = []
    with session(spec.runtime, role) as run:
        for variant in config.weights:
            if policy.weights is None and numbers:  # the base has no average of its own
                numbers[variant] = numbers[config.weights[0]]
                continue
            loaded = run.policy(spec.policy, policy, store, 0, spec.dtype, variant)
            numbers[variant], samples, media = run.shrinking(
                functools.partial(measure, spec, loaded.policy, prompts, run), f"evaluation after {policy.step}")
            sizes.append(run.micro_batch_size)
            files[f"samples_{variant}"] = samples
            if variant == config.weights[0]:
                files["media"], media_meta = media_parts(media)
                if isinstance(media, Images):
                    files["grid.png"] = pictures.grid(media.pixels[:: max(1, len(media) // config.grid_images)],
                                                      config.grid_images)
    protocol = {"num_inference_steps": config.num_inference_steps, "guidance_scale": config.guidance_scale,
                "seed": config.seed, "schedule": spec.schedule, "shift": spec.shift, "sampler": "ode",
                "prompts": spec.prompts, "prompts_digest": prompts.digest, "num_prompts": len(prompts),
                "weights": list(config.weights), "micro_batch_size": min(sizes)}
    manifest = store.put("evaluations", key, files=files, count=len(prompts),
                         meta={"numbers": numbers, "protocol": protocol, "step": policy.step, "media": media_meta,
                               "prompts": prompts.texts},
                         stats={"seconds": time.perf_counter() - started})
    return manifest.ref(EvaluationRef)


def headline(meta: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's first weights."""
    return meta["numbers"][meta["protocol"]["weights"][0]]


def load_media(store: Store, ref: EvaluationRef) -> Any:
    """Media of an evaluation's first weights."""
    return media_from_parts(store.load(ref, "media"), store.manifest(ref).meta["media"])


# Flyte's own deck pages cost 0.5 s an evaluation: one of them asks pip what is installed.
@task(enable_deck=True, deck_fields=(),
      **resources.task_options("evaluate", version=VERSION, ignore=("store_uri", "role", "previous")))
@resources.retried
def evaluate(spec: EvaluateSpec, policy: PolicyRef, previous: list[EvaluationRef], scope: str, store_uri: str,
             role: RoleConfig) -> EvaluationRef:
    """Measure a policy on fixed prompts and noise; the Deck shows the samples and the curve so far."""
    store = open_store(store_uri)
    ref = evaluate_policy(spec, policy, store, role)
    metas = [store.manifest(item).meta for item in [*previous, ref]]
    Deck("evaluation", pictures.evaluation_page(metas, store.load_bytes(ref, "grid.png") if "grid.png" in
                                                store.manifest(ref).files else None))
    return ref
