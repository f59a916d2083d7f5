"""Evaluation: fixed prompts and noise, ODE sampling, raw and averaged weights, the protocol beside every number."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import eval as evaluation
from tasks.contracts.config import RECIPES, ROOT, RunConfig, load_recipe
from tasks.contracts.refs import PolicyRef
from tasks.prompts import read_prompts
from tasks.runtime import load_policy
from tests.runs import (
    TINY,
    Place,
    launcher,  # noqa: F401
    new_place,  # noqa: F401
    tiny,
    trained,
)

RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture(scope="module")
def place(launcher, new_place) -> Place:  # noqa: F811
    """A finished run with evaluations after 0, 1 and 2 iterations."""
    made = new_place()
    done = launcher.run(made, tiny(iterations=2, evaluation__num_points=3),
                        trace=["tasks.eval:measure"])
    assert done.returncode == 0, done.output
    assert len(done.calls) == 1 + 2 * 2  # the base once: it has no average of its own
    return made


@pytest.fixture(scope="module")
def manifests(place) -> list[Any]:
    store = place.store()
    return sorted((store.find("evaluations", key) for key in store.keys("evaluations")), key=lambda m: m.meta["step"])


def recipe(**changes: Any) -> RunConfig:
    return load_recipe("base", TINY | {"iterations": 2} | {k.replace("__", "."): v for k, v in changes.items()})


def evaluate(place: Place, folder: Path, policy: PolicyRef, **changes: Any) -> Any:
    """Evaluate a stored policy from scratch: the policy is read from `place`, the result goes to `folder`."""
    from tasks.store import open_store

    config, store = recipe(**changes), open_store(str(folder))
    for ref in (policy.weights, policy.state):
        if ref is not None and store.find(ref.kind, ref.key) is None:
            manifest = place.store().find(ref.kind, ref.key)
            names = [name.removesuffix(".safetensors") for name in manifest.files]
            store.put(ref.kind, ref.key, count=manifest.count, meta=manifest.meta, stats={},
                      files={name: place.store().load(ref, name) for name in names})
    ref = evaluation.evaluate_policy(config.evaluate_spec(), policy, store, config.topology.evaluate)
    return store, store.find("evaluations", ref.key)


@pytest.fixture(scope="module")
def policy(place) -> PolicyRef:
    return PolicyRef.model_validate(place.summary()["policy"])


@pytest.fixture(scope="module")
def base(policy) -> PolicyRef:
    return PolicyRef(base_digest=policy.base_digest)


def test_every_number_is_stored_with_its_protocol(manifests):
    assert [manifest.meta["step"] for manifest in manifests] == [0, 1, 2]
    prompts = read_prompts(recipe().prompts.evaluate).texts[:6]
    for manifest in manifests:
        assert manifest.meta["protocol"] | {"prompts_digest": ""} == {
            "num_inference_steps": 3, "guidance_scale": 1.0, "seed": 7, "schedule": "linear", "shift": 1.0,
            "sampler": "ode", "prompts": recipe().prompts.evaluate, "prompts_digest": "", "num_prompts": 6,
            "weights": ["ema", "raw"], "micro_batch_size": 3}
        assert tuple(manifest.meta["prompts"]) == prompts
        assert set(manifest.meta["numbers"]) == {"ema", "raw"}
        assert {"ocr/exact_match", "ocr/one_minus_ned", "ocr/score"} <= manifest.meta["numbers"]["raw"].keys()


def test_two_evaluations_are_bitwise_equal_on_one_lane_or_two(place, policy, manifests, tmp_path):
    found = [evaluate(place, tmp_path / str(lanes), policy, topology__evaluate__parallelism=lanes) for lanes in (1, 2)]
    for store, manifest in found:
        assert manifest.digest == manifests[-1].digest
        for name in ("media", "samples_ema", "samples_raw"):
            here, there = store.load(manifest, name), place.store().load(manifests[-1], name)
            assert all(torch.equal(here[key], there[key]) for key in there | here)


def test_neither_the_run_nor_its_noise_changes_an_evaluation(place, base, manifests, tmp_path):
    """ODE: what the SDE adds in training, its steps, guidance and seed, have no part in it."""
    _, other = evaluate(place, tmp_path, base, seed=5, sampling__noise_level=0.2, sampling__sde_kind="dance",
                        sampling__num_inference_steps=5, sampling__guidance_scale=2.0)
    assert other.digest == manifests[0].digest
    _, seeded = evaluate(place, tmp_path, base, evaluation__seed=8)
    assert seeded.meta["numbers"] != manifests[0].meta["numbers"]
    _, guided = evaluate(place, tmp_path, base, evaluation__guidance_scale=2.0)
    assert guided.meta["numbers"] != manifests[0].meta["numbers"]


def test_a_samples_image_does_not_depend_on_how_many_are_evaluated(place, base, manifests, tmp_path):
    store, three = evaluate(place, tmp_path, base, evaluation__num_prompts=3)
    pixels = place.store().load(manifests[0], "media")["pixels"]
    assert torch.equal(store.load(three, "media")["pixels"], pixels[:3])
    assert not torch.equal(pixels[0], pixels[1])


def test_raw_and_averaged_weights_differ_after_training_and_not_before(place, manifests):
    before, after = manifests[0], manifests[-1]
    assert before.meta["numbers"]["raw"] == before.meta["numbers"]["ema"]
    assert after.meta["numbers"]["raw"] != after.meta["numbers"]["ema"]
    _, tensors = trained(place)
    assert any(not torch.equal(value, tensors[name.replace("raw/", "ema/", 1)])
               for name, value in tensors.items() if name.startswith("raw/"))


def test_a_run_evaluates_its_base_once_and_another_run_of_the_store_finds_it(launcher, place):  # noqa: F811
    done = launcher.run(place, tiny(iterations=1, seed=9), trace=["tasks.eval:measure"])
    assert done.returncode == 0, done.output
    assert len(done.calls) == 2  # raw and averaged weights after one iteration; the base is known


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_no_recipe_evaluates_on_a_prompt_it_trains_on(name):
    config = load_recipe(name)
    train, held_out = (set(read_prompts(path).texts) for path in (config.prompts.train, config.prompts.evaluate))
    assert not train & held_out
    assert not {text.split('"')[1] for text in train} & {text.split('"')[1] for text in held_out}


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_judged_by_a_reader_that_is_not_its_reward(name):
    config = load_recipe(name)
    assert {reader.name for reader in config.evaluation.readers} - {reward.name for reward in config.rewards}


def test_the_deck_shows_the_grid_the_curve_and_the_protocol(launcher, place):  # noqa: F811
    pages = [path.read_text() for path in launcher.temp.rglob("*.html")]
    pages = [page for page in pages if "Evaluation after 2 iterations" in page]
    assert pages
    page = pages[-1]
    pictures = dict(re.findall(r'<img alt="(\w+)" src="data:image/png;base64,([^"]+)"', page))
    assert pictures.keys() == {"samples", "curve"}
    grid = [place.store().load_bytes(place.store().find("evaluations", key), "grid.png")
            for key in place.store().keys("evaluations")]
    assert base64.b64decode(pictures["samples"]) in grid
    assert base64.b64decode(pictures["curve"]).startswith(b"\x89PNG")
    for words in ("num_inference_steps = 3", "guidance_scale = 1.0", "seed = 7", "sampler = ode", "ocr/exact_match",
                  "<th>ema</th><th>raw</th>"):
        assert words in page


def test_the_curve_has_a_point_for_each_evaluation(manifests, monkeypatch):
    from tasks import pictures

    seen = {}
    monkeypatch.setattr(pictures, "curve", lambda series, *_: seen.update(series) or b"")
    pictures.evaluation_page([manifest.meta for manifest in manifests], None)
    assert seen.keys() == {"ocr/exact_match (ema)", "ocr/exact_match (raw)"}
    assert [step for step, _ in seen["ocr/exact_match (raw)"]] == [0, 1, 2]


def test_diversity_is_the_distance_between_draws_of_one_prompt(base, monkeypatch):
    """By hand: two draws that differ by 2 in every element are 2 apart."""
    config = recipe(evaluation__diversity_prompts=2, evaluation__diversity_draws=2)
    loaded = load_policy(config.policy, config.seed, "fp32")

    def two_apart(spec, policy, prompts, purpose, run):
        assert purpose == "diversity"
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        return torch.tensor([0.0, 2.0, 5.0, 7.0]).reshape(4, 1, 1, 1).expand(4, 3, 16, 32)

    monkeypatch.setattr(evaluation, "sample_ode", two_apart)
    prompts = read_prompts(str(ROOT / config.prompts.evaluate)).texts
    assert evaluation.diversity_of(config.evaluate_spec(), loaded.policy, prompts, None) == pytest.approx(2.0)
