"""What a task asks the cluster for, read from a recipe's `topology`; this file holds no numbers.

A task is registered with the topology of the recipe `base`, which every recipe extends; the loop then gives each stage
the topology of the run's own recipe (`node_overrides`, `set_pod_template`). Fixed at registration are the secrets, and
the pods of the tasks around the loop; a recipe that wants others is refused (`check_registered`).
"""

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from flytekit import Cache, FlyteContextManager, Resources, Secret
from flytekit.exceptions.user import FlyteRecoverableException

from tasks.contracts.config import RECIPES, RoleConfig, Topology
from tasks.contracts.errors import ConfigError, StoreUnavailableError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def retried(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """On a cluster, let Flyte run the task again, `retries` times, when the store does not answer.

    Flyte runs a task again only for this exception and for pods that were lost; every other error is final.
    """
    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except StoreUnavailableError as error:
            if "FLYTE_INTERNAL_EXECUTION_ID" not in os.environ:
                raise
            raise FlyteRecoverableException(str(error)) from error

    return call


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
    return {**_sizes(config), "container_image": _image_template(config), "pod_template_name": pod_template(config),
            "secret_requests": [_secret(variable, source) for variable, source in
                                sorted(registered_topology().secrets.items())]}


def pod_template(config: RoleConfig) -> str:
    """Name of the PodTemplate a role's pods are made from."""
    return config.pod_template or ("flowmill-gpu" if config.gpus else "flowmill-cpu")


def set_pod_template(task: Any, config: RoleConfig) -> None:
    """In a dynamic task, which gives Flyte its children's tasks: use the PodTemplate of the run's own recipe."""
    task.metadata.pod_template_name = pod_template(config)


def check_registered(topology: Topology) -> None:
    """Refuse a recipe that would need what only a registration can give.

    Raises:
        ConfigError: other secrets, or another pod for the tasks around the loop, than the tasks are registered with.
    """
    registered = registered_topology()
    if topology.secrets != registered.secrets:
        where, came, expected = "secrets", topology.secrets, registered.secrets
    elif pod_template(topology.control) != pod_template(registered.control):
        where, came = "control", pod_template(topology.control)
        expected = f"the PodTemplate {pod_template(registered.control)}"
    else:
        return
    raise ConfigError(f"topology.{where}: {came}; the tasks are registered with {expected}. Set it in "
                      "workflows/recipes/base.yaml and register again.")


def node_overrides(config: RoleConfig, node_name: str) -> dict[str, Any]:
    """Keyword arguments of `with_overrides` that give one node what its run's recipe says. Local runs ignore them.

    Args:
        node_name: Name of the node in the console; unique in its workflow.
    """
    overrides: dict[str, Any] = {"node_name": node_name, **_sizes(config)}
    settings = FlyteContextManager.current_context().serialization_settings
    if settings is not None:  # on the cluster: the images that this version was registered with
        from flytekit.core.python_auto_container import get_registerable_container_image

        overrides["container_image"] = get_registerable_container_image(_image_template(config), settings.image_config)
    return overrides


def _sizes(config: RoleConfig) -> dict[str, Any]:
    size = Resources(cpu=str(config.cpu), mem=str(config.memory_bytes), gpu=str(config.gpus) if config.gpus else None)
    sizes = {"requests": size, "limits": size, "retries": config.retries, "timeout": config.timeout_s,
             "interruptible": config.interruptible}
    if config.shared_memory_bytes:
        sizes["shared_memory"] = str(config.shared_memory_bytes)
    return sizes


def _image_template(config: RoleConfig) -> str:
    """Filled in at registration from `--image NAME=...`."""
    return f"{{{{.image.{config.image}}}}}"


def _secret(variable: str, source: str) -> Secret:
    group, _, key = source.partition("/")
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR, env_var=variable)
