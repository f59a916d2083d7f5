"""Throw-away policy: packed-token audio latents [N, L, C]; attention over the tokens."""

import hashlib
from typing import Literal

from tasks.contracts.config import PolicyConfig
from tasks.contracts.media import Audio

TOKENS, CHANNELS, WIDTH = 6, 4, 8


class Config(PolicyConfig):
    """Nothing to set."""

    name: Literal["packed_audio"] = "packed_audio"


class PackedAudio:
    """A few hundred parameters: one attention block over L tokens and a prompt token."""

    latent_shape = (TOKENS, CHANNELS)

    def __init__(self, config):
        import torch
        from torch import nn

        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            # An inner size of CHANNELS + 1 = 5 would not do: MKL then rounds a row by its place in the batch.
            block = nn.ModuleDict({"enter": nn.Linear(2 * CHANNELS, WIDTH),
                                   "attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True),
                                   "leave": nn.Linear(WIDTH, CHANNELS)})
        self.components = {"transformer": block}
        self.base_digest = hashlib.sha256(b"packed_audio").hexdigest()

    def component_at(self, sigma):
        return "transformer"

    def encode(self, prompts):
        import torch

        digests = [hashlib.sha256(prompt.encode()).digest()[:WIDTH] for prompt in prompts]
        return {"prompt_token": (torch.tensor([list(digest) for digest in digests]).float() / 255 - 0.5)[:, None]}

    def velocity(self, latents, sigma, conditions):
        import torch

        block = self.components["transformer"]
        level = sigma.float().reshape(-1, 1, 1).expand(-1, *self.latent_shape)
        hidden = block["enter"](torch.cat([latents, level], 2))
        tokens = torch.cat([conditions["prompt_token"], hidden], 1)
        mixed, _ = block["attention"](tokens, tokens, tokens, need_weights=False)
        return block["leave"](hidden + mixed[:, 1:])

    def decode(self, latents):
        return Audio(latents.flatten(1).tanh()[:, None].contiguous(), sample_rate_hz=16000)


def build(config, dtype="fp32"):
    return PackedAudio(config)
