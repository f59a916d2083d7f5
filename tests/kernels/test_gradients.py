"""Gradient sums: bits do not depend on ranks or micro-batches; ranks are simulated here and real (gloo) once, slow."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from flowmill_kernels import GUARANTEES, LeafPlan, LeafSum, all_reduce_leaves, assert_bitwise_equal, leaf_sum, wgrad

RANKS = GUARANTEES["leaf_sum"].tensor_parallel
MICRO_BATCHES = (1, 3, 8)


def rank_sums(gradients: torch.Tensor, num_ranks: int, micro_batch: int) -> list[torch.Tensor]:
    """Every rank's subtree, ranks one after the other."""
    sums = []
    for rank in range(num_ranks):
        plan = LeafPlan(len(gradients), num_ranks, rank)
        total = LeafSum(plan, gradients.shape[1:])
        for first in range(plan.samples.start, plan.samples.stop, micro_batch):
            total.add(first, gradients[first : min(first + micro_batch, plan.samples.stop)])
        sums.append(total.rank_sum())
    return sums


def reduce_simulated(sums: list[torch.Tensor], num_samples: int) -> list[torch.Tensor]:
    """all_reduce_leaves on every rank in step: the exchange hands out what the peer holds in that round."""
    count = len(sums)
    held, step = list(sums), 1
    while step < count:
        before = list(held)
        for rank in range(count):
            pair = LeafPlan(num_samples, 2, 1 if rank & step else 0)
            held[rank] = all_reduce_leaves(before[rank], pair, lambda _, __, r=rank, b=before, s=step: b[r ^ s])
        step *= 2
    return held


@pytest.mark.parametrize("num_samples", [8, 24, 37, 5, 1])
def test_sums_are_equal_for_any_ranks_and_micro_batches(num_samples: int) -> None:
    gradients = torch.randn(num_samples, 6, 5)
    base = leaf_sum(gradients)
    assert (base - gradients.double().sum(0)).abs().max() < 1e-5
    for ranks in RANKS:
        for micro_batch in MICRO_BATCHES:
            for total in reduce_simulated(rank_sums(gradients, ranks, micro_batch), num_samples):
                assert_bitwise_equal(total, base)


def test_weights_and_gradient_norm_follow() -> None:
    gradients = torch.randn(24, 40) * torch.logspace(-4, 4, 24)[:, None]
    outcomes = []
    for ranks in RANKS:
        total = reduce_simulated(rank_sums(gradients, ranks, 3), 24)[0]
        weight = torch.nn.Parameter(torch.ones(40))
        weight.grad = total
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        torch.optim.AdamW([weight], lr=1e-2).step()
        outcomes.append((norm, weight.detach()))
    for norm, weight in outcomes[1:]:
        assert_bitwise_equal(norm, outcomes[0][0])
        assert_bitwise_equal(weight, outcomes[0][1])


def test_the_order_is_serial_in_a_leaf_and_a_tree_over_leaves() -> None:
    # 16 samples, two a leaf. Leaf 0: 2**24 + 1 loses its 1; the others give 2 each, which the tree keeps.
    gradients = torch.ones(16, 1)
    gradients[0] = 2.0**24
    assert leaf_sum(gradients).item() == 2.0**24 + 14
    # One by one all of them would be lost.
    assert LeafPlan(16).leaf_samples(0) == range(2)


def test_every_sample_is_in_one_leaf_and_on_one_rank() -> None:
    for num_samples in (1, 5, 8, 24, 37):
        plan = LeafPlan(num_samples)
        assert [s for leaf in range(8) for s in plan.leaf_samples(leaf)] == list(range(num_samples))
        for leaf in range(8):
            assert all(s * 8 // num_samples == leaf for s in plan.leaf_samples(leaf))
        for ranks in RANKS:
            owned = [s for rank in range(ranks) for s in LeafPlan(num_samples, ranks, rank).samples]
            assert owned == list(range(num_samples))


@pytest.mark.parametrize("num_ranks", [3, 5, 6, 7, 16, 0])
def test_rank_counts_that_do_not_divide_the_leaves_are_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="do not divide the 8 leaves"):
        LeafPlan(24, num_ranks)


def test_other_orders_and_missing_samples_are_refused() -> None:
    total = LeafSum(LeafPlan(8), (2,))
    with pytest.raises(ValueError, match=r"next is\s+0"):
        total.add(1, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="fp32"):
        total.add(0, torch.zeros(1, 2).half())
    total.add(0, torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"samples 3\.\.7 of rank 0 were not added"):
        total.rank_sum()
    with pytest.raises(ValueError, match="samples 3"):
        total.add(3, torch.zeros(9, 2))
    with pytest.raises(ValueError, match="num_samples"):
        LeafPlan(0)
    with pytest.raises(ValueError, match="rank must be"):
        LeafPlan(8, 2, 2)


def test_nan_and_infinities_propagate() -> None:
    gradients = torch.zeros(8, 3)
    gradients[3, 0], gradients[2, 1] = float("nan"), float("inf")
    total = leaf_sum(gradients)
    assert total[0].isnan()
    assert total[1].isinf()
    assert total[2] == 0


def test_wgrad_of_a_sample_does_not_depend_on_the_others() -> None:
    dy, x = torch.randn(3, 6, 5).bfloat16(), torch.randn(3, 6, 7).bfloat16()
    dw = wgrad(dy, x, num_sms=1)
    assert (dw - dy.double().transpose(1, 2) @ x.double()).abs().max() < 1e-5
    for i in range(3):
        assert_bitwise_equal(wgrad(dy[i : i + 1], x[i : i + 1], num_sms=1)[0], dw[i])
    assert wgrad(dy[:0], x[:0], num_sms=1).shape == (0, 5, 7)
    with pytest.raises(ValueError, match=r"dy \[S, T, N\]"):
        wgrad(dy, x[:2], num_sms=1)
    with pytest.raises(TypeError, match="Cast"):
        wgrad(dy, x.float(), num_sms=1)


def _rank_main(rank: int, num_ranks: int, store: str, out: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    gradients = torch.randn(24, 50, generator=torch.Generator().manual_seed(7))
    plan = LeafPlan(24, num_ranks, rank)
    total = LeafSum(plan, (50,))
    for first in range(plan.samples.start, plan.samples.stop, 3):
        total.add(first, gradients[first : min(first + 3, plan.samples.stop)])
    torch.save(all_reduce_leaves(total.rank_sum(), plan), f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_gloo_ranks_give_the_bits_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    base = leaf_sum(torch.randn(24, 50, generator=torch.Generator().manual_seed(7)))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank_main, args=(r, num_ranks, str(tmp_path / "store"), str(tmp_path / "out")))
             for r in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(num_ranks):
        assert_bitwise_equal(torch.load(f"{tmp_path / 'out'}.{rank}"), base)
