"""Fused forwards of the transformer blocks that diffusers' SD3, FLUX, Qwen-Image and Wan models are made of.

In: a block module (weights are read where they lie, PEFT adapters included) and the block's own arguments. Out: what
the block returns. Only operators of this package and copies are used, so a sample's bits depend on nothing but the
sample; `apply_kernels` puts these in the place of the modules' `forward`. diffusers is never imported: modules are told
by class name and checked by structure. A block with a feature that is not covered here is left to its parts, which are
replaced one by one (`leaf_forward`).
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .attention import attention
from .elementwise import gelu, gelu_tanh, layer_norm_modulate, qk_norm_rope, rms_norm, silu
from .functional import KernelOptions, Layer, feed_forward, linear, linears, patch_embed
from .projected import Stream, projected_attention

Forward = Callable[..., Any]
_LAYER_NORMS = ("LayerNorm", "FP32LayerNorm")
Rope = tuple[Tensor, Tensor]


class UnsupportedError(ValueError):
    """A module, or an argument of a call, that these kernels do not compute."""


def kind(module: nn.Module) -> str:
    return type(module).__name__


def _is_lora(module: nn.Module) -> bool:
    """PEFT's plain LoRA around a layer; its other methods have other attributes or class names."""
    return kind(module) == "Linear" and hasattr(module, "base_layer") and hasattr(module, "lora_A")


def is_linear(module: nn.Module) -> bool:
    """A plain nn.Linear, or PEFT's LoRA around one."""
    return type(module) is nn.Linear or (_is_lora(module) and type(module.base_layer) is nn.Linear)


def layer_of(module: Any) -> Layer:
    """Weights of an nn.Linear, with its PEFT adapter if one is active.

    Raises:
        UnsupportedError: several active adapters, a variant (DoRA) or adapter dropout while training.
    """
    if type(module) is nn.Linear:
        return Layer(module.weight, module.bias)
    if not is_linear(module):  # reading its .weight would leave out what the module adds to it
        raise UnsupportedError(f"a {type(module).__module__}.{kind(module)} stands where an nn.Linear or PEFT's plain "
                               "LoRA around one is computed; merge or remove it")
    base = module.base_layer
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not active:
        return Layer(base.weight, base.bias)
    if len(active) > 1:
        raise UnsupportedError(f"{len(active)} LoRA adapters are active ({', '.join(active)}); activate one with "
                               "set_adapter, or merge the others")
    name = active[0]
    if name in getattr(module, "lora_variant", {}):
        raise UnsupportedError(f"adapter {name!r} is a LoRA variant (DoRA or the like); only plain LoRA is computed")
    dropout = module.lora_dropout[name]
    if module.training and getattr(dropout, "p", 0.0) > 0:
        raise UnsupportedError(f"adapter {name!r} has dropout {dropout.p}: rollout and training would differ; set "
                               "lora_dropout to 0")
    down, up = module.lora_A[name], module.lora_B[name]
    if up.bias is not None:
        raise UnsupportedError(f"adapter {name!r} has a bias in lora_B (lora_bias=True); only plain LoRA is computed")
    return Layer(base.weight, base.bias, down.weight, up.weight, float(module.scaling[name]))


def _no_dropout(parts: Any) -> None:
    """Modules that the block's own forward would call between ours: dropout that does nothing."""
    for part in parts:
        if isinstance(part, nn.Dropout):
            if part.p > 0 and part.training:
                raise UnsupportedError(f"dropout {part.p} in training mode: rollout and training would differ; set it "
                                       "to 0")
        elif not isinstance(part, nn.Identity):
            raise UnsupportedError(f"a {kind(part)} stands where only dropout is expected")


def _out(attn: Any) -> Layer:
    """An attention's output projection."""
    _no_dropout(attn.to_out[1:])
    return layer_of(attn.to_out[0])


def _check_attention(attn: Any, *processors: str) -> None:
    """The fused forwards are what these processors compute from separate projections, and nothing else."""
    if kind(attn.processor) not in processors:
        raise UnsupportedError(f"the attention processor is a {kind(attn.processor)}; the fused block computes "
                               f"{processors[0]} alone. Set that one, or take the kernels off")
    if getattr(attn, "fused_projections", False):
        raise UnsupportedError("the attention's projections are fused; call unfuse_qkv_projections() first")


def _norm_weight(norm: nn.Module | None) -> Tensor | None:
    if norm is None:
        return None
    if kind(norm) != "RMSNorm":
        raise UnsupportedError(f"a {kind(norm)} stands where a query or key norm (RMSNorm) is computed")
    return norm.weight  # type: ignore[return-value]


def _norm_eps(norm: Any, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if norm.eps is None else float(norm.eps)


def _rms_like(norm: nn.Module | None) -> bool:
    return norm is None or (kind(norm) == "RMSNorm" and norm.weight is not None
                            and getattr(norm, "bias", None) is None)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, x.shape[2] // heads)


def _stream(x: Tensor, to_q: nn.Module | None, to_k: nn.Module, to_v: nn.Module, norm_q: Any, norm_k: Any,
            rope: Rope | None = None) -> Stream:
    """Tokens that share projections, their head norms and rotary embedding."""
    eps = 1e-6 if norm_k is None else _norm_eps(norm_k, x.dtype)
    if norm_q is not None and _norm_eps(norm_q, x.dtype) != eps:
        raise UnsupportedError(f"query and key norms have different eps, {norm_q.eps} and {norm_k.eps}")
    return Stream(x, None if to_q is None else layer_of(to_q), layer_of(to_k), layer_of(to_v), _norm_weight(norm_q),
                  _norm_weight(norm_k), eps, rope)


def _attend(options: KernelOptions, q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
    return attention(q, k, v, lengths=lengths, num_sms=options.num_sms, backend=options.backend)


def _modulate(options: KernelOptions, norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(modulated rows, x): x comes back for the residual, so that its gradients are added inside the norm."""
    if kind(norm) not in _LAYER_NORMS:
        raise UnsupportedError(f"a {kind(norm)} stands where a LayerNorm is computed")
    return layer_norm_modulate(x, scale, shift, weight=norm.weight, bias=norm.bias, eps=norm.eps, keep=True,
                               backend=options.backend)


def _feed_forward_parts(ff: Any) -> tuple[nn.Module, str, nn.Module] | None:
    """(first linear, "tanh" or "none", second linear) of diffusers' FeedForward with GELU; None for another kind."""
    net = list(ff.net)
    if len(net) < 3 or kind(net[0]) != "GELU" or not is_linear(net[0].proj) or not is_linear(net[2]):
        return None
    if any(not isinstance(part, nn.Dropout | nn.Identity) for part in (net[1], *net[3:])):
        return None
    return net[0].proj, net[0].approximate, net[2]


def _feed_forward(options: KernelOptions, ff: nn.Module, x: Tensor, gate: Tensor | None, residual: Tensor) -> Tensor:
    """residual + gate * second(gelu(first(x)))."""
    net = ff.net
    first, approximate, second = net[0].proj, net[0].approximate, net[2]  # type: ignore[index]
    _no_dropout([net[1], *net[3:]])  # type: ignore[index]
    return feed_forward(x, layer_of(first), layer_of(second), options=options, gate=gate, residual=residual,
                        activation="gelu_tanh" if approximate == "tanh" else "gelu")


def _conditioning(options: KernelOptions, module: Any, activated: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Shift, scale and gate rows [B, C] of an adaLN layer; `activated` is silu(temb)."""
    return linear(activated, layer_of(module.linear), options=options).chunk(parts, dim=1)


def _refuse(block: nn.Module, **given: Any) -> None:
    """Arguments that change the block's mathematics and are not covered: an error rather than other bits."""
    for name, value in given.items():
        if value is not None and value != {}:
            given_keys = f" with {', '.join(value)}" if isinstance(value, dict) else ""
            raise UnsupportedError(f"{kind(block)} with kernels applied got {name}{given_keys}, which they do not "
                                   "compute; remove it, or take the kernels off (.remove()) for this call")
    if getattr(block, "_chunk_size", None) is not None:
        raise UnsupportedError(f"{kind(block)} has feed-forward chunking on; switch it off (disable_forward_chunking)")


def _clip(x: Tensor) -> Tensor:
    """diffusers clips fp16 streams to finite values."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


# SD3 ---------------------------------------------------------------------------------------------------------------

def _covers_sd3(block: Any) -> bool:
    attns = [block.attn] + ([block.attn2] if block.attn2 is not None else [])
    norms = [n for a in attns for n in (a.norm_q, a.norm_k)] + [block.attn.norm_added_q, block.attn.norm_added_k]
    feeds = [block.ff] + ([] if block.context_pre_only else [block.ff_context])
    return all(_rms_like(n) for n in norms) and all(_feed_forward_parts(f) for f in feeds)


def sd3_block(block: Any, options: KernelOptions, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor,
              joint_attention_kwargs: dict | None = None) -> tuple[Tensor | None, Tensor]:
    """diffusers' JointTransformerBlock, with and without dual attention."""
    _refuse(block, joint_attention_kwargs=joint_attention_kwargs)
    attn, image, text = block.attn, hidden_states, encoder_hidden_states
    _check_attention(attn, "JointAttnProcessor2_0")
    active = silu(temb, backend=options.backend)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, *second = _conditioning(
        options, block.norm1, active, 9 if block.use_dual_attention else 6)
    norm = block.norm1.norm
    if block.use_dual_attention:
        shift2, scale2, gate2 = second
        x, x2, image = layer_norm_modulate(image, scale, shift, weight=norm.weight, bias=norm.bias, eps=norm.eps,
                                           scale2=scale2, shift2=shift2, keep=True, backend=options.backend)
    else:
        (x, image), x2, gate2 = _modulate(options, norm, image, scale, shift), None, None
    if block.context_pre_only:
        c_scale, c_shift = _conditioning(options, block.norm1_context, active, 2)
    else:
        c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = _conditioning(
            options, block.norm1_context, active, 6)
    c, text = _modulate(options, block.norm1_context.norm, text, c_scale, c_shift)

    # The last block returns no text, so its text asks nothing.
    out = projected_attention([
        _stream(x, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k),
        _stream(c, None if block.context_pre_only else attn.add_q_proj, attn.add_k_proj, attn.add_v_proj,
                attn.norm_added_q, attn.norm_added_k)], attn.heads, options=options)
    image = linear(out[0].flatten(2), _out(attn), options=options, gate=gate, residual=image)
    if block.use_dual_attention:
        attn2 = block.attn2
        _check_attention(attn2, "JointAttnProcessor2_0")
        out2, = projected_attention([_stream(x2, attn2.to_q, attn2.to_k, attn2.to_v, attn2.norm_q, attn2.norm_k)],  # type: ignore[arg-type]
                                    attn2.heads, options=options)
        image = linear(out2.flatten(2), _out(attn2), options=options, gate=gate2, residual=image)
    x, image = _modulate(options, block.norm2, image, scale_mlp, shift_mlp)
    image = _feed_forward(options, block.ff, x, gate_mlp, image)
    if block.context_pre_only:
        return None, image
    text = linear(out[1].flatten(2), layer_of(attn.to_add_out), options=options, gate=c_gate, residual=text)
    c, text = _modulate(options, block.norm2_context, text, c_scale_mlp, c_shift_mlp)
    return _feed_forward(options, block.ff_context, c, c_gate_mlp, text), image


# FLUX --------------------------------------------------------------------------------------------------------------

def _half_rope(image_rotary_emb: Any) -> Rope | None:
    """(cos, sin) [T, D] with every value twice -> [T, D / 2] fp32."""
    if image_rotary_emb is None:
        return None
    cos, sin = image_rotary_emb
    return cos[..., ::2].float().contiguous(), sin[..., ::2].float().contiguous()


def _rope_rows(rope: Rope | None, start: int, stop: int) -> Rope | None:
    return None if rope is None else (rope[0][start:stop], rope[1][start:stop])


def _covers_flux(block: Any) -> bool:
    attn = block.attn
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    return all(_rms_like(n) for n in norms) and all(_feed_forward_parts(f) for f in (block.ff, block.ff_context))


def _covers_flux_single(block: Any) -> bool:
    act = block.act_mlp
    return (_rms_like(block.attn.norm_q) and _rms_like(block.attn.norm_k) and is_linear(block.proj_mlp)
            and is_linear(block.proj_out) and type(act) is nn.GELU and act.approximate == "tanh")


def flux_block(block: Any, options: KernelOptions, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor,
               image_rotary_emb: Any = None, joint_attention_kwargs: dict | None = None) -> tuple[Tensor, Tensor]:
    """diffusers' FluxTransformerBlock; rope rows are text first, as FLUX's ids are."""
    _refuse(block, joint_attention_kwargs=joint_attention_kwargs)
    attn, image, text = block.attn, hidden_states, encoder_hidden_states
    _check_attention(attn, "FluxAttnProcessor")
    active, rope = silu(temb, backend=options.backend), _half_rope(image_rotary_emb)
    cut = text.shape[1]
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _conditioning(options, block.norm1, active, 6)
    c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = _conditioning(
        options, block.norm1_context, active, 6)
    x, image = _modulate(options, block.norm1.norm, image, scale, shift)
    c, text = _modulate(options, block.norm1_context.norm, text, c_scale, c_shift)
    out_i, out_t = projected_attention([
        _stream(x, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k,
                _rope_rows(rope, cut, cut + image.shape[1])),
        _stream(c, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k,
                _rope_rows(rope, 0, cut))], attn.heads, options=options)
    image = linear(out_i.flatten(2), _out(attn), options=options, gate=gate, residual=image)
    text = linear(out_t.flatten(2), layer_of(attn.to_add_out), options=options, gate=c_gate, residual=text)
    x, image = _modulate(options, block.norm2, image, scale_mlp, shift_mlp)
    image = _feed_forward(options, block.ff, x, gate_mlp, image)
    c, text = _modulate(options, block.norm2_context, text, c_scale_mlp, c_shift_mlp)
    return _clip(_feed_forward(options, block.ff_context, c, c_gate_mlp, text)), image


def flux_single_block(block: Any, options: KernelOptions, hidden_states: Tensor, encoder_hidden_states: Tensor,
                      temb: Tensor, image_rotary_emb: Any = None, joint_attention_kwargs: dict | None = None
                      ) -> tuple[Tensor, Tensor]:
    """diffusers' FluxSingleTransformerBlock: attention and MLP side by side over text and image together."""
    _refuse(block, joint_attention_kwargs=joint_attention_kwargs)
    attn, cut = block.attn, encoder_hidden_states.shape[1]
    _check_attention(attn, "FluxAttnProcessor")
    joined = torch.cat((encoder_hidden_states, hidden_states), 1)
    active = silu(temb, backend=options.backend)
    shift, scale, gate = _conditioning(options, block.norm, active, 3)
    x, joined = _modulate(options, block.norm.norm, joined, scale, shift)
    mlp = linear(x, layer_of(block.proj_mlp), options=options, activation="gelu_tanh")
    stream = _stream(x, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k, _half_rope(image_rotary_emb))
    out, = projected_attention([stream], attn.heads, options=options)
    out = torch.cat((out.flatten(2), mlp), 2)
    joined = _clip(linear(out, layer_of(block.proj_out), options=options, gate=gate, residual=joined))
    return joined[:, :cut], joined[:, cut:]


# Qwen-Image --------------------------------------------------------------------------------------------------------

def _covers_qwen(block: Any) -> bool:
    attn = block.attn
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    return (not block.zero_cond_t and all(_rms_like(n) for n in norms)
            and all(_feed_forward_parts(f) for f in (block.img_mlp, block.txt_mlp)))


def _complex_rope(freqs: Tensor) -> Rope:
    return freqs.real.float().contiguous(), freqs.imag.float().contiguous()


_CHECKED: list[tuple[Any, int | None]] = []  # the last mask looked at: a forward asks once a block


def _prefix_lengths(mask: Tensor) -> Tensor:
    """int32 [B]: how many leading tokens a boolean mask [B, T] keeps.

    Raises:
        UnsupportedError: for a mask with a hole. Looking costs one wait for the GPU a forward; in a CUDA graph's
            capture nothing can be looked at, so the warm-up before it is what looks.
    """
    keep = mask.bool()
    lengths = keep.sum(1, dtype=torch.int32)
    version = None if mask.is_inference() else mask._version
    if any(seen() is mask and at == version for seen, at in _CHECKED):
        return lengths
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return lengths
    if not torch.equal(keep, torch.arange(mask.shape[1], device=mask.device)[None] < lengths[:, None]):
        raise UnsupportedError("encoder_hidden_states_mask keeps tokens behind a masked one; the kernels take prompts "
                               "that are padded at the end")
    _CHECKED[:] = [(ref(mask), version)]
    return lengths


def qwen_block(block: Any, options: KernelOptions, hidden_states: Tensor, encoder_hidden_states: Tensor,
               encoder_hidden_states_mask: Tensor | None, temb: Tensor, image_rotary_emb: Any = None,
               joint_attention_kwargs: dict | None = None, modulate_index: Any = None) -> tuple[Tensor, Tensor]:
    """diffusers' QwenImageTransformerBlock; prompts padded at the end never reach another token's bits."""
    _refuse(block, joint_attention_kwargs=joint_attention_kwargs, modulate_index=modulate_index)
    attn, image, text = block.attn, hidden_states, encoder_hidden_states
    _check_attention(attn, "QwenDoubleStreamAttnProcessor2_0")
    active = silu(temb, backend=options.backend)
    shift, scale, gate, shift2, scale2, gate2 = linear(active, layer_of(block.img_mod[1]), options=options).chunk(6, 1)
    c_shift, c_scale, c_gate, c_shift2, c_scale2, c_gate2 = linear(active, layer_of(block.txt_mod[1]),
                                                                   options=options).chunk(6, 1)
    image_rope, text_rope = (None, None) if image_rotary_emb is None else map(_complex_rope, image_rotary_emb)
    x, image = _modulate(options, block.img_norm1, image, scale, shift)
    c, text = _modulate(options, block.txt_norm1, text, c_scale, c_shift)
    lengths = None if encoder_hidden_states_mask is None else (None, _prefix_lengths(encoder_hidden_states_mask))
    out_i, out_t = projected_attention([
        _stream(x, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k, image_rope),
        _stream(c, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k,
                text_rope)], attn.heads, options=options, lengths=lengths)
    image = linear(out_i.flatten(2), _out(attn), options=options, gate=gate, residual=image)
    text = linear(out_t.flatten(2), layer_of(attn.to_add_out), options=options, gate=c_gate, residual=text)
    x, image = _modulate(options, block.img_norm2, image, scale2, shift2)
    image = _feed_forward(options, block.img_mlp, x, gate2, image)
    c, text = _modulate(options, block.txt_norm2, text, c_scale2, c_shift2)
    text = _feed_forward(options, block.txt_mlp, c, c_gate2, text)
    return _clip(text), _clip(image)


# Wan ---------------------------------------------------------------------------------------------------------------

def _covers_wan(block: Any) -> bool:
    norms = (block.attn1.norm_q, block.attn1.norm_k, block.attn2.norm_q, block.attn2.norm_k)
    return (all(_rms_like(n) and n is not None for n in norms) and block.attn2.add_k_proj is None
            and bool(_feed_forward_parts(block.ffn)))


def wan_block(block: Any, options: KernelOptions, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor,
              rotary_emb: Any) -> Tensor:
    """diffusers' WanTransformerBlock (text to video): self-attention, cross-attention, feed-forward."""
    if temb.dim() != 3:
        raise UnsupportedError(f"{kind(block)} with kernels applied needs temb [B, 6, C], got {tuple(temb.shape)}: one "
                               "timestep a token (Wan 2.2 TI2V) is not computed here")
    _refuse(block)
    for one in (block.attn1, block.attn2):
        _check_attention(one, "WanAttnProcessor", "WanAttnProcessor2_0")
    x = hidden_states
    # fp32 like the table: elementwise, so no order of summation.
    shift, scale, gate, shift2, scale2, gate2 = (block.scale_shift_table + temb.float()).unbind(1)
    rope = None
    if rotary_emb is not None:
        cos, sin = (t.reshape(-1, t.shape[-1]) for t in rotary_emb)
        rope = cos[:, 0::2].float().contiguous(), sin[:, 1::2].float().contiguous()

    def normed(attn: Any, norm: Any, t: Tensor, rope: Rope | None) -> Tensor:
        return qk_norm_rope(_heads(t, attn.heads), norm.weight, eps=_norm_eps(norm, t.dtype), rope=rope, norm="all",
                            backend=options.backend)

    attn = block.attn1
    y, x = _modulate(options, block.norm1, x, scale, shift)
    q, k, v = linears(y, [layer_of(p) for p in (attn.to_q, attn.to_k, attn.to_v)], options=options)
    q, k = normed(attn, attn.norm_q, q, rope), normed(attn, attn.norm_k, k, rope)
    out = _attend(options, q, k, _heads(v, attn.heads))
    x = linear(out.flatten(2), _out(attn), options=options, gate=gate, residual=x)

    attn = block.attn2
    y = x
    if not isinstance(block.norm2, nn.Identity):
        norm = block.norm2
        y, x = layer_norm_modulate(x, None, None, weight=norm.weight, bias=norm.bias, eps=norm.eps, keep=True,
                                   backend=options.backend)
    q = linear(y, layer_of(attn.to_q), options=options)  # type: ignore[arg-type]
    k, v = linears(encoder_hidden_states, [layer_of(p) for p in (attn.to_k, attn.to_v)], options=options)
    q, k = normed(attn, attn.norm_q, q, None), normed(attn, attn.norm_k, k, None)
    out = _attend(options, q, k, _heads(v, attn.heads))
    x = linear(out.flatten(2), _out(attn), options=options, residual=x)

    y, x = _modulate(options, block.norm3, x, scale2, shift2)
    return _feed_forward(options, block.ffn, y, gate2, x)


# The last norm -----------------------------------------------------------------------------------------------------

def _covers_norm_out(module: Any) -> bool:
    return kind(module.norm) in _LAYER_NORMS and is_linear(module.linear)


def norm_out(module: Any, options: KernelOptions, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    """diffusers' AdaLayerNormContinuous."""
    active = silu(conditioning_embedding, backend=options.backend).to(x.dtype)
    scale, shift = _conditioning(options, module, active, 2)
    return _modulate(options, module.norm, x, scale, shift)[0]


BLOCKS: dict[str, tuple[Callable[[Any], bool], Forward]] = {
    "JointTransformerBlock": (_covers_sd3, sd3_block),
    "FluxTransformerBlock": (_covers_flux, flux_block),
    "FluxSingleTransformerBlock": (_covers_flux_single, flux_single_block),
    "QwenImageTransformerBlock": (_covers_qwen, qwen_block),
    "WanTransformerBlock": (_covers_wan, wan_block),
    "AdaLayerNormContinuous": (_covers_norm_out, norm_out),
}
"""Class name -> whether this instance is covered, and its forward(block, options, ...)."""


# Single modules ----------------------------------------------------------------------------------------------------

def linear_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    if x.dim() == 1:
        return linear(x[None], layer_of(module), options=options)[0]
    return linear(x, layer_of(module), options=options)


def dropout_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    _no_dropout([module])
    return x


def conv_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    """A patch convolution; channels first, as the convolution returns."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    patch = module.kernel_size
    if x.dim() != 2 + len(patch):
        raise UnsupportedError(f"{kind(module)} with kernels applied takes a batch [B, C, ...], got {tuple(x.shape)}")
    x = x[(..., *(slice(0, size // p * p) for size, p in zip(x.shape[2:], patch, strict=True)))]  # as torch floors
    layer = Layer(module.weight.flatten(1), module.bias)
    grid = [size // p for size, p in zip(x.shape[2:], patch, strict=True)]
    return patch_embed(x, layer, patch, options=options).transpose(1, 2).unflatten(2, grid)


def layer_norm_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    rows = x[None, None] if x.dim() == 1 else x[:, None].flatten(1, -2)
    return layer_norm_modulate(rows, None, None, weight=module.weight, bias=module.bias, eps=module.eps,  # type: ignore[union-attr]
                               backend=options.backend).view(x.shape)


def rms_norm_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, eps=_norm_eps(module, x.dtype), backend=options.backend)


def gelu_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    return (gelu_tanh if module.approximate == "tanh" else gelu)(x, backend=options.backend)


def silu_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    return silu(x, backend=options.backend)


def gelu_projection_forward(module: Any, options: KernelOptions, x: Tensor) -> Tensor:
    """diffusers' GELU: a projection and its activation."""
    if module.approximate == "tanh":
        return linear(x, layer_of(module.proj), options=options, activation="gelu_tanh")
    return gelu(linear(x, layer_of(module.proj), options=options), backend=options.backend)


def _last_dim_only(module: Any) -> bool:
    shape = getattr(module, "normalized_shape", None) or getattr(module, "dim", None)
    return len(tuple(shape)) == 1 if shape is not None else False


def leaf_forward(module: nn.Module) -> Forward | None:
    """The forward that takes the place of a single module's, or None for a module that is no such thing."""
    if is_linear(module):
        return linear_forward
    if type(module) in (nn.Conv2d, nn.Conv3d):
        plain = module.padding == "valid" or not any(module.padding)  # type: ignore[arg-type]
        patch = (module.kernel_size == module.stride and module.groups == 1 and plain
                 and all(d == 1 for d in module.dilation))
        return conv_forward if patch else None
    if (type(module) is nn.LayerNorm or kind(module) == "FP32LayerNorm") and _last_dim_only(module):
        return layer_norm_forward
    if kind(module) == "RMSNorm" and _last_dim_only(module) and getattr(module, "bias", None) is None:
        return rms_norm_forward
    if type(module) is nn.GELU:
        return gelu_forward
    if type(module) is nn.SiLU:
        return silu_forward
    if type(module) is nn.Dropout:
        return dropout_forward
    if kind(module) == "GELU" and hasattr(module, "proj") and is_linear(module.proj):
        return gelu_projection_forward
    return None
