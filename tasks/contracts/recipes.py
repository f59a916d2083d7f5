"""Recipe files: find one, follow `extends:`, apply overrides, and say what is wrong with it.

In: a name or path, and overrides. Out: a plain mapping for `RunConfig`; the checks are the config's own.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from tasks.contracts.config import RECIPES, RunConfig
from tasks.contracts.errors import ConfigError


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read(name_or_path: str, overrides: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as a mapping, with its parents below it and the overrides on top; see `config.load_recipe`.

    Raises:
        ConfigError: no such recipe, unreadable YAML, a cycle of parents, or an override that has no place.
    """
    data = _read_recipe(name_or_path, seen=())
    for key, value in _parse_overrides(overrides):
        _assign(data, key, value)
    data.setdefault("name", Path(name_or_path).stem)
    return data


def _read_recipe(name_or_path: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES / f"{name_or_path}.yaml"
    elif not path.is_absolute() and not path.exists():
        path = (seen[-1].parent if seen else RECIPES) / path
    if not path.is_file():
        raise ConfigError(f"no recipe {name_or_path!r}; found {', '.join(recipe_names())}. Name one of them, or give "
                          "the path of a .yaml file.")
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"recipe {path.name} extends itself through {[item.name for item in seen]}.")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path} holds {type(data).__name__}, expected a mapping of settings.")
    parent = data.pop("extends", None)
    if not isinstance(parent, str | None):
        raise ConfigError(f"recipe {path}: extends is {parent!r}, expected the name or path of one recipe.")
    return data if parent is None else _merge(_read_recipe(parent, (*seen, path)), data)


def _merge(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Overlay `change`: mappings merge key by key, anything else replaces. Another plugin name replaces its mapping."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, dict) and isinstance(value, Mapping):
            same_plugin = value.get("name", old.get("name")) == old.get("name")
            merged[key] = _merge(old, value) if same_plugin else value
    return merged


def _parse_overrides(overrides: str | Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    try:
        items = shlex.split(overrides) if isinstance(overrides, str) else overrides
    except ValueError as error:
        raise ConfigError(f"overrides {overrides!r} cannot be split: {error}.") from None
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r} is not key=value, such as sampling.group_size=12. Quote an "
                              "item whose value has spaces: 'evaluation.readers=[{name: ocr}]'.")
        try:
            yield key, yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {item!r}: the value is not YAML: {error}") from None


def _assign(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    here: Any = data
    for part in parents:
        if isinstance(here, list):
            here = next((item for item in here if isinstance(item, dict) and item.get("name") == part), None)
        else:
            here = here.setdefault(part, {})
        if not isinstance(here, list | dict):
            raise ConfigError(f"override {dotted}={value!r}: there is no section {part!r} to set it in.")
    if not isinstance(here, dict):
        raise ConfigError(f"override {dotted}={value!r}: name the list item, such as rewards.ocr.weight=2.")
    here[last] = value


def _known_keys(loc: Sequence[str | int], data: Any) -> list[str]:
    """The keys that the section at `loc` of a recipe understands; a plugin's section has the plugin's own."""
    section: Any = RunConfig
    for depth, part in enumerate(loc):
        data = data[part] if isinstance(data, dict | list) else None  # type: ignore[index]
        field = getattr(section, "model_fields", {}).get(str(part))
        if field is not None:
            kinds = (field.annotation, *get_args(field.annotation))
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
        axis = {"policy": "policies", "algorithm": "algorithms", "rewards": "rewards", "readers": "rewards"}.get(
            str(loc[depth - 1] if isinstance(part, int) else part))
        if axis and isinstance(data, dict):
            from tasks.plugins import load

            section = load(axis, data["name"]).Config
    return list(getattr(section, "model_fields", {}))


def explain(source: str, error: ValidationError, data: Mapping[str, Any]) -> str:
    """What is wrong with a recipe: one line a mistake, with the nearest known key for a misspelt one."""
    import difflib

    lines = [f"recipe {source!r} cannot run:"]
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "recipe"
        if item["type"] == "extra_forbidden":
            known = _known_keys(item["loc"][:-1], data)
            close = difflib.get_close_matches(str(item["loc"][-1]), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}."
            lines.append(f"  {where}: unknown key (value {item['input']!r}); {hint}")
        elif item["type"] == "value_error":
            lines.append(f"  {where}: {item['msg'].removeprefix('Value error, ').rstrip('.')}.")
        else:
            lines.append(f"  {where}: got {item['input']!r}; {item['msg']}.")
    return "\n".join(lines)
