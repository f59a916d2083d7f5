"""A micro-batch as a CUDA graph: the gradients of the step called directly, bit for bit; what cannot be is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowmill_kernels import (
    GradientLeaves,
    KernelOptions,
    Layer,
    LeafPlan,
    MicroBatchGraph,
    apply_kernels,
    assert_bitwise_equal,
    linear,
)

from tests.kernels.test_gradients import _Layer, batch, layer

SAMPLES = 8


def toy(factor: float = 1.0) -> tuple[list[torch.nn.Parameter], Callable[..., torch.Tensor]]:
    """Parameters, and a step that returns each sample's loss."""
    w, b = layer()

    def step(x: torch.Tensor, name: str = "a") -> torch.Tensor:
        losses = (_Layer.apply(x, w, b) ** 3 * factor).sum((1, 2))  # type: ignore[operator]
        losses.sum().backward()
        return losses.detach()

    return [w, b], step


def gradients(leaves: GradientLeaves, call: Callable[[int, torch.Tensor], Any], x: torch.Tensor, size: int
              ) -> list[torch.Tensor]:
    with leaves:
        for first in range(0, len(x), size):
            call(first, x[first:first + size])
        norm = leaves.finish()
    return [*(p.grad.clone() for p in leaves.parameters), norm]  # type: ignore[union-attr]


def test_without_a_gpu_the_step_is_called() -> None:
    parameters, step = toy()
    leaves, x = GradientLeaves(parameters, LeafPlan(SAMPLES)), batch(SAMPLES)

    def directly(first: int, part: torch.Tensor) -> None:
        with leaves.micro_batch(first, len(part)):
            step(part)

    want = gradients(leaves, directly, x, 8)
    graph = MicroBatchGraph(leaves, 2, step, {"x": x[:2]})
    for ours, theirs in zip(gradients(leaves, lambda first, part: graph(first, x=part), x, 2), want, strict=True):
        assert_bitwise_equal(ours, theirs)
    with leaves:
        assert_bitwise_equal(graph(0, x=x[:2]), step_alone(x[:2]))


def step_alone(x: torch.Tensor) -> torch.Tensor:
    return toy()[1](x)


def test_other_inputs_than_recorded_are_refused() -> None:
    parameters, step = toy()
    leaves, x = GradientLeaves(parameters, LeafPlan(SAMPLES)), batch(SAMPLES)
    graph = MicroBatchGraph(leaves, 2, step, {"x": x[:2], "name": "a"})
    with leaves:
        for bad, match in (({"x": x[:2]}, r"\['x'\] came, but \['name', 'x'\]"),
                           ({"x": x[:3], "name": "a"}, "make a graph for each size"),
                           ({"x": x[:2].double(), "name": "a"}, "float64"),
                           ({"x": x[:2], "name": "b"}, "'b', but 'a' was recorded"),
                           ({"x": 1.0, "name": "a"}, "only tensors may change")):
            with pytest.raises(ValueError, match=match):
                graph(0, **bad)
        graph(0, x=x[:2], name="a")
        with pytest.raises(ValueError, match="the next is 2"):
            graph(4, x=x[:2], name="a")
    with pytest.raises(RuntimeError, match="enter the collector first"):
        graph(0, x=x[:2], name="a")
    for size in (0, 9):
        with pytest.raises(ValueError, match=f"micro-batch of {size}"):
            MicroBatchGraph(leaves, size, step, {"x": x})


# On a GPU ------------------------------------------------------------------------------------------------------------

def model_on(gpu: torch.device) -> tuple[torch.nn.Module, list[torch.nn.Parameter], dict[str, torch.Tensor]]:
    """A tiny SD3 transformer in bf16 with adapters, and its tensors for all samples."""
    pytest.importorskip("diffusers", reason="the model classes come from diffusers")
    from tests.kernels.models import FAMILIES, add_lora, to

    model = FAMILIES["sd3"].build()
    parameters = add_lora(model, "sd3")
    model.to(gpu, torch.bfloat16)
    inputs = to(FAMILIES["sd3"].inputs(SAMPLES), gpu, torch.bfloat16)
    return model, parameters, {k: v for k, v in inputs.items() if torch.is_tensor(v)}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 8])
def test_on_a_gpu_a_graph_gives_the_bits_of_the_step_update_after_update(gpu: torch.device, size: int) -> None:
    model, parameters, inputs = model_on(gpu)

    def step(**given: torch.Tensor) -> torch.Tensor:
        losses = model(**given, return_dict=False)[0].float().square().flatten(1).sum(1)
        losses.sum().backward()
        return losses.detach()

    def take(first: int) -> dict[str, torch.Tensor]:
        return {k: v[first:first + size] for k, v in inputs.items()}

    start = [p.detach().clone() for p in parameters]
    leaves = GradientLeaves(parameters, LeafPlan(SAMPLES))
    found: dict[str, list[torch.Tensor]] = {}
    with apply_kernels(model, "consistent", num_sms=132):
        graph = MicroBatchGraph(leaves, size, step, take(0))
        for how in ("step", "graph"):
            with torch.no_grad():
                for p, value in zip(parameters, start, strict=True):
                    p.copy_(value)
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            found[how] = []
            for _ in range(2):
                losses = []
                with leaves:
                    for first in range(0, SAMPLES, size):
                        if how == "graph":
                            losses.append(graph(first, **take(first)).clone())
                        else:
                            with leaves.micro_batch(first, size):
                                losses.append(step(**take(first)))
                    norm = leaves.finish()
                found[how] += [torch.cat(losses), norm, *(p.grad.clone() for p in parameters)]  # type: ignore[union-attr]
                optimizer.step()
            found[how] += [p.detach().clone() for p in parameters]
    assert float(found["step"][1]) > 0
    for ours, theirs in zip(found["graph"], found["step"], strict=True):
        assert_bitwise_equal(ours, theirs)


@pytest.mark.gpu
def test_on_a_gpu_what_cannot_be_replayed_is_refused(gpu: torch.device) -> None:
    w, b = (torch.nn.Parameter(torch.randn(size, device=gpu).bfloat16()) for size in ((32, 16), (32,)))
    leaves, x = GradientLeaves([w, b], LeafPlan(SAMPLES)), torch.randn(SAMPLES, 3, 16, device=gpu).bfloat16()

    def step(x: torch.Tensor, wait: bool = False) -> None:
        loss = linear(x, Layer(w, b), options=KernelOptions("consistent", 132)).float().sum()
        loss.backward()
        if wait:
            loss.item()

    with pytest.raises(RuntimeError, match=r"(?s)captur.*must not wait for the GPU"):
        MicroBatchGraph(leaves, 2, step, {"x": x[:2], "wait": True})
    graph = MicroBatchGraph(leaves, 2, step, {"x": x[:2]})
    with leaves:
        graph(0, x=x[:2])
    b.data = b.data.clone()
    with leaves, pytest.raises(RuntimeError, match="memory has moved"):
        graph(0, x=x[:2])
