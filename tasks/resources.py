"""What a task asks the cluster for, read from a recipe's `topology`; this file holds no numbers.

A task's resources are fixed when it is registered, so they come from the recipe `base`, which every recipe extends.
"""

from functools import cache
from typing import Any

from flytekit import Cache, Resources

from tasks.contracts.config import RECIPES, RoleConfig, Topology


@cache
def registered_topology() -> Topology:
    """The topology of the recipe `base`."""
    import yaml

    data = yaml.safe_load((RECIPES / "base.yaml").read_text(encoding="utf-8"))
    return Topology.model_validate(data.get("topology", {}))


def task_options(role: str, *, version: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keyword arguments of a cached stage's ``@task``.

    Args:
        role: Role of the topology.
        version: Cache version: raised when the same inputs would give another result.
        ignore: Inputs that cannot change the result.
    """
    return {"cache": Cache(version=version, serialize=False, ignored_inputs=ignore),
            **uncached_task_options(getattr(registered_topology(), role))}


def uncached_task_options(config: RoleConfig) -> dict[str, Any]:
    """Keyword arguments of a ``@task`` whose effect is its purpose."""
    size = Resources(cpu=str(config.cpu), mem=str(config.memory_bytes), gpu=str(config.gpus) if config.gpus else None)
    return {"requests": size, "limits": size, "retries": config.retries, "timeout": config.timeout_s,
            "interruptible": config.interruptible}
