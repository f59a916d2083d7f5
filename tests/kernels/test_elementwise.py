"""Row and elementwise operators: right against fp64 in both directions; a row's bits wherever it stands."""

from collections.abc import Callable

import pytest
import torch
from flowmill_kernels import (
    GUARANTEES,
    assert_bitwise_equal,
    gated_residual,
    gelu,
    gelu_tanh,
    layer_norm_modulate,
    log_softmax,
    mean,
    qk_norm_rope,
    qk_norm_rope_pair,
    relative_frobenius_error,
    rms_norm,
    silu,
    swiglu,
    timestep_embedding,
)
from flowmill_kernels.elementwise import column_sum, gate_gradient, gelu_tanh_backward, scale_by_gate
from torch import Tensor
from torch.nn import functional

from tests.kernels.devices import PLACES, ROUNDING

Place = tuple[str, str, torch.dtype]
B, T, C, H, D = 3, 37, 48, 3, 16


def rope_tables(tokens: int, dims: int, *batch: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*batch, tokens, dims // 2, dtype=torch.float64)
    return angles.cos().float(), angles.sin().float()


def rotated(x: Tensor, rope: tuple[Tensor, Tensor], layout: str) -> Tensor:
    c, s = (t.double().unsqueeze(-2) for t in rope)
    a, b = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    u, w = a * c - b * s, a * s + b * c
    return torch.stack((u, w), -1).flatten(-2) if layout == "interleaved" else torch.cat((u, w), -1)


def normed(x: Tensor, weight: Tensor | None, dims: int = 1, eps: float = 1e-6) -> Tensor:
    over = tuple(range(-dims, 0))
    y = x / (x.square().mean(over, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.view(x.shape[-dims:])


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


# name -> (shapes of the inputs; per_sample ones first B; function of ours; of fp64)
ROPE, ROPE_B = rope_tables(T, D), rope_tables(T, D, B)
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Callable, Callable]] = {
    "layer_norm": (((B, T, C),), lambda x, **k: layer_norm_modulate(x, None, None, **k),
                   lambda x: functional.layer_norm(x, (C,), eps=1e-6)),
    "layer_norm_affine": (((B, T, C), (C,), (C,)),
                          lambda x, w, b, **k: layer_norm_modulate(x, None, None, weight=w, bias=b, **k),
                          lambda x, w, b: functional.layer_norm(x, (C,), w, b, eps=1e-6)),
    "modulate": (((B, T, C), (B, C), (B, C)), layer_norm_modulate, modulated),
    "modulate_twice": (((B, T, C), (B, C), (B, C), (B, C), (B, C)),
                       lambda x, a, b, c, d, **k: torch.cat(layer_norm_modulate(x, a, b, scale2=c, shift2=d, **k), 2),
                       lambda x, a, b, c, d: torch.cat((modulated(x, a, b), modulated(x, c, d)), 2)),
    "modulate_affine": (((B, T, C), (B, C), (B, C), (C,), (C,)),
                        lambda x, a, b, w, v, **k: layer_norm_modulate(x, a, b, weight=w, bias=v, **k),
                        lambda x, a, b, w, v: functional.layer_norm(x, (C,), w, v, eps=1e-6) * (1 + a[:, None])
                        + b[:, None]),
    "modulate_keep": (((B, T, C), (B, C), (B, C)),
                      lambda x, a, b, **k: (lambda y, z: y + 3 * z)(*layer_norm_modulate(x, a, b, keep=True, **k)),
                      lambda x, a, b: modulated(x, a, b) + 3 * x),
    "rms_norm": (((B, T, C), (C,)), lambda x, w, **k: rms_norm(x, w, eps=1e-6, **k), normed),
    "rms_norm_plain": (((B, T, C),), lambda x, **k: rms_norm(x, None, eps=1e-6, **k), lambda x: normed(x, None)),
    "qk_norm": (((B, T, H, D), (D,)), lambda x, w, **k: qk_norm_rope(x, w, eps=1e-6, **k), normed),
    "qk_norm_all": (((B, T, H, D), (H * D,)), lambda x, w, **k: qk_norm_rope(x, w, eps=1e-6, norm="all", **k),
                    lambda x, w: normed(x, w, 2)),
    "rope": (((B, T, H, D),), lambda x, **k: qk_norm_rope(x, None, eps=1e-6, rope=on(ROPE, x), **k),
             lambda x: rotated(x, on(ROPE, x), "interleaved")),
    "qk_norm_rope": (((B, T, H, D), (D,)),
                     lambda x, w, **k: qk_norm_rope(x, w, eps=1e-6, rope=on(ROPE_B, x), rope_layout="half", **k),
                     lambda x, w: rotated(normed(x, w), on(ROPE_B, x), "half")),
    "qk_norm_all_rope": (((B, T, H, D), (H * D,)),
                         lambda x, w, **k: qk_norm_rope(x, w, eps=1e-6, rope=on(ROPE, x), norm="all", **k),
                         lambda x, w: rotated(normed(x, w, 2), on(ROPE, x), "interleaved")),
    "pair": (((B, T, H, D), (B, T, H, D), (D,), (D,)),
             lambda q, k_, w, v, **k: torch.cat(qk_norm_rope_pair(q, k_, w, v, eps=1e-6, rope=on(ROPE, q), **k), 3),
             lambda q, k_, w, v: torch.cat((rotated(normed(q, w), on(ROPE, q), "interleaved"),
                                           rotated(normed(k_, v), on(ROPE, q), "interleaved")), 3)),
    "gelu_tanh": (((B, T, C),), gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    "gelu": (((B, T, C),), gelu, functional.gelu),
    "silu": (((B, T, C),), silu, functional.silu),
    "swiglu": (((B, T, C), (B, T, C)), swiglu, lambda g, u: functional.silu(g) * u),
    "gated_residual": (((B, T, C), (B, C), (B, T, C)), gated_residual, lambda r, g, y: r + g[:, None] * y),
    "mean": (((B, T, C),), lambda x, **k: mean(x, 2, **k), lambda x: x.mean((1, 2))),
    "log_softmax": (((B, T, C),), log_softmax, lambda x: x.log_softmax(-1)),
    "log_softmax_long": (((B, 5000),), log_softmax, lambda x: x.log_softmax(-1)),
}


def on(rope: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    c, s = rope
    return tuple((t if t.dim() == 2 else t[:x.shape[0]]).to(x.device) for t in (c, s))  # type: ignore[return-value]


def make(name: str, place: Place) -> list[Tensor]:
    device, _, dtype = place
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in CASES[name][0]]


@PLACES
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match_fp64(name: str, place: Place) -> None:
    _, ours, exact = CASES[name]
    inputs = make(name, place)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out, want = ours(*inputs, backend=place[1]), exact(*wide)
    assert relative_frobenius_error(out.detach(), want.detach()) < ROUNDING[place[2]] * (3 if "keep" in name else 1)
    weight = torch.randn(want.shape, dtype=torch.float64).to(want.device)
    out.backward(weight.to(out.dtype))
    want.backward(weight.to(out.dtype).double())
    for ours_in, theirs in zip(inputs, wide, strict=True):
        assert ours_in.grad is not None
        # The rotation back is rounded to fp32 and sums over tokens are fp32: the gradient's own rounding dominates.
        bound = ROUNDING[place[2]] * (4 if "keep" in name else 2)
        assert relative_frobenius_error(ours_in.grad, theirs.grad) < bound, name  # type: ignore[arg-type]


@PLACES
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c[0][0][0] == B])
def test_a_samples_bits_do_not_depend_on_the_batch(name: str, place: Place) -> None:
    _, ours, _ = CASES[name]
    promised = GUARANTEES["elementwise"]
    assert promised.run
    assert promised.batch
    assert promised.position
    inputs = make(name, place)

    def call(rows: list[int]) -> tuple[Tensor, list[Tensor]]:
        own = [(t[rows] if t.shape[:1] == (B,) and len(t.shape) > 1 else t).detach().clone().requires_grad_()
               for t in inputs]
        out = ours(*own, backend=place[1])
        out.backward(weight[rows])
        return out.detach(), [t.grad for t in own if t.shape[0] == len(rows) and t.dim() > 1]  # type: ignore[misc]

    weight = torch.randn_like(ours(*inputs, backend=place[1]))
    if name == "qk_norm_rope":  # its angles go with the sample, so rows must keep their place
        choices = [[0], [0, 1]]
    else:
        choices = [[0], [2], [1, 0], [2, 0, 1]]
    base, grads = call([0, 1, 2])
    again, _ = call([0, 1, 2])
    assert_bitwise_equal(base, again)
    for rows in choices:
        out, own = call(rows)
        assert_bitwise_equal(out, base[rows])
        for g, whole in zip(own, grads, strict=True):
            assert_bitwise_equal(g, whole[rows])
    with torch.no_grad():
        assert_bitwise_equal(ours(*inputs, backend=place[1]), base)


@PLACES
def test_slices_of_wider_tensors_need_no_copy_and_give_the_same_bits(place: Place) -> None:
    device, backend, dtype = place
    wide = torch.randn(B, T, 3 * C).to(device, dtype)
    rows = torch.randn(B, 2 * C).to(device, dtype)
    part, scale, shift = wide[..., C:2 * C], rows[:, :C], rows[:, C:]
    own = [t.contiguous() for t in (part, scale, shift)]
    assert_bitwise_equal(layer_norm_modulate(part, scale, shift, backend=backend),
                         layer_norm_modulate(*own, backend=backend))
    q, weight = part.unflatten(2, (H, D)), torch.randn(D).to(device, dtype)
    assert_bitwise_equal(qk_norm_rope(q, weight, eps=1e-6, backend=backend),
                         qk_norm_rope(q.contiguous(), weight, eps=1e-6, backend=backend))


@PLACES
def test_sums_over_tokens_match_fp64(place: Place) -> None:
    device, backend, dtype = place
    a, b = (torch.randn(B, 101, C).to(device, dtype) for _ in range(2))
    assert relative_frobenius_error(column_sum(a, backend=backend), a.double().sum(1)) < 3e-6
    assert relative_frobenius_error(gate_gradient(a, b, backend=backend), (a.double() * b.double()).sum(1)) < 3e-6
    assert column_sum(a[:, :0], backend=backend).eq(0).all()


@PLACES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_through_as_in_torch(value: float, place: Place) -> None:
    device, backend, dtype = place
    x = torch.randn(1, 4, C)
    x[0, 1, 5] = value
    x = x.to(device, dtype)
    for ours, torchs in ((gelu_tanh, lambda t: functional.gelu(t, approximate="tanh")), (silu, functional.silu),
                         (log_softmax, lambda t: t.log_softmax(-1))):
        out, want = ours(x, backend=backend).float(), torchs(x.float())
        if ours is silu and value == -float("inf"):  # torch gives nan at -inf: -inf * 0
            want[0, 1, 5] = out[0, 1, 5]
        assert out.isnan().equal(want.isnan())
        assert out.isposinf().equal(want.isposinf())
    assert layer_norm_modulate(x, None, None, backend=backend)[0, 1].isnan().all()
    assert layer_norm_modulate(x, None, None, backend=backend)[0, [0, 2, 3]].isfinite().all()


@PLACES
def test_no_rows_give_no_rows(place: Place) -> None:
    device, backend, dtype = place
    x = torch.randn(0, T, C).to(device, dtype)
    assert layer_norm_modulate(x, None, None, backend=backend).shape == x.shape
    assert gelu_tanh(x, backend=backend).shape == x.shape
    assert qk_norm_rope(x.unflatten(2, (H, D)), None, eps=1e-6, backend=backend).shape == (0, T, H, D)
    assert log_softmax(x, backend=backend).shape == x.shape


@PLACES
def test_plain_backwards_are_the_functions_own(place: Place) -> None:
    device, backend, dtype = place
    x, dy = (torch.randn(2, 5, C).to(device, dtype) for _ in range(2))
    leaf = x.clone().requires_grad_()
    gelu_tanh(leaf, backend=backend).backward(dy)
    assert_bitwise_equal(gelu_tanh_backward(dy, x, backend=backend), leaf.grad)  # type: ignore[arg-type]
    gate = torch.randn(2, C).to(device, dtype)
    y = dy.clone().requires_grad_()
    gated_residual(x, gate, y, backend=backend).backward(x)
    assert_bitwise_equal(scale_by_gate(x, gate, backend=backend), y.grad)  # type: ignore[arg-type]


def test_timestep_embedding_is_the_models_own() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings", reason="the formula's source")
    t = torch.tensor([0.0, 1.5, 700.0, 999.0])
    for dim, flip, shift in ((16, True, 0.0), (17, False, 1.0)):
        ours = timestep_embedding(t, dim, flip_sin_to_cos=flip, downscale_freq_shift=shift)
        want = embeddings.get_timestep_embedding(t, dim, flip, shift)
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
        for i in range(4):
            assert_bitwise_equal(timestep_embedding(t[i:i + 1], dim, flip_sin_to_cos=flip,
                                                    downscale_freq_shift=shift), ours[i:i + 1])


X4, X3 = torch.randn(B, T, H, D), torch.randn(B, T, C)
BAD: dict[str, tuple[Callable, type[Exception], str]] = {
    "rank": (lambda: layer_norm_modulate(X4, None, None), ValueError, r"must be \[B, T, C\]"),
    "scale": (lambda: layer_norm_modulate(X3, X3[:, 0, 1:], X3[:, 0, 1:]), ValueError, "scale must be"),
    "alone": (lambda: layer_norm_modulate(X3, X3[:, 0], None), ValueError, "come together"),
    "bias": (lambda: layer_norm_modulate(X3, None, None, bias=X3[0, 0]), ValueError, "bias without a weight"),
    "dtype": (lambda: gelu_tanh(X3.double()), TypeError, "bf16, fp16 or fp32"),
    "weight": (lambda: qk_norm_rope(X4, torch.ones(D + 1), eps=1e-6), ValueError, "a weight must be"),
    "norm": (lambda: qk_norm_rope(X4, None, eps=1e-6, norm="row"), ValueError, "'head' or 'all'"),
    "rope": (lambda: qk_norm_rope(X4, None, eps=1e-6, rope=rope_tables(T + 1, D)), ValueError, "rope must be"),
    "rope_dtype": (lambda: qk_norm_rope(X4, None, eps=1e-6, rope=tuple(t.half() for t in ROPE)),  # type: ignore[arg-type]
                   TypeError, "fp32"),
    "layout": (lambda: qk_norm_rope(X4, None, eps=1e-6, rope=ROPE, rope_layout="x"), ValueError, "rope_layout"),
    "pair": (lambda: qk_norm_rope_pair(X4, X4[:, 1:], None, None, eps=1e-6), ValueError, "one shape and dtype"),
    "one_weight": (lambda: qk_norm_rope_pair(X4, X4, torch.ones(D), None, eps=1e-6), ValueError, "each tensor or"),
    "swiglu": (lambda: swiglu(X3, X3[:, 1:]), ValueError, "one shape and dtype"),
    "gate": (lambda: gated_residual(X3, X3[:, 0, 1:], X3), ValueError, r"gate \[B, C\]"),
    "residual": (lambda: gated_residual(X3[:, 1:], X3[:, 0], X3), ValueError, "residual and y"),
    "mean": (lambda: mean(X3, 3), ValueError, "dimensions"),
    "empty": (lambda: log_softmax(X3[..., :0]), ValueError, "non-empty"),
    "column_sum": (lambda: column_sum(X3[0]), ValueError, r"\[B, T, C\]"),
    "timesteps": (lambda: timestep_embedding(X3, 16), ValueError, r"timesteps \[B\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, error, match = BAD[name]
    with pytest.raises(error, match=match):
        call()
