"""A task's pod as a container: the manifests' PodTemplate, ConfigMap and Secrets as flags of podman or docker.

What is kept from Kubernetes: user and group, read-only root, dropped capabilities, no new privileges, CPU and memory
limits, /dev/shm, writable emptyDirs, environment by ConfigMap, Secret and Flyte's secret requests. What is not: the
network (the host's, so that services on loopback are reached), scheduling, NetworkPolicies, quotas.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from images.build import ENGINES

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "k8s" / "base"
_LABEL = "flowmill.stack"
"""Label of every container: the stack's folder."""


class StackError(Exception):
    """The stack cannot do what was asked; the message says what to do."""


def find_engine(wanted: str = "") -> str:
    """docker or podman: the one asked for, else the one that `make images` chooses."""
    for name in (wanted,) if wanted else ENGINES:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    raise StackError(f"{wanted or 'neither docker nor podman'} does not answer to `info`. Install one "
                     "(`apt-get install podman runc`) or start its service.")


def guarded(command: Iterable[str]) -> list[str]:
    """The command for a new session: its whole group is killed when it ends or its standard input closes.

    The input is a pipe of ours, which closes however we end, so no server outlives us.
    """
    return ["sh", "-c", '("$@"; kill -9 0) & cat >/dev/null; kill -9 0', "sh", *command]


def documents(folder: str) -> list[dict[str, Any]]:
    """Every Kubernetes object of one folder of k8s/base."""
    return [document for path in sorted((BASE / folder).glob("*.yaml")) for document in
            yaml.safe_load_all(path.read_text()) if document and document.get("kind") != "Kustomization"]


def find(objects: Iterable[Mapping[str, Any]], kind: str, name: str) -> Mapping[str, Any]:
    """The object of that kind and name."""
    for item in objects:
        if item["kind"] == kind and item["metadata"]["name"] == name:
            return item
    raise StackError(f"the manifests have no {kind} {name!r}, which a task asks for; look in k8s/base.")


@dataclass
class Cluster:
    """What the manifests say about the task namespace, and what this machine puts in place of the rest."""

    engine: str
    scratch: Path
    """Folder for the pods' emptyDirs and logs."""
    endpoints: Mapping[str, str]
    """`host:port` of a Service as the manifests name it -> where it listens here."""
    secrets: Mapping[str, Mapping[str, str]]
    """Secret -> key -> value."""
    objects: list[dict[str, Any]] = field(default_factory=lambda: documents("tasks"))

    def local(self, value: str) -> str:
        """A value from the manifests with its Services' addresses replaced by local ones."""
        for service, here in self.endpoints.items():
            value = value.replace(service, here)
        return value

    def secret(self, name: str, key: str) -> str:
        """One key of a Secret."""
        try:
            return self.secrets[name][key]
        except KeyError:
            raise StackError(f"no Secret {name!r} with key {key!r}; there are "
                             f"{ {known: sorted(keys) for known, keys in self.secrets.items()} }.") from None

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        """A container's environment: `envFrom` ConfigMaps, then `env`."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= find(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        for item in container.get("env", ()):
            reference = item.get("valueFrom", {}).get("secretKeyRef")
            found[item["name"]] = self.secret(reference["name"], reference["key"]) if reference else item["value"]
        return {name: self.local(value) for name, value in found.items()}

    def options(self, name: str, spec: Mapping[str, Any], container: Mapping[str, Any],
                limits: Mapping[str, str], shared_memory: str = "") -> list[str]:
        """Flags of `run` for one container of a pod.

        Args:
            name: Name of the container; its emptyDirs lie in a folder of that name.
            spec: The pod's spec. container: The container's.
            limits: `cpu` in cores and `memory` in bytes, or with a unit that the engine knows.
            shared_memory: Size of /dev/shm; empty = the PodTemplate's, else the engine's.
        """
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        options = [f"--name={name}", f"--label={_LABEL}={self.scratch}", "--network=host",
                   f"--user={security['runAsUser']}:{security['runAsGroup']}"]
        if security.get("readOnlyRootFilesystem"):
            options.append("--read-only")
            if self.engine == "podman":
                options.append("--read-only-tmpfs=false")  # as in Kubernetes: only what is mounted can be written
        if not security.get("allowPrivilegeEscalation", True):
            options.append("--security-opt=no-new-privileges")
        options += [f"--cap-drop={capability}" for capability in security.get("capabilities", {}).get("drop", ())]
        if limits.get("cpu"):
            options.append(f"--cpus={min(float(limits['cpu']), os.cpu_count() or 1)}")
        if limits.get("memory"):
            options += [f"--memory={limits['memory']}", f"--memory-swap={limits['memory']}"]
        if container.get("workingDir"):
            options.append(f"--workdir={container['workingDir']}")
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            empty = volumes.get(mount["name"], {}).get("emptyDir")
            if mount["mountPath"] == "/dev/shm":
                shared_memory = shared_memory or str(empty["sizeLimit"]).replace("Gi", "g").replace("Mi", "m")
            elif empty is not None:
                options.append(f"--volume={self.empty_dir(name, mount['name'])}:{mount['mountPath']}")
        if shared_memory:
            options.append(f"--shm-size={shared_memory}")
        return options

    def remove_containers(self) -> None:
        """Remove every container of this folder, those of a stack that was killed too."""
        listed = subprocess.run([self.engine, "ps", "--all", "--quiet", f"--filter=label={_LABEL}={self.scratch}"],
                                capture_output=True, text=True).stdout.split()
        if listed:
            subprocess.run([self.engine, "rm", "--force", *listed], capture_output=True)

    def empty_dir(self, pod: str, volume: str) -> Path:
        """A new folder that anyone may write to, as Kubernetes makes an emptyDir."""
        folder = self.scratch / "volumes" / pod / volume
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        return folder

    def pod_template(self, name: str) -> Mapping[str, Any]:
        """Spec of a PodTemplate; its container is called `default`."""
        return find(self.objects, "PodTemplate", name)["template"]["spec"]
