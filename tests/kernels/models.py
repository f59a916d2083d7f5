"""Tiny random models of the families that `apply_kernels` knows, and inputs. No download, seconds on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A model class at toy size."""

    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    """(batch, text_length) -> keyword arguments of the model; sample i is the same for every batch size."""
    batched: tuple[str, ...]
    """Arguments whose first dimension is the batch."""


def _randomise(model: nn.Module) -> nn.Module:
    """Weights that let every part matter: also gates, biases and norms, which start at 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.data.copy_(noise * scale + (1.0 if "norm" in name and parameter.dim() == 1 else 0.0))
    return model.eval()


def _samples(batch: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + i))
                        for i in range(batch)])


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return _randomise(SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm"))


def _sd3_inputs(batch: int, text: int = 5) -> Inputs:
    return {"hidden_states": _samples(batch, 4, 8, 6),
            "encoder_hidden_states": _samples(batch, 7, 24, seed=1)[:, :text],
            "pooled_projections": _samples(batch, 20, seed=2), "timestep": torch.arange(batch) * 37.0 + 500.0,
            "return_dict": False}


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return _randomise(FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=True, axes_dims_rope=(4, 6, 6)))


def _flux_inputs(batch: int, text: int = 5) -> Inputs:
    rows = torch.arange(12)
    ids = torch.stack((torch.zeros(12), (rows // 4).float(), (rows % 4).float()), 1)
    return {"hidden_states": _samples(batch, 12, 16), "encoder_hidden_states": _samples(batch, 7, 24, seed=1)[:, :text],
            "pooled_projections": _samples(batch, 20, seed=2), "timestep": torch.arange(batch) * 0.037 + 0.5,
            "guidance": torch.full((batch,), 3.5), "img_ids": ids, "txt_ids": torch.zeros(text, 3),
            "return_dict": False}


def _qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return _randomise(QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6)))


def _qwen_inputs(batch: int, text: int = 5) -> Inputs:
    lengths = torch.tensor([3, 5, 2, 4] * batch)[:batch].clamp(max=text)
    mask = torch.arange(text)[None] < lengths[:, None]
    return {"hidden_states": _samples(batch, 12, 16), "encoder_hidden_states": _samples(batch, 9, 24, seed=1)[:, :text],
            "encoder_hidden_states_mask": mask, "timestep": torch.arange(batch) * 0.037 + 0.5,
            "img_shapes": [[(1, 3, 4)]] * batch, "return_dict": False}


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return _randomise(WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=24,
        freq_dim=16, ffn_dim=48, num_layers=2, cross_attn_norm=True, rope_max_seq_len=16))


def _wan_inputs(batch: int, text: int = 5) -> Inputs:
    return {"hidden_states": _samples(batch, 4, 2, 4, 6),
            "encoder_hidden_states": _samples(batch, 7, 24, seed=1)[:, :text],
            "timestep": torch.arange(batch) * 37.0 + 500.0, "return_dict": False}


FAMILIES: dict[str, Family] = {
    "sd3": Family(_sd3, _sd3_inputs, ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")),
    "flux": Family(_flux, _flux_inputs,
                   ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance")),
    "qwen": Family(_qwen, _qwen_inputs,
                   ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep")),
    "wan": Family(_wan, _wan_inputs, ("hidden_states", "encoder_hidden_states", "timestep")),
}

LORA_TARGETS = {
    "sd3": ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"],
    "flux": ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp"],
    "qwen": ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj"],
    "wan": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj"],
}


def add_lora(model: nn.Module, family: str, rank: int = 4) -> list[nn.Parameter]:
    """Freeze the model and give it adapters whose up projection is not zero; returns the adapters' parameters."""
    from peft import LoraConfig

    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_TARGETS[family]))  # type: ignore[operator]
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return [p for p in model.parameters() if p.requires_grad]


def take(inputs: Inputs, family: str, samples: slice | list[int]) -> Inputs:
    """The inputs of some samples."""
    out = dict(inputs)
    for name in FAMILIES[family].batched:
        out[name] = inputs[name][samples]
    if "img_shapes" in out:
        out["img_shapes"] = out["img_shapes"][: len(out["hidden_states"])]
    return out


def to(inputs: Inputs, device: torch.device | str, dtype: torch.dtype) -> Inputs:
    """On a device; the hidden states in `dtype`, times as they are."""
    out = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            keep = name in ("timestep", "guidance", "img_ids", "txt_ids") or not value.is_floating_point()
            value = value.to(device) if keep else value.to(device, dtype)
        out[name] = value
    return out
