"""Linear layers with gradients: right against fp64, the same bits in rollout and training, LoRA merged and unmerged."""

import dataclasses

import pytest
import torch
from flowmill_kernels import (
    GradientLeaves,
    KernelOptions,
    Layer,
    LeafPlan,
    assert_bitwise_equal,
    feed_forward,
    gelu,
    gelu_tanh,
    linear,
    linears,
    merged,
    patch_embed,
    relative_frobenius_error,
)
from torch import Tensor
from torch.nn import functional

CPU = KernelOptions("consistent", num_sms=132)
BATCH, TOKENS, K, N, RANK = 4, 6, 48, 40, 6


def make_layer(n: int = N, k: int = K, rank: int = RANK, seed: int = 0, dtype: torch.dtype = torch.float32,
               device: torch.device | str = "cpu") -> Layer:
    torch.manual_seed(seed)

    def parameter(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(device, dtype).requires_grad_()

    return Layer(parameter(n, k), parameter(n), parameter(rank, k), parameter(n, rank), 2.0)


def tensors(layer: Layer) -> list[Tensor]:
    return [layer.weight, layer.bias, layer.lora_a, layer.lora_b]  # type: ignore[list-item]


def in_double(layer: Layer) -> Layer:
    return dataclasses.replace(layer, **{
        name: getattr(layer, name).detach().double().requires_grad_()
        for name in ("weight", "bias", "lora_a", "lora_b")})


def exact(layer: Layer, x: Tensor, activation: str = "none", gate: Tensor | None = None,
          residual: Tensor | None = None) -> Tensor:
    weight, bias, a, b = tensors(layer)
    y = x @ weight.T + layer.lora_scale * (x @ a.T) @ b.T + bias
    if activation == "gelu_tanh":
        y = functional.gelu(y, approximate="tanh")
    if gate is not None:
        y = y * gate[:, None]
    return y if residual is None else residual + y


EPILOGUES = {"plain": {}, "gelu": {"activation": "gelu_tanh"}, "gate": {"gate": True}, "residual": {"residual": True},
             "all": {"activation": "gelu_tanh", "gate": True, "residual": True}}


@pytest.mark.parametrize("mode", ["consistent", "tp_invariant"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_outputs_and_every_gradient_match_fp64(name: str, mode: str) -> None:
    layer, options = make_layer(k=128), KernelOptions(mode, 132)  # type: ignore[arg-type]
    wide = in_double(layer)
    epilogue = dict(EPILOGUES[name])
    inputs = [torch.randn(BATCH, TOKENS, 128, requires_grad=True)]
    for key, shape in (("gate", (BATCH, N)), ("residual", (BATCH, TOKENS, N))):
        if key in epilogue:
            epilogue[key] = torch.randn(shape, requires_grad=True)  # type: ignore[assignment]
            inputs.append(epilogue[key])  # type: ignore[arg-type]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    wide_epilogue = dict(zip([k for k in epilogue if k != "activation"], doubles[1:], strict=True))
    if "activation" in epilogue:
        wide_epilogue["activation"] = epilogue["activation"]  # type: ignore[assignment]
    out = linear(inputs[0], layer, options=options, **epilogue)  # type: ignore[arg-type]
    want = exact(wide, doubles[0], **wide_epilogue)  # type: ignore[arg-type]
    weight = torch.randn(want.shape, dtype=torch.float64)
    (out * weight.float()).sum().backward()
    (want * weight).sum().backward()
    assert relative_frobenius_error(out.detach(), want.detach()) < 3e-6
    for ours, theirs in zip([*inputs, *tensors(layer)], [*doubles, *tensors(wide)], strict=True):
        assert ours.grad is not None
        assert relative_frobenius_error(ours.grad, theirs.grad) < 1e-5  # type: ignore[arg-type]


def test_layers_of_one_input_are_the_single_layers_bit_for_bit() -> None:
    layers = [make_layer(seed=1), make_layer(n=24, rank=3, seed=2), dataclasses.replace(make_layer(seed=3), lora_a=None,
                                                                                      lora_b=None)]
    x = torch.randn(BATCH, TOKENS, K)
    for ours, layer in zip(linears(x, layers, options=CPU), layers, strict=True):
        assert_bitwise_equal(ours.detach(), linear(x, layer, options=CPU).detach())


def test_gradients_of_shared_inputs_add_up() -> None:
    layers = [make_layer(seed=1), make_layer(n=24, rank=3, seed=2)]
    wide = [in_double(layer) for layer in layers]
    x = torch.randn(BATCH, TOKENS, K, requires_grad=True)
    wide_x = x.detach().double().requires_grad_()
    sum(y.square().sum() for y in linears(x, layers, options=CPU)).backward()  # type: ignore[union-attr]
    sum(exact(layer, wide_x).square().sum() for layer in wide).backward()  # type: ignore[union-attr]
    assert relative_frobenius_error(x.grad, wide_x.grad) < 1e-5  # type: ignore[arg-type]
    for layer, other in zip(layers, wide, strict=True):
        for ours, theirs in zip(tensors(layer), tensors(other), strict=True):
            assert relative_frobenius_error(ours.grad, theirs.grad) < 1e-5  # type: ignore[arg-type]


def test_an_output_that_nobody_uses_gets_no_gradient() -> None:
    layers = [make_layer(seed=1), make_layer(seed=2)]
    first, _ = linears(torch.randn(BATCH, TOKENS, K), layers, options=CPU)
    first.sum().backward()
    assert layers[0].weight.grad is not None
    assert layers[1].weight.grad is None or not layers[1].weight.grad.any()


@pytest.mark.parametrize("epilogue", [{}, {"activation": "gelu_tanh"}], ids=["plain", "gelu"])
def test_rollout_and_training_have_the_same_bits(epilogue: dict) -> None:
    layer, x = make_layer(), torch.randn(BATCH, TOKENS, K)
    trained = linear(x, layer, options=CPU, **epilogue)
    with torch.no_grad():
        assert_bitwise_equal(linear(x, layer, options=CPU, **epilogue), trained.detach())
        for b in range(BATCH):
            assert_bitwise_equal(linear(x[b:b + 1], layer, options=CPU, **epilogue), trained.detach()[b:b + 1])


def test_merged_bits_differ_and_are_as_close_as_its_rounding() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    x = torch.randn(BATCH, TOKENS, K).bfloat16()
    with torch.no_grad():
        unmerged, single = linear(x, layer, options=CPU), linear(x, merged(layer, options=CPU), options=CPU)
        assert not torch.equal(unmerged, single)
        want = exact(in_double(layer), x.double())
        # Roundings of weight, adapter's hidden row and output: 2^-9 each in the norm, at most.
        assert relative_frobenius_error(single, want) < 3 * 2**-9
        assert relative_frobenius_error(unmerged, want) < 3 * 2**-9
        assert_bitwise_equal(linear(x[1:2], merged(layer, options=CPU), options=CPU), single[1:2])


@pytest.mark.parametrize("micro", [1, 3])
def test_weight_gradients_have_the_same_bits_for_every_micro_batch(micro: int) -> None:
    x, total = torch.randn(8, TOKENS, K), 8
    found = {}
    for size in (total, micro):
        layer = make_layer()
        with GradientLeaves(tensors(layer), LeafPlan(total)) as leaves:
            for first in range(0, total, size):
                part = x[first:first + size]
                with leaves.micro_batch(first, len(part)):
                    linear(part, layer, options=CPU, activation="gelu_tanh").square().sum().backward()
            leaves.finish()
        found[size] = [t.grad for t in tensors(layer)]
    for one, other in zip(found[total], found[micro], strict=True):
        assert_bitwise_equal(one, other)  # type: ignore[arg-type]


# Feed-forward ------------------------------------------------------------------------------------------------------

WIDE = 64


def make_feed_forward(k: int = K, n: int = N, wide: int = WIDE, **how) -> tuple[Layer, Layer]:
    return make_layer(wide, k, seed=1, **how), make_layer(n, wide, seed=2, **how)


def exact_feed_forward(x: Tensor, first: Layer, second: Layer, activation: str, gate: Tensor | None = None,
                       residual: Tensor | None = None) -> Tensor:
    h = functional.gelu(exact(first, x), approximate="tanh" if activation == "gelu_tanh" else "none")
    return exact(second, h, gate=gate, residual=residual)


def without_adapter(layer: Layer) -> Layer:
    return dataclasses.replace(layer, lora_a=None, lora_b=None)


@pytest.mark.parametrize("mode", ["consistent", "tp_invariant"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("adapters", ["both", "none"])
def test_feed_forward_is_two_layers_and_its_gradients_match_fp64(mode: str, activation: str, adapters: str) -> None:
    options, layers = KernelOptions(mode, 132), make_feed_forward(128, wide=256)  # type: ignore[arg-type]
    if adapters == "none":
        layers = (without_adapter(layers[0]), without_adapter(layers[1]))
    x, gate = torch.randn(BATCH, TOKENS, 128, requires_grad=True), torch.randn(BATCH, N, requires_grad=True)
    residual = torch.randn(BATCH, TOKENS, N, requires_grad=True)
    out = feed_forward(x, *layers, options=options, activation=activation, gate=gate, residual=residual)  # type: ignore[arg-type]
    act = gelu_tanh if activation == "gelu_tanh" else gelu
    with torch.no_grad():
        rolled = feed_forward(x, *layers, options=options, activation=activation, gate=gate, residual=residual)  # type: ignore[arg-type]
        h = act(linear(x, layers[0], options=options))
        assert_bitwise_equal(rolled, linear(h, layers[1], options=options, gate=gate, residual=residual))
    assert_bitwise_equal(out.detach(), rolled)
    inputs = [x, gate, residual, *(t for layer in layers for t in tensors(layer) if t is not None)]
    h = act(linear(x, layers[0], options=options))
    weight = torch.randn(out.shape)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    parts = torch.autograd.grad((linear(h, layers[1], options=options, gate=gate, residual=residual) * weight).sum(),
                                inputs)
    for one, other in zip(ours, parts, strict=True):
        assert relative_frobenius_error(one, other) < 1e-5
    if adapters == "both":
        doubles = [t.detach().double().requires_grad_() for t in (x, gate, residual)]
        wide = [in_double(layer) for layer in layers]
        want = exact_feed_forward(doubles[0], *wide, activation, *doubles[1:])
        exactly = torch.autograd.grad((want * weight.double()).sum(),
                                      [*doubles, *(t for layer in wide for t in tensors(layer))])
        for one, other in zip(ours, exactly, strict=True):
            assert relative_frobenius_error(one, other) < 1e-5


@pytest.mark.parametrize("trained", ["x", "first", "second", "gate"])
def test_feed_forward_gives_gradients_to_what_asks_alone(trained: str) -> None:
    layers = make_feed_forward()
    x, gate = torch.randn(BATCH, TOKENS, K), torch.randn(BATCH, N)
    asking = {"x": [x], "gate": [gate], "first": tensors(layers[0]), "second": tensors(layers[1])}[trained]
    for t in (x, gate, *tensors(layers[0]), *tensors(layers[1])):
        t.requires_grad_(any(t is one for one in asking))
    weight = torch.randn(BATCH, TOKENS, N)
    out = feed_forward(x, *layers, options=CPU, gate=gate)
    found = torch.autograd.grad((out * weight).sum(), asking)
    parts = linear(gelu_tanh(linear(x, layers[0], options=CPU)), layers[1], options=CPU, gate=gate)
    for one, other in zip(found, torch.autograd.grad((parts * weight).sum(), asking), strict=True):
        assert relative_frobenius_error(one, other) < 1e-5


@pytest.mark.parametrize("micro", [1, 3])
def test_feed_forward_gradients_have_the_same_bits_for_every_micro_batch(micro: int) -> None:
    x, found = torch.randn(8, TOKENS, K), {}
    for size in (8, micro):
        layers, inputs = make_feed_forward(), []
        parameters = [t for layer in layers for t in tensors(layer)]
        with GradientLeaves(parameters, LeafPlan(8)) as leaves:
            for first in range(0, 8, size):
                part = x[first:first + size].clone().requires_grad_()
                with leaves.micro_batch(first, len(part)):
                    feed_forward(part, *layers, options=CPU).square().sum().backward()
                inputs.append(part.grad)
            leaves.finish()
        found[size] = [torch.cat(inputs), *(t.grad for t in parameters)]
    for one, other in zip(found[8], found[micro], strict=True):
        assert_bitwise_equal(one, other)  # type: ignore[arg-type]


def test_feed_forward_keeps_nothing_wide_that_its_backward_does_not_read() -> None:
    """Adapters on attention alone: of the tensors as wide as the hidden one, the slope is kept and nothing else."""
    layers, kept = make_feed_forward(), []
    for t in (*tensors(layers[0]), *tensors(layers[1])):
        t.requires_grad_(False)
    x = torch.randn(BATCH, TOKENS, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        feed_forward(x, *layers, options=CPU).sum().backward()
    assert kept.count((BATCH, TOKENS, WIDE)) == 1


def test_feed_forward_refuses_what_does_not_fit() -> None:
    first, second = make_feed_forward()
    x = torch.randn(BATCH, TOKENS, K, requires_grad=True)
    with pytest.raises(ValueError, match="second takes 48 channels and first gives 64"):
        feed_forward(x, first, make_layer(), options=CPU)
    with pytest.raises(ValueError, match="'gelu_tanh' or 'gelu'"):
        feed_forward(x, first, second, options=CPU, activation="silu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gate must be \[B, N\]"):
        feed_forward(x, first, second, options=CPU, gate=torch.zeros(BATCH, WIDE))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["consistent", "tp_invariant"])
def test_on_a_gpu_feed_forward_keeps_bits_and_gradients(mode: str, gpu: torch.device) -> None:
    options = KernelOptions(mode, 132)  # type: ignore[arg-type]
    layers = make_feed_forward(384, 384, 1536, rank=24, dtype=torch.bfloat16, device=gpu)
    x = torch.randn(BATCH, 77, 384, device=gpu).bfloat16().requires_grad_()
    gate = torch.randn(BATCH, 384, device=gpu).bfloat16()
    weight = torch.randn(BATCH, 77, 384, device=gpu).bfloat16()
    out = feed_forward(x, *layers, options=options, gate=gate, residual=x)
    parameters = [t for layer in layers for t in tensors(layer)]
    found = torch.autograd.grad((out * weight).sum(), [x, *parameters])
    for sms in (132, 32):
        fewer = dataclasses.replace(options, num_sms=sms)
        for b in range(BATCH):
            one = x.detach()[b:b + 1].requires_grad_()
            y = feed_forward(one, *layers, options=fewer, gate=gate[b:b + 1], residual=one)
            assert_bitwise_equal(y.detach(), out.detach()[b:b + 1])
            assert_bitwise_equal(torch.autograd.grad((y * weight[b:b + 1]).sum(), one)[0], found[0][b:b + 1])
    wide, wide_x = [in_double(layer) for layer in layers], x.detach().double().requires_grad_()
    want = exact_feed_forward(wide_x, *wide, "gelu_tanh", gate.double(), wide_x)
    exactly = torch.autograd.grad((want * weight.double()).sum(), [wide_x, *(t for one in wide for t in tensors(one))])
    assert relative_frobenius_error(out.detach(), want.detach()) < 3 * 2**-8
    for one, other in zip(found, exactly, strict=True):
        assert relative_frobenius_error(one, other) < 0.02


@pytest.mark.parametrize("patch", [(2, 2), (1, 2, 2)])
def test_patch_embed_is_the_convolution(patch: tuple[int, ...]) -> None:
    sizes = (2, 4, 6)[-len(patch):]
    x = torch.randn(2, 3, *sizes, requires_grad=True)
    conv = (torch.nn.Conv2d if len(patch) == 2 else torch.nn.Conv3d)(3, 5, patch, patch).double()
    layer = Layer(conv.weight.detach().float().flatten(1).requires_grad_(), conv.bias.detach().float())  # type: ignore[union-attr]
    out = patch_embed(x, layer, patch, options=CPU)
    want = conv(x.detach().double()).flatten(2).transpose(1, 2)
    assert relative_frobenius_error(out.detach(), want.detach()) < 1e-6
    with pytest.raises(ValueError, match="multiples of the patch"):
        patch_embed(x[..., :-1], layer, patch, options=CPU)


def test_layers_that_do_not_fit_are_refused() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="come together"):
        Layer(layer.weight, lora_a=layer.lora_a)
    with pytest.raises(ValueError, match="needs lora_a"):
        Layer(layer.weight, lora_a=layer.lora_a, lora_b=layer.lora_b[:-1])  # type: ignore[index]
    with pytest.raises(ValueError, match="goes with one layer"):
        linears(torch.randn(1, 2, K), [layer, layer], options=CPU, activation="gelu_tanh")
    with pytest.raises(ValueError, match="mode must be"):
        KernelOptions("reference", 132)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_sms"):
        KernelOptions("consistent", 0)


def test_autocast_chooses_the_products_dtype() -> None:
    layer, x = make_layer(), torch.randn(BATCH, TOKENS, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, layer, options=CPU)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == layer.lora_a.grad.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [{}, {"activation": "gelu_tanh"}], ids=["plain", "gelu"])
def test_on_a_gpu_bits_and_gradients_hold(epilogue: dict, gpu: torch.device) -> None:
    layer = make_layer(256, 384, 24, dtype=torch.bfloat16, device=gpu)
    x = torch.randn(BATCH, 77, 384, device=gpu).bfloat16().requires_grad_()
    out = linear(x, layer, options=CPU, **epilogue)
    with torch.no_grad():
        for sms in (132, 32):
            options = dataclasses.replace(CPU, num_sms=sms)
            for b in range(BATCH):
                assert_bitwise_equal(linear(x[b:b + 1], layer, options=options, **epilogue), out.detach()[b:b + 1])
    wide, wide_x = in_double(layer), x.detach().double().requires_grad_()
    want = exact(wide, wide_x, **epilogue)
    weight = torch.randn_like(want)
    (out * weight.bfloat16()).sum().backward()
    (want * weight).sum().backward()
    assert relative_frobenius_error(out.detach(), want.detach()) < 3 * 2**-8
    for ours, theirs in zip([x, *tensors(layer)], [wide_x, *tensors(wide)], strict=True):
        assert relative_frobenius_error(ours.grad, theirs.grad) < 0.02  # type: ignore[arg-type]
