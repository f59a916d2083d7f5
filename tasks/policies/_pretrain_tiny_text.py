"""Make the embedded policy's checkpoint and prompt files: `python -m tasks.policies._pretrain_tiny_text --out FILE`.

In: nothing but fonts from matplotlib's own data. Out: `assets/tiny_text.safetensors`, from which RL starts, and
`workflows/recipes/prompts/tiny_text_*.txt`. Flow matching on rendered strings of the train split, seeded; the same
machine gives the same bits. The learning rate is constant and the averaged weights are kept, so a run of n steps is the
first n steps of any longer one: the number of steps is the only knob, and it is set so that RL has something to
improve. Strings of the dev and test split are never rendered here.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.policies import tiny_text
from tasks.policies.tiny_text import CHARSET, COLOURS, HEIGHT, NUM_CHARACTERS, TEMPLATES, WIDTH, split_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

SETTINGS: dict[str, Any] = {
    "num_images": 16000, "batch_size": 64, "learning_rate": 1.5e-3, "betas": (0.9, 0.98), "weight_decay": 0.01,
    "warmup_steps": 100, "max_grad_norm": 1.0, "ema_decay": 0.997, "empty_prompt_fraction": 0.1,
}
NUM_STEPS, SEED = 2500, 0
"""Of the shipped checkpoint."""
RGB = {"red": (200, 40, 40), "blue": (40, 70, 200), "green": (30, 130, 50), "black": (20, 20, 20)}
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSansMono-Bold.ttf")
SUPERSAMPLING = 3


def strings(split: str) -> list[str]:
    """All strings of a split, sorted."""
    return [text for text in map("".join, itertools.product(sorted(CHARSET), repeat=NUM_CHARACTERS))
            if split_of(text) == split]


def prompts(split: str) -> list[str]:
    """Every string of a split in every colour and template."""
    return [template.format(colour=colour, text=text)
            for text in strings(split) for colour in COLOURS for template in TEMPLATES]


def write_prompts(folder: Path) -> None:
    """Write ``tiny_text_{train,dev,test}.txt``, one prompt a line."""
    for split in ("train", "dev", "test"):
        (folder / f"tiny_text_{split}.txt").write_text("".join(f"{prompt}\n" for prompt in prompts(split)))


def render(text: str, colour: str, draw: random.Random) -> "Image":
    """One RGB training image, WIDTH x HEIGHT, with the font, place, tilt and shades that `draw` picks."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    width, height = WIDTH * SUPERSAMPLING, HEIGHT * SUPERSAMPLING
    background = (draw.randint(215, 255),) * 3
    ink = tuple(min(255, max(0, value + draw.randint(-15, 15))) for value in RGB[colour])
    font_file = Path(matplotlib.get_data_path(), "fonts", "ttf", draw.choice(FONTS))
    image = Image.new("RGB", (width, height), background)
    canvas = ImageDraw.Draw(image)
    size = int(height * 0.8)
    while True:
        font = ImageFont.truetype(font_file, size)
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        if right - left <= width * 0.92:
            break
        size -= 1
    margin_x, margin_y = (width - (right - left)) / 2, (height - (bottom - top)) / 2
    canvas.text((margin_x * (1 + draw.uniform(-0.3, 0.3)) - left, margin_y * (1 + draw.uniform(-0.3, 0.3)) - top),
                text, font=font, fill=ink)
    tilted = image.rotate(draw.uniform(-3, 3), resample=Image.Resampling.BILINEAR, fillcolor=background)
    return tilted.resize((WIDTH, HEIGHT), Image.Resampling.BOX)


def training_set(num_images: int, seed: int) -> tuple["Tensor", list[str]]:
    """Images uint8 [N, 3, H, W] of strings of the train split, and a prompt for each."""
    import numpy as np
    import torch

    draw, texts = random.Random(seed), strings("train")
    images, captions = [], []
    for _ in range(num_images):
        text, colour = draw.choice(texts), draw.choice(COLOURS)
        images.append(np.asarray(render(text, colour, draw)))
        captions.append(draw.choice(TEMPLATES).format(colour=colour, text=text))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), captions


def sample(policy: tiny_text.TinyText, texts: list[str], *, num_inference_steps: int = 8, seed: int = 7,
           batch_size: int = 64) -> "Tensor":
    """Final latents [N, 3, H, W] of an ODE on the linear schedule, prompt i from the i-th of one stream of noise."""
    import torch

    noise = torch.randn(len(texts), *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    sigmas = [1 - step / num_inference_steps for step in range(num_inference_steps + 1)]
    done = []
    with torch.no_grad():
        for start in range(0, len(texts), batch_size):
            latents = noise[start:start + batch_size]
            conditions = policy.encode(texts[start:start + batch_size])
            for sigma, sigma_next in itertools.pairwise(sigmas):
                sigma_M = torch.full((len(latents),), sigma)
                latents = latents + (sigma_next - sigma) * policy.velocity(latents, sigma_M, conditions)
            done.append(latents)
    return torch.cat(done)


def measure(policy: tiny_text.TinyText, split: str, reader: str = "ocr", **options: Any) -> dict[str, float]:
    """Mean of each part of a reading reward over every prompt of a split."""
    from tasks.plugins import load

    texts, module = prompts(split), load("rewards", reader)
    parts = module.build(module.Config())(policy.decode(sample(policy, texts, **options)), texts, [{}] * len(texts))
    return {name: float(values.mean()) for name, values in parts.items()}


def pretrain(num_steps: int, seed: int, start: Path | None = None) -> Iterator[tuple[int, "nn.ModuleDict", float]]:
    """Train; yields after every step (step, averaged weights, loss). The averaged weights change in place.

    Args:
        start: Continue from this checkpoint's weights (with a fresh optimiser) instead of from random ones.
    """
    import copy

    import torch
    from torch import nn

    settings, batch_size = SETTINGS, SETTINGS["batch_size"]
    images, captions = training_set(settings["num_images"], seed)
    tokens, positions = tiny_text.token_ids(captions)
    empty_tokens, empty_positions = tiny_text.token_ids([""])
    torch.manual_seed(seed)
    transformer, prompt_encoder = tiny_text.load_modules(start) if start else tiny_text.new_modules()
    model = nn.ModuleDict({"transformer": transformer, "prompt_encoder": prompt_encoder})
    average = copy.deepcopy(model).requires_grad_(False)
    parameters: list[Tensor] = list(model.parameters())
    averages: list[Tensor] = list(average.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], betas=settings["betas"],
                                  weight_decay=settings["weight_decay"], foreach=True)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, step / settings["warmup_steps"])
        chosen = torch.randint(len(images), (batch_size,), generator=generator)
        clean = images[chosen].float() / 127.5 - 1
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.randn(batch_size, generator=generator).sigmoid()
        dropped = (torch.rand(batch_size, generator=generator) < settings["empty_prompt_fraction"])[:, None]
        conditions = tiny_text.embed(prompt_encoder, torch.where(dropped, empty_tokens, tokens[chosen]),
                                     torch.where(dropped, empty_positions, positions[chosen]))
        mix = sigma[:, None, None, None]
        velocity = tiny_text.predict(transformer, (1 - mix) * clean + mix * noise, sigma, conditions)
        loss = nn.functional.mse_loss(velocity, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        torch._foreach_lerp_(averages, [parameter.detach() for parameter in parameters],
                             1 - min(settings["ema_decay"], step / (step + 10)))
        yield step, average, loss.item()


def save(weights: "nn.ModuleDict", path: Path, metadata: dict[str, Any]) -> None:
    """Write fp16 safetensors with the settings in the header, under one key: several are written in random order."""
    from safetensors.torch import save as to_bytes

    tensors = {name: value.half().contiguous() for name, value in weights.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_bytes(tensors, metadata={"pretraining": json.dumps(metadata)}))


def main() -> None:
    """Command line: write prompts, or pretrain, report dev quality on the way and save."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="checkpoint to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--evaluate-every", type=int, default=500, help="steps between readings of dev; 0 = never")
    parser.add_argument("--snapshots", type=Path, help="folder that keeps the weights of each evaluation")
    parser.add_argument("--prompts", type=Path, help="folder to write the prompt files to")
    options = parser.parse_args()
    if options.prompts:
        write_prompts(options.prompts)
    if not options.out:
        return
    torch.set_num_threads(1)
    start, running = time.process_time(), 0.0
    for step, weights, loss in pretrain(options.steps, options.seed):
        running = loss if step == 1 else 0.98 * running + 0.02 * loss
        last = step == options.steps
        metadata = {"steps": step, "seed": options.seed, **SETTINGS}
        if last:
            save(weights, options.out, metadata)
        if last or (options.evaluate_every and step % options.evaluate_every == 0):
            cpu_s = time.process_time() - start
            path = options.out
            if options.snapshots and not last:
                path = options.snapshots / f"{step}.safetensors"
                save(weights, path, metadata)
            report = f"step {step} loss {running:.4f} cpu {cpu_s:.0f} s"
            if options.evaluate_every:
                policy = tiny_text.TinyText(tiny_text.Config(), weights["transformer"],
                                            weights["prompt_encoder"], "")  # type: ignore[arg-type]
                report += f" dev {measure(policy, 'dev')}"
            print(report, flush=True)


if __name__ == "__main__":
    main()
