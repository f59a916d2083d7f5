"""The embedded policy and the files made for it."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.contracts.config import ROOT
from tasks.contracts.errors import CheckpointError, ContractError
from tasks.policies import _pretrain_tiny_text as pretraining
from tasks.policies import tiny_text

SPLITS = ("train", "dev", "test")
PROMPT = 'a red sign that says "7K"'


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return tiny_text.build(tiny_text.Config())


def test_splits_partition_all_strings():
    parts = [set(pretraining.strings(split)) for split in SPLITS]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 20 ** 2
    assert [len(part) for part in parts] == [311, 43, 46]


@pytest.mark.parametrize(("text", "split"), [("37", "dev"), ("7K", "train")])
def test_split_rule_stays_what_it_was(text, split):
    assert tiny_text.split_of(text) == split


@pytest.mark.parametrize("split", SPLITS)
def test_prompt_file_holds_every_prompt_of_its_split_and_no_other(split):
    content = (ROOT / "workflows" / "recipes" / "prompts" / f"tiny_text_{split}.txt").read_text()
    lines = content.splitlines()
    assert content.endswith("\n")
    assert lines == pretraining.prompts(split)
    assert len(set(lines)) == len(lines)
    assert {tiny_text.split_of(line.split('"')[1]) for line in lines} == {split}


def test_training_images_show_train_strings_only():
    images, captions = pretraining.training_set(50, seed=3)
    assert images.shape == (50, 3, 16, 32)
    assert images.dtype == torch.uint8
    assert set(captions) <= set(pretraining.prompts("train"))


def test_pretraining_gives_the_same_bits_twice_and_a_longer_run_starts_with_a_shorter_one(monkeypatch):
    monkeypatch.setitem(pretraining.SETTINGS, "num_images", 16)
    monkeypatch.setitem(pretraining.SETTINGS, "batch_size", 8)

    def weights_after(step, num_steps):
        for at, weights, _ in pretraining.pretrain(num_steps, seed=1):
            if at == step:
                return {name: value.clone() for name, value in weights.state_dict().items()}
        raise AssertionError

    first, second, longer = weights_after(2, 2), weights_after(2, 2), weights_after(2, 4)
    assert all(torch.equal(value, second[name]) and torch.equal(value, longer[name]) for name, value in first.items())


def test_shipped_checkpoint_says_how_it_was_made_and_is_small(policy):
    path = tiny_text.CHECKPOINT
    assert path.stat().st_size <= 3_000_000
    assert policy.base_digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["pretraining"])
    assert metadata == json.loads(json.dumps(
        {"steps": pretraining.NUM_STEPS, "seed": pretraining.SEED, **pretraining.SETTINGS}))


def test_shipped_checkpoint_paints_some_but_not_most_dev_strings(policy):
    from tasks.rewards import ocr

    prompts = pretraining.prompts("dev")[::4]
    reader = ocr.build(ocr.Config())
    parts = reader(policy.decode(pretraining.sample(policy, prompts)), prompts, [{}] * len(prompts))
    assert 0.15 < parts["exact_match"].mean() < 0.55


def test_every_prompt_of_the_files_can_be_encoded(policy):
    conditions = policy.encode([prompt for split in SPLITS for prompt in pretraining.prompts(split)])
    assert conditions["prompt_embeds"].shape == (3200, tiny_text.NUM_TOKENS, tiny_text.HIDDEN_SIZE)
    assert len(conditions["prompt_embeds"].flatten(1).unique(dim=0)) == 3200


@pytest.mark.parametrize(("prompt", "complaint"), [
    ('a pink sign that says "7K"', "pink"),
    ('a red sign that says "7Q"', "'7Q'"),
    ('a red sign that says "7"', "'7'"),
    ('a red sign that says "7KA"', "'7KA'"),
    ("a red sign that says 7K", "quoted"),
    ('a red sign that says "7K" in "bold"', "quoted"),
    ('a red sign that says "7K" twice', "quoted"),
    ('a red red red red sign "7K"', "6 words"),
])
def test_a_prompt_the_model_cannot_paint_is_refused_with_what_it_can(policy, prompt, complaint):
    with pytest.raises(ContractError, match=complaint) as caught:
        policy.encode([PROMPT, prompt])
    assert prompt in str(caught.value)
    assert tiny_text.CHARSET in str(caught.value)


def test_decode_maps_minus_one_to_black_and_one_to_white(policy):
    latents = torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0]).reshape(5, 1, 1, 1).expand(5, *policy.latent_shape)
    assert policy.decode(latents).pixels[:, 0, 0, 0].tolist() == [0, 0, 128, 255, 255]


@pytest.fixture
def damaged(tmp_path):
    """Function that stores a changed copy of the shipped checkpoint and returns its path."""
    def make(change) -> Path:
        path = tmp_path / "damaged.safetensors"
        tensors = load_file(tiny_text.CHECKPOINT)
        change(tensors)
        save_file(tensors, path)
        return path

    return make


def refuses(path: Path, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        tiny_text.build(tiny_text.Config(checkpoint=str(path)))
    assert str(path) in str(caught.value)
    assert "_pretrain_tiny_text" in str(caught.value)


def test_missing_checkpoint_is_refused(tmp_path):
    refuses(tmp_path / "none.safetensors", "no such file")


@pytest.mark.parametrize("length", [0, 5, 1000, 1_000_000])
def test_truncated_checkpoint_is_refused(tmp_path, length):
    path = tmp_path / "short.safetensors"
    path.write_bytes(tiny_text.CHECKPOINT.read_bytes()[:length])
    refuses(path, "not a readable safetensors file")


def test_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"PK\x03\x04" * 1000)
    refuses(path, "not a readable safetensors file")


def test_missing_tensor_is_refused(damaged):
    refuses(damaged(lambda tensors: tensors.pop("prompt_encoder.pool.bias")), r"does not fit.*prompt_encoder\.pool\.b")


def test_wrong_shape_is_refused(damaged):
    refuses(damaged(lambda tensors: tensors.update({"transformer.proj_out.bias": torch.zeros(7).half()})),
            r"does not fit.*transformer\.proj_out\.bias")


def test_non_finite_weights_are_refused(damaged):
    refuses(damaged(lambda tensors: tensors["transformer.proj_out.bias"].fill_(float("nan"))), "not finite")


@pytest.mark.parametrize(("settings", "complaint"), [
    ({"trainable": "lora", "lora_rank": 96}, "lora_rank"),
    ({"trainable": "lora", "lora_targets": ()}, "lora_targets"),
])
def test_adapters_that_cannot_work_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny_text.check(SimpleNamespace(policy=tiny_text.Config(**settings)))
    tiny_text.check(SimpleNamespace(policy=tiny_text.Config(**{**settings, "trainable": "full"})))


def test_every_lora_target_names_layers_of_the_transformer(policy):
    layers = [name for name, module in policy.components["transformer"].named_modules()
              if isinstance(module, torch.nn.Linear)]
    for target in tiny_text.Config().lora_targets:
        assert any(name.endswith(f".{target}") for name in layers)
