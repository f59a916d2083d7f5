"""`apply_kernels`: put this package's operators in the place of a diffusers transformer's own, and take them off again.

In: a module and a mode. Out: a handle that lists what was replaced. Only the instances' `forward` changes: parameters,
buffers, names and the state dict stay, so checkpoints, PEFT adapters and optimizers see nothing. Hooks of replaced
modules stay; a fused block calls none of its parts, so hooks inside one are refused (those added later are not called).
"""

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from .blocks import BLOCKS, Forward, UnsupportedError, kind, leaf_forward
from .functional import KernelOptions
from .gemm import Backend

ApplyMode = Literal["consistent", "tp_invariant", "reference"]
_MODES = ("consistent", "tp_invariant", "reference")
_LOCK = threading.RLock()
_STACK = "_flowmill_forwards"

# What may stay as it is: containers, and classes whose own code between their parts is elementwise, copies or views
# (read in diffusers 0.42). Any other class may sum over something, so it carries no promise unless it is replaced.
_KEEP = frozenset((
    "ModuleList", "ModuleDict", "Sequential", "ParameterList", "ParameterDict", "Identity", "Embedding", "ReLU", "Tanh",
    "Sigmoid", "Flatten", "Unflatten", "DistributedDataParallel", "OptimizedModule",
    "SD3Transformer2DModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel",
    "PatchEmbed", "Timesteps", "TimestepEmbedding", "CombinedTimestepTextProjEmbeddings",
    "CombinedTimestepGuidanceTextProjEmbeddings", "PixArtAlphaTextProjection", "FluxPosEmbed", "QwenEmbedRope",
    "QwenEmbedLayer3DRope", "QwenTimestepProjEmbeddings", "WanRotaryPosEmbed", "WanTimeTextImageEmbedding",
    "FeedForward", "AdaLayerNormZero", "AdaLayerNormZeroSingle", "SD35AdaLayerNormZeroX", "AdaLayerNormContinuous",
))


@dataclass(frozen=True)
class Replacement:
    """One module whose forward was replaced."""

    name: str
    """Path in the root module; empty for the root itself."""
    kind: str
    """Class name."""
    fused: bool
    """A whole block, rather than a single linear, norm or activation."""


@dataclass
class _Entry:
    """One level of a module's replaced forwards."""

    owner: "AppliedKernels"
    forward: Forward | None
    """None: the module's own (mode `reference`)."""


class _Dispatch:
    """The instance's `forward`: calls the topmost level. A class, so that a copied module gets its own."""

    def __init__(self, module: nn.Module, original: Any) -> None:
        self.module, self.original = module, original
        functools.update_wrapper(self, original, updated=())

    @torch.compiler.disable  # a compiler that traced into the operators would put its own arithmetic in their place
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A tuple, replaced as a whole under the lock: a call in another thread sees the old or the new one.
        stack: tuple[_Entry, ...] = self.module.__dict__.get(_STACK, ())
        entry = stack[-1] if stack else None
        if entry is None or entry.forward is None:
            return self.original(*args, **kwargs)
        return entry.forward(self.module, entry.owner.options, *args, **kwargs)


class AppliedKernels:
    """Handle of one `apply_kernels`: `replaced` says what, `remove` undoes it; also a context manager."""

    def __init__(self, mode: ApplyMode, options: KernelOptions) -> None:
        self.mode = mode
        self.options = options
        self.replaced: tuple[Replacement, ...] = ()
        self.unreached: tuple[Replacement, ...] = ()
        """Modules that keep torch's own arithmetic (only with `partial`): their bits carry no promise."""
        self._modules: list[nn.Module] = []

    def set_num_sms(self, num_sms: int) -> None:
        """The partition's new SM count, from the next call on; bits stay."""
        self.options = replace(self.options, num_sms=num_sms)

    def remove(self) -> None:
        """Give the modules the forwards that they had; a second call does nothing. Nested applications keep theirs."""
        with _LOCK:
            for module in self._modules:
                _pop(module, self)
            self._modules = []

    def __getstate__(self) -> dict[str, Any]:
        # A copied block keeps its mode, and drags no other block along.
        return self.__dict__ | {"_modules": []}

    def __enter__(self) -> "AppliedKernels":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for item in self.replaced:
            counts[item.kind] = counts.get(item.kind, 0) + 1
        text = f"{self.mode}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        if self.unreached:
            text += f"; without promise: {', '.join(item.name for item in self.unreached)}"
        return text


def _push(module: nn.Module, entry: _Entry) -> None:
    stack = module.__dict__.get(_STACK, ())
    if not stack:
        own = module.__dict__.get("forward")  # an instance's own forward (accelerate's hooks) is what comes back
        dispatch = _Dispatch(module, own if own is not None else module.forward)
        dispatch.had_own = own is not None  # type: ignore[attr-defined]
        module.__dict__["forward"] = dispatch
    module.__dict__[_STACK] = (*stack, entry)


def _pop(module: nn.Module, owner: AppliedKernels) -> None:
    stack = tuple(entry for entry in module.__dict__.get(_STACK, ()) if entry.owner is not owner)
    if stack:
        module.__dict__[_STACK] = stack
        return
    module.__dict__.pop(_STACK, None)
    _restore(module)


def _restore(module: nn.Module) -> None:
    dispatch = module.__dict__.get("forward")
    if isinstance(dispatch, _Dispatch):
        if dispatch.had_own:  # type: ignore[attr-defined]
            module.__dict__["forward"] = dispatch.original
        else:
            del module.__dict__["forward"]


def apply_kernels(module: nn.Module, mode: ApplyMode, *, num_sms: int, backend: Backend = "auto",
                  partial: bool = False) -> AppliedKernels:
    """Replace the arithmetic of a diffusers transformer by operators whose bits depend on nothing but the sample.

    Blocks of SD3, FLUX, Qwen-Image and Wan become one fused forward each; linear layers (with their PEFT adapters),
    norms, activations and patch convolutions elsewhere in the module are replaced one by one. Rollout and training
    must apply the same mode: then their outputs are equal bit for bit.

    Args:
        module: Any nn.Module that holds such blocks or layers.
        mode: `consistent`; `tp_invariant` (the bits of tensor-parallel shards too, slower); `reference`: the module's
            own forward, for comparisons: nested inside another mode it restores torch's arithmetic for a while.
        num_sms: SMs of the caller's partition; `AppliedKernels.set_num_sms` changes it at a safe point.
        backend: As in `gemm_nt`.
        partial: Accept modules that nothing here can replace (`AppliedKernels.unreached` lists them).

    Returns:
        A handle; also a context manager. Applications nest (the last one counts) and may be removed in any order.
        Applying, removing and calling from several threads is safe; a thread sees the change from its next call on.

    Raises:
        ValueError: unknown mode, a module in which nothing can be replaced, one that would keep a part of torch's own
            arithmetic without `partial`, or (`tp_invariant`) norms across heads, whose sum would need the other ranks'
            columns. On an error nothing stays replaced.
    """
    if mode not in _MODES:
        raise ValueError(f"apply_kernels: mode must be one of {_MODES}, got {mode!r}")
    if backend not in ("auto", "triton", "cpu"):
        raise ValueError(f"apply_kernels: backend must be 'auto', 'triton' or 'cpu', got {backend!r}")
    options = KernelOptions("consistent" if mode == "reference" else mode, num_sms, backend)
    handle = AppliedKernels(mode, options)
    replaced: list[Replacement] = []
    covered: set[nn.Module] = set()  # modules inside a fused block: its forward reads their weights
    unreached: list[Replacement] = []
    with _LOCK:
        try:
            for name, part in module.named_modules():
                if part in covered:
                    continue
                forward, fused = _forward_for(name, part, mode)
                if forward is None:
                    if kind(part) not in _KEEP:
                        unreached.append(Replacement(name, kind(part), False))
                    continue
                _check_hooks(name, part, fused)
                _push(part, _Entry(handle, None if mode == "reference" else forward))
                handle._modules.append(part)
                replaced.append(Replacement(name, kind(part), fused))
                covered.update(child for child in part.modules() if child is not part)
            if not replaced:
                raise ValueError(f"apply_kernels: nothing in {kind(module)} can be replaced: it holds no linear layer, "
                                 f"norm, activation or patch convolution, and none of {', '.join(BLOCKS)}")
            if unreached and not partial:
                names = ", ".join(f"{item.name} ({item.kind})" for item in unreached[:5])
                raise UnsupportedError(
                    f"apply_kernels: {len(unreached)} modules of {kind(module)} cannot be replaced, so the outputs "
                    f"would carry no promise: {names}{', ...' if len(unreached) > 5 else ''}. Use mode 'reference', "
                    "or partial=True to replace the rest")
        except BaseException:
            handle.remove()
            raise
    handle.replaced, handle.unreached = tuple(replaced), tuple(unreached)
    return handle


def _check_hooks(name: str, module: nn.Module, fused: bool) -> None:
    """Refuse hooks that would no longer be called: the forward of a fused block calls none of its parts."""
    inside = [(f"{name}.{inner}".strip("."), part) for inner, part in module.named_modules() if inner] if fused else []
    for path, part in inside:
        own = "forward" in part.__dict__ and _STACK not in part.__dict__
        if part._forward_hooks or part._forward_pre_hooks or own:
            raise UnsupportedError(f"apply_kernels: {path} has a hook or a forward of its own, and the fused "
                                   f"{kind(module)} would not call it; remove it first")
    if hasattr(module, "_hf_hook"):
        raise UnsupportedError(f"apply_kernels: {name or 'the module'} has a hook of accelerate, which would not be "
                               "called; remove it (remove_hook_from_module), or apply before adding it")


def remove_kernels(module: nn.Module) -> None:
    """Give every module under `module` its own forward back, whoever replaced it: a copy's handle stayed behind."""
    with _LOCK:
        for part in module.modules():
            if part.__dict__.pop(_STACK, None) is not None:
                _restore(part)


def _forward_for(name: str, module: nn.Module, mode: ApplyMode) -> tuple[Forward | None, bool]:
    if kind(module) in BLOCKS:
        covers, forward = BLOCKS[kind(module)]
        if covers(module):
            if mode == "tp_invariant" and kind(module) == "WanTransformerBlock":
                raise UnsupportedError(f"apply_kernels: {name or 'the module'} is a {kind(module)}, whose query and "
                                       "key norms run across heads: their sums need every rank's columns, so mode "
                                       "'tp_invariant' cannot hold; use 'consistent'")
            return forward, True
        return None, False
    return leaf_forward(module), False
