"""The embedded policy: a real miniature of text rendering, which paints two characters in 16x32 pixels on a CPU.

In: prompts such as ``a red sign that says "7K"``. Out: velocities of diffusers' own `SD3Transformer2DModel` (1.3 M
parameters) and images. Next: rollout and update drive it like any other policy. Latents are pixels, so there is no VAE,
and the prompt encoder is a table of words and characters, trained with the transformer and frozen in RL.
The checkpoint is made by `tasks.policies._pretrain_tiny_text`.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.contracts.config import Dtype, PolicyConfig
from tasks.contracts.errors import CheckpointError, ContractError
from tasks.contracts.media import Images

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKPOINT = Path(__file__).parent / "assets" / "tiny_text.safetensors"
CHARSET = "ACEFHKLMNPRTUXY34679"
NUM_CHARACTERS = 2
COLOURS = ("red", "blue", "green", "black")
TEMPLATES = ('a {colour} sign that says "{text}"', '{colour} text reading "{text}"')
HEIGHT, WIDTH = 16, 32
HIDDEN_SIZE = 96
NUM_LAYERS, NUM_HEADS, PATCH_SIZE = 4, 4, 4

_PAD, _EMPTY, _QUOTE = "<pad>", "<empty>", '"'
_WORDS = ("a", "sign", "that", "says", "text", "reading", *COLOURS)
_VOCABULARY = {token: index for index, token in enumerate((_PAD, _EMPTY, _QUOTE, *_WORDS, *CHARSET))}
_MAX_WORDS = 5
NUM_TOKENS = _MAX_WORDS + 1 + NUM_CHARACTERS
"""Tokens of every prompt: its words, the quote, its characters; shorter prompts end in rows of zeros."""
_CAN_PAINT = (f"tiny_text paints exactly {NUM_CHARACTERS} of the characters {CHARSET} in {', '.join(COLOURS)}, from "
              f"prompts like {TEMPLATES[0].format(colour='red', text='7K')!r} or "
              f"{TEMPLATES[1].format(colour='red', text='7K')!r}")


class Config(PolicyConfig):
    """Settings of the embedded policy."""

    name: Literal["tiny_text"] = "tiny_text"
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0",
                                     "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    """Endings of the names of the linear layers that get an adapter; used only with ``trainable: lora``."""


def check(run_config: Any) -> None:
    """Refuse what cannot work, while the recipe is parsed.

    Raises:
        ValueError: adapters at least as large as the layers they adapt, or no layer to adapt.
    """
    config = run_config.policy
    if config.trainable == "lora" and config.lora_rank >= HIDDEN_SIZE:
        raise ValueError(f"policy.lora_rank is {config.lora_rank}, but the layers of tiny_text are {HIDDEN_SIZE} wide: "
                         "such an adapter is not low-rank. Use a rank of 4 to 32, or trainable: full")
    if config.trainable == "lora" and not config.lora_targets:
        raise ValueError("policy.lora_targets is empty, so nothing would be trained; leave it out for the attention "
                         "projections")


def split_of(text: str) -> Literal["dev", "test", "train"]:
    """The split a painted string belongs to: one tenth dev, one tenth test, the rest for pretraining and RL."""
    return {0: "dev", 1: "test"}.get(zlib.crc32(text.encode()) % 10, "train")  # type: ignore[return-value]


def tokenize(prompt: str) -> list[tuple[int, int]]:
    """Token and position ids of one prompt, at most `NUM_TOKENS` pairs. Position 0 is a word, k the k-th character.

    Raises:
        ContractError: the prompt asks for something the model never learned; names it and what can be painted.
    """
    if not prompt:
        return [(_VOCABULARY[_EMPTY], 0)]
    head, *rest = prompt.split('"')
    if len(rest) != 2 or rest[1].strip():
        raise ContractError(f"prompt {prompt!r} does not end in exactly one quoted text. {_CAN_PAINT}.")
    words, text = head.split(), rest[0]
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        raise ContractError(f"prompt {prompt!r} has words the model never saw: {', '.join(unknown)}. {_CAN_PAINT}.")
    if len(words) > _MAX_WORDS:
        raise ContractError(f"prompt {prompt!r} has {len(words)} words before the text, at most {_MAX_WORDS} fit. "
                            f"{_CAN_PAINT}.")
    if len(text) != NUM_CHARACTERS or not set(text) <= set(CHARSET):
        raise ContractError(f"prompt {prompt!r} asks for the text {text!r}. {_CAN_PAINT}.")
    return [*((_VOCABULARY[word], 0) for word in words), (_VOCABULARY[_QUOTE], 0),
            *((_VOCABULARY[character], place) for place, character in enumerate(text, 1))]


def token_ids(prompts: Sequence[str]) -> tuple["Tensor", "Tensor"]:
    """Token and position ids, int64 [N, NUM_TOKENS] each, padded with token 0."""
    import torch

    ids = torch.zeros(2, len(prompts), NUM_TOKENS, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        pairs = tokenize(prompt)
        ids[:, row, :len(pairs)] = torch.tensor(pairs).T
    return ids[0], ids[1]


def embed(prompt_encoder: "nn.ModuleDict", tokens: "Tensor", positions: "Tensor") -> dict[str, "Tensor"]:
    """Conditions of tokenized prompts: ``prompt_embeds`` [N, L, D] and their mean, projected, ``pooled`` [N, D]."""
    mask = (tokens != _VOCABULARY[_PAD]).unsqueeze(-1)
    rows = (prompt_encoder["tokens"](tokens) + prompt_encoder["positions"](positions)) * mask
    return {"prompt_embeds": rows, "pooled": prompt_encoder["pool"](rows.sum(1) / mask.sum(1))}


def new_modules() -> tuple["nn.Module", "nn.ModuleDict"]:
    """The transformer and the prompt encoder, freshly initialised from torch's global generator."""
    from diffusers import SD3Transformer2DModel
    from torch import nn

    prompt_encoder = nn.ModuleDict({
        "tokens": nn.Embedding(len(_VOCABULARY), HIDDEN_SIZE),
        "positions": nn.Embedding(1 + NUM_CHARACTERS, HIDDEN_SIZE),
        "pool": nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE),
    })
    transformer = SD3Transformer2DModel(
        sample_size=WIDTH, patch_size=PATCH_SIZE, in_channels=3, out_channels=3, num_layers=NUM_LAYERS,
        attention_head_dim=HIDDEN_SIZE // NUM_HEADS, num_attention_heads=NUM_HEADS, joint_attention_dim=HIDDEN_SIZE,
        caption_projection_dim=HIDDEN_SIZE, pooled_projection_dim=HIDDEN_SIZE,
        pos_embed_max_size=WIDTH // PATCH_SIZE, qk_norm="rms_norm")
    return transformer, prompt_encoder


def predict(transformer: "nn.Module", latents: "Tensor", sigma: "Tensor",
            conditions: Mapping[str, "Tensor"]) -> "Tensor":
    """One forward pass: the velocity of latents [M, 3, H, W] at sigma [M], in the transformer's output dtype."""
    return transformer(hidden_states=latents, timestep=sigma * 1000, encoder_hidden_states=conditions["prompt_embeds"],
                       pooled_projections=conditions["pooled"], return_dict=False)[0]


class TinyText:
    """The policy; see `tasks.policies.base.Policy`. Weights stay fp32; `dtype` is what they compute in."""

    latent_shape: tuple[int, ...] = (3, HEIGHT, WIDTH)

    def __init__(self, config: Config, transformer: "nn.Module", prompt_encoder: "nn.ModuleDict", base_digest: str,
                 dtype: Dtype = "fp32") -> None:
        self.config = config
        self.base_digest = base_digest
        self.dtype = dtype
        self._transformer = transformer.eval()
        self._prompt_encoder = prompt_encoder.eval().requires_grad_(False)
        self._encoded: dict[str, dict[str, Tensor]] = {}

    @property
    def components(self) -> Mapping[str, "nn.Module"]:
        """The transformer; the prompt encoder is never trained in RL."""
        return {"transformer": self._transformer}

    def component_at(self, sigma: float) -> str:
        """Always ``transformer``."""
        return "transformer"

    def encode(self, prompts: Sequence[str]) -> dict[str, "Tensor"]:
        """``prompt_embeds`` fp32 [N, NUM_TOKENS, HIDDEN_SIZE] and ``pooled`` fp32 [N, HIDDEN_SIZE].

        Each distinct prompt is encoded once, on its own, so a row's bits do not depend on the others.

        Raises:
            ContractError: a prompt the model cannot paint.
        """
        import torch

        for prompt in prompts:
            if prompt not in self._encoded:
                with torch.no_grad():
                    self._encoded[prompt] = embed(self._prompt_encoder, *token_ids([prompt]))
        shapes = {"prompt_embeds": (0, NUM_TOKENS, HIDDEN_SIZE), "pooled": (0, HIDDEN_SIZE)}
        return {name: torch.cat([torch.empty(shape), *(self._encoded[prompt][name] for prompt in prompts)])
                for name, shape in shapes.items()}

    def velocity(self, latents: "Tensor", sigma: "Tensor", conditions: Mapping[str, "Tensor"]) -> "Tensor":
        """dx/dsigma, fp32 [M, 3, H, W], of fp32 latents at sigma [M], any float dtype."""
        import torch

        device = next(self._transformer.parameters()).device
        lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.dtype)
        with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
            velocity = predict(self._transformer, latents.to(device), sigma.to(device, torch.float32),
                               {name: value.to(device) for name, value in conditions.items()})
        return velocity.float()

    def decode(self, latents: "Tensor") -> Images:
        """uint8 images of latents [N, 3, H, W]: -1 is 0, 1 is 255, values beyond are clipped."""
        import torch

        pixels = (latents.detach().float() / 2 + 0.5).clamp(0, 1) * 255
        return Images(pixels=pixels.round().to(torch.uint8))


def build(config: Config, dtype: Dtype = "fp32") -> TinyText:
    """Load the checkpoint.

    Raises:
        CheckpointError: the file is missing, unreadable, or of another model; says which file and what to do.
    """
    path = Path(config.checkpoint) if config.checkpoint else CHECKPOINT
    transformer, prompt_encoder = load_modules(path)
    return TinyText(config, transformer, prompt_encoder, hashlib.sha256(path.read_bytes()).hexdigest(), dtype)


def load_modules(path: Path) -> tuple["nn.Module", "nn.ModuleDict"]:
    """The transformer and the prompt encoder of a checkpoint.

    Raises:
        CheckpointError: as `build`.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    cure = ("Leave policy.checkpoint empty for the one that ships with flowmill, restore it with `git checkout`, or "
            "make one: python -m tasks.policies._pretrain_tiny_text --out FILE")
    if not path.is_file():
        raise CheckpointError(f"tiny_text checkpoint {path}: no such file. {cure}.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"tiny_text checkpoint {path} ({path.stat().st_size} bytes) is not a readable "
                              f"safetensors file: {error}. {cure}.") from None
    with torch.random.fork_rng(devices=[]):  # initial values are overwritten; leave the caller's generator alone
        modules = dict(zip(("transformer", "prompt_encoder"), new_modules(), strict=True))
    for name, module in modules.items():
        have = {key.removeprefix(f"{name}."): value.float() for key, value in tensors.items()
                if key.startswith(f"{name}.")}
        want = module.state_dict()
        wrong = sorted(key for key in have.keys() | want.keys()
                       if key not in have or key not in want or have[key].shape != want[key].shape)
        broken = sorted(key for key, value in have.items() if not value.isfinite().all())
        if wrong or broken:
            what = f"does not fit the model in {len(wrong)} tensors" if wrong else "holds values that are not finite"
            raise CheckpointError(f"tiny_text checkpoint {path} {what}, first {name}.{(wrong or broken)[0]}. {cure}.")
        module.load_state_dict(have)
    return modules["transformer"], modules["prompt_encoder"]  # type: ignore[return-value]
