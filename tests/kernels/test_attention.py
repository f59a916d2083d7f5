"""Attention: right against fp64, and what it promises: run, batch, position, padding, decode = prefill."""

import sys
from typing import Any

import pytest
import torch
from flowmill_kernels import GUARANTEES, assert_bitwise_equal, attention, relative_frobenius_error
from torch import Tensor

from tests.kernels.devices import PLACES

Place = tuple[str, str, torch.dtype]
SMS = 132
# Weights are rounded once more before the second product, and so is the backward's.
BOUND = {torch.float32: 3e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
GRADIENT_BOUND = {torch.float32: 1e-5, torch.float16: 3 * 2.0**-10, torch.bfloat16: 3 * 2.0**-7}


def sizes(place: Place) -> tuple[int, int, int, int, int]:
    """(batch, heads, channels, image tokens, text tokens): several blocks and a ragged end where it is fast."""
    if place[0] == "cuda":
        return 3, 2, 64, 201, 77
    return (3, 2, 16, 72, 13) if place[1] == "triton" else (3, 2, 8, 9, 5)


def make(place: Place, *tokens: int, requires_grad: bool = False) -> list[Tensor]:
    batch, heads, dims, _, _ = sizes(place)
    return [torch.randn(batch, t, heads, dims).to(place[0], place[2]).requires_grad_(requires_grad) for t in tokens]


def exact(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor], lengths: list[Tensor | None] | None = None,
          causal: bool = False) -> list[Tensor]:
    q, k, v = (torch.cat(list(ts), 1).transpose(1, 2) for ts in (qs, ks, vs))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if lengths is not None:
        seen = torch.cat([torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) if n is None else
                          torch.arange(t.shape[1], device=t.device)[None] < n[:, None]
                          for t, n in zip(ks, lengths, strict=True)], 1)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if causal:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        scores = scores.masked_fill((j > i + k.shape[2] - q.shape[2]).to(q.device), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return list(out.split([t.shape[1] for t in qs], 1))


def call(place: Place, q, k, v, *, num_sms: int = SMS, **more) -> Any:
    return attention(q, k, v, num_sms=num_sms, backend=place[1], **more)  # type: ignore[arg-type]


@PLACES
@pytest.mark.parametrize("form", ["full", "joint", "cross", "causal", "joint_lengths"])
def test_forward_and_gradients_match_fp64(form: str, place: Place) -> None:
    _, _, _, image, text = sizes(place)
    tokens = {"full": ((image,), (image,)), "joint": ((image, text), (image, text)), "cross": ((image,), (text,)),
              "causal": ((image,), (image + 3,)), "joint_lengths": ((image, text), (image, text))}[form]
    qs, ks, vs = (make(place, *tokens[i], requires_grad=True) for i in (0, 1, 1))
    lengths = None
    if form == "joint_lengths":
        lengths = [None, torch.tensor([text, 1, text // 2], dtype=torch.int32, device=place[0])]
    outs = call(place, tuple(qs), tuple(ks), tuple(vs), lengths=lengths, causal=form == "causal")
    wide = [[t.detach().double().requires_grad_() for t in ts] for ts in (qs, ks, vs)]
    wanted = exact(*wide, lengths, form == "causal")
    for ours, want in zip(outs, wanted, strict=True):
        assert ours.is_contiguous()
        assert relative_frobenius_error(ours.detach(), want.detach()) < BOUND[place[2]]
    weights = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, weights)
    torch.autograd.backward(wanted, [w.double() for w in weights])
    for ours, theirs in zip([*qs, *ks, *vs], [t for ts in wide for t in ts], strict=True):
        assert relative_frobenius_error(ours.grad, theirs.grad) < GRADIENT_BOUND[place[2]]  # type: ignore[arg-type]


def joint(place: Place, qs: list[Tensor], ks: list[Tensor], vs: list[Tensor], weights: list[Tensor], rows: list[int],
          lengths: Tensor | None, **more) -> list[Tensor]:
    """Outputs and all gradients of some samples."""
    own = [[t.detach()[rows].clone().requires_grad_() for t in ts] for ts in (qs, ks, vs)]
    chosen = None if lengths is None else (None, lengths[rows].contiguous())
    outs = call(place, *(tuple(ts) for ts in own), lengths=chosen, **more)
    torch.autograd.backward(outs, [w[rows] for w in weights])
    return [*(out.detach() for out in outs), *(t.grad for ts in own for t in ts)]  # type: ignore[misc]


@PLACES
@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
def test_a_samples_bits_do_not_depend_on_the_batch(with_lengths: bool, place: Place) -> None:
    for name in ("attention", "attention_backward"):
        promised = GUARANTEES[name]
        assert promised.run
        assert promised.batch
        assert promised.position
        assert promised.sm_count
    _, _, _, image, text = sizes(place)
    qs, ks, vs = (make(place, image, text) for _ in range(3))
    weights = make(place, image, text)
    lengths = torch.tensor([text, 3, text - 2], dtype=torch.int32, device=place[0]) if with_lengths else None
    base = joint(place, qs, ks, vs, weights, [0, 1, 2], lengths)
    for rows in ([0, 1, 2], [0], [2, 1]):
        for ours, whole in zip(joint(place, qs, ks, vs, weights, rows, lengths), base, strict=True):
            assert_bitwise_equal(ours, whole[rows])
    for ours, whole in zip(joint(place, qs, ks, vs, weights, [0, 1, 2], lengths, num_sms=7), base, strict=True):
        assert_bitwise_equal(ours, whole)
    with torch.no_grad():
        chosen = None if lengths is None else (None, lengths)
        for ours, whole in zip(call(place, tuple(qs), tuple(ks), tuple(vs), lengths=chosen), base, strict=False):
            assert_bitwise_equal(ours, whole)


@PLACES
def test_padding_changes_no_bit(place: Place) -> None:
    """Another sample's longer prompt pads this one's; what stands in the padding is arbitrary, even NaN."""
    _, _, _, image, text = sizes(place)
    qs, ks, vs = (make(place, image, text) for _ in range(3))
    weights = make(place, image, text)
    lengths = torch.tensor([text, text - 1, 4], dtype=torch.int32, device=place[0])
    base = joint(place, qs, ks, vs, weights, [0, 1, 2], lengths)

    def padded(t: Tensor, fill: float) -> Tensor:
        return torch.cat((t, t.new_full((t.shape[0], 70, *t.shape[2:]), fill)), 1)

    longer = [[ts[0], padded(ts[1], fill)] for ts, fill in ((qs, 0.5), (ks, float("nan")), (vs, float("nan")))]
    zero = [weights[0], padded(weights[1], 0.0)]
    more = joint(place, *longer, zero, [0, 1, 2], lengths)
    for ours, whole in zip(more, base, strict=True):
        assert_bitwise_equal(ours[:, :whole.shape[1]], whole)
    for gradient in more[2:]:
        assert gradient[:, text:].eq(0).all() or gradient.shape[1] == image


@PLACES
def test_a_heads_bits_do_not_depend_on_its_position(place: Place) -> None:
    _, _, _, image, text = sizes(place)
    qs, ks, vs, weights = (make(place, image, text) for _ in range(4))
    base = joint(place, qs, ks, vs, weights, [0, 1, 2], None)
    turned = [[t.flip(2) for t in ts] for ts in (qs, ks, vs, weights)]
    for ours, whole in zip(joint(place, *turned, [0, 1, 2], None), base, strict=True):
        assert_bitwise_equal(ours.flip(2), whole)


@PLACES
def test_lengths_that_are_too_long_or_negative_count_as_all_keys_or_none(place: Place) -> None:
    _, _, _, image, text = sizes(place)
    q, k, v = make(place, image, text, text)
    odd, plain = (torch.tensor(n, dtype=torch.int32, device=place[0]) for n in ([text + 9, -4, 2], [text, 0, 2]))
    assert_bitwise_equal(call(place, q, k, v, lengths=odd), call(place, q, k, v, lengths=plain))


@PLACES
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_from_a_cache_gives_prefills_bits(queries: int, place: Place) -> None:
    _, _, _, image, _ = sizes(place)
    q, k, v = (make(place, image)[0] for _ in range(3))
    prefill = call(place, q, k, v, causal=True)
    for stop in (queries, image // 2, image):
        out = call(place, q[:, stop - queries:stop], k[:, :stop], v[:, :stop], causal=True)
        assert_bitwise_equal(out, prefill[:, stop - queries:stop])


@PLACES
def test_slices_of_a_packed_projection_give_the_same_bits(place: Place) -> None:
    _, heads, dims, image, _ = sizes(place)
    packed = torch.randn(2, image, 3 * heads * dims).to(place[0], place[2])
    parts = [t.unflatten(2, (heads, dims)) for t in packed.chunk(3, 2)]
    assert_bitwise_equal(call(place, *parts), call(place, *(t.contiguous() for t in parts)))
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts]
    assert_bitwise_equal(call(place, *turned), call(place, *parts))


@PLACES
def test_a_sample_without_keys_gives_zeros(place: Place) -> None:
    _, _, _, image, text = sizes(place)
    q, k, v = make(place, image, text, text, requires_grad=True)
    lengths = torch.tensor([0, 2, 0], dtype=torch.int32, device=place[0])
    out = call(place, q, k, v, lengths=lengths)
    out.sum().backward()
    assert out[[0, 2]].eq(0).all()
    assert out[1].ne(0).any()
    for t in (q, k, v):
        assert t.grad[[0, 2]].eq(0).all()  # type: ignore[index]


@PLACES
def test_nan_reaches_the_rows_that_read_it_and_no_other_sample(place: Place) -> None:
    _, _, _, image, _ = sizes(place)
    q, k, v = make(place, image, image, image)
    k[1, 3] = float("nan")
    out = call(place, q, k, v)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [32, 48, 64, 128, 160, 256])
def test_every_head_size_works_on_a_gpu(dims: int, gpu: torch.device) -> None:
    place: Place = ("cuda", "auto", torch.bfloat16)
    qkv = [torch.randn(2, 150, 3, dims, device=gpu).bfloat16().requires_grad_() for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in qkv]
    out, (want,) = call(place, *qkv), exact(*([t] for t in wide))
    assert relative_frobenius_error(out.detach(), want.detach()) < BOUND[torch.bfloat16]
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight.double())
    for ours, theirs in zip(qkv, wide, strict=True):
        assert relative_frobenius_error(ours.grad, theirs.grad) < GRADIENT_BOUND[torch.bfloat16]  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_queries_a_program_takes_are_no_part_of_the_bits(gpu: torch.device,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    from flowmill_kernels import triton_attention
    from flowmill_kernels.triton_backend import hopper_kernels

    place: Place = ("cuda", "auto", torch.bfloat16)
    qs, ks, vs, weights = (make(place, 201, 77) for _ in range(4))
    base = joint(place, qs, ks, vs, weights, [0, 1, 2], None)
    m, n, _, stages = triton_attention.FORWARD[64]
    monkeypatch.setitem(triton_attention.FORWARD, 64, (m // 2, n, 4, stages))
    m, n, _, stages = triton_attention.BACKWARD_KEYS[64]
    monkeypatch.setitem(triton_attention.BACKWARD_KEYS, 64, (m, n * 2, 8, 2))
    if hopper_kernels(gpu) is not None:
        from flowmill_kernels import hopper_attention

        groups, n, stages, _ = hopper_attention.FORWARD[64]
        assert groups == 3
        monkeypatch.setitem(hopper_attention.FORWARD, 64, (2, n, stages, 240))
    for ours, whole in zip(joint(place, qs, ks, vs, weights, [0, 1, 2], None), base, strict=True):
        assert_bitwise_equal(ours, whole)


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "gluon"), [(64, False), (128, False), (128, True)])
def test_other_kernels_keep_the_same_promises(dims: int, gluon: bool, gpu: torch.device,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128, and the kernels for other GPUs than Hopper: everything that heads of 64 are tested for."""
    from flowmill_kernels import triton_attention

    if not gluon:
        monkeypatch.setattr(triton_attention, "_specialized", lambda _: None)
    elif triton_attention._specialized(gpu) is None:
        pytest.skip("the Gluon kernels are for Hopper")
    monkeypatch.setattr(sys.modules[__name__], "sizes", lambda _: (3, 2, dims, 201, 77))
    place: Place = ("cuda", "auto", torch.bfloat16)
    for form in ("full", "joint", "cross", "causal", "joint_lengths"):
        test_forward_and_gradients_match_fp64(form, place)
    for with_lengths in (False, True):
        test_a_samples_bits_do_not_depend_on_the_batch(with_lengths, place)
    test_padding_changes_no_bit(place)
    test_a_heads_bits_do_not_depend_on_its_position(place)
    for queries in (1, 3):
        test_decoding_from_a_cache_gives_prefills_bits(queries, place)
    test_slices_of_a_packed_projection_give_the_same_bits(place)
    test_a_sample_without_keys_gives_zeros(place)


@pytest.mark.gpu
def test_a_hundred_runs_give_the_same_bits(gpu: torch.device) -> None:
    place: Place = ("cuda", "auto", torch.bfloat16)
    qs, ks, vs, weights = (make(place, 201, 77) for _ in range(4))
    base = joint(place, qs, ks, vs, weights, [0, 1, 2], None)
    for _ in range(100):
        for ours, whole in zip(joint(place, qs, ks, vs, weights, [0, 1, 2], None), base, strict=True):
            assert_bitwise_equal(ours, whole)


CPU: Place = ("cpu", "auto", torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = make(CPU, 5, 6, 6)
    n = torch.tensor([1, 2, 3], dtype=torch.int32)
    for bad, error, match in (
        (lambda: call(CPU, q, k, v[:, 1:]), ValueError, "same segments"),
        (lambda: call(CPU, q, k.bfloat16(), v), TypeError, "of one kind"),
        (lambda: call(CPU, q[..., 0], k, v), ValueError, "must be"),
        (lambda: call(CPU, (q, q, q), k, v), ValueError, "one tensor or two"),
        (lambda: call(CPU, q[1:], k, v), ValueError, "must be"),
        (lambda: call(CPU, *(torch.zeros(1, 2, 1, 272) for _ in range(3))), ValueError, "at most 256"),
        (lambda: call(CPU, q, k, v, lengths=n.long()), ValueError, "int32"),
        (lambda: call(CPU, q, k, v, lengths=n[:2]), ValueError, "int32"),
        (lambda: call(CPU, q, k, v, lengths=(n, n)), ValueError, "a key segment"),
        (lambda: call(CPU, q, k, v, lengths=n, causal=True), ValueError, "causal takes"),
        (lambda: call(CPU, k, q, q, causal=True), ValueError, "causal takes"),
        (lambda: call(CPU, q, k, v, scale=0.0), ValueError, "scale"),
        (lambda: attention(q, k, v, num_sms=0), ValueError, "num_sms"),
    ):
        with pytest.raises(error, match=match):
            bad()
