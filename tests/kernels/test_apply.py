"""`apply_kernels` on the four model families: right, the same bits for every batch, rollout = training, reversible."""

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("diffusers", reason="the model classes come from diffusers")

from flowmill_kernels import (
    GradientLeaves,
    LeafPlan,
    apply_kernels,
    assert_bitwise_equal,
    relative_frobenius_error,
    remove_kernels,
)
from flowmill_kernels.blocks import UnsupportedError

from tests.kernels.models import FAMILIES, LORA_TARGETS, add_lora, take, to

SMS = 132
BATCH = 4
families = pytest.mark.parametrize("family", sorted(FAMILIES))


def build(family: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
    return FAMILIES[family].build().to(device, dtype)


def run(model: nn.Module, inputs: dict) -> Tensor:
    return model(**inputs)[0]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def applied(request: pytest.FixtureRequest) -> Iterator[tuple[str, nn.Module, dict, Tensor]]:
    """(family, model with kernels, inputs of 4 samples, their output) on the CPU back end."""
    model = build(request.param)
    inputs = FAMILIES[request.param].inputs(BATCH)
    with apply_kernels(model, "consistent", num_sms=SMS):
        with torch.no_grad():
            out = run(model, inputs)
        yield request.param, model, inputs, out


def test_output_is_the_models_own_up_to_rounding(applied: tuple) -> None:
    family, _, inputs, out = applied
    with torch.no_grad():
        exact = run(build(family, torch.float64), to(inputs, "cpu", torch.float64))
        own = run(build(family), inputs)
    # fp32 products of at most 48 terms through two blocks; the model's own fp32 error is the measure.
    assert relative_frobenius_error(out, exact) < 4 * relative_frobenius_error(own, exact) + 1e-6


@pytest.mark.parametrize("samples", [[0], [1], [0, 1, 2], [3, 2, 1, 0]], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(applied: tuple, samples: list[int]) -> None:
    family, model, inputs, out = applied
    with torch.no_grad():
        assert_bitwise_equal(run(model, take(inputs, family, samples)), out[samples])


def test_rollout_and_training_forward_have_the_same_bits(applied: tuple) -> None:
    _, model, inputs, out = applied
    model.requires_grad_(True)
    trained = run(model, inputs)
    assert trained.requires_grad
    assert_bitwise_equal(trained.detach(), out)


@families
def test_no_operation_of_a_forward_and_backward_can_mix_samples(family: str) -> None:
    """A whole transformer with LoRA: nothing outside of the list of operations that sum over nothing."""
    model, seen, inputs = build(family), Operations(), FAMILIES[family].inputs(2)
    add_lora(model, family)
    with apply_kernels(model, "consistent", num_sms=SMS), seen:
        run(model, inputs).square().flatten(1)[:, 0].backward(torch.ones(2))
    assert not seen.forbidden, f"operations that may sum in another order: {sorted(seen.forbidden)}"
    assert seen.count > 100


def test_the_allow_list_refuses_torchs_own_arithmetic() -> None:
    model, seen, inputs = build("sd3"), Operations(), FAMILIES["sd3"].inputs(2)
    with seen, torch.no_grad():
        run(model, inputs)
    assert {"addmm", "native_layer_norm", "convolution"} <= {name.split(".")[1] for name in seen.forbidden}


class Operations(TorchDispatchMode):
    """Collects aten operations that are neither elementwise, nor copies, views or creations."""

    ALLOWED = frozenset((
        "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "slice", "select", "split",
        "chunk", "unsqueeze", "squeeze", "alias", "detach", "clone", "copy_", "_to_copy", "empty", "empty_like",
        "new_empty", "empty_strided", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
        "new_ones", "full", "full_like", "new_full", "fill_", "zero_", "cat", "stack", "unbind", "as_strided",
        "arange", "index_select", "index", "slice_backward", "select_backward", "split_with_sizes", "lift_fresh",
        "scalar_tensor", "view_as_real", "view_as_complex", "_conj", "repeat_interleave", "constant_pad_nd",
        "repeat", "_reshape_alias", "embedding", "flip", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_",
        "neg", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "pow", "tanh", "sigmoid", "reciprocal", "where", "lt",
        "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
        "bitwise_not", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "rsub", "abs", "isnan", "isinf",
        "isfinite", "erf", "polar", "masked_fill", "masked_fill_", "exp2", "addcmul", "remainder", "floor_divide"
    ))
    """A name stands here only if an element of its result depends on one element of each input: it sums nothing."""
    EXACT = frozenset(("_local_scalar_dense", "equal", "any", "all", "max", "amax"))
    """Maxima and comparisons: exact in every order; so are sums of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        self.count += 1
        integers = isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex()
        exact = name in self.EXACT or (name in ("sum", "cumsum") and integers)
        if name not in self.ALLOWED and not exact and not func.is_view:
            self.forbidden.add(str(func))
        return result


@families
def test_gradients_are_the_models_own_up_to_rounding(family: str) -> None:
    model, exact = build(family), build(family, torch.float64)
    parameters, exact_parameters = add_lora(model, family), add_lora(exact, family)
    inputs = FAMILIES[family].inputs(2)
    weights = torch.randn(run(exact, to(inputs, "cpu", torch.float64)).shape, dtype=torch.float64)
    (run(exact, to(inputs, "cpu", torch.float64)) * weights).sum().backward()
    with apply_kernels(model, "consistent", num_sms=SMS):
        (run(model, inputs) * weights.float()).sum().backward()
    for ours, theirs in zip(parameters, exact_parameters, strict=True):
        check_gradient("", ours.grad, theirs.grad)


def check_gradient(name: str, ours: Tensor | None, theirs: Tensor | None) -> None:
    if ours is None:  # nobody reads it, as the last block's text queries
        assert theirs is None or not theirs.any(), name
        return
    assert theirs is not None, name
    # Where the exact gradient is 0 (a key's bias shifts all scores of a row alike) rounding remains, hence the floor.
    error = (ours.double() - theirs).norm() / (theirs.norm() + 1e-3)
    assert error < 2e-4, f"{name}: {error}"


def test_gradients_of_every_parameter_are_right() -> None:
    """Full fine-tuning of the toy: weights, biases, norms, tables and gates, through every Function's backward."""
    for family in ("sd3", "wan"):
        model, exact = build(family), build(family, torch.float64)
        inputs = FAMILIES[family].inputs(2)
        (run(exact, to(inputs, "cpu", torch.float64)).square()).sum().backward()
        with apply_kernels(model, "consistent", num_sms=SMS):
            run(model, inputs).square().sum().backward()
        wanted = dict(exact.named_parameters())
        for name, parameter in model.named_parameters():
            check_gradient(f"{family} {name}", parameter.grad, wanted[name].grad)


@pytest.mark.parametrize("micro", [1, 3])
def test_lora_gradients_have_the_same_bits_for_every_micro_batch(micro: int) -> None:
    family, total = "sd3", 4
    grads = {}
    for size in (total, micro):
        model = build(family)
        parameters = add_lora(model, family)
        inputs = FAMILIES[family].inputs(total)
        with apply_kernels(model, "consistent", num_sms=SMS), \
                GradientLeaves(parameters, LeafPlan(total)) as leaves:
            for first in range(0, total, size):
                part = take(inputs, family, slice(first, first + size))
                with leaves.micro_batch(first, len(part["hidden_states"])):
                    run(model, part).square().sum().backward()
            norm = leaves.finish()
        grads[size] = [p.grad for p in parameters] + [norm]
    for one, other in zip(grads[total], grads[micro], strict=True):
        assert_bitwise_equal(one, other)


def test_another_samples_prompt_length_changes_nothing() -> None:
    model = build("qwen")
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        short, long = FAMILIES["qwen"].inputs(2, 3), FAMILIES["qwen"].inputs(2, 8)
        long["encoder_hidden_states_mask"] = torch.arange(8)[None] < torch.tensor([[3], [8]])
        assert_bitwise_equal(run(model, long)[:1], run(model, short)[:1])


def test_gradient_checkpointing_changes_nothing() -> None:
    family, grads = "sd3", []
    for checkpointing in (False, True):
        model = build(family)
        parameters = add_lora(model, family)
        model.train()
        if checkpointing:
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        with apply_kernels(model, "consistent", num_sms=SMS), GradientLeaves(parameters, LeafPlan(2)) as leaves:
            with leaves.micro_batch(0, 2):
                run(model, FAMILIES[family].inputs(2)).square().sum().backward()
            leaves.finish()
        grads.append([p.grad for p in parameters])
    for one, other in zip(*grads, strict=True):
        assert_bitwise_equal(one, other)


def test_prompts_with_a_hole_are_refused() -> None:
    model, inputs = build("qwen"), FAMILIES["qwen"].inputs(1)
    inputs["encoder_hidden_states_mask"] = torch.tensor([[True, False, True, True, False]])
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad(), \
            pytest.raises(UnsupportedError, match="padded at the end"):
        run(model, inputs)


def test_tp_invariant_runs_and_differs_from_consistent_only_in_rounding() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(2)
    add_lora(model, "sd3")
    with torch.no_grad(), apply_kernels(model, "consistent", num_sms=SMS):
        one = run(model, inputs)
    with torch.no_grad(), apply_kernels(model, "tp_invariant", num_sms=SMS):
        other = run(model, inputs)
        assert_bitwise_equal(run(model, take(inputs, "sd3", [1])), other[1:])
    assert relative_frobenius_error(one, other) < 1e-5


def test_tp_invariant_refuses_norms_across_heads() -> None:
    model = build("wan")
    with pytest.raises(ValueError, match="across heads"):
        apply_kernels(model, "tp_invariant", num_sms=SMS)
    assert not any("forward" in part.__dict__ for part in model.modules())


# Applying and removing ---------------------------------------------------------------------------------------------

def test_it_reports_what_it_replaced_and_removes_it(applied: tuple) -> None:
    family = applied[0]
    model = build(family)
    before = {name: dict(part.__dict__) for name, part in model.named_modules()}
    keys = list(model.state_dict())
    handle = apply_kernels(model, "consistent", num_sms=SMS)
    kinds = {item.kind for item in handle.replaced if item.fused}
    assert kinds - {"AdaLayerNormContinuous"} == {
        "sd3": {"JointTransformerBlock"}, "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
        "qwen": {"QwenImageTransformerBlock"}, "wan": {"WanTransformerBlock"}}[family]
    assert any(item.name == "proj_out" and not item.fused for item in handle.replaced)
    assert "Linear" in str(handle)
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert {name: dict(part.__dict__) for name, part in model.named_modules()} == before


def test_a_module_without_anything_to_replace_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing in Sequential can be replaced"):
        apply_kernels(nn.Sequential(nn.Flatten(), nn.ReLU()), "consistent", num_sms=SMS)


def test_a_module_that_would_keep_other_arithmetic_is_refused_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8))
    with pytest.raises(ValueError, match=r"1 \(GroupNorm\)"):
        apply_kernels(model, "consistent", num_sms=SMS)
    assert "forward" not in model[0].__dict__
    with apply_kernels(model, "consistent", num_sms=SMS, partial=True) as handle:
        assert [item.name for item in handle.unreached] == ["1"]


@pytest.mark.parametrize(("mode", "sms", "match"), [("fast", SMS, "mode must be"), ("consistent", 0, "num_sms"),
                                                    ("consistent", 1.5, "num_sms")])
def test_bad_arguments_are_refused(mode: str, sms: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        apply_kernels(build("sd3"), mode, num_sms=sms)  # type: ignore[arg-type]


def test_applications_nest_and_are_removed_in_any_order() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with torch.no_grad():
        own = run(model, inputs)
        outer = apply_kernels(model, "consistent", num_sms=SMS)
        ours = run(model, inputs)
        assert not torch.equal(own, ours)
        inner = apply_kernels(model, "reference", num_sms=SMS)
        assert_bitwise_equal(run(model, inputs), own)
        outer.remove()
        assert_bitwise_equal(run(model, inputs), own)
        again = apply_kernels(model, "consistent", num_sms=96)
        assert_bitwise_equal(run(model, inputs), ours)
        inner.remove()
        assert_bitwise_equal(run(model, inputs), ours)
        again.remove()
        assert_bitwise_equal(run(model, inputs), own)


def test_an_exception_inside_takes_the_kernels_off() -> None:
    model = build("sd3")
    with pytest.raises(RuntimeError, match="mine"), apply_kernels(model, "consistent", num_sms=SMS):
        raise RuntimeError("mine")
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        twin = copy.deepcopy(model)
        out = run(model, inputs)
        for parameter in model.parameters():
            parameter.zero_()
        assert_bitwise_equal(run(twin, inputs), out)


def test_an_instances_own_forward_comes_back() -> None:
    linear = nn.Linear(4, 4)
    linear.forward = own = lambda x: x  # type: ignore[method-assign]
    apply_kernels(linear, "consistent", num_sms=SMS).remove()
    assert linear.forward is own


def test_threads_apply_and_remove_at_the_same_time() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    errors: list[BaseException] = []
    with torch.no_grad(), apply_kernels(model, "consistent", num_sms=SMS):
        ours = run(model, inputs)

        def work() -> None:
            try:
                with torch.no_grad():
                    for _ in range(3):
                        with apply_kernels(model, "consistent", num_sms=SMS):
                            assert_bitwise_equal(run(model, inputs), ours)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_compiled_models_keep_the_bits() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        assert_bitwise_equal(torch.compile(model, backend="eager")(**inputs)[0], run(model, inputs))


def test_an_empty_batch_gives_an_empty_batch() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        assert run(model, take(inputs, "sd3", slice(0, 0))).shape == (0, 4, 8, 6)


def test_second_derivatives_are_refused() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    inputs["hidden_states"].requires_grad_()
    with apply_kernels(model, "consistent", num_sms=SMS):
        (grad,) = torch.autograd.grad(run(model, inputs).square().sum(), inputs["hidden_states"], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_what_a_fused_block_does_not_compute_is_refused() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        with pytest.raises(UnsupportedError, match="ip_hidden_states"):
            run(model, inputs | {"joint_attention_kwargs": {"ip_hidden_states": torch.zeros(1)}})
        model.enable_forward_chunking(1, 1)  # type: ignore[operator]
        with pytest.raises(UnsupportedError, match="chunking"):
            run(model, inputs)


@pytest.mark.parametrize("trouble", ["dropout", "two", "dora"])
def test_adapters_that_would_break_the_promise_are_refused(trouble: str) -> None:
    from peft import LoraConfig

    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    config = {"r": 4, "target_modules": LORA_TARGETS["sd3"]}
    model.add_adapter(LoraConfig(**config, lora_dropout=0.1 if trouble == "dropout" else 0.0,  # type: ignore[operator]
                                 use_dora=trouble == "dora"))
    if trouble == "two":
        model.add_adapter(LoraConfig(**config), adapter_name="second")  # type: ignore[operator]
        model.set_adapter(["default", "second"])  # type: ignore[operator]
    model.train()
    with apply_kernels(model, "consistent", num_sms=SMS), \
            pytest.raises(UnsupportedError, match={"dropout": "dropout", "two": "2 LoRA", "dora": "variant"}[trouble]):
        run(model, inputs)


def test_dropout_in_training_is_refused_also_when_it_is_switched_on_later() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        run(model, inputs)
        model.transformer_blocks[1].ff.net[1].p = 0.1
        run(model, inputs)
        model.train()
        with pytest.raises(UnsupportedError, match=r"dropout 0\.1"):
            run(model, inputs)


def test_adapters_of_another_kind_are_refused() -> None:
    from peft import LoHaConfig, inject_adapter_in_model

    inputs = FAMILIES["sd3"].inputs(1)
    model = inject_adapter_in_model(LoHaConfig(r=2, target_modules=["to_q"]), build("sd3"))
    with apply_kernels(model, "consistent", num_sms=SMS), pytest.raises(UnsupportedError, match="plain LoRA"):
        run(model, inputs)


def test_attention_processors_of_another_kind_are_refused() -> None:
    class Doubled:
        def __call__(self, *args: object, **kwargs: object) -> None: ...

    model, inputs = build("flux"), FAMILIES["flux"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        model.transformer_blocks[0].attn.processor = Doubled()
        with pytest.raises(UnsupportedError, match="the attention processor is a Doubled"):
            run(model, inputs)


def test_hooks_that_would_not_be_called_are_refused() -> None:
    model = build("sd3")
    handle = model.transformer_blocks[0].attn.to_q.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0\.attn\.to_q has a hook"):
        apply_kernels(model, "consistent", num_sms=SMS)
    assert not any("forward" in part.__dict__ for part in model.modules())
    handle.remove()
    called = []
    model.transformer_blocks[0].register_forward_hook(lambda *_: called.append(1))
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        run(model, FAMILIES["sd3"].inputs(1))
    assert called


def test_classes_that_nobody_has_read_are_refused() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).mean(1)

    with pytest.raises(UnsupportedError, match="Pooled"):
        apply_kernels(Pooled(), "consistent", num_sms=SMS)


def test_a_mask_that_changes_in_place_counts_as_it_is() -> None:
    model, inputs = build("qwen"), FAMILIES["qwen"].inputs(2)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.inference_mode():
        mask = torch.arange(5)[None] < torch.tensor([[3], [5]])
        first = run(model, inputs | {"encoder_hidden_states_mask": mask})
        mask.numpy()[:] = [[True, True, False, False, False], [True] * 5]
        second = run(model, inputs | {"encoder_hidden_states_mask": mask})
        again = run(model, inputs | {"encoder_hidden_states_mask": mask.clone()})
    assert_bitwise_equal(second, again)
    assert not torch.equal(first, second)


def test_a_copys_kernels_can_be_taken_off_without_its_handle() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with torch.no_grad():
        own = run(model, inputs)
        with apply_kernels(model, "consistent", num_sms=SMS):
            twin = copy.deepcopy(model)
        remove_kernels(twin)
        assert not any("forward" in part.__dict__ for part in twin.modules())
        assert_bitwise_equal(run(twin, inputs), own)


def test_disabled_adapters_are_not_computed() -> None:
    model, inputs = build("sd3"), FAMILIES["sd3"].inputs(1)
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        plain = run(model, inputs)
    add_lora(model, "sd3")
    with apply_kernels(model, "consistent", num_sms=SMS), torch.no_grad():
        assert not torch.equal(run(model, inputs), plain)
        model.disable_adapters()  # type: ignore[operator]
        assert_bitwise_equal(run(model, inputs), plain)


# On a GPU ----------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@families
def test_on_a_gpu_rollout_and_training_agree_at_every_batch_size(family: str, gpu: torch.device) -> None:
    model = build(family, torch.bfloat16, gpu)
    add_lora(model, family)
    inputs = to(FAMILIES[family].inputs(BATCH), gpu, torch.bfloat16)
    with apply_kernels(model, "consistent", num_sms=SMS) as handle:
        with torch.no_grad():
            out = run(model, inputs)
            handle.set_num_sms(32)
            for samples in ([0], [2], [3, 1], [0, 1, 2]):
                assert_bitwise_equal(run(model, take(inputs, family, samples)), out[samples])
        trained = run(model, inputs)
        assert trained.requires_grad
        assert_bitwise_equal(trained.detach(), out)
    exact = build(family, torch.float32, gpu)
    add_lora(exact, family)
    with torch.no_grad():
        want, own = run(exact, to(inputs, gpu, torch.float32)), run(model, inputs)
    # The models round their timesteps to bf16, which is most of the error; ours adds no more than their own arithmetic.
    assert relative_frobenius_error(out, want) < 1.1 * relative_frobenius_error(own, want) + 2e-3


@families
def test_in_bf16_outputs_are_as_close_as_the_models_own(family: str) -> None:
    model, inputs = build(family, torch.bfloat16), to(FAMILIES[family].inputs(2), "cpu", torch.bfloat16)
    exact = build(family)
    with torch.no_grad():
        want, own = run(exact, to(inputs, "cpu", torch.float32)), run(model, inputs)
        with apply_kernels(model, "consistent", num_sms=SMS):
            ours = run(model, inputs)
    assert relative_frobenius_error(ours, want) < 1.1 * relative_frobenius_error(own, want) + 2e-3


@pytest.mark.gpu
def test_on_a_gpu_only_allowed_operations_run(gpu: torch.device) -> None:
    model = build("sd3", torch.bfloat16, gpu)
    add_lora(model, "sd3")
    inputs, seen = to(FAMILIES["sd3"].inputs(2), gpu, torch.bfloat16), Operations()
    with apply_kernels(model, "consistent", num_sms=SMS), seen:
        run(model, inputs).backward(torch.ones(2, 4, 8, 6, device=gpu, dtype=torch.bfloat16))
    assert not seen.forbidden, f"operations that may sum in another order: {sorted(seen.forbidden)}"
