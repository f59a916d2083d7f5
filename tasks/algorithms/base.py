"""What an algorithm is: the protocol every file of this axis meets, and the rules they share.

In: rewards, trajectories, velocities. Out: advantages and a loss a row. Next: the update stage sums and steps.
An algorithm never names a rank, a device or a resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tasks.contracts.batches import AdvantageBatch, RewardBatch, TrajectoryBatch
from tasks.contracts.config import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """M rows to train on, as the loss needs them.

    Attributes:
        latents: float32 [M, *latent], the denoiser's input. sigma: float64 [M].
        extra: whatever the algorithm's loss needs, name -> [M, ...].
    """

    latents: "Tensor"
    sigma: "Tensor"
    extra: Mapping[str, "Tensor"] = field(default_factory=dict)


class Algorithm(Protocol):
    """An algorithm module has ``Config`` (an `AlgorithmConfig`) and these functions.

    It may also have ``check(run_config)``, which raises ValueError for combinations that cannot work.
    """

    Config: type[AlgorithmConfig]

    def needs(self, config: AlgorithmConfig) -> frozenset[str]:
        """Further velocities the loss wants: ``reference`` (the base policy), ``old`` (the behaviour policy)."""
        ...

    def advantages(self, config: AlgorithmConfig, rewards: RewardBatch, trajectories: TrajectoryBatch,
                   reward_weights: Mapping[str, float]) -> AdvantageBatch:
        """Advantages of the batch."""
        ...

    def pairs(self, config: AlgorithmConfig, trajectories: TrajectoryBatch, advantages: AdvantageBatch) -> "Tensor":
        """What there is to train on: int64 [R, 2] of (position of the sample, draw), in sample order.

        A draw is an SDE step for policy-gradient algorithms, a random time for forward-process ones.
        """
        ...

    def rows(self, config: AlgorithmConfig, trajectories: TrajectoryBatch, advantages: AdvantageBatch,
             pairs: "Tensor", seed: int) -> Rows:
        """The rows of some pairs [M, 2]. A row depends on its own pair and `seed` only."""
        ...

    def loss(self, config: AlgorithmConfig, rows: Rows, velocities: Mapping[str, "Tensor"],
             trajectories: TrajectoryBatch) -> tuple["Tensor", Mapping[str, "Tensor"]]:
        """Loss fp32 [M] (differentiable in ``velocities["policy"]``) and numbers a row, [M], for the metrics."""
        ...
