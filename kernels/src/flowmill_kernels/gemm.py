"""The linear layer's operators: checks, the choice of back end and schedule, and nothing of the arithmetic.

In: activations, weights and the caller's SM count. Out: new tensors, no autograd graph; the autograd Functions that
rollout and training share are built on these. `gemm_nt` is the forward, `gemm_nn` its dgrad, `wgrad` a sample's own
weight gradient; `gemm_nt_partial` and `gemm_nn_partial` are one rank's share for tensor parallelism.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import cpu_backend
from .availability import triton_reason
from .heuristics import Layout, Tile, split_tile_for, spread_segments, tile_for, tree_tile_for
from .schemes import NUM_SEGMENTS, Activation, Epilogue, Scheme, consistent_scheme, tp_scheme

Mode = Literal["consistent", "tp_invariant"]
Backend = Literal["auto", "triton", "cpu"]
Loads = Literal["auto", "tma", "pointer"]

_ACTIVATIONS = ("none", "gelu_tanh")
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Schedule:
    """What a GPU does for one GEMM. Only `scheme` is part of the result's bits; the rest is speed."""

    scheme: Scheme
    tile: Tile
    spread: bool
    """Segments go to different programs and are added by a second kernel (split-K)."""
    loads: Loads = "auto"
    """`auto`: TMA where the GPU and the row lengths allow it, else plain pointers."""


NORM_CHANNELS = (16, 32, 64)
"""Channels of a head whose norm can end a product: whole heads in every tile."""


@dataclass(frozen=True)
class HeadNorm:
    """The RMS norm of a product's columns, head by head; see `gemm_nt_normed`."""

    weight: Tensor
    """[D]"""
    eps: float


def ends_in_norm(n: int, k: int, channels: int, mode: Mode) -> bool:
    """Whether a product [M, n] over k can end in norms of heads of `channels`: by N and K alone, never by rows."""
    return (mode == "consistent" and channels in NORM_CHANNELS and n % channels == 0
            and consistent_scheme(n, k).num_segments(k) == 1)


def gemm_nt_schedule(m: int, n: int, k: int, *, mode: Mode = "consistent", epilogue: Epilogue | None = None,
                     num_sms: int = 132) -> Schedule:
    """The schedule that `gemm_nt` and `gemm_nn` take for m rows, n output columns and contraction length k.

    num_sms: SMs of the caller's partition, which choose among tiles of the same bits; the default is an H200's.
    """
    if mode == "tp_invariant":
        scheme, tile = tp_scheme(k), tree_tile_for(n, k, m=m)
    elif mode == "consistent":
        scheme = consistent_scheme(n, k)
        if epilogue is not None and epilogue.norm:
            tile = split_tile_for(n, k, m=m, num_sms=num_sms)
        else:
            tile = tile_for(n, k, m=m, num_sms=num_sms, gated=epilogue is not None and epilogue.gate)
    else:
        raise ValueError(f"mode must be 'consistent' or 'tp_invariant', got {mode!r}")
    return Schedule(scheme, tile, spread_segments(m, n, scheme.num_segments(k)))


def _choose_backend(name: str, backend: Backend, tensors: tuple[Tensor, ...]) -> Literal["triton", "cpu"]:
    """Back end for these tensors.

    Raises:
        ValueError: tensors on different devices, or a back end that cannot take them.
        RuntimeError: Triton is needed and unavailable.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{name}: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    if backend not in ("auto", "triton", "cpu"):
        raise ValueError(f"{name}: backend must be 'auto', 'triton' or 'cpu', got {backend!r}")
    chosen = ("cpu" if device.type == "cpu" else "triton") if backend == "auto" else backend
    if chosen == "cpu":
        if device.type != "cpu":
            raise ValueError(f"{name}: the CPU back end got tensors on {device}; move them or use backend='auto'")
        return "cpu"
    if (reason := triton_reason()) is not None:
        raise RuntimeError(f"{name}: the Triton back end is unavailable: {reason}")
    if device.type != "cuda":
        from . import triton_backend

        if not triton_backend.interpreted():
            raise ValueError(f"{name}: the Triton back end needs CUDA tensors, got {device}; use backend='auto', or "
                             "set TRITON_INTERPRET=1 before the first import of triton")
    return "triton"


def _check_common(name: str, x: Tensor, w: Tensor, num_sms: int, backend: str) -> None:
    """What every operator asks of its two operands and its SM count."""
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError(f"{name}: num_sms is the SM count of the caller's partition, a positive int; got {num_sms!r}")
    allowed = (torch.bfloat16, torch.float16) if backend == "triton" else (torch.bfloat16, torch.float16, torch.float32)
    if x.dtype not in allowed or w.dtype != x.dtype:
        raise TypeError(f"{name}: the operands are {x.dtype} and {w.dtype}; both must be the same of "
                        f"{', '.join(str(dtype) for dtype in allowed)} on the {backend} back end. Cast them first")


def _check_operands(name: str, x: Tensor, w: Tensor, layout: Layout) -> None:
    if x.dim() < 2 or w.dim() != 2:
        raise ValueError(f"{name}: x must be [..., K] of at least two dimensions and w a matrix, got "
                         f"{tuple(x.shape)} and {tuple(w.shape)}")
    contraction = w.shape[1] if layout == "nt" else w.shape[0]
    if x.shape[-1] != contraction:
        wanted = "x [..., K] and w [N, K]" if layout == "nt" else "dy [..., N] and w [N, K]"
        raise ValueError(f"{name}: needs {wanted}, got {tuple(x.shape)} and {tuple(w.shape)}: the inner sizes "
                         f"{x.shape[-1]} and {contraction} differ")
    if contraction == 0 or w.numel() == 0:
        raise ValueError(f"{name}: w has no elements: {tuple(w.shape)}")


def _check_epilogue(name: str, n: int, lead: tuple[int, ...], activation: str, bias: Tensor | None,
                    gate: Tensor | None, residual: Tensor | None, out: Tensor | None, dtype: torch.dtype) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {_ACTIVATIONS}, got {activation!r}")
    rows = 1
    for size in lead:
        rows *= size
    for label, tensor, shapes in (("bias", bias, ((n,),)), ("residual", residual, ((*lead, n),)),
                                  ("out", out, ((*lead, n),))):
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ValueError(f"{name}: {label} must be {list(shapes[0])}, got {tuple(tensor.shape)}")
    if gate is not None and (gate.dim() != 2 or gate.shape[1] != n or (rows % gate.shape[0] if len(gate) else rows)):
        raise ValueError(f"{name}: gate must be [G, {n}] with G a divisor of the {rows} rows, got {tuple(gate.shape)}")
    for label, tensor in (("bias", bias), ("gate", gate), ("residual", residual)):
        if tensor is not None and tensor.dtype not in (dtype, torch.float32):
            raise TypeError(f"{name}: {label} is {tensor.dtype}; it must be {dtype} like x, or torch.float32")
    if out is not None and (out.dtype != dtype or not _is_rows(out)):
        raise TypeError(f"{name}: out must be {dtype}, contiguous or a column slice of a contiguous tensor, got "
                        f"{out.dtype} with shape {tuple(out.shape)} and strides {out.stride()}")


def _check_extra(name: str, x: Tensor, w: Tensor, layout: Layout, pairs: tuple[Pair, ...], mode: str) -> None:
    """`extra` is up to three more products of the same rows and columns, each with a contraction of its own."""
    if mode != "consistent":
        raise ValueError(f"{name}: extra goes with mode 'consistent'; in {mode!r} the tree is over K alone, so add the "
                         "second product through residual")
    if len(pairs) > 3:
        raise ValueError(f"{name}: at most three extra products, got {len(pairs)}")
    wanted = w.shape[0] if layout == "nt" else w.shape[1]
    for h, b in pairs:
        inner, columns = (b.shape[-1], b.shape[0]) if layout == "nt" else (b.shape[0], b.shape[-1])
        if h.shape[:-1] != x.shape[:-1] or b.dim() != 2 or h.shape[-1] != inner or columns != wanted or inner % 16:
            form = f"[{wanted}, R]" if layout == "nt" else f"[R, {wanted}]"
            raise ValueError(f"{name}: extra needs h {[*x.shape[:-1]]} + [R] and b {form} with R a multiple of 16, got "
                             f"{tuple(h.shape)} and {tuple(b.shape)}")
        if h.dtype != x.dtype or b.dtype != x.dtype:
            raise TypeError(f"{name}: extra is {h.dtype} and {b.dtype}; both must be {x.dtype} like x")


def _check_norm(name: str, n: int, k: int, norm: HeadNorm, mode: Mode, schedule: Schedule | None) -> None:
    if norm.weight.dim() != 1 or not ends_in_norm(n, k, len(norm.weight), mode):
        raise ValueError(f"{name}: a norm can end a product in mode 'consistent' of one segment (N > 512 or K < 1024) "
                         f"whose N is whole heads of {', '.join(map(str, NORM_CHANNELS))} channels; got N={n}, K={k}, "
                         f"a weight {tuple(norm.weight.shape)} and mode {mode!r}")
    if not (math.isfinite(norm.eps) and norm.eps >= 0):
        raise ValueError(f"{name}: eps must not be negative, got {norm.eps}")
    if schedule is not None and not (schedule.tile.split_roles and schedule.scheme.num_segments(k) == 1):
        raise ValueError(f"{name}: a norm goes with one segment and a tile of split roles, got {schedule}")


def _is_rows(t: Tensor) -> bool:
    """Whether t [..., N] is rows of neighbouring elements at one distance, apart from each other: no copy is needed."""
    if t.is_contiguous():
        return True
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        return False
    outer = [(size, step) for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
    even = all(step == inner_size * inner for (_, step), (inner_size, inner) in itertools.pairwise(outer))
    return even and (not outer or outer[-1][1] >= t.shape[-1])


def _rows(x: Tensor, columns: int) -> Tensor:
    """x as [rows, columns] with unit column stride and 16-byte aligned base and rows where its length allows it."""
    x = x.reshape(-1, columns)
    row_bytes = x.stride(0) * x.element_size()
    if x.stride(1) != 1 or x.stride(0) < columns or row_bytes % 16:
        x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Plan:
    """What a call comes to, once its shapes have been looked at."""

    backend: Literal["triton", "cpu"]
    m: int
    n: int
    k: int
    schedule: Schedule
    epilogue: Epilogue
    dtype: torch.dtype


def _plan(name: str, x: Tensor, w: Tensor, layout: Layout, *, bias: Tensor | None, activation: Activation,
          gate: Tensor | None, residual: Tensor | None, mode: Mode, num_sms: int, out: Tensor | None, backend: Backend,
          schedule: Schedule | None, partial_of: int | None, extra: tuple[Pair, ...], norm: HeadNorm | None) -> _Plan:
    """All checks of a call, and its schedule."""
    weight = None if norm is None else norm.weight
    given = tuple(t for t in (x, w, bias, gate, residual, out, weight, *(t for pair in extra for t in pair))
                  if t is not None)
    chosen = _choose_backend(name, backend, given)
    _check_common(name, x, w, num_sms, chosen)
    _check_operands(name, x, w, layout)
    if extra:
        _check_extra(name, x, w, layout, extra, mode)
    lead, k = tuple(x.shape[:-1]), x.shape[-1]
    n = w.shape[0] if layout == "nt" else w.shape[1]
    dtype = x.dtype if partial_of is None else torch.float32
    _check_epilogue(name, n, lead, activation, bias, gate, residual, out, dtype)
    m = 1
    for size in lead:
        m *= size
    epilogue = Epilogue(bias is not None, activation, gate is not None, residual is not None)
    if norm is not None:
        _check_norm(name, n, k, norm, mode, schedule)
        epilogue = dataclasses.replace(epilogue, norm=len(norm.weight), eps=float(norm.eps))
    if schedule is None:
        if partial_of is None:
            # A gate of many rows costs no more registers than a bias; a factor an element comes as a residual does.
            as_residual = gate is not None and len(gate) == m and residual is None and gate.dtype == dtype
            few = gate is not None and m // max(1, gate.shape[0]) < 64 and not as_residual
            schedule = gemm_nt_schedule(m, n, k, mode=mode, epilogue=dataclasses.replace(epilogue, gate=few),
                                        num_sms=num_sms)
        else:
            scheme = tp_scheme(k * partial_of)
            schedule = Schedule(scheme, tree_tile_for(n, k, m=m), spread_segments(m, n, scheme.num_segments(k)))
    return _Plan(chosen, m, n, k, schedule, epilogue, dtype)


def _gemm(name: str, x: Tensor, w: Tensor, layout: Layout, *, bias: Tensor | None, activation: Activation,
          gate: Tensor | None, residual: Tensor | None, mode: Mode, num_sms: int, out: Tensor | None,
          backend: Backend, schedule: Schedule | None, partial_of: int | None = None,
          extra: Pair | Sequence[Pair] | None = None) -> Tensor:
    """Shared body of the operators; `partial_of`: the rank count when the fp32 sum of one rank is wanted."""
    return _gemm_and_norm(name, x, w, layout, bias=bias, activation=activation, gate=gate, residual=residual, mode=mode,
                          num_sms=num_sms, out=out, backend=backend, schedule=schedule, partial_of=partial_of,
                          extra=extra)[0]


def _gemm_and_norm(name: str, x: Tensor, w: Tensor, layout: Layout, *, bias: Tensor | None, activation: Activation,
                   gate: Tensor | None, residual: Tensor | None, mode: Mode, num_sms: int, out: Tensor | None,
                   backend: Backend, schedule: Schedule | None, partial_of: int | None = None,
                   extra: Pair | Sequence[Pair] | None = None, norm: HeadNorm | None = None
                   ) -> tuple[Tensor, Tensor | None]:
    """(result, the norm's rstd [M, N / D] if there is a norm)."""
    pairs: tuple[Pair, ...] = ()
    if extra is not None:
        pairs = (extra,) if isinstance(extra[0], Tensor) else tuple(extra)  # type: ignore[assignment]

    def run() -> tuple[Tensor | None, Tensor | None]:
        plan = _plan(name, x, w, layout, bias=bias, activation=activation, gate=gate, residual=residual, mode=mode,
                     num_sms=num_sms, out=out, backend=backend, schedule=schedule, partial_of=partial_of, extra=pairs,
                     norm=norm)
        rstd = None
        if norm is not None:
            rstd = torch.empty((plan.m, plan.n // plan.epilogue.norm), dtype=torch.float32, device=x.device)
        y = torch.empty((*x.shape[:-1], plan.n), dtype=plan.dtype, device=x.device) if out is None else out
        if plan.m:
            _compute(name, plan, x, w, layout, y.view(-1, plan.n), bias, gate, residual, num_sms, pairs, norm, rstd)
        return y if out is None else None, rstd

    with _no_grad():
        if x.is_cuda:
            from .launch import replay

            # Checks cost the host more than a launch does, so a call whose shapes have been seen skips all of this.
            key = (name, layout, activation, mode, num_sms, backend, schedule, partial_of,
                   None if norm is None else norm.eps)
            weight = None if norm is None else norm.weight
            y, rstd = replay(key, (x, w, bias, gate, residual, out, weight, *(t for pair in pairs for t in pair)), run)
        else:
            y, rstd = run()
    return (y if out is None else out), rstd  # type: ignore[return-value]


def _no_grad() -> AbstractContextManager:
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _compute(name: str, plan: _Plan, x: Tensor, w: Tensor, layout: Layout, y: Tensor, bias: Tensor | None,
             gate: Tensor | None, residual: Tensor | None, num_sms: int, pairs: tuple[Pair, ...],
             norm: HeadNorm | None, rstd: Tensor | None) -> None:
    """Write the result of a checked call to y [M, N]."""
    schedule, weight = plan.schedule, None if norm is None else norm.weight
    x2 = _rows(x, plan.k)
    residual2 = None if residual is None else residual.reshape(-1, plan.n)
    if plan.backend == "cpu":
        more = tuple((h.reshape(plan.m, -1), b) for h, b in pairs)
        cpu_backend.gemm(x2, w, y, layout=layout, scheme=schedule.scheme, epilogue=plan.epilogue, bias=bias, gate=gate,
                         residual=residual2, extra=more, norm=weight, rstd=rstd)
        return
    from . import triton_backend
    from .launch import do_not_replay

    # Kernels index their last dimension with stride 1.
    bias2, gate2, residual2 = (t if t is None or t.stride(-1) == 1 else t.contiguous()
                               for t in (bias, gate, residual2))
    w2 = _rows(w, w.shape[1])
    more = tuple((_rows(h, h.shape[-1]), _rows(b, b.shape[1])) for h, b in pairs)
    inside = [t for pair in more for t in pair]
    for used, given in zip((x2, w2, bias2, gate2, residual2, *inside),
                           (x, w, bias, gate, residual, *(t for pair in pairs for t in pair)), strict=True):
        if used is not None and used.data_ptr() != given.data_ptr():  # type: ignore[union-attr]
            do_not_replay()  # a copy was made
    tma = schedule.loads != "pointer" and triton_backend.uses_tma(x2, w2, *inside)
    if schedule.loads == "tma" and not tma:
        raise ValueError(f"{name}: loads='tma' needs a Hopper or newer GPU and rows of whole 16 bytes, got K={plan.k} "
                         f"and N={plan.n}")
    triton_backend.gemm(x2, w2, y, layout=layout, scheme=schedule.scheme, epilogue=plan.epilogue, bias=bias2,
                        gate=gate2, residual=residual2, num_sms=num_sms, tile=schedule.tile, spread=schedule.spread,
                        tma=tma, extra=more, norm=weight, rstd=rstd)


def gemm_nt(x: Tensor, w: Tensor, bias: Tensor | None = None, *, num_sms: int, activation: Activation = "none",
            gate: Tensor | None = None, residual: Tensor | None = None, mode: Mode = "consistent",
            extra: Pair | Sequence[Pair] | None = None, out: Tensor | None = None, backend: Backend = "auto",
            schedule: Schedule | None = None) -> Tensor:
    """A linear layer's forward, ``residual + gate * activation(x @ w.T + bias)``, rounded at the end.

    The fp32 sum runs over K in an order fixed by N, K and the mode. The bits of a row depend on that row, w and K only:
    not on the other rows, the row's position, the run or num_sms. In mode `tp_invariant` K is always summed in 8
    segments and a balanced tree, so that tensor-parallel shards (`gemm_nt_partial`) give the same bits too.

    Args:
        x: ``[..., K]``, bf16 or fp16 (on the CPU also fp32). A column slice of a wider tensor is read where it is if
            its rows and its start are whole multiples of 16 bytes; anything else that is not contiguous is copied.
        w: ``[N, K]``, same dtype.
        bias: ``[N]``, dtype of x or fp32.
        num_sms: SMs of the caller's partition; never read from the device. The CPU back end ignores it.
        activation: `none` or `gelu_tanh`, in fp32, of the sum rounded to x's dtype. So it gives the bits of a call
            without it followed by `flowmill_kernels.gelu_tanh`, which training takes because it keeps that sum.
        gate: ``[G, N]``; row r is scaled by gate row ``r // (rows / G)``: one gate a sample, or (G = rows) a factor
            an element.
        residual: ``[..., N]``.
        extra: ``(h [..., R], b [N, R])`` with R a multiple of 16, or up to three such pairs: each ``h @ b.T`` is added
            to the fp32 sum before the bias, in order, in the last segment's accumulator. An adapter's up projection
            costs R more of K. Only `consistent`.
        out: Where to write: contiguous, or a column slice of a contiguous tensor, whose other columns stay as they
            are. Rows that are no multiple of 16 bytes apart cost one more pass.
        backend: `auto` takes the CPU back end for CPU tensors. `triton` with CPU tensors needs Triton's interpreter.
        schedule: Tile, spread and loads by hand (`gemm_nt_schedule`); only its scheme can change bits.

    Returns:
        ``[..., N]`` of x's dtype. NaN and infinities propagate as in torch. Zero rows give zero rows.

    Raises:
        TypeError, ValueError: for dtypes and shapes that do not fit; `tp_invariant` needs K to be a multiple of 128.
        RuntimeError: the Triton back end was needed and is unavailable, with the reason.

    Guarantees: run, batch, position, SM count (`GUARANTEES["gemm_nt"]`); `tp_invariant` also TP 1 = 2 = 4 = 8.
    Error against fp64: the bound in `GUARANTEES`. Shapes: any; K not a multiple of 8 loads by plain pointers, slower.
    """
    return _gemm("gemm_nt", x, w, "nt", bias=bias, activation=activation, gate=gate, residual=residual, mode=mode,
                 num_sms=num_sms, out=out, backend=backend, schedule=schedule, extra=extra)


def gemm_nt_normed(x: Tensor, w: Tensor, bias: Tensor | None, norm: HeadNorm, *, num_sms: int,
                   extra: Pair | Sequence[Pair] | None = None, backend: Backend = "auto",
                   schedule: Schedule | None = None) -> tuple[Tensor, Tensor]:
    """`gemm_nt` in mode `consistent`, then the RMS norm of every head of D columns in fp32; rounded once, at the end.

    Queries and keys leave their projection normalised, without a pass of their own. The bits are not those of
    `gemm_nt` followed by `qk_norm_rope`, which norms the rounded product.

    Args:
        x, w, bias, num_sms, extra, backend: As in `gemm_nt`.
        norm: Weight ``[D]``, contiguous, D of 16, 32 or 64 and N whole heads; `ends_in_norm` says for which N and K.

    Returns:
        ``[..., N]`` of x's dtype, and fp32 ``[rows, N / D]``: what every head was multiplied by, for a backward.

    Guarantees: those of `gemm_nt`.
    """
    norm = dataclasses.replace(norm, weight=norm.weight.contiguous())
    y, rstd = _gemm_and_norm("gemm_nt_normed", x, w, "nt", bias=bias, activation="none", gate=None, residual=None,
                             mode="consistent", num_sms=num_sms, out=None, backend=backend, schedule=schedule,
                             extra=extra, norm=norm)
    return y, rstd  # type: ignore[return-value]


def gemm_nn(dy: Tensor, w: Tensor, *, num_sms: int, gate: Tensor | None = None, residual: Tensor | None = None,
            extra: Pair | Sequence[Pair] | None = None, mode: Mode = "consistent", out: Tensor | None = None,
            backend: Backend = "auto", schedule: Schedule | None = None) -> Tensor:
    """A linear layer's dgrad, ``dx = gate * (dy @ w) + residual``, with the guarantees of `gemm_nt`; it contracts N.

    Args:
        dy: ``[..., N]``. w: ``[N, K]``. residual: ``[..., K]``, for a gradient that joins from another branch.
        gate, out: As in `gemm_nt`, with K columns.
        extra: ``(dh [..., R], a [R, K])``, or up to three pairs: ``dh @ a`` is added as in `gemm_nt`. The gradient of
            an input that q, k and v share is one sum.

    Returns:
        ``[..., K]`` of dy's dtype.
    """
    return _gemm("gemm_nn", dy, w, "nn", bias=None, activation="none", gate=gate, residual=residual, mode=mode,
                 num_sms=num_sms, out=out, backend=backend, schedule=schedule, extra=extra)


def _check_ranks(name: str, num_ranks: int) -> None:
    if num_ranks not in (1, 2, 4, 8):
        raise ValueError(f"{name}: num_ranks must divide the {NUM_SEGMENTS} segments (1, 2, 4 or 8), got {num_ranks}")


def gemm_nt_partial(x: Tensor, w: Tensor, *, num_ranks: int, num_sms: int, backend: Backend = "auto",
                    schedule: Schedule | None = None) -> Tensor:
    """One rank's fp32 sum of a row-parallel linear in mode `tp_invariant`; `combine_partials` makes the layer's output.

    Args:
        x: ``[..., K / num_ranks]``, this rank's columns. w: ``[N, K / num_ranks]``, the same columns.
        num_ranks: 1, 2, 4 or 8; the rank holds 8 / num_ranks of the 8 segments and adds them as their subtree.

    Returns:
        ``[..., N]`` fp32, no bias, not rounded.
    """
    _check_ranks("gemm_nt_partial", num_ranks)
    return _gemm("gemm_nt_partial", x, w, "nt", bias=None, activation="none", gate=None, residual=None,
                 mode="tp_invariant", num_sms=num_sms, out=None, backend=backend, schedule=schedule,
                 partial_of=num_ranks)


def gemm_nn_partial(dy: Tensor, w: Tensor, *, num_ranks: int, num_sms: int, backend: Backend = "auto",
                    schedule: Schedule | None = None) -> Tensor:
    """One rank's fp32 dgrad sum of a column-parallel linear: dy ``[..., N / num_ranks]``, w ``[N / num_ranks, K]``."""
    _check_ranks("gemm_nn_partial", num_ranks)
    return _gemm("gemm_nn_partial", dy, w, "nn", bias=None, activation="none", gate=None, residual=None,
                 mode="tp_invariant", num_sms=num_sms, out=None, backend=backend, schedule=schedule,
                 partial_of=num_ranks)


@torch.no_grad()
def wgrad(dy: Tensor, x: Tensor, *, num_sms: int, backend: Backend = "auto") -> Tensor:
    """Every sample's own weight gradient in fp32, ``dw[s] = dy[s].T @ x[s]``, tokens added in order.

    A weight's gradient is the sum of these over the update batch, which `LeafSum` takes. The bits of dw[s] depend on
    sample s only.

    Args:
        dy: ``[S, T, N]``. x: ``[S, T, K]``, same dtype (bf16 or fp16; on the CPU also fp32).

    Returns:
        ``[S, N, K]`` fp32: 4 N K bytes a sample, small for LoRA and the reason not to use this for full fine-tuning.
    """
    chosen = _choose_backend("wgrad", backend, (dy, x))
    if dy.dim() != 3 or x.dim() != 3 or dy.shape[:2] != x.shape[:2]:
        raise ValueError(f"wgrad: needs dy [S, T, N] and x [S, T, K], got {tuple(dy.shape)} and {tuple(x.shape)}")
    _check_common("wgrad", x, dy, num_sms, chosen)
    if dy.numel() == 0 or x.numel() == 0:
        return torch.zeros((dy.shape[0], dy.shape[2], x.shape[2]), dtype=torch.float32, device=dy.device)
    if chosen == "cpu":
        return cpu_backend.wgrad(dy, x)
    from . import triton_backend

    return triton_backend.wgrad(dy.contiguous(), x.contiguous(), num_sms=num_sms)
