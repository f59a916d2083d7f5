"""What the text-reading rewards share: the text a prompt asks for, and how far a reading is from it."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.contracts.errors import RewardError
from tasks.contracts.media import Images, Media

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


def target_text(prompt: str) -> str:
    """The text an image of `prompt` should show: what stands in its first pair of double quotes, else all of it."""
    found = _QUOTED.search(prompt)
    return found[1] or found[2] or "" if found else prompt


def normalise(text: str) -> str:
    """Text as it is compared: without white space, in lower case."""
    return "".join(text.split()).lower()


def targets_of(prompts: Sequence[str]) -> list[str]:
    """The normalised target of each prompt.

    Raises:
        RewardError: a prompt asks for no text at all.
    """
    targets = [normalise(target_text(prompt)) for prompt in prompts]
    for sample, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        if not target:
            raise RewardError(f"sample {sample}: the prompt {prompt!r} asks for no text, so there is nothing to read. "
                              'Quote the text, as in: a red sign that says "7K".')
    return targets


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions between two texts."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def reading_parts(readings: Sequence[str], targets: Sequence[str]) -> dict[str, "ndarray"]:
    """``one_minus_ned`` and ``exact_match``, float64 [N].

    The first is 1 - distance / target length, not below 0, as in yifan123/flow_grpo `ocr.py` at ac4c86e.
    """
    import numpy as np

    pairs = [(normalise(reading), target) for reading, target in zip(readings, targets, strict=True)]
    closeness = [max(0.0, 1 - edit_distance(reading, target) / len(target)) for reading, target in pairs]
    return {"one_minus_ned": np.array(closeness, dtype=np.float64),
            "exact_match": np.array([reading == target for reading, target in pairs], dtype=np.float64)}


def image_pixels(reward: str, media: Media, prompts: Sequence[Any]) -> "Tensor":
    """The uint8 pixels [N, 3, H, W] of images.

    Raises:
        RewardError: other media, or not one prompt an image.
    """
    if not isinstance(media, Images):
        raise RewardError(f"reward {reward!r} scores images, got {getattr(media, 'kind', type(media).__name__)}; use a "
                          "policy that makes images, or a reward for this kind of media.")
    if len(media) != len(prompts):
        raise RewardError(f"reward {reward!r} got {len(media)} images and {len(prompts)} prompts, expected one each.")
    return media.pixels.cpu()
