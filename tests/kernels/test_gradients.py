"""Gradient sums: bits do not depend on ranks or micro-batches; ranks are simulated here and real (gloo) once, slow."""

import importlib.util
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flowmill_kernels import (
    GUARANTEES,
    GradientLeaves,
    LeafPlan,
    LeafSum,
    add_leaves,
    all_reduce_leaves,
    assert_bitwise_equal,
    leaf_sum,
    relative_frobenius_error,
    wgrad,
    wgrad_leaves,
)
from flowmill_kernels.collector import LARGE, deliver, deliver_outer
from flowmill_kernels.schemes import tree_sum

RANKS = GUARANTEES["leaf_sum"].tensor_parallel
assert GUARANTEES["wgrad_leaves"].tensor_parallel == RANKS
MICRO_BATCHES = (1, 3, 8)
WGRAD_ERROR = 3e-5  # GUARANTEES["wgrad"].error_bound

interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1 in the environment")


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


# Per-sample weight gradients summed into leaves --------------------------------------------------------------------

OUTER_SHAPES = ((32, 200, 70), (200, 32, 130), (5, 7, 1), (150, 140, 65))
"""(N, K, tokens): narrow in N, narrow in K, tiny, and both sides larger than a tile; tokens that fill no last step."""


def outer_inputs(samples: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16,
                 device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """dy and x as column slices of wider tensors."""
    n, k, tokens = shape
    return (torch.randn(samples, tokens, n + 16, device=device).to(dtype)[..., 8:8 + n],
            torch.randn(samples, tokens, k + 8, device=device).to(dtype)[..., 8:])


def leaves_of(dy: torch.Tensor, x: torch.Tensor, micro_batch: int, num_ranks: int = 1, **options: object
              ) -> torch.Tensor:
    """All leaves [8, N, K], rank after rank."""
    found = []
    for rank in range(num_ranks):
        plan = LeafPlan(len(dy), num_ranks, rank)
        leaves = torch.zeros(len(plan.leaves), dy.shape[2], x.shape[2], device=dy.device)
        for first in range(plan.samples.start, plan.samples.stop, micro_batch):
            rows = slice(first, min(first + micro_batch, plan.samples.stop))
            wgrad_leaves(leaves, dy[rows], x[rows], first_sample=first, plan=plan, **options)  # type: ignore[arg-type]
        found.append(leaves)
    return torch.cat(found)


def check_outer(dy: torch.Tensor, x: torch.Tensor) -> None:
    samples = len(dy)
    base = leaves_of(dy, x, samples)
    exact = torch.stack([dy[s].double().T @ x[s].double() for s in range(samples)])
    for leaf in range(8):
        rows = LeafPlan(samples).leaf_samples(leaf)
        want = exact[rows.start:rows.stop].sum(0)
        assert relative_frobenius_error(base[leaf], want) < WGRAD_ERROR if len(rows) else not base[leaf].any()
    for micro_batch in MICRO_BATCHES:
        for ranks in RANKS:
            assert_bitwise_equal(leaves_of(dy, x, micro_batch, ranks), base)


@pytest.mark.parametrize("shape", [(4, 6, 9), (6, 4, 1)])
@pytest.mark.parametrize("samples", [19, 5])
def test_leaves_of_weight_gradients_are_equal_for_any_cut(shape: tuple[int, int, int], samples: int) -> None:
    check_outer(*outer_inputs(samples, shape, torch.bfloat16))


def carry_example(dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """16 samples, two a leaf, of 128 tokens: sample 0 gives 2**24, sample 1 gives 1 in token 0 and 1 in token 64.

    Summed for itself, sample 1 is 2, which 2**24 keeps; added token by token to 2**24 each 1 would be lost.
    """
    dy, x = torch.zeros(16, 128, 16), torch.zeros(16, 128, 16)
    dy[0, 5], x[0, 5] = 2.0**12, 2.0**12
    dy[1, (0, 64)], x[1, (0, 64)] = 1.0, 1.0
    return dy.to(device, dtype), x.to(device, dtype)


def test_a_sample_is_summed_from_zero_before_it_joins_its_leaf() -> None:
    dy, x = carry_example(torch.float32, "cpu")
    for micro_batch in (1, 16):
        assert (leaves_of(dy, x, micro_batch)[0] == 2.0**24 + 2).all()


def test_wgrad_leaves_is_the_leaf_sum_of_wgrad_and_of_add_leaves() -> None:
    dy, x = outer_inputs(11, (4, 6, 9))
    per_sample = wgrad(dy, x, num_sms=1)
    leaves = torch.zeros(8, 4, 6)
    add_leaves(leaves, per_sample, first_sample=0, plan=LeafPlan(11))
    assert_bitwise_equal(leaves, leaves_of(dy, x, 3))
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    for delivered in (deliver(parameter, per_sample), deliver_outer(parameter, dy, x)):
        assert delivered is not None
        assert_bitwise_equal(delivered, leaf_sum(per_sample))


def test_leaves_and_inputs_that_do_not_fit_are_refused() -> None:
    plan, leaves = LeafPlan(16, 2, 1), torch.zeros(4, 5, 7)
    dy, x = torch.randn(2, 3, 5), torch.randn(2, 3, 7)
    wgrad_leaves(leaves, dy[:0], x[:0], first_sample=8, plan=plan)
    wgrad_leaves(leaves, dy[:, :0], x[:, :0], first_sample=8, plan=plan)
    assert not leaves.any()
    for first in (7, 15, -1):
        with pytest.raises(ValueError, match="are not all of rank 1"):
            wgrad_leaves(leaves, dy, x, first_sample=first, plan=plan)
        with pytest.raises(ValueError, match="are not all of rank 1"):
            add_leaves(leaves, torch.zeros(2, 5, 7), first_sample=first, plan=plan)
    with pytest.raises(ValueError, match=r"dy \[S, T, N\]"):
        wgrad_leaves(leaves, dy, x[:1], first_sample=8, plan=plan)
    with pytest.raises(TypeError, match="Cast"):
        wgrad_leaves(leaves, dy, x.half(), first_sample=8, plan=plan)
    with pytest.raises(TypeError, match="Cast"):
        wgrad_leaves(leaves, dy.double(), x.double(), first_sample=8, plan=plan)
    with pytest.raises(ValueError, match=r"leaves must be fp32 \[4, 5, 7\]"):
        wgrad_leaves(torch.zeros(8, 5, 7), dy, x, first_sample=8, plan=plan)
    with pytest.raises(ValueError, match="contiguous"):
        wgrad_leaves(torch.zeros(4, 7, 5).mT, dy, x, first_sample=8, plan=plan)
    with pytest.raises(ValueError, match="fp32"):
        add_leaves(leaves, torch.zeros(2, 5, 7).half(), first_sample=8, plan=plan)
    with pytest.raises(ValueError, match="leaves must be"):
        add_leaves(leaves, torch.zeros(2, 5, 6), first_sample=8, plan=plan)


# A whole model's gradients -------------------------------------------------------------------------------------------

class _Layer(torch.autograd.Function):
    """x @ w.T + b, whose weight gradients go the package's way; sums walk, so that no library chooses their order."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w, b)
        y = b.float()
        for k in range(x.shape[2]):
            y = y + x[..., k:k + 1] * w[:, k].float()
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor):  # type: ignore[override]
        x, w, b = ctx.saved_tensors
        d_b = dy[:, 0]
        for t in range(1, dy.shape[1]):
            d_b = d_b + dy[:, t]
        return None, deliver_outer(w, dy, x), deliver(b, d_b)


def backward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> None:
    """Gradients of the sum of cubes of the layer's output."""
    y = _Layer.apply(x, w, b)
    (y * y * y).sum().backward()  # type: ignore[operator]


def layer(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    made = torch.Generator().manual_seed(3)
    return (torch.nn.Parameter(torch.randn(4, 6, generator=made).to(dtype)),
            torch.nn.Parameter(torch.randn(4, generator=made).to(dtype)))


def batch(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 6, generator=torch.Generator().manual_seed(5))


def collect(x: torch.Tensor, micro_batch: int, plan: LeafPlan, passes: int = 1, *,
            exchange: Callable[[torch.Tensor, int], torch.Tensor] | None = None, dtype: torch.dtype = torch.float32
            ) -> list[torch.Tensor]:
    """[gradients, norm, weights after a step] of one rank; `passes` rows a sample, one pass after another."""
    w, b = layer(dtype)
    with GradientLeaves([w, b], plan) as leaves:
        for first in range(plan.samples.start, plan.samples.stop, micro_batch):
            part = x[first:min(first + micro_batch, plan.samples.stop)]
            rows = torch.cat([part * (j + 1) for j in range(passes)])
            with leaves.micro_batch(first, len(part)):
                backward(rows, w, b)
        norm = leaves.finish(exchange)
    grads = [w.grad, b.grad]
    torch.optim.AdamW([w, b], lr=1e-2).step()
    return [*grads, norm, w.detach(), b.detach()]  # type: ignore[list-item]


def collect_on_ranks(x: torch.Tensor, micro_batch: int, num_ranks: int, passes: int = 1) -> list[list[torch.Tensor]]:
    """`collect` on every rank, ranks as threads that exchange through queues."""
    boxes = {(a, b): queue.Queue() for a in range(num_ranks) for b in range(num_ranks)}
    found: dict[int, list[torch.Tensor]] = {}

    def run(rank: int) -> None:
        def exchange(tensor: torch.Tensor, peer: int) -> torch.Tensor:
            boxes[rank, peer].put(tensor.clone())
            return boxes[peer, rank].get(timeout=20)

        found[rank] = collect(x, micro_batch, LeafPlan(len(x), num_ranks, rank), passes, exchange=exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(num_ranks)]


def reference(x: torch.Tensor, passes: int) -> list[torch.Tensor]:
    """The gradients in fp64 by autograd."""
    w, b = (t.detach().double().requires_grad_() for t in layer())
    for j in range(passes):
        (x.double() * (j + 1) @ w.T + b).pow(3).sum().backward()
    return [w.grad, b.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("samples", [24, 5])  # 5: of 8 ranks some have no samples
def test_collected_gradients_norm_and_weights_are_equal_for_any_ranks_and_micro_batches(samples: int, passes: int
                                                                                        ) -> None:
    x = batch(samples)
    base = collect(x, samples, LeafPlan(samples), passes)
    want = reference(x, passes)
    for ours, exact in zip(base, want, strict=False):
        assert relative_frobenius_error(ours, exact) < 1e-5  # GUARANTEES["leaf_sum"].error_bound
    assert abs(base[2].item() - torch.cat([g.flatten() for g in want]).norm().item()) < 1e-5 * base[2].item()
    for ranks in RANKS:
        for micro_batch in MICRO_BATCHES:
            for found in collect_on_ranks(x, micro_batch, ranks, passes):
                for one, other in zip(found, base, strict=True):
                    assert_bitwise_equal(one, other)


def test_one_pass_after_another_is_a_call_a_pass() -> None:
    x = batch(8)
    together = collect(x, 3, LeafPlan(8), 2)
    w, b = layer()
    with GradientLeaves([w, b], LeafPlan(8)) as leaves:
        for first in range(0, 8, 2):
            part = x[first:first + 2]
            with leaves.micro_batch(first, 2):
                for j in range(2):
                    backward(part * (j + 1), w, b)
        leaves.finish()
    assert_bitwise_equal(w.grad, together[0])  # type: ignore[arg-type]
    assert_bitwise_equal(b.grad, together[1])  # type: ignore[arg-type]


def test_gradients_have_their_parameters_dtype_and_are_rounded_once() -> None:
    x = batch(8)
    with_fp32 = [t.bfloat16().float() for t in layer()]
    w, b = (torch.nn.Parameter(t) for t in with_fp32)
    exact, rounded = [], []
    for parameters, out in (((w, b), exact), (layer(torch.bfloat16), rounded)):
        with GradientLeaves(parameters, LeafPlan(8)) as leaves:
            with leaves.micro_batch(0, 8):
                backward(x, *parameters)
            leaves.finish()
        out += [p.grad for p in parameters]
    for one, other in zip(exact, rounded, strict=True):
        assert_bitwise_equal(one.bfloat16(), other)


def test_a_collector_serves_update_after_update() -> None:
    x, (w, b) = batch(8), layer()
    leaves = GradientLeaves([w, b], LeafPlan(8))
    found = []
    for _ in range(2):
        with leaves:
            assert w.grad is None
            for first in (0, 4):
                with leaves.micro_batch(first, 4):
                    backward(x[first:first + 4], w, b)
            leaves.finish()
        found.append((w.grad, b.grad))
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    backward(x, w, b)  # outside of the collector autograd adds as ever
    assert_bitwise_equal(w.grad, 2 * found[0][0])  # type: ignore[arg-type]


def test_a_parameter_that_nothing_used_gets_zeros() -> None:
    (w, b), unused = layer(), torch.nn.Parameter(torch.ones(3))
    with GradientLeaves([w, unused, b], LeafPlan(2)) as leaves:
        with leaves.micro_batch(0, 2):
            backward(batch(2), w, b)
        leaves.finish()
    assert unused.grad is not None
    assert not unused.grad.any()


def test_nan_in_one_sample_reaches_the_norm() -> None:
    x = batch(8)
    x[3, 0, 0] = float("nan")
    assert collect(x, 3, LeafPlan(8))[2].isnan()


def test_collectors_refuse_what_they_cannot_hold() -> None:
    w, b = layer()
    with pytest.raises(ValueError, match="no parameters"):
        GradientLeaves([], LeafPlan(8))
    with pytest.raises(ValueError, match="twice"):
        GradientLeaves([w, w], LeafPlan(8))
    with pytest.raises(ValueError, match="no elements"):
        GradientLeaves([torch.nn.Parameter(torch.zeros(0))], LeafPlan(8))
    with pytest.raises(ValueError, match="one collector a device"):
        GradientLeaves([w, torch.nn.Parameter(torch.zeros(2, device="meta"))], LeafPlan(8))
    large = torch.nn.Parameter(torch.zeros(LARGE + 1))
    with pytest.raises(ValueError, match="allow_large"):
        GradientLeaves([large], LeafPlan(8))
    GradientLeaves([large], LeafPlan(8), allow_large=True)
    with GradientLeaves([w], LeafPlan(8)):
        with pytest.raises(RuntimeError, match="another collector"), GradientLeaves([w, b], LeafPlan(8)):
            pass
        with GradientLeaves([b], LeafPlan(8)):
            pass


def test_micro_batches_that_would_change_the_sum_are_refused() -> None:
    x, (w, b) = batch(8), layer()
    leaves = GradientLeaves([w, b], LeafPlan(8))
    with pytest.raises(RuntimeError, match="enter the collector"), leaves.micro_batch(0, 2):
        pass
    with leaves:
        for first, size in ((1, 2), (0, 9), (0, 0), (-1, 2)):
            with pytest.raises(ValueError, match=r"next is\s+0"), leaves.micro_batch(first, size):
                pass
        with pytest.raises(RuntimeError, match="outside of micro_batch"):
            backward(x[:2], w, b)
        with leaves.micro_batch(0, 2):
            backward(x[:2], w, b)
            with pytest.raises(RuntimeError, match="already open"), leaves.micro_batch(2, 2):
                pass
            with pytest.raises(RuntimeError, match="inside of micro_batch"):
                leaves.finish()
        with pytest.raises(RuntimeError, match=r"samples 2\.\.7 of rank 0 had no backward"):
            leaves.finish()
    for rows in (x[:3], x[:1], x[:0]):
        with leaves, pytest.raises(ValueError, match="rows must be a multiple"), leaves.micro_batch(0, 2):
            backward(rows, w, b)


def test_micro_batches_that_use_a_parameter_differently_are_refused() -> None:
    x, (w, b) = batch(8), layer()
    for uses in (0, 2):
        with GradientLeaves([w, b], LeafPlan(8)) as leaves:
            with leaves.micro_batch(0, 4):
                backward(x[:4], w, b)
            with pytest.raises(RuntimeError, match=f"used {uses} times"), leaves.micro_batch(4, 4):
                [backward(x[4:], w, b) for _ in range(uses)]
            with pytest.raises(RuntimeError, match="a micro-batch failed"):
                leaves.finish()


def test_a_failed_micro_batch_must_be_repeated_from_the_start() -> None:
    x, (w, b) = batch(8), layer()
    leaves = GradientLeaves([w, b], LeafPlan(8))
    with leaves:
        with pytest.raises(KeyError), leaves.micro_batch(0, 8):
            {"no such": backward(x, w, b)}["key"]
        with pytest.raises(RuntimeError, match="a micro-batch failed"), leaves.micro_batch(0, 8):
            pass
    with leaves:
        with leaves.micro_batch(0, 8):
            backward(x, w, b)
        leaves.finish()
        with pytest.raises(RuntimeError, match="is finished"):
            leaves.finish()
        with pytest.raises(RuntimeError, match="is finished"), leaves.micro_batch(0, 8):
            pass
    assert_bitwise_equal(w.grad, collect(x, 8, LeafPlan(8))[0])  # type: ignore[arg-type]


def test_gradients_that_would_pass_the_collector_by_are_refused() -> None:
    x, (w, b) = batch(8), layer()
    with GradientLeaves([w], LeafPlan(8)) as leaves, leaves.micro_batch(0, 8), \
            pytest.raises(RuntimeError, match="no collector has registered"):
        backward(x, w, b)
    with GradientLeaves([w, b], LeafPlan(8)) as leaves, leaves.micro_batch(0, 8), \
            pytest.raises(RuntimeError, match="a part of the registered parameter"):
        backward(x, w[:2], b[:2])
    with GradientLeaves([w, b], LeafPlan(8)) as leaves:
        with leaves.micro_batch(0, 8):
            backward(x, w, b)
            w.square().sum().backward()
        with pytest.raises(RuntimeError, match="autograd made a gradient"):
            leaves.finish()


def _collecting_rank(rank: int, num_ranks: int, store: str, out: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    found = [collect(batch(24), micro_batch, LeafPlan(24, num_ranks, rank), 2) for micro_batch in MICRO_BATCHES]
    torch.save(found, f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_collectors_on_gloo_ranks_give_the_bits_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    base = collect(batch(24), 24, LeafPlan(24), 2)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_collecting_rank,
                             args=(r, num_ranks, str(tmp_path / "store"), str(tmp_path / "out")))
             for r in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(num_ranks):
        for found in torch.load(f"{tmp_path / 'out'}.{rank}"):
            for one, other in zip(found, base, strict=True):
                assert_bitwise_equal(one, other)


# Triton: in its interpreter (fp16: its bf16 product is wrong) and on a GPU -------------------------------------------

def check_schedules(dy: torch.Tensor, x: torch.Tensor) -> None:
    """One pass and spread give the same bits; so does each on its own for any cut."""
    from flowmill_kernels import triton_gradients

    samples, found = len(dy), []
    for spread in (False, True):
        leaves = torch.zeros(8, dy.shape[2], x.shape[2], device=dy.device)
        for first in range(0, samples, 3 if spread else samples):
            rows = slice(first, first + (3 if spread else samples))
            triton_gradients.wgrad_leaves(leaves, dy[rows], x[rows], first, 0, samples, 8, spread=spread)
        found.append(leaves)
    assert_bitwise_equal(found[1], found[0])


@interpreter
@pytest.mark.parametrize("shape", OUTER_SHAPES)
def test_interpreted_weight_gradients_are_right_for_any_cut_and_schedule(shape: tuple[int, int, int]) -> None:
    dy, x = outer_inputs(20, shape)  # leaves of 2 and 3 samples: with fewer the order does not show
    base = leaves_of(dy, x, 20, backend="triton")
    for leaf in range(8):
        rows = LeafPlan(20).leaf_samples(leaf)
        want = torch.einsum("stn,stk->nk", dy[rows.start:rows.stop].double(), x[rows.start:rows.stop].double())
        assert relative_frobenius_error(base[leaf], want) < WGRAD_ERROR
    assert_bitwise_equal(leaves_of(dy, x, 3, 2, backend="triton"), base)
    check_schedules(dy, x)


def check_stacked(device: torch.device | str, dtype: torch.dtype, n: int, k: int, tokens: int) -> None:
    """Parameters that share x in one launch: the bits of a launch each, wherever the batch starts."""
    from flowmill_kernels import triton_gradients

    for count in (2, 3):
        dy, x = outer_inputs(19, (count * n, k, tokens), dtype, device)
        one, together, recorded = (torch.zeros(8, count * n * k + 5, device=device) for _ in range(3))

        def parts(leaves: torch.Tensor, count: int = count) -> list[torch.Tensor]:
            return [leaves[:, i * n * k:(i + 1) * n * k].view(8, n, k) for i in range(count)]

        for first in range(0, 19, 5):
            rows = slice(first, first + 5)
            for i, leaves in enumerate(parts(one)):
                triton_gradients.wgrad_leaves(leaves, dy[rows, :, i * n:(i + 1) * n], x[rows], first, 0, 19, 8,
                                              spread=False)
            position = torch.tensor([first], dtype=torch.int32, device=device)
            for leaves, where in ((together, first), (recorded, position)):
                assert triton_gradients.wgrad_leaves_stacked(parts(leaves), dy[rows], x[rows], where, 0, 19, 8)
        assert float(one.abs().max()) > 0
        assert_bitwise_equal(recorded, together)
        if x.is_cuda:
            assert_bitwise_equal(together, one)
        else:  # the interpreter's product is numpy's, whose order follows the shape
            assert relative_frobenius_error(together, one.double()) < 1e-6


def check_positions(device: torch.device | str, dtype: torch.dtype) -> None:
    """The first sample's number, read by the kernel from memory: the bits of the number given."""
    from flowmill_kernels import triton_gradients

    dy, x = outer_inputs(19, (32, 70, 40), dtype, device)
    per_sample = torch.randn(19, 6, 7, device=device)
    for spread in (False, True):
        found = []
        for device_side in (False, True):
            leaves, added = torch.zeros(8, 32, 70, device=device), torch.zeros(8, 6, 7, device=device)
            for first in range(0, 19, 4):
                rows = slice(first, first + 4)
                where = torch.tensor([first], dtype=torch.int32, device=device) if device_side else first
                triton_gradients.wgrad_leaves(leaves, dy[rows], x[rows], where, 0, 19, 8, spread=spread)
                triton_gradients.add_leaves(added, per_sample[rows], where, 0, 19, 8)
            found.append((leaves, added))
        for ours, theirs in zip(*found, strict=True):
            assert_bitwise_equal(ours, theirs)


@interpreter
def test_interpreted_stacked_gradients_and_positions_in_memory_change_no_bit() -> None:
    check_stacked("cpu", torch.float16, 16, 70, 40)
    check_positions("cpu", torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_stacked_gradients_and_positions_in_memory_change_no_bit(dtype: torch.dtype, gpu: torch.device
                                                                          ) -> None:
    for n, k, tokens in ((32, 1536, 205), (32, 1536, 577), (16, 200, 70), (40, 136, 33)):
        check_stacked(gpu, dtype, n, k, tokens)
    check_positions(gpu, dtype)


@interpreter
def test_interpreted_samples_are_spread_where_one_leaf_takes_many() -> None:
    from flowmill_kernels.triton_gradients import spreads, tile_for

    tile = tile_for(32, 1536)
    assert not spreads(32, 1536, 576, tile, 32, 8)
    assert spreads(32, 1536, 576, tile, 32, 1)
    assert not spreads(32, 1536, 576, tile, 4, 1)


@interpreter
def test_interpreted_leaves_add_samples_in_order() -> None:
    dy, x = carry_example(torch.float16, "cpu")
    for micro_batch in (1, 16):
        assert (leaves_of(dy, x, micro_batch, backend="triton")[0] == 2.0**24 + 2).all()
    gradients = torch.randn(19, 3, 500)
    for first_leaf, ranks in ((0, 1), (4, 2)):
        plan = LeafPlan(19, ranks, ranks - 1)
        ours, want = torch.zeros(2, len(plan.leaves), 3, 500).unbind()
        assert plan.leaves.start == first_leaf
        for first in range(plan.samples.start, plan.samples.stop, 3):
            rows = slice(first, min(first + 3, plan.samples.stop))
            add_leaves(ours, gradients[rows], first_sample=first, plan=plan, backend="triton")
            add_leaves(want, gradients[rows], first_sample=first, plan=plan)
        assert_bitwise_equal(ours, want)


def check_end(device: torch.device | str, counts: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """A GPU's end of a sum: the tree's bits, one rounding, and a norm that the number of leaves does not show in."""
    from flowmill_kernels import cpu_backend, triton_gradients

    for count in counts:
        wide = torch.randn(8, count + 3, device=device)
        for leaves in (wide[:, :count], wide[:4, :count], wide[:2, :count], wide[:1, :count]):
            exact, norm = triton_gradients.sum_leaves(leaves, torch.float32)
            assert_bitwise_equal(exact, tree_sum(leaves.unbind(), torch.add))
            assert norm.dtype == torch.float64
            assert norm.shape == ()
            want = exact.double().norm()
            assert abs(norm - want) <= 1e-13 * want
            assert_bitwise_equal(triton_gradients.sum_leaves(exact[None], torch.float32)[1], norm)
            for dtype in dtypes:
                rounded, again = triton_gradients.sum_leaves(leaves, dtype)
                assert_bitwise_equal(rounded, exact.to(dtype))
                assert_bitwise_equal(again, norm)
    leaves = torch.randn(8, 3, 5)
    total, norm = cpu_backend.sum_leaves(leaves, torch.float16)
    ours, our_norm = triton_gradients.sum_leaves(leaves.to(device), torch.float16)
    assert_bitwise_equal(ours.cpu(), total)
    assert abs(our_norm.cpu() - norm) <= 1e-14 * norm


@interpreter
def test_interpreted_leaves_end_in_one_pass() -> None:
    check_end("cpu", (1, 1000, 1024, 5003), torch.float16)


@pytest.mark.gpu
def test_on_a_gpu_leaves_end_in_one_pass(gpu: torch.device) -> None:
    # 5000003: more blocks than one step of the norm's sum takes
    check_end(gpu, (1, 1000, 1024, 5003, 5_000_003), torch.float16, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*OUTER_SHAPES, (32, 1536, 576), (1536, 32, 205), (96, 1536, 577)])
def test_on_a_gpu_weight_gradients_hold_for_any_cut_and_schedule(shape: tuple[int, int, int], dtype: torch.dtype,
                                                                 gpu: torch.device) -> None:
    dy, x = outer_inputs(19, shape, dtype, gpu)
    check_outer(dy, x)
    check_schedules(dy, x)
    base = leaves_of(dy, x, 19)
    for _ in range(20):
        assert_bitwise_equal(leaves_of(dy, x, 19), base)


@pytest.mark.gpu
def test_on_a_gpu_a_sample_is_summed_from_zero_and_leaves_match_the_cpu(gpu: torch.device) -> None:
    dy, x = carry_example(torch.bfloat16, gpu)
    for micro_batch in (1, 16):
        assert (leaves_of(dy, x, micro_batch)[0] == 2.0**24 + 2).all()
    gradients = torch.randn(19, 3, 500, device=gpu)
    assert_bitwise_equal(leaf_sum(gradients).cpu(), leaf_sum(gradients.cpu()))
    parameter = torch.nn.Parameter(torch.zeros(3, 500, device=gpu))
    assert_bitwise_equal(deliver(parameter, gradients), leaf_sum(gradients))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_on_a_gpu_a_models_gradients_have_the_same_bits_for_any_micro_batch(micro_batch: int, gpu: torch.device
                                                                           ) -> None:
    dy, x = outer_inputs(24, (32, 1536, 205), torch.bfloat16, gpu)
    bias = torch.randn(24, 1536, device=gpu)
    found = []
    for size in (24, micro_batch):
        w, b = torch.nn.Parameter(torch.zeros(32, 1536, device=gpu)), torch.nn.Parameter(torch.zeros(1536, device=gpu))
        with GradientLeaves([w, b], LeafPlan(24)) as leaves:
            for first in range(0, 24, size):
                with leaves.micro_batch(first, size):
                    assert deliver_outer(w, dy[first:first + size], x[first:first + size]) is None
                    assert deliver(b, bias[first:first + size]) is None
            norm = leaves.finish()
        found.append((w.grad, b.grad, norm))
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)
