"""What every reward of the axis must do; a new file in tasks/rewards is tested here as soon as it exists."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tasks.contracts.config import RewardConfig
from tasks.contracts.errors import RewardError
from tasks.contracts.media import Audio, Images
from tasks.plugins import load, names
from tasks.policies._pretrain_tiny_text import render

NUM_SAMPLES = 21
CONFIGS = {"ocr": {"dense": 0.5}}
"""Settings under which a reward is tested, where its defaults would leave something out."""
every_reward = pytest.mark.parametrize("name", names("rewards"))


@pytest.fixture(scope="module")
def samples():
    """Images from clean to illegible, and their prompts."""
    draw, noise = random.Random(0), np.random.default_rng(0)
    texts = ["".join(draw.sample("ACEFHKLMNPRTUXY34679", 2)) for _ in range(NUM_SAMPLES)]
    images = np.stack([np.asarray(render(text, "red", draw)) for text in texts]).astype(np.float64)
    images += noise.normal(size=images.shape) * np.linspace(0, 90, NUM_SAMPLES)[:, None, None, None]
    pixels = torch.from_numpy(images.clip(0, 255).astype(np.uint8)).permute(0, 3, 1, 2).contiguous()
    return pixels, [f'a red sign that says "{text}"' for text in texts]


@pytest.fixture(scope="module")
def scorers():
    torch.set_num_threads(1)
    built = {}

    def get(name):
        if name not in built:
            module = load("rewards", name)
            built[name] = module.build(module.Config(name=name, **CONFIGS.get(name, {})))
        return built[name]

    return get


def score(scorer, samples, rows):
    pixels, prompts = samples
    return scorer(Images(pixels=pixels[rows]), [prompts[row] for row in rows], [{} for _ in rows])


@every_reward
def test_importing_the_module_imports_nothing_heavy(name, heavy_imports_of):
    assert heavy_imports_of(f"tasks.rewards.{name}") == set()


@every_reward
def test_config_has_defaults_and_refuses_unknown_keys(name):
    config_type = load("rewards", name).Config
    assert issubclass(config_type, RewardConfig)
    assert config_type(name=name).weight == 1.0
    with pytest.raises(ValidationError, match="no_such_key"):
        config_type(name=name, no_such_key=1)


@every_reward
def test_source_reaches_for_no_rank_resource_or_flyte(name, forbidden_names):
    assert forbidden_names(load("rewards", name)) == set()


@every_reward
def test_parts_are_finite_float64_one_a_sample(scorers, samples, name):
    parts = score(scorers(name), samples, range(NUM_SAMPLES))
    assert "score" in parts
    for values in parts.values():
        assert values.dtype == np.float64
        assert values.shape == (NUM_SAMPLES,)
        assert np.isfinite(values).all()
    assert len(set(parts["score"])) > 1


@every_reward
def test_a_samples_numbers_do_not_depend_on_its_batch(scorers, samples, name):
    whole = score(scorers(name), samples, range(NUM_SAMPLES))
    order = random.Random(1).sample(range(NUM_SAMPLES), NUM_SAMPLES)
    shuffled = score(scorers(name), samples, order)
    pieces = [score(scorers(name), samples, range(start, min(start + size, NUM_SAMPLES)))
              for size in (1, 5) for start in range(0, NUM_SAMPLES, size)]
    for part, values in whole.items():
        assert np.array_equal(shuffled[part], values[order])
        assert np.array_equal(np.concatenate([piece[part] for piece in pieces]), np.tile(values, 2))


@every_reward
def test_calls_from_several_threads_give_the_same_numbers(scorers, samples, name):
    whole = score(scorers(name), samples, range(NUM_SAMPLES))
    lanes = [range(start, NUM_SAMPLES, 4) for start in range(4)] * 3
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = list(pool.map(lambda rows: score(scorers(name), samples, rows), lanes))
    for rows, parts in zip(lanes, results, strict=True):
        for part, values in parts.items():
            assert np.array_equal(values, whole[part][list(rows)])


@every_reward
def test_no_samples_give_no_numbers(scorers, samples, name):
    assert len(score(scorers(name), samples, [])["score"]) == 0


@every_reward
def test_media_of_another_kind_is_refused_by_name(scorers, name):
    sound = Audio(samples=torch.zeros(1, 1, 16), sample_rate_hz=16000)
    with pytest.raises(RewardError, match=f"{name}.*audio"):
        scorers(name)(sound, ['a red sign that says "7K"'], [{}])
