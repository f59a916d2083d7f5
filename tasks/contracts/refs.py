"""References that travel over Flyte edges: where an artifact lies and what its content is; never tensors."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.contracts.config import StrictModel

SCHEMA_VERSION = 1
"""Raised when a stored artifact's layout changes; older ones are then refused by name."""


class ArtifactRef(StrictModel):
    """One stored artifact. ``digest`` is the SHA-256 over its files' names and SHA-256s and its meta."""

    kind: str
    """Folder in the store: trajectories, rewards, advantages, policies, train_states, evaluations."""
    key: str
    """Digest of everything the artifact was made from: same inputs, same key."""
    uri: str
    """Folder (or S3 prefix) that holds the data."""
    schema_version: int = SCHEMA_VERSION
    """Layout of the data."""
    count: Annotated[int, Field(ge=0)]
    """Samples (or tensors, for weights)."""
    digest: str
    """SHA-256 of the content."""


class TrajectoryRef(ArtifactRef):
    """A stored `TrajectoryBatch`."""

    kind: Literal["trajectories"] = "trajectories"


class RewardRef(ArtifactRef):
    """A stored `RewardBatch`."""

    kind: Literal["rewards"] = "rewards"


class AdvantageRef(ArtifactRef):
    """A stored `AdvantageBatch`."""

    kind: Literal["advantages"] = "advantages"


class EvaluationRef(ArtifactRef):
    """Stored evaluation: numbers, images and the contract they were made under."""

    kind: Literal["evaluations"] = "evaluations"


class TrainStateRef(ArtifactRef):
    """A stored `TrainState`: optimizer moments, EMA, old policy, data position."""

    kind: Literal["train_states"] = "train_states"


class WeightsRef(ArtifactRef):
    """Stored weights of every trained component, raw and averaged."""

    kind: Literal["policies"] = "policies"


class ComponentRef(StrictModel):
    """One trained component of a policy."""

    format: Literal["full", "lora"]
    """All weights, or low-rank adapters."""
    num_parameters: int
    """Trained parameters."""


class PolicyRef(StrictModel):
    """A policy: base model, plus trained components unless it is the base itself."""

    base_digest: str
    """SHA-256 of the base checkpoint."""
    step: Annotated[int, Field(ge=0)] = 0
    """Iterations trained; 0 = the base."""
    components: dict[str, ComponentRef] = Field(default_factory=dict)
    """`transformer`, `transformer_2`, `pe`: which parts were trained and how."""
    weights: WeightsRef | None = None
    """None for the base."""
    state: TrainStateRef | None = None
    """What the next update continues from; None for the base."""
