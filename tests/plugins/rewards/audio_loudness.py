"""Throw-away reward for audio: root mean square, 0..1."""

from typing import Literal

from tasks.contracts.config import RewardConfig
from tasks.contracts.errors import RewardError


class Config(RewardConfig):
    """Nothing to set."""

    name: Literal["audio_loudness"] = "audio_loudness"


def build(config):
    def score(media, prompts, metadata):
        if media.kind != "audio":
            raise RewardError(f"audio_loudness scores audio, got {media.kind}")
        return {"score": media.samples.double().flatten(1).square().mean(1).sqrt().numpy()}

    return score
