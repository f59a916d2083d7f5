"""What one training run carries from task to task: its identity and each stage's part of the recipe."""

from typing import Annotated

from pydantic import Field

from tasks.contracts.config import (
    AdvantageSpec,
    EvaluateSpec,
    RetentionConfig,
    RewardSpec,
    RolloutSpec,
    RunConfig,
    StrictModel,
    Topology,
    TrackingConfig,
    UpdateSpec,
    digest_of,
)
from tasks.contracts.refs import PolicyRef


class RunPlan(StrictModel):
    """A validated run, ready for the stages."""

    name: str
    """Name of the run in MLflow."""
    run_key: str
    """Digest of what decides the run's weights; an interrupted or lengthened run has the same one and continues."""
    report_key: str
    """Digest of the run key and of how it is judged: one report and, locally, one MLflow run."""
    run_id: str
    """MLflow run."""
    scope: str
    """Store id and run key: the cache of a wiped store, or of another run, is never hit."""
    store_uri: str
    """Where artifacts lie: a folder or ``s3://bucket/prefix``."""
    iterations: Annotated[int, Field(ge=1)]
    """Iterations of the run."""
    evaluation_iterations: list[int]
    """Iterations after which the policy is evaluated; 0 = before training."""
    rollout: RolloutSpec
    """Stage 1's part of the recipe."""
    reward: RewardSpec
    """Stage 2's."""
    advantage: AdvantageSpec
    """Stage 3's."""
    update: UpdateSpec
    """Stage 4's."""
    evaluate: EvaluateSpec
    """Stage 5's."""
    topology: Topology
    """Where each role runs."""
    retention: RetentionConfig
    """What stays in the store."""
    tracking: TrackingConfig
    """MLflow."""


class RunSummary(StrictModel):
    """What a finished run leaves behind."""

    name: str
    """Name of the run in MLflow."""
    run_id: str
    """MLflow run."""
    policy: PolicyRef
    """The trained policy."""
    before: dict[str, float]
    """Headline numbers before training."""
    after: dict[str, float]
    """Headline numbers after it."""
    report: str
    """Where the before/after picture lies."""

    def __str__(self) -> str:
        return f"{self.name}: finished, {self.policy.step} iterations"

    __repr__ = __str__


def report_key_of(config: RunConfig, run_key: str, evaluation_prompts_digest: str) -> str:
    """Digest of a run and of what its evaluations measure; how often it is evaluated does not matter."""
    described = config.evaluate_spec().model_dump(mode="json")
    del described["evaluation"]["num_points"]
    return digest_of({"run": run_key, "prompts": evaluation_prompts_digest, "evaluate": described})


def run_key_of(config: RunConfig, prompts_digest: str, base_digest: str) -> str:
    """Digest of everything that decides the weights of each iteration, contents of files included."""
    specs = (config.rollout_spec(), config.reward_spec(), config.advantage_spec(), config.update_spec())
    return digest_of({"prompts": prompts_digest, "base": base_digest,
                      **{type(spec).__name__: spec.model_dump(mode="json") for spec in specs}})
