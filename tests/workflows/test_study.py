"""The study's own arithmetic: paired gains, their interval, and what the permuted control may and may not change."""

import torch

from tasks.contracts.batches import RewardBatch
from tasks.reward import load_rewards, save_rewards
from tasks.store import open_store
from workflows.study import gain_interval, permuted


def result(before, after):
    prompts = [f'a red sign that says "{text}"' for text in ("AA", "AA", "CC", "CC")]
    return {"prompts": prompts, "before_samples": {"ocr/exact_match": before},
            "after_samples": {"ocr/exact_match": after}}


def test_the_gain_is_paired_and_its_interval_is_clustered_by_string():
    # Seed means of the gains: AA 1, 1 and CC 0.5, -0.5, so clusters gain 1 and 0, and the mean is 0.5. A bootstrap of
    # two clusters gives 0, 0.5 or 1 with probability 1/4, 1/2, 1/4: the 95 % interval is the whole range.
    runs = [result([0, 0, 0, 1], [1, 1, 1, 0]), result([0, 0, 0, 0], [1, 1, 0, 0])]
    assert gain_interval(runs, "ocr") == (0.5, 0.0, 1.0)


def test_an_interval_of_equal_clusters_has_no_width():
    assert gain_interval([result([0, 0, 0, 0], [1, 0, 0, 1])], "ocr") == (0.5, 0.5, 0.5)


def test_permuted_rewards_keep_each_groups_scores_and_lose_their_samples(tmp_path):
    store = open_store(str(tmp_path))
    scores = torch.arange(24, dtype=torch.float64)
    batch = RewardBatch(torch.arange(24), {"ocr": scores}, 2 * scores, torch.zeros(24, dtype=torch.bool))
    ref = permuted(store, save_rewards(store, "k", batch, {"seconds": 0.0}), seed=0, iteration=1, group_size=12)
    shuffled = load_rewards(store, ref)
    assert shuffled.sample_ids.equal(batch.sample_ids)
    assert shuffled.total.equal(2 * shuffled.scores["ocr"])
    for group in (slice(0, 12), slice(12, 24)):
        assert shuffled.total[group].sort().values.equal(batch.total[group])
        assert not shuffled.total[group].equal(batch.total[group])


def test_permuting_again_gives_the_same_order_and_another_iteration_another(tmp_path):
    store = open_store(str(tmp_path))
    scores = torch.arange(12, dtype=torch.float64)
    batch = RewardBatch(torch.arange(12), {"ocr": scores}, scores, torch.zeros(12, dtype=torch.bool))
    ref = save_rewards(store, "k", batch, {"seconds": 0.0})
    first, second = (load_rewards(store, permuted(store, ref, 0, 1, 12)).total for _ in range(2))
    assert first.equal(second)
    assert not first.equal(load_rewards(store, permuted(store, ref, 0, 2, 12)).total)
