"""Launch every kernel once on small shapes, for compute-sanitizer:

    PYTHONPATH=kernels/src compute-sanitizer --tool memcheck python kernels/benchmarks/every_kernel.py
    PYTHONPATH=kernels/src compute-sanitizer --tool racecheck python kernels/benchmarks/every_kernel.py
"""

import dataclasses

import torch

import flowmill_kernels as fk
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
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
