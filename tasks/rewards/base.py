"""What a reward is: the protocol every file of this axis meets.

In: media, prompts, metadata. Out: float64 numbers a sample. A reward never sees groups, advantages or weights.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tasks.contracts.media import Media

if TYPE_CHECKING:
    from numpy import ndarray


class Scorer(Protocol):
    """A loaded reward. A reward module has ``Config`` (a `RewardConfig`) and ``build(config) -> Scorer``.

    A scorer is called from several threads at once, and sample i's numbers depend on sample i only.
    """

    def __call__(self, media: Media, prompts: Sequence[str],
                 metadata: Sequence[Mapping[str, Any]]) -> Mapping[str, "ndarray"]:
        """Score N samples: ``score`` float64 [N], and any further parts, float64 [N], for the metrics.

        Raises:
            RewardError: the media or prompt cannot be scored; names the sample's position and what to do.
        """
        ...
