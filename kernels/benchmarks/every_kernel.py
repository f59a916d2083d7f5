"""Launch every kernel once on small shapes, for compute-sanitizer:

    PYTHONPATH=kernels/src compute-sanitizer --tool memcheck python kernels/benchmarks/every_kernel.py
    PYTHONPATH=kernels/src compute-sanitizer --tool racecheck python kernels/benchmarks/every_kernel.py

Names of sections behind it run these alone; run it once without the sanitizer first, which then finds the kernels
compiled.
"""

import argparse
import dataclasses

import torch

import flowmill_kernels as fk
from flowmill_kernels.elementwise import activation_slope
from flowmill_kernels.gradients import wgrad_leaves_stacked
from flowmill_kernels.heuristics import CATALOGUE

M, N, K = 450, 264, 1024  # several tiles a program at num_sms=2, and edges in every direction


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def products() -> None:
    """Every tile of both modes, split sums, pointer loads, dgrad."""
    x, w, bias, gate, residual = normal(M, K), normal(N, K), normal(N), normal(2, N), normal(M, N)
    for mode in ("consistent", "tp_invariant"):
        plan = fk.gemm_nt_schedule(M, N, K, mode=mode)
        whole = dataclasses.replace(plan, scheme=fk.Scheme(K, "serial")) if mode == "consistent" else plan
        for name, tile in CATALOGUE.items():
            if mode == "tp_invariant" and tile.block_m * tile.block_n > 128 * 128:
                continue
            schedule = dataclasses.replace(whole, tile=tile, spread=False)
            y = fk.gemm_nt(x, w, bias, activation="gelu_tanh", gate=gate, residual=residual, num_sms=2,
                           schedule=schedule)
            print(mode, name, bool(y.isfinite().all()), flush=True)
        for options in ({"spread": True}, {"loads": "pointer", "spread": False, "tile": CATALOGUE["narrow"]}):
            fk.gemm_nt(x, w, bias, num_sms=2, schedule=dataclasses.replace(plan, **options))
        fk.gemm_nn(normal(M, 256), w[:256], mode=mode, num_sms=2)


def partial_products() -> None:
    """One rank's sums, their combination, and samples' own weight gradients."""
    x, w, bias = normal(M, K), normal(N, K), normal(N)
    for ranks in (1, 2, 4, 8):
        parts = [fk.gemm_nt_partial(x[:, :K // ranks].contiguous(), w[:, :K // ranks].contiguous(), num_ranks=ranks,
                                    num_sms=2)] * ranks
        fk.combine_partials(parts, bias, dtype=x.dtype, num_sms=2)
        print("partial", ranks, flush=True)
    fk.leaf_sum(fk.wgrad(x.view(9, 50, K)[..., :48].contiguous(), x.view(9, 50, K), num_sms=2))


def products_in_one_sum() -> None:
    """Extra products, residuals and factors by TMA, norms at the end, in every tile that takes them."""
    x, w, bias, residual, h, b = normal(M, K), normal(N, K), normal(N), normal(M, N), normal(M, 48), normal(N, 48)
    gate, factor = normal(M // 75, N), normal(M, K)
    whole = dataclasses.replace(fk.gemm_nt_schedule(M, N, K), scheme=fk.Scheme(K, "serial"), spread=False)
    for name, tile in CATALOGUE.items():
        fk.gemm_nt(x, w, bias, gate=gate, residual=residual, extra=[(h, b)] * 3, num_sms=2,
                   schedule=dataclasses.replace(whole, tile=tile))
        fk.gemm_nn(residual, w, gate=factor, num_sms=2,
                   schedule=dataclasses.replace(fk.gemm_nt_schedule(M, K, N), tile=tile, spread=False))
        if tile.split_roles:
            fk.gemm_nt_normed(x[:, :512], w[:256, :512], None, fk.HeadNorm(normal(64), 1e-6), num_sms=2,
                              schedule=dataclasses.replace(fk.gemm_nt_schedule(M, 256, 512), tile=tile, spread=False))
        print("one sum", name, flush=True)
    fk.gemm_nt(x, w, bias, extra=(h, b), num_sms=2)


def rows_and_elements() -> None:
    """Norms, modulation, rotary embedding, activations, gates and rows of a loss, forward and backward."""
    batch, tokens, heads, dims = 3, 41, 3, 64
    c = heads * dims

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    x, y, rows = leaf(batch, tokens, c), leaf(batch, tokens, c), [leaf(batch, c) for _ in range(4)]
    q, k = leaf(batch, tokens, heads, dims), leaf(batch, tokens, heads, dims)
    rope = tuple(torch.randn(tokens, dims // 2, device="cuda") for _ in range(2))
    outs = [*fk.layer_norm_modulate(x, rows[0], rows[1], scale2=rows[2], shift2=rows[3], keep=True),
            fk.layer_norm_modulate(x, None, None, weight=leaf(c), bias=leaf(c)), fk.rms_norm(x, leaf(c), eps=1e-6),
            *fk.qk_norm_rope_pair(q, k, leaf(dims), leaf(dims), eps=1e-6, rope=rope),
            fk.qk_norm_rope(q, leaf(c), eps=1e-6, rope=rope, norm="all", rope_layout="half"), fk.gelu_tanh(x),
            fk.gelu(x), fk.silu(x), fk.swiglu(x, y), fk.gated_residual(x, rows[0], y), fk.mean(x, 2), fk.log_softmax(x),
            fk.log_softmax(leaf(2, 20000))]
    torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
    for op in ("gelu_tanh", "gelu"):
        activation_slope(op, x)
    print("rows and elements", flush=True)


def attention_both_ways() -> None:
    """Joint with lengths, causal and cross attention at every head size that has kernels of its own."""
    for dims in (64, 128, 48, 256):
        def leaf(tokens: int, dims: int = dims) -> torch.Tensor:
            return torch.randn(2, tokens, 2, dims, device="cuda", dtype=torch.bfloat16).requires_grad_()

        lengths = torch.tensor([5, 33], dtype=torch.int32, device="cuda")
        pairs = [(leaf(130), leaf(33)) for _ in range(3)]
        outs = [*fk.attention(*pairs, lengths=(None, lengths), num_sms=2),
                fk.attention(leaf(70), leaf(140), leaf(140), causal=True, num_sms=2),
                fk.attention(leaf(70), leaf(33), leaf(33), num_sms=2)]
        torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
        print("attention", dims, flush=True)


def norms_around_attention() -> None:
    """Projections that end in norms, and attention's backward that ends before them."""
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    norms = [torch.ones(64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    streams = [fk.Stream(leaf(2, tokens, 192), *(fk.Layer(leaf(128, 192)) for _ in range(3)), *norms)
               for tokens in (130, 33)]
    outs = fk.projected_attention(streams, 2, options=fk.KernelOptions("consistent", 2))
    torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
    print("norms around attention", flush=True)


def adapters() -> None:
    """Gradients into leaves, in one pass and spread."""
    plan = fk.LeafPlan(20)
    for n, k in ((32, 192), (192, 32), (200, 136)):
        leaves = torch.zeros(8, n, k, device="cuda")
        dy, x = (torch.randn(20, 70, size, device="cuda", dtype=torch.bfloat16) for size in (n, k))
        fk.wgrad_leaves(leaves, dy, x, first_sample=0, plan=plan)
        fk.add_leaves(leaves, torch.randn(3, n, k, device="cuda"), first_sample=4, plan=plan)
    together = torch.zeros(3, 8, 32, 192, device="cuda")
    dy, x = (torch.randn(20, 70, size, device="cuda", dtype=torch.bfloat16) for size in (96, 192))
    wgrad_leaves_stacked(together.unbind(), dy, x, first_sample=0, plan=plan)
    parameters = [torch.nn.Parameter(normal(40, 72)) for _ in range(2)]
    with fk.GradientLeaves(parameters, plan) as collector:
        with collector.micro_batch(0, 20):
            fk.linear(normal(20, 9, 72), fk.Layer(parameters[0]), options=fk.KernelOptions("consistent", 2)).backward(
                normal(20, 9, 40))
        collector.finish()
    print("adapters", flush=True)


SECTIONS = (products, partial_products, products_in_one_sum, rows_and_elements, attention_both_ways,
            norms_around_attention, adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("sections", nargs="*", metavar="section", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args().sections
    if unknown := set(chosen) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.manual_seed(0)
    for section in SECTIONS:
        if not chosen or section.__name__ in chosen:
            section()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
