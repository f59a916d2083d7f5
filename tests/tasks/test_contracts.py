"""Batches, media, references and errors: what they refuse, what their messages name, what survives a trip."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from pydantic import ValidationError

from tasks.contracts import errors, refs
from tasks.contracts.batches import (
    AdvantageBatch,
    RewardBatch,
    SamplingContract,
    TrainState,
    TrajectoryBatch,
    TrajectoryIndex,
)
from tasks.contracts.errors import ContractError, FlowmillError, RewardError
from tasks.contracts.media import Audio, Images, Mesh, Tokens, Video, media_from_parts, media_parts
from tasks.store import open_store

N, S, T = 3, 2, 4
LATENT = (2, 5)
INDEX = [field.name for field in fields(TrajectoryIndex)]


@pytest.fixture
def contract():
    return SamplingContract(
        policy="toy", base_digest="b", latent_shape=LATENT, schedule="linear", shift=1.0, num_inference_steps=T,
        sigmas_digest="s", guidance_scale=1.0, sde_kind="flow", noise_level=0.7, dtype="fp32", kernels="reference",
        micro_batch_size=4)


@pytest.fixture
def good(contract):
    """A sound trajectory batch; sample ids are 10, 11, 12."""
    return TrajectoryBatch(
        sample_ids=torch.tensor([10, 11, 12]), group_ids=torch.tensor([0, 0, 1]), parent_ids=torch.tensor([-1, -1, 10]),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64),
        sde_indices=torch.tensor([[0, 1]]).repeat(N, 1), step_mask=torch.ones(N, S, dtype=torch.bool),
        log_probs=torch.zeros(N, S), contract=contract, step_latents=torch.zeros(N, S, 2, *LATENT),
        final_latents=torch.zeros(N, *LATENT), media=Images(torch.zeros(N, 3, 2, 2, dtype=torch.uint8)),
        prompts=("a", "b", "c"), metadata=({}, {}, {}), condition_refs={"prompt": ("x", "y", "z")})


def spoilt(tensor: torch.Tensor, row: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


# Trajectories

@pytest.mark.parametrize("name", ["sample_ids", "group_ids", "parent_ids", "sigmas", "sde_indices", "step_mask",
                                  "log_probs", "step_latents", "final_latents"])
def test_a_trajectory_tensor_of_another_shape_or_dtype_is_refused_by_name(good, name):
    tensor = getattr(good, name)
    for wrong in (tensor[:-1], tensor[None], tensor.to(torch.float16)):
        with pytest.raises(ContractError, match=r"Trajectory(Batch|Index)\.\w+: got .* expected"):
            replace(good, **{name: wrong})
    with pytest.raises(ContractError) as caught:
        replace(good, **{name: tensor.to(torch.float16)})
    assert f".{name}: got float16 {list(tensor.shape)}" in str(caught.value)


@pytest.mark.parametrize("name", ["prompts", "metadata", "media"])
def test_a_trajectory_list_of_another_length_is_refused_by_name(good, name):
    short = Images(good.media.pixels[:2]) if name == "media" else getattr(good, name)[:2]
    with pytest.raises(ContractError, match=rf"{name} holds 2 entries, expected 3"):
        replace(good, **{name: short})


def test_a_condition_of_another_length_is_refused_by_name(good):
    with pytest.raises(ContractError, match=r"condition_refs\['negative'\] holds 1 entries, expected 3"):
        replace(good, condition_refs={"prompt": ("x", "y", "z"), "negative": ("x",)})


@pytest.mark.parametrize("name", ["log_probs", "step_latents", "final_latents"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_trajectory_value_that_is_not_finite_is_refused_and_names_the_sample(good, name, value):
    with pytest.raises(ContractError, match=rf"\.{name}: sample 11 is not finite.*learning_rate"):
        replace(good, **{name: spoilt(getattr(good, name), 1, value)})


@pytest.mark.parametrize("name", ["log_probs", "step_latents", "final_latents", "sigmas"])
def test_a_trajectory_tensor_with_a_graph_is_refused(good, name):
    with pytest.raises(ContractError, match=rf"{name} still holds a graph"):
        replace(good, **{name: getattr(good, name).clone().requires_grad_()})


def test_repeated_sample_ids_are_refused_and_named(good):
    with pytest.raises(ContractError, match=r"sample_ids repeat.*11"):
        replace(good, sample_ids=torch.tensor([10, 11, 11]))


def test_sigmas_that_do_not_fall_to_zero_are_refused(good):
    for sigmas in ([1.0, 0.75, 0.75, 0.25, 0.0], [1.0, 0.75, 0.5, 0.25, 0.1], [1.0, float("nan"), 0.5, 0.25, 0.0]):
        with pytest.raises(ContractError, match=r"sigmas.*fall"):
            replace(good, sigmas=torch.tensor(sigmas, dtype=torch.float64))


@pytest.mark.parametrize("step", [-1, T])
def test_a_step_outside_the_schedule_is_refused_and_names_the_sample(good, step):
    with pytest.raises(ContractError, match=r"sde_indices: sample 12 .*0\.\.3"):
        replace(good, sde_indices=spoilt(good.sde_indices, 2, step))


def test_a_batch_without_sde_steps_is_sound(good):
    none = replace(good, sde_indices=torch.zeros(N, 0, dtype=torch.int64), step_mask=torch.ones(N, 0, dtype=torch.bool),
                   log_probs=torch.zeros(N, 0), step_latents=torch.zeros(N, 0, 2, *LATENT))
    assert (len(none), none.num_sde_steps) == (N, 0)
    with pytest.raises(ContractError, match="final_latents: sample 12 is not finite"):
        replace(none, final_latents=spoilt(none.final_latents, 2, float("nan")))


def test_the_index_alone_checks_what_it_holds(good):
    index = TrajectoryIndex(**{name: getattr(good, name) for name in INDEX})
    assert index.num_sde_steps == S
    with pytest.raises(ContractError, match=r"TrajectoryIndex\.log_probs: sample 10 is not finite"):
        replace(index, log_probs=spoilt(index.log_probs, 0, float("nan")))


def test_batches_are_frozen(good):
    with pytest.raises(FrozenInstanceError):
        good.prompts = ()


# The sampling contract

def test_the_same_contract_is_accepted(contract):
    contract.require(SamplingContract.model_validate_json(contract.model_dump_json()), "update")


@pytest.mark.parametrize(("name", "other"), [
    ("policy", "sd3"), ("base_digest", "c"), ("latent_shape", (2, 6)), ("schedule", "sd3"), ("shift", 3.0),
    ("num_inference_steps", 5), ("sigmas_digest", "t"), ("guidance_scale", 4.5), ("sde_kind", "cps"),
    ("noise_level", 0.8), ("dtype", "bf16"), ("kernels", "fused"), ("micro_batch_size", 8)])
def test_another_contract_is_refused_with_the_field_and_both_values(contract, name, other):
    with pytest.raises(ContractError) as caught:
        contract.require(contract.model_copy(update={name: other}), "update")
    message = str(caught.value)
    assert message.startswith("update: ")
    assert f"({name} {getattr(contract, name)!r} -> {other!r})" in message, "that field and no other"


def test_every_field_that_differs_is_named(contract):
    with pytest.raises(ContractError, match=r"shift 1\.0 -> 3\.0; noise_level 0\.7 -> 0\.1"):
        contract.require(contract.model_copy(update={"noise_level": 0.1, "shift": 3.0}), "update")


# Rewards and advantages

def rewards(**change) -> RewardBatch:
    values = {"sample_ids": torch.tensor([10, 11, 12]), "scores": {"ocr": torch.zeros(N, dtype=torch.float64)},
              "total": torch.zeros(N, dtype=torch.float64), "failed": torch.zeros(N, dtype=torch.bool)}
    return RewardBatch(**(values | change))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_and_names_reward_and_sample(value):
    bad = torch.tensor([0.0, value, 0.0], dtype=torch.float64)
    with pytest.raises(RewardError, match=rf"RewardBatch\.ocr: sample 11 is {value}.*the rollout is kept"):
        rewards(scores={"ocr": bad})
    with pytest.raises(RewardError, match=r"RewardBatch\.total: sample 11"):
        rewards(total=bad)


def test_an_explicit_failure_may_hold_no_number_and_details_may_hold_none():
    bad = torch.tensor([0.0, float("nan"), 0.0], dtype=torch.float64)
    assert rewards(scores={"ocr": bad}, total=bad, failed=torch.tensor([False, True, False])).failed.sum() == 1
    assert len(rewards(details={"ocr/part": bad})) == N


@pytest.mark.parametrize("change", [
    {"sample_ids": torch.zeros(N)}, {"total": torch.zeros(N)}, {"total": torch.zeros(2, dtype=torch.float64)},
    {"failed": torch.zeros(N)}, {"scores": {"ocr": torch.zeros(N, 1, dtype=torch.float64)}},
    {"details": {"ocr": torch.zeros(2, dtype=torch.float64)}},
    {"total": torch.zeros(N, dtype=torch.float64, requires_grad=True)}])
def test_a_reward_batch_of_another_shape_or_dtype_is_refused(change):
    with pytest.raises(ContractError, match=r"RewardBatch\.\w+"):
        rewards(**change)


def advantages(**change) -> AdvantageBatch:
    values = {"sample_ids": torch.tensor([10, 11, 12]), "advantages": torch.zeros(N, dtype=torch.float64),
              "weights": torch.ones(N, S, dtype=torch.float64), "valid": torch.ones(N, dtype=torch.bool), "stats": {}}
    return AdvantageBatch(**(values | change))


def test_advantages_come_a_sample_or_a_step():
    assert len(advantages()) == N
    assert len(advantages(advantages=torch.zeros(N, S, dtype=torch.float64))) == N
    assert len(advantages(weights=torch.ones(N, 0, dtype=torch.float64))) == N


@pytest.mark.parametrize("change", [
    {"advantages": torch.zeros(N, S + 1, dtype=torch.float64)}, {"advantages": torch.zeros(N)},
    {"weights": torch.ones(N, dtype=torch.float64)}, {"weights": torch.ones(N - 1, S, dtype=torch.float64)},
    {"valid": torch.ones(N)}, {"sample_ids": torch.ones(N)},
    {"advantages": torch.zeros(N, dtype=torch.float64, requires_grad=True)}])
def test_an_advantage_batch_of_another_shape_or_dtype_is_refused(change):
    with pytest.raises(ContractError, match=r"AdvantageBatch\.\w+"):
        advantages(**change)


@pytest.mark.parametrize(("name", "shape"), [("advantages", (N,)), ("advantages", (N, S)), ("weights", (N, S))])
def test_an_advantage_that_is_not_finite_is_refused_and_names_the_sample(name, shape):
    values = spoilt(torch.ones(shape, dtype=torch.float64), 2, float("nan"))
    with pytest.raises(ContractError, match=rf"AdvantageBatch\.{name}: sample 12 is not finite"):
        advantages(**{name: values})


# Media

MEDIA = {
    "image": Images(torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(torch.uint8)),
    "video": Video(torch.arange(2 * 3 * 3 * 2 * 2).reshape(2, 3, 3, 2, 2).to(torch.uint8), fps=23.976),
    "audio": Audio(torch.linspace(-1, 1, 2 * 2 * 7).reshape(2, 2, 7), sample_rate_hz=44100),
    "mesh": Mesh(torch.linspace(0, 1, 2 * 4 * 3).reshape(2, 4, 3), torch.tensor([[[0, 1, 2]], [[1, 2, 3]]])),
    "tokens": Tokens(torch.tensor([[1, 2**40, 3], [4, 5, 6]]), vocabulary="bpe"),
}


@pytest.mark.parametrize("kind", MEDIA)
def test_media_survive_the_store(tmp_path, kind):
    media, store = MEDIA[kind], open_store(str(tmp_path))
    tensors, meta = media_parts(media)
    store.put("trajectories", "k", files={"media": tensors}, count=len(media), meta={"media": meta}, stats={})
    manifest = store.find("trajectories", "k")
    again = media_from_parts(store.load(manifest, "media"), manifest.meta["media"])
    assert type(again) is type(media)
    assert again.kind == kind
    assert len(again) == 2
    for field in fields(media):
        one, other = getattr(media, field.name), getattr(again, field.name)
        assert torch.equal(one, other) and one.dtype == other.dtype if hasattr(one, "ndim") else one == other


def test_an_unknown_kind_of_media_is_refused_with_those_that_exist():
    with pytest.raises(ContractError, match=r"'smell'.*image, video, audio, mesh, tokens"):
        media_from_parts({}, {"kind": "smell"})


@pytest.mark.parametrize(("make", "name"), [
    (lambda: Images(torch.zeros(1, 3, 2, 2)), "Images.pixels"),
    (lambda: Images(torch.zeros(3, 2, 2, dtype=torch.uint8)), "Images.pixels"),
    (lambda: Images(torch.zeros(1, 4, 2, 2, dtype=torch.uint8)), "Images.pixels"),
    (lambda: Video(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), fps=8.0), "Video.frames"),
    (lambda: Video(torch.zeros(1, 3, 2, 2, 2, dtype=torch.uint8), fps=8.0), "Video.frames"),
    (lambda: Audio(torch.zeros(1, 1, 4, dtype=torch.float64), 8000), "Audio.samples"),
    (lambda: Mesh(torch.zeros(1, 4, 3), torch.zeros(1, 1, 3)), "Mesh.faces"),
    (lambda: Mesh(torch.zeros(4, 3), torch.zeros(1, 1, 3, dtype=torch.int64)), "Mesh.vertices"),
    (lambda: Mesh(torch.zeros(1, 4, 2), torch.zeros(1, 1, 3, dtype=torch.int64)), "Mesh.vertices"),
    (lambda: Tokens(torch.zeros(1, 4), "bpe"), "Tokens.ids"),
])
def test_media_of_another_rank_dtype_or_channel_count_are_refused_by_name(make, name):
    with pytest.raises(ContractError, match=f"{name}.*expected"):
        make()


def test_a_mesh_of_unequal_counts_is_refused():
    with pytest.raises(ContractError, match=r"Mesh\.faces: got int64 \[2, 1, 3\], expected int64 \[1, F, 3\]"):
        Mesh(torch.zeros(1, 4, 3), torch.zeros(2, 1, 3, dtype=torch.int64))


# Train state

def state(**change) -> TrainState:
    weights = {"transformer": {"a": torch.zeros(2), "b": torch.zeros(1, 3)}, "transformer_2": {"a": torch.zeros(2)}}
    values = {name: copy.deepcopy(weights) for name in ("weights", "ema", "exp_avg", "exp_avg_sq", "old")}
    return TrainState(iteration=1, optimizer_steps=2, **(values | change))


@pytest.mark.parametrize("name", ["ema", "exp_avg", "exp_avg_sq", "old"])
@pytest.mark.parametrize("wrong", [
    {"transformer": {"a": torch.zeros(2), "b": torch.zeros(1, 3)}},
    {"transformer": {"a": torch.zeros(2)}, "transformer_2": {"a": torch.zeros(2)}},
    {"transformer": {"a": torch.zeros(2), "b": torch.zeros(3)}, "transformer_2": {"a": torch.zeros(2)}},
], ids=["component", "parameter", "shape"])
def test_a_train_state_of_another_model_is_refused_by_part(name, wrong):
    with pytest.raises(ContractError, match=rf"TrainState\.{name} does not match TrainState\.weights"):
        state(**{name: wrong})


def test_only_the_old_policy_may_be_absent():
    assert state(old={}).old == {}
    for name in ("ema", "exp_avg", "exp_avg_sq"):
        with pytest.raises(ContractError, match=name):
            state(**{name: {}})


# Errors and references

ERRORS = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, FlowmillError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_message(kind):
    again = pickle.loads(pickle.dumps(kind("where: 3, expected 4; do this")))
    assert type(again) is kind
    assert str(again) == "where: 3, expected 4; do this"


def test_errors_that_mean_bad_input_are_value_errors():
    assert {kind.__name__ for kind in ERRORS if issubclass(kind, ValueError)} == {
        "ConfigError", "PluginNotFoundError", "ContractError"}


def _refs() -> list[refs.StrictModel]:
    common = {"key": "k", "uri": "s3://b/p", "count": 3, "digest": "d"}
    kinds = [value for value in vars(refs).values() if inspect.isclass(value) and issubclass(value, refs.ArtifactRef)
             and value is not refs.ArtifactRef]
    made = [kind(**common) for kind in kinds]
    policy = refs.PolicyRef(base_digest="b", step=4, components={
        "transformer": refs.ComponentRef(format="lora", num_parameters=5)},
        weights=refs.WeightsRef(**common), state=refs.TrainStateRef(**common))
    return [*made, policy, refs.PolicyRef(base_digest="b")]


@pytest.mark.parametrize("ref", _refs(), ids=lambda ref: type(ref).__name__)
def test_references_survive_json(ref):
    again = type(ref).model_validate_json(ref.model_dump_json())
    assert again == ref
    assert again.model_dump() == ref.model_dump()


def test_a_reference_of_one_kind_is_not_taken_for_another():
    ref = refs.RewardRef(key="k", uri="u", count=3, digest="d")
    with pytest.raises(ValidationError):
        refs.TrajectoryRef.model_validate(ref.model_dump())
    with pytest.raises(ValidationError):
        refs.RewardRef(key="k", uri="u", count=-1, digest="d")
    with pytest.raises(ValidationError):
        refs.RewardRef(key="k", uri="u", count=1, digest="d", extra=1)


def test_two_bases_share_no_components():
    one, other = refs.PolicyRef(base_digest="b"), refs.PolicyRef(base_digest="b")
    one.components["x"] = refs.ComponentRef(format="full", num_parameters=1)
    assert other.components == {}
