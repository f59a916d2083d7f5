"""Prompt files and the order they are drawn in. In: a recipe's `prompts`. Out: the prompts of an iteration.

The order is a pure function of (seed, iteration): no loader, no state, so a resumed run draws the same prompts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tasks.contracts.config import ROOT, digest_of
from tasks.contracts.errors import ConfigError


@dataclass(frozen=True)
class Prompts:
    """Texts and, one a text, the metadata of a `.jsonl` file (empty for `.txt`)."""

    texts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: another file of the same name is another input."""
        return digest_of({"texts": list(self.texts), "metadata": [dict(entry) for entry in self.metadata]})


def read_prompts(path: str) -> Prompts:
    """Read a prompts file, `.txt` (a prompt a line) or `.jsonl` (`{"prompt": ..., "metadata": {...}}` a line).

    Raises:
        ConfigError: missing, unreadable, truncated (no newline at the end), empty, a line without a prompt, or
            metadata that is not a mapping.
    """
    file = Path(path) if Path(path).is_absolute() else ROOT / path
    try:
        return _parse(path, file.suffix, file.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path}: cannot be read ({error}). Set prompts.train and prompts.evaluate to "
                          "UTF-8 text files.") from None


@lru_cache(maxsize=4)  # keyed by content: every rollout reads the file, few find another one
def _parse(path: str, suffix: str, content: bytes) -> Prompts:
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    if not text.strip():
        raise ConfigError(f"prompts file {path} is empty; it needs one prompt a line.")
    if not text.endswith("\n"):
        raise ConfigError(f"prompts file {path} does not end with a newline: it was probably truncated after "
                          f"{text[text.rfind(chr(10)) + 1:][:60]!r}. Copy it again, or end its last line.")
    texts, metadata = [], []
    # Not splitlines(): it also splits at U+2028 and friends, which JSON strings may hold as they are.
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        entry: Any = {"prompt": line.strip()}
        if suffix == ".jsonl":
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"prompts file {path}, line {number}: not JSON ({error}).") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"prompts file {path}, line {number}: the prompt is empty. Remove the line: an empty "
                              "prompt has nothing to be rewarded for.")
        if not isinstance(entry.get("metadata", {}), dict):
            raise ConfigError(f"prompts file {path}, line {number}: metadata is {entry['metadata']!r}, expected a "
                              "mapping such as {\"target\": \"7K\"}.")
        texts.append(prompt.strip())
        metadata.append(entry.get("metadata", {}))
    return Prompts(tuple(texts), tuple(metadata))


def draw_positions(num_prompts: int, count: int, seed: int, iteration: int) -> list[int]:
    """Positions of the `count` prompts of an iteration (from 0): every prompt once, in a new order, each epoch."""
    import torch

    from tasks.sde import derive_seed

    orders: dict[int, list[int]] = {}
    positions = []
    for place in range(iteration * count, (iteration + 1) * count):
        epoch, offset = divmod(place, num_prompts)
        if epoch not in orders:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch, 0, "prompts"))
            orders[epoch] = torch.randperm(num_prompts, generator=generator).tolist()
        positions.append(orders[epoch][offset])
    return positions
