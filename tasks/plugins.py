"""Plugins by module name: a policy, algorithm or reward is one file on its axis, named as it is in a recipe."""

import importlib
import pkgutil
from types import ModuleType
from typing import Literal

from tasks.contracts.errors import PluginNotFoundError

Axis = Literal["policies", "algorithms", "rewards"]
AXES: tuple[Axis, ...] = ("policies", "algorithms", "rewards")
_NOT_PLUGINS = ("base",)


def names(axis: str) -> list[str]:
    """The plugins of an axis, found on disk: every module but `base` and those with a leading underscore."""
    if axis not in AXES:
        raise PluginNotFoundError(f"no plugin axis {axis!r}; the axes are {', '.join(AXES)}.")
    package = importlib.import_module(f"tasks.{axis}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__)
                  if module.name not in _NOT_PLUGINS and not module.name.startswith("_") and not module.ispkg)


def load(axis: str, name: str) -> ModuleType:
    """The plugin module `name` of an axis.

    Raises:
        PluginNotFoundError: unknown axis or name; the message lists what exists and where to put a new one.
    """
    found = names(axis)
    if name not in found:
        raise PluginNotFoundError(f"no {axis} plugin named {name!r}; found {', '.join(found)}. "
                                  f"A new one is one file, tasks/{axis}/{name}.py.")
    return importlib.import_module(f"tasks.{axis}.{name}")
