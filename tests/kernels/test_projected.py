"""Attention with its projections: norms at the end of products, and a backward that ends before them."""

import dataclasses

import pytest
import torch
from flowmill_kernels import (
    GradientLeaves,
    KernelOptions,
    Layer,
    LeafPlan,
    assert_bitwise_equal,
    attention,
    linear,
    qk_norm_rope,
    relative_frobenius_error,
)
from flowmill_kernels.gemm import HeadNorm, ends_in_norm, gemm_nt_normed, gemm_nt_schedule
from flowmill_kernels.heuristics import LARGE, LARGE_SPLIT, MEDIUM_SPLIT, split_tile_for
from flowmill_kernels.projected import Stream, projected_attention
from flowmill_kernels.schemes import Epilogue
from torch import Tensor

from tests.kernels.devices import PLACES, ROUNDING

HEADS, D, K, RANK = 3, 16, 40, 16
EPS = 1e-6
OPTIONS = KernelOptions("consistent", num_sms=7)


def normal(*shape: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, over: float = 1.0
           ) -> Tensor:
    return (torch.randn(shape) / over**0.5).to(device, dtype)


def make_stream(batch: int, tokens: int, asks: bool = True, k: int = K, n: int = HEADS * D, d: int = D,
                adapters: bool = True, **how) -> Stream:
    def layer() -> Layer:
        adapter = (normal(RANK, k, over=k, **how), normal(n, RANK, over=RANK, **how)) if adapters else (None, None)
        return Layer(normal(n, k, over=k, **how), normal(n, **how), *adapter, 0.5)

    return Stream(normal(batch, tokens, k, **how), layer() if asks else None, layer(), layer(),
                  1 + 0.3 * normal(d, **how) if asks else None, 1 + 0.3 * normal(d, **how), EPS)


def named(stream: Stream) -> dict[str, Tensor]:
    """All tensors of a stream that may have a gradient."""
    found = {"x": stream.x, "norm_k": stream.norm_k}
    if stream.q is not None:
        found["norm_q"] = stream.norm_q
    for part in ("q", "k", "v"):
        layer = getattr(stream, part)
        if layer is not None:
            found |= {f"{part}.{name}": getattr(layer, name) for name in ("weight", "bias", "lora_a", "lora_b")}
    return {name: t for name, t in found.items() if t is not None}


def mapped(stream: Stream, change) -> Stream:
    layers = {part: None if (layer := getattr(stream, part)) is None else dataclasses.replace(
        layer, **{name: None if (t := getattr(layer, name)) is None else change(t)
                  for name in ("weight", "bias", "lora_a", "lora_b")}) for part in ("q", "k", "v")}
    return dataclasses.replace(stream, x=change(stream.x), norm_q=None if stream.norm_q is None else change(
        stream.norm_q), norm_k=change(stream.norm_k), **layers)


def exact(streams: list[Stream], heads: int, lengths: list | None = None) -> list[Tensor]:
    """In fp64, by torch."""
    def project(x: Tensor, layer: Layer, norm: Tensor | None) -> Tensor:
        y = x @ layer.weight.T + layer.bias
        if layer.lora_a is not None:
            y = y + layer.lora_scale * (x @ layer.lora_a.T) @ layer.lora_b.T
        y = y.unflatten(-1, (heads, -1))
        if norm is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * norm
        return y.transpose(1, 2)

    k = torch.cat([project(s.x, s.k, s.norm_k) for s in streams], 2)
    v = torch.cat([project(s.x, s.v, None) for s in streams], 2)
    seen = torch.ones(k.shape[0], 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
    at = 0
    for s, length in zip(streams, lengths or [None] * len(streams), strict=True):
        if length is not None:
            seen[..., at:at + s.x.shape[1]] = (torch.arange(s.x.shape[1], device=k.device) < length[:, None])[
                :, None, None]
        at += s.x.shape[1]
    return [torch.nn.functional.scaled_dot_product_attention(project(s.x, s.q, s.norm_q), k, v, seen).transpose(1, 2)
            for s in streams if s.q is not None]


def backward(streams: list[Stream], outs, weights: list[Tensor], names: list[str]) -> list[dict[str, Tensor]]:
    """Gradients of a weighted sum of all results, by stream and name."""
    asked = [[t for name, t in named(s).items() if name in names] for s in streams]
    total = sum((out * w.to(out)).sum() for out, w in zip(outs, weights, strict=True))
    found = iter(torch.autograd.grad(total, [t for ts in asked for t in ts]))  # type: ignore[arg-type]
    return [{name: next(found) for name in named(s) if name in names} for s in streams]


def asking(streams: list[Stream], names: list[str]) -> list[Stream]:
    def copy(s: Stream) -> Stream:
        s = mapped(s, lambda t: t.detach().clone())
        for name, t in named(s).items():
            t.requires_grad_(name in names)
        return s
    return [copy(s) for s in streams]


ADAPTERS = [f"{part}.{name}" for part in ("q", "k", "v") for name in ("lora_a", "lora_b")]
NAMES = {"adapters": ["x", *ADAPTERS],
         "everything": ["x", "norm_q", "norm_k", *ADAPTERS, *(f"{p}.{n}" for p in ("q", "k", "v")
                                                             for n in ("weight", "bias"))]}


@PLACES
@pytest.mark.parametrize("asks", [True, False], ids=["joint", "silent-text"])
@pytest.mark.parametrize("names", NAMES)
def test_outputs_and_gradients_match_fp64(place: tuple, asks: bool, names: str) -> None:
    device, backend, dtype = place
    how = {"device": device, "dtype": dtype}
    options = dataclasses.replace(OPTIONS, backend=backend)
    streams = asking([make_stream(2, 9, **how), make_stream(2, 5, asks, **how)], NAMES[names])
    wide = asking([mapped(s, lambda t: t.double()) for s in streams], NAMES[names])
    outs = projected_attention(streams, HEADS, options=options)
    assert outs[0].grad_fn is not None
    assert "Projected" in type(outs[0].grad_fn).__name__
    want = exact(wide, HEADS)
    weights = [torch.randn(w.shape, dtype=torch.float64, device=device) for w in want]
    bound = 1e-5 if dtype == torch.float32 else 16 * ROUNDING[dtype]
    for out, w in zip(outs, want, strict=True):
        assert relative_frobenius_error(out.detach(), w.detach()) < bound
    for ours, theirs in zip(backward(streams, outs, weights, NAMES[names]), backward(wide, want, weights, NAMES[names]),
                            strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert relative_frobenius_error(gradient, theirs[name]) < bound, name


def test_both_ways_through_the_norms_agree() -> None:
    """Frozen norms end in attention's backward; trainable ones, and weights of 0, compute the product once more."""
    plain = [make_stream(2, 9), make_stream(2, 5)]
    weights = [torch.randn(2, t, HEADS, D) for t in (9, 5)]
    found = []
    for names in (NAMES["adapters"], [*NAMES["adapters"], "norm_q"]):
        streams = asking(plain, names)
        outs = projected_attention(streams, HEADS, options=OPTIONS)
        found.append((outs, backward(streams, outs, weights, NAMES["adapters"])))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert_bitwise_equal(one.detach(), other.detach())
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        for name in ours:
            assert relative_frobenius_error(ours[name], theirs[name]) < 1e-5, name


def test_a_norm_weight_of_zero_loses_no_gradient() -> None:
    streams = asking([make_stream(2, 7)], NAMES["adapters"])
    with torch.no_grad():
        streams[0].norm_q[3] = 0.0  # type: ignore[index]
    wide = asking([mapped(s, lambda t: t.double()) for s in streams], NAMES["adapters"])
    outs, want = projected_attention(streams, HEADS, options=OPTIONS), exact(wide, HEADS)
    weights = [torch.randn(want[0].shape)]
    (ours,), (theirs,) = (backward(s, o, weights, NAMES["adapters"]) for s, o in ((streams, outs), (wide, want)))
    for name in ours:
        assert ours[name].isfinite().all()
        assert relative_frobenius_error(ours[name], theirs[name]) < 1e-5, name


def test_a_frozen_norm_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking makes the host wait for the GPU, and a graph's recording could not look at all."""
    streams, looks = asking([make_stream(2, 7)], NAMES["adapters"]), []
    monkeypatch.setattr(torch.Tensor, "any", lambda t, *a, _any=torch.Tensor.any: looks.append(1) or _any(t, *a))

    def backward_once() -> int:
        looks.clear()
        sum(out.sum() for out in projected_attention(streams, HEADS, options=OPTIONS)).backward()  # type: ignore[union-attr]
        return len(looks)

    assert backward_once() == 2  # queries and keys
    assert backward_once() == 0
    with torch.no_grad():
        streams[0].norm_q[0] = 0.0  # type: ignore[index]
    assert backward_once() == 1


@pytest.mark.parametrize("place", [pytest.param(("cpu", torch.float32), id="cpu"),
                                   pytest.param(("cuda", torch.bfloat16), id="gpu", marks=pytest.mark.gpu)])
def test_bits_are_the_samples_own(place: tuple) -> None:
    """Rollout and training, a batch and a sample alone, what stands behind a prompt's end."""
    device, dtype = place
    heads, d, k, batch = (HEADS, D, K, 3) if device == "cpu" else (24, 64, 1536, 5)
    tokens = (9, 5) if device == "cpu" else (150, 77)
    how = {"device": device, "dtype": dtype, "k": k, "n": heads * d, "d": d}
    streams = asking([make_stream(batch, t, **how) for t in tokens], NAMES["adapters"])
    lengths = (None, torch.arange(2, 2 + batch, dtype=torch.int32, device=device))
    weights = [torch.randn(batch, t, heads, d, device=device) for t in tokens]
    outs = projected_attention(streams, heads, options=OPTIONS, lengths=lengths)
    xs = [g["x"] for g in backward(streams, outs, weights, ["x"])]
    with torch.no_grad():
        for out, rolled in zip(outs, projected_attention(streams, heads, options=OPTIONS, lengths=lengths),
                               strict=True):
            assert_bitwise_equal(out.detach(), rolled)
    for b in range(batch):
        alone = [dataclasses.replace(s, x=s.x[b:b + 1].detach().clone()) for s in streams]
        alone[1].x[:, 2 + b:] = 7.0  # padding: no other token may notice
        for s in alone:
            s.x.requires_grad_()
        other = dataclasses.replace(OPTIONS, num_sms=96)
        ours = projected_attention(alone, heads, options=other, lengths=(None, lengths[1][b:b + 1]))
        assert_bitwise_equal(ours[0].detach(), outs[0][b:b + 1].detach())
        assert_bitwise_equal(ours[1][:, :2 + b].detach(), outs[1][b:b + 1, :2 + b].detach())
        mine = [w[b:b + 1].clone() for w in weights]
        mine[1][:, 2 + b:] = 0.0
        same = [w.clone() for w in weights]
        for i in range(batch):
            same[1][i, 2 + i:] = 0.0
        if b == 0:
            outs = projected_attention(streams, heads, options=OPTIONS, lengths=lengths)
            xs = [g["x"] for g in backward(streams, outs, same, ["x"])]
        own = [g["x"] for g in backward(alone, ours, mine, ["x"])]
        assert_bitwise_equal(own[0], xs[0][b:b + 1])
        assert_bitwise_equal(own[1][:, :2 + b], xs[1][b:b + 1, :2 + b])


@pytest.mark.parametrize("trained", ["adapters", "everything"])
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_have_the_same_bits_for_every_micro_batch(trained: str, micro: int) -> None:
    plain, found = [make_stream(8, 4), make_stream(8, 3)], []
    for size in (8, micro):
        streams = asking(plain, NAMES[trained])
        parameters = [t for s in streams for name, t in named(s).items() if name != "x" and t.requires_grad]
        with GradientLeaves(parameters, LeafPlan(8)) as leaves:
            for first in range(0, 8, size):
                part = [dataclasses.replace(s, x=s.x[first:first + size]) for s in streams]
                with leaves.micro_batch(first, len(part[0].x)):
                    sum(o.square().sum() for o in projected_attention(part, HEADS, options=OPTIONS)).backward()  # type: ignore[union-attr]
            leaves.finish()
        found.append([t.grad for t in parameters])
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["heads of 8", "tp_invariant", "no norms"])
def test_what_cannot_end_in_a_norm_goes_one_step_after_the_other(why: str) -> None:
    n = HEADS * (8 if why == "heads of 8" else D)
    k = 128 if why == "tp_invariant" else K
    streams = [make_stream(2, 6, n=n, d=n // HEADS, k=k)]
    if why == "no norms":
        streams = [dataclasses.replace(streams[0], norm_q=None, norm_k=None)]
    options = KernelOptions("tp_invariant" if why == "tp_invariant" else "consistent", 132)
    streams[0].x.requires_grad_()
    out, = projected_attention(streams, HEADS, options=options)
    assert "Projected" not in type(out.grad_fn).__name__
    if why != "no norms":
        want, = exact([mapped(streams[0], lambda t: t.detach().double())], HEADS)
        assert relative_frobenius_error(out.detach(), want) < 1e-5


@pytest.mark.parametrize("asks", [True, False], ids=["joint", "silent-text"])
def test_with_rotary_embedding_it_is_the_parts_one_after_the_other(asks: bool) -> None:
    streams = [dataclasses.replace(make_stream(2, t, a), rope=(torch.randn(t, D // 2), torch.randn(t, D // 2)))
               for t, a in ((6, True), (4, asks))]
    outs, qs, ks, vs = projected_attention(streams, HEADS, options=OPTIONS), [], [], []
    for s in streams:
        how = {"eps": EPS, "rope": s.rope}
        for layer, norm, found in ((s.q, s.norm_q, qs), (s.k, s.norm_k, ks), (s.v, None, vs)):
            if layer is not None:
                heads = linear(s.x, layer, options=OPTIONS).unflatten(-1, (HEADS, -1))
                found.append(heads if norm is None else qk_norm_rope(heads, norm, **how))
    for out, want in zip(outs, attention(qs, ks, vs, num_sms=7), strict=True):
        assert_bitwise_equal(out, want)


@PLACES
def test_a_product_that_ends_in_norms(place: tuple) -> None:
    device, backend, dtype = place
    for d in (16, 32, 64):
        x, w, bias = (normal(*s, device=device, dtype=dtype, over=s[-1]) for s in ((90, 104), (192, 104), (192,)))
        h, b, weight = (normal(*s, device=device, dtype=dtype) for s in ((90, 16), (192, 16), (d,)))
        y, rstd = gemm_nt_normed(x, w, bias, HeadNorm(weight, 0.01), num_sms=3, extra=(h, b), backend=backend)
        raw = (x.double() @ w.double().T + h.double() @ b.double().T + bias.double()).unflatten(1, (-1, d))
        r = torch.rsqrt(raw.square().mean(-1) + 0.01)
        assert relative_frobenius_error(rstd, r) < 2e-6
        assert relative_frobenius_error(y.unflatten(1, (-1, d)), raw * r[..., None] * weight.double()) < max(
            ROUNDING[dtype], 3e-6)
        if backend != "triton":
            for rows in (slice(0, 1), slice(60, 90)):
                some, some_rstd = gemm_nt_normed(x[rows], w, bias, HeadNorm(weight, 0.01), num_sms=2,
                                                 extra=(h[rows], b))
                assert_bitwise_equal(some, y[rows])
                assert_bitwise_equal(some_rstd, rstd[rows])


def test_norms_are_chosen_by_n_and_k_alone() -> None:
    assert ends_in_norm(1536, 1536, 64, "consistent")
    assert not ends_in_norm(1536, 1536, 64, "tp_invariant")
    assert not ends_in_norm(512, 2048, 64, "consistent")  # several segments
    assert not ends_in_norm(3072, 3072, 128, "consistent")
    for m in (1, 64, 600, 18432):
        assert split_tile_for(1536, 1536, m=m, num_sms=132) in (LARGE_SPLIT, MEDIUM_SPLIT)
        plan = gemm_nt_schedule(m, 1536, 1536, epilogue=Epilogue(norm=64, eps=EPS))
        assert plan.tile.split_roles
        assert not plan.spread


def test_what_does_not_fit_is_refused() -> None:
    x, w = torch.randn(4, 40), torch.randn(48, 40)
    good = HeadNorm(torch.ones(16), EPS)
    with pytest.raises(ValueError, match="whole heads of 16, 32, 64"):
        gemm_nt_normed(x, w[:40], None, good, num_sms=1)
    with pytest.raises(ValueError, match="eps must not be negative"):
        gemm_nt_normed(x, w, None, HeadNorm(torch.ones(16), -1.0), num_sms=1)
    with pytest.raises(ValueError, match="tile of split roles"):
        gemm_nt_normed(x, w, None, good, num_sms=1, schedule=dataclasses.replace(
            gemm_nt_schedule(4, 48, 40), tile=LARGE))
    stream = make_stream(2, 5)
    with pytest.raises(ValueError, match="of which the first asks"):
        projected_attention([make_stream(2, 5, asks=False)], HEADS, options=OPTIONS)
    with pytest.raises(ValueError, match="must have one N, a multiple of 5 heads"):
        projected_attention([stream], 5, options=OPTIONS)
    with pytest.raises(ValueError, match=r"weight must be \[16\]"):
        projected_attention([dataclasses.replace(stream, norm_k=torch.ones(8))], HEADS, options=OPTIONS)
    with pytest.raises(ValueError, match="both norms of a stream or to none"):
        projected_attention([dataclasses.replace(stream, norm_q=None)], HEADS, options=OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [16, 32, 64])
def test_gpu_norms_have_the_same_bits_for_every_tile_and_row_count(d: int, gpu: torch.device) -> None:
    x, w = (normal(*s, device=gpu, dtype=torch.bfloat16, over=s[-1]) for s in ((5000, 768), (1536, 768)))
    norm = HeadNorm(normal(d, device=gpu, dtype=torch.bfloat16), EPS)
    y, rstd = gemm_nt_normed(x, w, None, norm, num_sms=132)
    plan = gemm_nt_schedule(5000, 1536, 768)
    for tile in (LARGE_SPLIT, MEDIUM_SPLIT):
        for sms in (132, 96, 8):
            some = gemm_nt_normed(x, w, None, norm, num_sms=sms, schedule=dataclasses.replace(plan, tile=tile))
            assert_bitwise_equal(some[0], y)
            assert_bitwise_equal(some[1], rstd)
    for rows in (slice(0, 1), slice(17, 81), slice(100, 700), slice(999, 3000)):
        some = gemm_nt_normed(x[rows], w, None, norm, num_sms=132)
        assert_bitwise_equal(some[0], y[rows])
        assert_bitwise_equal(some[1], rstd[rows])
