"""SD3.5-M's transformer (24 layers, 384 px, 205 text tokens, LoRA r32 unmerged): our kernels against torch.compile.

    PYTHONPATH=kernels/src python kernels/benchmarks/sd35_block_stack.py [forward] [train] [bits] [profile]

Needs diffusers and peft. Both sides are the same model with the same random weights and adapters: eager, block-wise
`torch.compile(fullgraph=True)` and `apply_kernels(model, "consistent")`. Times are medians over rounds in which the
candidates take turns on fresh inputs, so they meet the same clocks. In training also both as CUDA graphs: compile's
forward and backward, and ours as `MicroBatchGraph`. `bits`: log-probs of a Flow-SDE step, no-grad against training
forward and over batch sizes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

from flowmill_kernels import GradientLeaves, LeafPlan, MicroBatchGraph, apply_kernels, mean

LORA = ["attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k", "attn.to_out.0",
        "attn.to_q", "attn.to_v"]
SIDE, TEXT, RANK = 48, 205, 32
SIGMA, SIGMA_NEXT, NOISE = 0.790368, 0.707278, 0.7
START = time.time()


def say(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def build(device: str, layers: int = 24) -> SD3Transformer2DModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = SD3Transformer2DModel(
            sample_size=128, patch_size=2, in_channels=16, num_layers=layers, attention_head_dim=64,
            num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
            out_channels=16, pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm")
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()


def inputs(batch: int, device: str, seed: int = 0) -> dict:
    generator = torch.Generator(device).manual_seed(seed)
    make = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    return {"hidden_states": torch.randn(batch, 16, SIDE, SIDE, **make),
            "encoder_hidden_states": torch.randn(batch, TEXT, 4096, **make),
            "pooled_projections": torch.randn(batch, 2048, **make),
            "timestep": torch.full((batch,), 700.0, device=device), "return_dict": False}


def timed(call, rounds: int = 1) -> float:
    """Milliseconds a call, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds


def compare(candidates: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each candidate (how to make the model ready, outside of the timing; what to time)."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for name, (ready, call) in candidates.items():
        before = time.time()
        with ready():
            for _ in range(3):
                call(0)
            torch.cuda.synchronize()
        say(f"{name}: ready after {time.time() - before:.1f} s")
    for index in range(rounds):
        for name, (ready, call) in candidates.items():
            with ready():
                times[name].append(timed(lambda call=call, index=index: call(index + 1), 2))
    return {name: statistics.median(values) for name, values in times.items()}


def log_prob(x: torch.Tensor, velocity: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Mean log-prob [B] of a Flow-SDE step from `x` to `sample` (Flow-GRPO's reference formula), without constants."""
    std = NOISE * (SIGMA / (1 - SIGMA)) ** 0.5
    deviation = std * (SIGMA - SIGMA_NEXT) ** 0.5
    dt = SIGMA_NEXT - SIGMA
    middle = x * (1 + std**2 / (2 * SIGMA) * dt) + velocity.float() * (1 + std**2 * (1 - SIGMA) / (2 * SIGMA)) * dt
    return mean(-((sample - middle) ** 2) / (2 * deviation**2), x.dim() - 1)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def profiled(name: str, call: Callable[[int], None]) -> None:
    """Print where the GPU's time goes once it is as warm as it gets, and the host's; a call's share of three."""
    from torch.profiler import ProfilerActivity, profile

    for index in range(20):
        call(index)
    torch.cuda.synchronize()
    before = time.time()
    call(0)
    host = time.time() - before
    torch.cuda.synchronize()
    took = statistics.median(timed(lambda: call(1), 3) for _ in range(3))
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for index in range(3):
            call(index)
        torch.cuda.synchronize()
    rows = sorted(p.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in rows)
    say(f"{name}: {took:.1f} ms a call, {total / 3e3:.1f} ms of them {sum(e.count for e in rows) / 3:.0f} kernels; the "
        f"host issued it in {host * 1e3:.1f} ms")
    for e in rows[:28]:
        share = e.device_time_total / total * 100
        print(f"   {e.device_time_total / 3e3:8.2f} ms {share:5.1f} % {e.count / 3:7.1f} {e.key[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["bits", "forward", "train"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--skip-eager", action="store_true")
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    device, results = "cuda", {}
    torch._dynamo.config.cache_size_limit = 64
    model = build(device, args.layers)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} G parameters, torch {torch.__version__}")
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = list(model.transformer_blocks)

    compiled = {id(b): torch.compile(b.forward, fullgraph=True) for b in blocks}

    @contextmanager
    def compile_on() -> Iterator[None]:
        for b in blocks:
            b.forward = compiled[id(b)]
        try:
            yield
        finally:
            for b in blocks:
                del b.forward

    def candidates(theirs: Callable[[int], None], ours: Callable[[int], None]) -> dict:
        chosen = {"eager": (nullcontext, theirs), "compile": (compile_on, theirs),
                  "consistent": (lambda: apply_kernels(model, "consistent", num_sms=args.sms), ours)}
        for name, skip in (("eager", args.skip_eager), ("compile", args.skip_compile)):
            if skip:
                del chosen[name]
        return chosen

    wide, data = ([inputs(batch, device, seed) for seed in range(3)] for batch in (64, 32))
    collector = GradientLeaves(trained, LeafPlan(32))

    def forward(index: int) -> None:
        with torch.no_grad():
            model(**wide[index % 3])

    def our_graph() -> Callable[[int], None]:
        def step(**given: torch.Tensor) -> None:
            (model(**given)[0].float() ** 2).mean().backward()

        with apply_kernels(model, "consistent", num_sms=args.sms):
            graph = MicroBatchGraph(collector, 32, step, data[0])

        def call(index: int) -> None:
            with collector:
                graph(0, **data[index % 3])
                collector.finish()
            for p in trained:
                p.grad = None

        return call

    if "bits" in args.what:
        x = inputs(64, device)
        latents = x["hidden_states"].float()
        with apply_kernels(model, "consistent", num_sms=args.sms) as handle:
            say(handle)
            with torch.no_grad():
                rollout = model(**x)[0]
            sample = latents - 0.08 * rollout.float() + 0.3 * torch.randn_like(latents)
            wanted = log_prob(latents, rollout, sample)
            worst = {}
            for batch in (1, 2, 3, 8, 16, 32, 64):
                part = {k: v[:batch] if torch.is_tensor(v) else v for k, v in x.items()}
                with torch.no_grad():
                    again = model(**part)[0]
                if batch <= 32:
                    training = model(**part)[0].detach()
                else:
                    training = again
                differ = [differing(t, rollout[:batch]) for t in (again, training)]
                gap = max((log_prob(latents[:batch], t, sample[:batch]) - wanted[:batch]).abs().max().item()
                          for t in (again, training))
                worst[batch] = (*differ, gap)
            handle.set_num_sms(96)
            with torch.no_grad():
                worst["64, 96 SMs"] = (differing(model(**x)[0], rollout),)
        say("batch: (elements that differ no-grad, training forward, max |log-prob gap|)", worst)
        with torch.no_grad():
            own = model(**x)[0]
            error = ((rollout.float() - own.float()).norm() / own.float().norm()).item()
        say(f"relative difference to eager {error:.2e}")
        results["bits"] = {str(k): v for k, v in worst.items()}
    if "forward" in args.what:
        results["forward 64"] = compare(candidates(forward, forward), args.rounds)
        say("forward, batch 64, ms", results["forward 64"])
    if "train" in args.what:
        def train(index: int) -> None:
            (model(**data[index % 3])[0].float() ** 2).mean().backward()
            for p in trained:
                p.grad = None

        def train_collected(index: int) -> None:
            """Ours as it is used: every gradient summed in fixed leaves, the norm taken."""
            with collector, collector.micro_batch(0, 32):
                (model(**data[index % 3])[0].float() ** 2).mean().backward()
            collector.finish()

        def compiled_graph() -> Callable[[int], None]:
            """compile's forward and backward as one CUDA graph, as torch's manual says."""
            fixed = {k: v.clone() if torch.is_tensor(v) else v for k, v in data[0].items()}

            def step() -> None:
                (model(**fixed)[0].float() ** 2).mean().backward()

            stream = torch.cuda.Stream()
            with compile_on():
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        step()
                stream.synchronize()
                for p in trained:
                    p.grad = None
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
            for p in trained:
                p.grad = None

            def call(index: int) -> None:
                for name, value in data[index % 3].items():
                    if torch.is_tensor(value):
                        fixed[name].copy_(value)
                graph.replay()

            return call

        chosen = candidates(train, train_collected)
        chosen["consistent, graph"] = (nullcontext, our_graph())
        if not args.skip_compile:
            chosen["compile, graph"] = (nullcontext, compiled_graph())
        results["train 32"] = compare(chosen, args.rounds)
        say("forward + backward, batch 32, ms", results["train 32"])
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
    if "profile" in args.what:
        with apply_kernels(model, "consistent", num_sms=args.sms):
            profiled("forward, batch 64", forward)
        profiled("forward + backward as a graph, batch 32", our_graph())
    for name, times in results.items():
        for ours in ("consistent", "consistent, graph"):
            for theirs in ("compile", "compile, graph"):
                if theirs in times and ours in times:
                    say(f"{name}: {theirs} / {ours} = {times[theirs] / times[ours]:.3f}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
