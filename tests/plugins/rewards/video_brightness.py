"""Throw-away reward for video: mean brightness, 0..1."""

from typing import Literal

from tasks.contracts.config import RewardConfig
from tasks.contracts.errors import RewardError


class Config(RewardConfig):
    """Nothing to set."""

    name: Literal["video_brightness"] = "video_brightness"


def build(config):
    def score(media, prompts, metadata):
        if media.kind != "video":
            raise RewardError(f"video_brightness scores video, got {media.kind}")
        return {"score": media.frames.double().flatten(1).mean(1).numpy() / 255}

    return score
