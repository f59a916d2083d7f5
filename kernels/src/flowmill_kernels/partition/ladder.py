"""How roles are kept apart on this machine: the highest rung of a ladder that holds, and why the ones above do not.

`mps+green`  several processes share the GPU through MPS, each on its own SMs
`green`      one process, each role on its own SMs
`mps`        several processes share the GPU through MPS, all SMs for everybody
`timeslice`  several processes take turns, the driver decides when
`exclusive`  one process, roles take turns on the whole GPU
`cpu`        no GPU

SMs are partitioned, memory bandwidth and L2 are not: say "SM-partitioned", never "isolated".
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .device import GREEN_DRIVER

IsolationMode = Literal["mps+green", "green", "mps", "timeslice", "exclusive", "cpu"]
RUNGS: tuple[IsolationMode, ...] = ("mps+green", "green", "mps", "timeslice", "exclusive", "cpu")


@dataclass(frozen=True)
class Mps:
    """What is known of an MPS daemon."""

    directory: str
    present: bool
    owner: int | None = None
    """UID of the daemon; one daemon serves clients of one UID (root's serves all)."""
    thread_percentage: str | None = None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, if set."""


@dataclass(frozen=True)
class Surroundings:
    """Everything that the choice depends on."""

    gpu: bool
    driver: int = 0
    """CUDA version of the driver, 1000 * major + 10 * minor; 0: cuda-python is missing."""
    processes: int = 1
    """Processes that share the GPU, this one included."""
    mps: Mps | None = None
    uid: int = 0
    partition_error: str | None = None
    """Why the roles do not fit the GPU, if they do not."""
    gpu_error: str | None = None
    """Why there is no GPU, if more is known than that none is visible."""


@dataclass(frozen=True)
class Isolation:
    """The rung that holds."""

    mode: IsolationMode
    refused: tuple[tuple[IsolationMode, str], ...]
    """Every rung above it, with the reason."""

    def __str__(self) -> str:
        reasons = "; ".join(f"not {mode}: {reason}" for mode, reason in self.refused)
        return f"isolation_mode {self.mode}" + (f" ({reasons})" if reasons else "")


def find_mps(environment: Mapping[str, str] | None = None) -> Mps:
    """Look for an MPS daemon where CUDA would: the pipe directory of the environment, or its default."""
    environment = os.environ if environment is None else environment
    directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    percentage = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    control = Path(directory) / "control"
    try:
        owner = control.stat().st_uid
    except OSError:
        return Mps(directory, False, None, percentage)
    return Mps(directory, True, owner, percentage)


def _mps_reason(around: Surroundings) -> str | None:
    if around.processes < 2:
        return "one process needs no MPS"
    mps = around.mps
    if mps is None or not mps.present:
        where = "" if mps is None else f" in {mps.directory}"
        return f"no MPS daemon answers{where}; start nvidia-cuda-mps-control -d, or set CUDA_MPS_PIPE_DIRECTORY"
    if mps.owner not in (None, 0, around.uid):
        return (f"the MPS daemon in {mps.directory} belongs to UID {mps.owner} and this process to {around.uid}; run "
                "both as one user")
    return None


def _green_reason(around: Surroundings) -> str | None:
    if around.driver == 0:
        return "cuda-python is not installed (pip install 'flowmill-kernels[cuda]')"
    if around.driver < GREEN_DRIVER:
        return (f"the driver is CUDA {around.driver // 1000}.{around.driver % 1000 // 10}; SM partitions need "
                f"{GREEN_DRIVER // 1000}.{GREEN_DRIVER % 1000 // 10} or newer")
    if around.mps is not None and around.mps.present and around.mps.thread_percentage is not None:
        return ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set, and green contexts then fail (error 915); unset it, the "
                "partitions take its place")
    return around.partition_error


def choose(around: Surroundings) -> Isolation:
    """The highest rung that holds, logged once with the reasons of the others; never silent, never an error."""
    refused: list[tuple[IsolationMode, str]] = []

    def settle(mode: IsolationMode) -> Isolation:
        isolation = Isolation(mode, tuple(refused))
        if refused:
            expected = mode == "green" and around.processes < 2
            logging.getLogger(__name__).log(logging.INFO if expected else logging.WARNING, "%s", isolation)
        return isolation

    if not around.gpu:
        refused.extend((mode, around.gpu_error or "no NVIDIA GPU is visible") for mode in RUNGS[:-1])
        return settle("cpu")
    mps, green = _mps_reason(around), _green_reason(around)
    if mps is None and green is None:
        return settle("mps+green")
    refused.append(("mps+green", mps if mps is not None else str(green)))
    if around.processes < 2 and green is None:
        return settle("green")
    refused.append(("green", str(green) if green is not None else
                    "several processes without MPS take turns on the whole GPU, whatever their partitions"))
    if mps is None:
        return settle("mps")
    refused.append(("mps", mps))
    if around.processes >= 2:
        return settle("timeslice")
    refused.append(("timeslice", "one process has no one to take turns with"))
    return settle("exclusive")
