"""The batches the stages exchange. Each stage makes a new small one keyed by sample id; none fills in an older one.

N samples, P groups, S SDE steps a sample, T denoising steps. ``*latent`` is the policy's latent shape, of any rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.contracts.config import Dtype, Schedule, SDEKind, StrictModel
from tasks.contracts.errors import ContractError, RewardError
from tasks.contracts.media import Media

if TYPE_CHECKING:
    from torch import Tensor


class SamplingContract(StrictModel):
    """The Markov chain a trajectory was drawn from. `update` replays under exactly this and refuses another."""

    policy: str
    """Name of the policy plugin."""
    base_digest: str
    """SHA-256 of its base checkpoint."""
    latent_shape: tuple[int, ...]
    """Shape of one sample's latents."""
    schedule: Schedule
    """Sigma schedule."""
    shift: float
    """Its shift, dimensionless."""
    num_inference_steps: int
    """Denoising steps T."""
    sigmas_digest: str
    """SHA-256 of the fp64 sigma table."""
    guidance_scale: float
    """Classifier-free guidance; 1 = off."""
    sde_kind: SDEKind
    """Stochastic transition."""
    noise_level: float
    """Scale of its noise, dimensionless."""
    dtype: Dtype
    """Compute type of the denoiser."""
    kernels: str
    """Kernel mode."""
    micro_batch_size: int
    """Rows of every forward pass."""

    def require(self, other: "SamplingContract", where: str) -> None:
        """Raise unless `other` is the same contract.

        Raises:
            ContractError: names each field that differs, with both values.
        """
        mine, theirs = self.model_dump(), other.model_dump()
        wrong = [f"{name} {mine[name]!r} -> {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
        if wrong:
            raise ContractError(f"{where}: the trajectories were drawn under another sampling contract "
                                f"({'; '.join(wrong)}). Replaying them would make every ratio wrong; rerun the "
                                "rollout, or restore the recipe it was made with.")


def _shape(where: str, tensor: "Tensor", expected: Sequence[int | None], dtype: str | None = None) -> None:
    good = tensor.ndim == len(expected) and all(
        want is None or have == want for have, want in zip(tensor.shape, expected, strict=True))
    found = str(tensor.dtype).removeprefix("torch.")
    if not good or (dtype and found != dtype):
        wanted = "[" + ", ".join("*" if want is None else str(want) for want in expected) + "]"
        raise ContractError(f"{where}: got {found} {list(tensor.shape)}, expected {dtype or 'any dtype'} {wanted}.")
    if tensor.requires_grad:
        raise ContractError(f"{where} still holds a graph (requires_grad); a stored batch keeps values only.")


@dataclass(frozen=True)
class TrajectoryIndex:
    """The small part of a trajectory batch: which samples, groups and steps there are. Enough for advantages.

    Attributes:
        sample_ids: int64 [N], unique within the run.
        group_ids: int64 [N]; one id a prompt occurrence (not a prompt text).
        parent_ids: int64 [N]; sample this one branched from, -1 = root.
        sigmas: float64 [T+1], falling to 0.
        sde_indices: int64 [N, S], the denoising step of each stored transition; S may be 0.
        step_mask: bool [N, S]; False = absent (padding), never trained.
        log_probs: float32 [N, S], mean over latent dims, of the stored step under the rollout policy.
        contract: the Markov chain the samples were drawn from.
    """

    sample_ids: "Tensor"
    group_ids: "Tensor"
    parent_ids: "Tensor"
    sigmas: "Tensor"
    sde_indices: "Tensor"
    step_mask: "Tensor"
    log_probs: "Tensor"
    contract: SamplingContract

    def __post_init__(self) -> None:
        name, num_samples = type(self).__name__, len(self.sample_ids)
        _shape(f"{name}.sample_ids", self.sample_ids, [num_samples], "int64")
        _shape(f"{name}.group_ids", self.group_ids, [num_samples], "int64")
        _shape(f"{name}.parent_ids", self.parent_ids, [num_samples], "int64")
        _shape(f"{name}.sigmas", self.sigmas, [self.contract.num_inference_steps + 1], "float64")
        num_steps = self.sde_indices.shape[-1] if self.sde_indices.ndim else -1
        _shape(f"{name}.sde_indices", self.sde_indices, [num_samples, num_steps], "int64")
        _shape(f"{name}.step_mask", self.step_mask, [num_samples, num_steps], "bool")
        _shape(f"{name}.log_probs", self.log_probs, [num_samples, num_steps], "float32")
        ids, counts = self.sample_ids.unique(return_counts=True)
        if len(ids) != num_samples:
            raise ContractError(f"{name}.sample_ids repeat: {ids[counts > 1][:3].tolist()}; every sample needs its own "
                                "id (and noise).")
        if not ((self.sigmas.diff() < 0).all() and self.sigmas[-1] == 0):
            raise ContractError(f"{name}.sigmas {self.sigmas.tolist()} do not fall to 0 step by step; take them from "
                                "tasks.sde.sigma_schedule.")
        outside = ((self.sde_indices < 0) | (self.sde_indices >= len(self.sigmas) - 1)).any(dim=1)
        if outside.any():
            raise ContractError(f"{name}.sde_indices: sample {self.sample_ids[outside][0].item()} has steps "
                                f"{self.sde_indices[outside][0].tolist()}, expected 0..{len(self.sigmas) - 2}.")
        self._require_finite("log_probs")

    def _require_finite(self, label: str) -> None:
        # flatten, not reshape(N, -1): without SDE steps there are no elements to divide by N.
        finite = getattr(self, label).isfinite().flatten(1).all(dim=1)
        if not finite.all():
            bad = self.sample_ids[~finite][0].item()
            raise ContractError(f"{type(self).__name__}.{label}: sample {bad} is not finite. The policy diverged: "
                                "lower optimizer.learning_rate or resume from an earlier policy.")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def num_sde_steps(self) -> int:
        """S."""
        return self.sde_indices.shape[1]


@dataclass(frozen=True)
class TrajectoryBatch(TrajectoryIndex):
    """Samples and the SDE steps that produced them, exactly as they were scored.

    Attributes (beside those of `TrajectoryIndex`):
        step_latents: float32 [N, S, 2, *latent], before and after each stored step.
        final_latents: float32 [N, *latent].
        media: decoded samples.
        prompts: N texts. metadata: N mappings, copied from the prompts file.
        condition_refs: ``prompt``, ``negative``, ``source_image``, ``first_frame`` -> N content digests.
    """

    step_latents: "Tensor"
    final_latents: "Tensor"
    media: Media
    prompts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]
    condition_refs: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        name, num_samples, latent = "TrajectoryBatch", len(self.sample_ids), self.contract.latent_shape
        _shape(f"{name}.step_latents", self.step_latents, [num_samples, self.num_sde_steps, 2, *latent], "float32")
        _shape(f"{name}.final_latents", self.final_latents, [num_samples, *latent], "float32")
        for label, values in (("prompts", self.prompts), ("metadata", self.metadata), ("media", self.media),
                              *((f"condition_refs[{key!r}]", refs) for key, refs in self.condition_refs.items())):
            if len(values) != num_samples:
                raise ContractError(f"{name}.{label} holds {len(values)} entries, expected {num_samples}: one a "
                                    "sample.")
        self._require_finite("step_latents")
        self._require_finite("final_latents")


@dataclass(frozen=True)
class RewardBatch:
    """Scores of a batch.

    Attributes:
        sample_ids: int64 [N].
        scores: reward name -> float64 [N]; finite wherever ``failed`` is False.
        total: float64 [N], the weighted sum.
        failed: bool [N]; an explicit failure is masked from every statistic and never counts as 0.
    """

    sample_ids: "Tensor"
    scores: Mapping[str, "Tensor"]
    total: "Tensor"
    failed: "Tensor"
    details: Mapping[str, "Tensor"] = field(default_factory=dict)
    """Further per-sample numbers for the metrics, ``reward/part`` -> float64 [N]; may hold NaN = not measured."""

    def __post_init__(self) -> None:
        num_samples = len(self.sample_ids)
        _shape("RewardBatch.sample_ids", self.sample_ids, [num_samples], "int64")
        _shape("RewardBatch.failed", self.failed, [num_samples], "bool")
        for name, values in (("total", self.total), *self.scores.items(), *self.details.items()):
            _shape(f"RewardBatch.{name}", values, [num_samples], "float64")
            bad = ~values.isfinite() & ~self.failed
            if name not in self.details and bad.any():
                where = int(bad.nonzero()[0])
                raise RewardError(f"RewardBatch.{name}: sample {self.sample_ids[where].item()} is "
                                  f"{values[where].item()}; rewards must be finite. Fix the reward and rerun: the "
                                  "rollout is kept.")

    def __len__(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True)
class AdvantageBatch:
    """What the loss weighs each sample (or step) by.

    Attributes:
        sample_ids: int64 [N].
        advantages: float64 [N], or [N, S] when steps differ.
        weights: float64 [N, S], factor of each step's loss, default 1.
        valid: bool [N]; False = contributes nothing (failed reward, or no signal in its group).
        stats: numbers about the groups, for the metrics.
    """

    sample_ids: "Tensor"
    advantages: "Tensor"
    weights: "Tensor"
    valid: "Tensor"
    stats: Mapping[str, float]

    def __post_init__(self) -> None:
        num_samples = len(self.sample_ids)
        num_steps = self.weights.shape[-1] if self.weights.ndim else -1
        _shape("AdvantageBatch.sample_ids", self.sample_ids, [num_samples], "int64")
        _shape("AdvantageBatch.weights", self.weights, [num_samples, num_steps], "float64")
        _shape("AdvantageBatch.valid", self.valid, [num_samples], "bool")
        per_step = [num_samples] if self.advantages.ndim == 1 else [num_samples, num_steps]
        _shape("AdvantageBatch.advantages", self.advantages, per_step, "float64")
        for label, values in (("advantages", self.advantages), ("weights", self.weights)):
            finite = values.isfinite().reshape(num_samples, values[:1].numel()).all(dim=1)
            if not finite.all():
                raise ContractError(f"AdvantageBatch.{label}: sample {self.sample_ids[~finite][0].item()} is not "
                                    "finite; the algorithm's advantage rule made it from finite rewards, so it is at "
                                    "fault.")

    def __len__(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True)
class TrainState:
    """Everything the next update needs, so that resuming gives the same bits as never having stopped.

    All maps are component -> parameter name -> tensor. There is no generator state: every draw derives from
    (run seed, iteration, sample index, purpose), so ``iteration`` is the random state and the data position.
    """

    iteration: int
    optimizer_steps: int
    weights: Mapping[str, Mapping[str, "Tensor"]]
    ema: Mapping[str, Mapping[str, "Tensor"]]
    exp_avg: Mapping[str, Mapping[str, "Tensor"]]
    exp_avg_sq: Mapping[str, Mapping[str, "Tensor"]]
    old: Mapping[str, Mapping[str, "Tensor"]] = field(default_factory=dict)
    """Weights of the behaviour policy, for algorithms that keep one."""

    def __post_init__(self) -> None:
        shapes = {part: {name: tuple(value.shape) for name, value in tensors.items()}
                  for part, tensors in self.weights.items()}
        for label in ("ema", "exp_avg", "exp_avg_sq", "old"):
            other = getattr(self, label)
            found = {part: {name: tuple(value.shape) for name, value in tensors.items()}
                     for part, tensors in other.items()}
            if found != shapes and not (label == "old" and not other):
                raise ContractError(f"TrainState.{label} does not match TrainState.weights in components, names or "
                                    "shapes; the state was written by another model or recipe.")
