"""Throw-away policy: five-dimensional video latents [N, C, F, H, W], two experts that switch at a sigma."""

import hashlib
from typing import Literal

from tasks.contracts.config import PolicyConfig
from tasks.contracts.media import Video

SWITCH_SIGMA = 0.6
CHANNELS, FRAMES, HEIGHT, WIDTH = 2, 3, 4, 4


class Config(PolicyConfig):
    """Nothing to set."""

    name: Literal["video_experts"] = "video_experts"


class VideoExperts:
    """546 parameters an expert: two 3-d convolutions over latents and sigma, shifted by the prompt."""

    latent_shape = (CHANNELS, FRAMES, HEIGHT, WIDTH)

    def __init__(self, config):
        import torch
        from torch import nn

        self.config = config
        self.components = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            for name in ("transformer", "transformer_2"):
                self.components[name] = nn.Sequential(
                    nn.Conv3d(CHANNELS + 1, 4, 3, padding=1), nn.SiLU(), nn.Conv3d(4, CHANNELS, 3, padding=1))
        self.base_digest = hashlib.sha256(b"video_experts").hexdigest()

    def component_at(self, sigma):
        return "transformer" if sigma >= SWITCH_SIGMA else "transformer_2"

    def encode(self, prompts):
        import torch

        digests = [hashlib.sha256(prompt.encode()).digest()[:CHANNELS] for prompt in prompts]
        return {"shift": torch.tensor([list(digest) for digest in digests]).float() / 255 - 0.5}

    def velocity(self, latents, sigma, conditions):
        import torch

        experts = {self.component_at(value) for value in sigma.tolist()}
        assert len(experts) == 1, "the stages promise rows of one component"
        level = sigma.float().reshape(-1, 1, 1, 1, 1).expand(-1, 1, *latents.shape[2:])
        shifted = latents + conditions["shift"][:, :, None, None, None]
        return self.components[experts.pop()](torch.cat([shifted, level], 1))

    def decode(self, latents):
        import torch

        grey = (latents[:, :1] / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return Video(grey.expand(-1, 3, -1, -1, -1).transpose(1, 2).contiguous(), fps=8.0)


def build(config, dtype="fp32"):
    return VideoExperts(config)
