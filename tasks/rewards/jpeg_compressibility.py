"""Compressibility: the fewer bytes an image takes as a JPEG, the better. Needs no model, so it suits first trials.

In: images. Out: minus the size in kilobytes. Source: DDPO, arXiv 2305.13301, `jpeg_compressibility` in
kvablack/ddpo-pytorch: JPEG at quality 95, size in bytes / 1000.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tasks.contracts.config import RewardConfig
from tasks.contracts.media import Media
from tasks.rewards._text import image_pixels

if TYPE_CHECKING:
    from numpy import ndarray

QUALITY = 95


class Config(RewardConfig):
    """Settings of the compressibility reward."""

    name: Literal["jpeg_compressibility"] = "jpeg_compressibility"


class Compressibility:
    """Stateless; see `tasks.rewards.base.Scorer`."""

    def __call__(self, media: Media, prompts: Sequence[str],
                 metadata: Sequence[Mapping[str, Any]]) -> dict[str, "ndarray"]:
        """``score`` = -bytes / 1000 and ``bytes``, float64 [N].

        Raises:
            RewardError: not images.
        """
        import numpy as np
        from PIL import Image

        sizes = []
        for pixels in image_pixels("jpeg_compressibility", media, prompts).permute(0, 2, 3, 1).numpy():
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="JPEG", quality=QUALITY)
            sizes.append(buffer.tell())
        num_bytes = np.array(sizes, dtype=np.float64)
        return {"score": -num_bytes / 1000, "bytes": num_bytes}


def build(config: Config) -> Compressibility:
    """Nothing to load."""
    return Compressibility()
