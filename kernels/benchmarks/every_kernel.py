"""Launch every kernel once on small shapes, for compute-sanitizer:

    PYTHONPATH=kernels/src compute-sanitizer --tool memcheck python kernels/benchmarks/every_kernel.py
    PYTHONPATH=kernels/src compute-sanitizer --tool racecheck python kernels/benchmarks/every_kernel.py
"""

import dataclasses

import torch

import flowmill_kernels as fk
from flowmill_kernels.elementwise import activation_slope
from flowmill_kernels.gradients import wgrad_leaves_stacked
from flowmill_kernels.heuristics import CATALOGUE


def main() -> None:
    torch.manual_seed(0)
    m, n, k = 450, 264, 1024  # several tiles a program at num_sms=2, and edges in every direction
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    bias, gate, residual = (torch.randn(s, device="cuda", dtype=x.dtype) for s in ((n,), (2, n), (m, n)))
    for mode in ("consistent", "tp_invariant"):
        plan = fk.gemm_nt_schedule(m, n, k, mode=mode)
        whole = dataclasses.replace(plan, scheme=fk.Scheme(k, "serial")) if mode == "consistent" else plan
        for name, tile in CATALOGUE.items():
            if mode == "tp_invariant" and tile.block_m * tile.block_n > 128 * 128:
                continue
            schedule = dataclasses.replace(whole, tile=tile, spread=False)
            y = fk.gemm_nt(x, w, bias, activation="gelu_tanh", gate=gate, residual=residual, num_sms=2,
                           schedule=schedule)
            print(mode, name, bool(y.isfinite().all()), flush=True)
        for options in ({"spread": True}, {"loads": "pointer", "spread": False, "tile": CATALOGUE["narrow"]}):
            fk.gemm_nt(x, w, bias, num_sms=2, schedule=dataclasses.replace(plan, **options))
        fk.gemm_nn(torch.randn(m, 256, device="cuda", dtype=x.dtype), w[:256], mode=mode, num_sms=2)
    for ranks in (1, 2, 4, 8):
        parts = [fk.gemm_nt_partial(x[:, :1024 // ranks].contiguous(), w[:, :1024 // ranks].contiguous(),
                                    num_ranks=ranks, num_sms=2)] * ranks
        fk.combine_partials(parts, bias, dtype=x.dtype, num_sms=2)
    fk.leaf_sum(fk.wgrad(x.view(9, 50, k)[..., :48].contiguous(), x.view(9, 50, k), num_sms=2))
    products_in_one_sum(x, w, bias, residual)
    rows_and_elements()
    attention_both_ways()
    norms_around_attention()
    adapters()
    torch.cuda.synchronize()
    print("every kernel ran")


def products_in_one_sum(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> None:
    """Extra products and residuals by TMA, in every tile that takes them."""
    m, n = len(x), len(w)
    h, b = (torch.randn(s, 48, device="cuda", dtype=x.dtype) for s in (m, n))
    gate = torch.randn(m // 75, n, device="cuda", dtype=x.dtype)
    plan = fk.gemm_nt_schedule(m, n, x.shape[1])
    whole = dataclasses.replace(plan, scheme=fk.Scheme(x.shape[1], "serial"), spread=False)
    for name, tile in CATALOGUE.items():
        fk.gemm_nt(x, w, bias, gate=gate, residual=residual, extra=[(h, b)] * 3, num_sms=2,
                   schedule=dataclasses.replace(whole, tile=tile))
        print("extra", name, flush=True)
    fk.gemm_nt(x, w, bias, extra=(h, b), num_sms=2)
    factor = torch.randn_like(x)
    for name, tile in CATALOGUE.items():
        if tile.split_roles:
            fk.gemm_nt_normed(x[:, :512], w[:256, :512], None, fk.HeadNorm(bias[:64].contiguous(), 1e-6), num_sms=2,
                              schedule=dataclasses.replace(fk.gemm_nt_schedule(m, 256, 512), tile=tile, spread=False))
            print("norms", name, flush=True)
        turned = dataclasses.replace(fk.gemm_nt_schedule(m, x.shape[1], n), tile=tile, spread=False)
        fk.gemm_nn(residual, w, gate=factor, num_sms=2, schedule=turned)
        print("a factor an element", name, flush=True)


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
    print("adapters", flush=True)


if __name__ == "__main__":
    main()
