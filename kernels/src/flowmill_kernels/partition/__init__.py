"""SM partitions: several roles share one GPU, each on SMs of its own.

In: what each role asks for. Out: a stream and an SM count a role, and the isolation mode that holds, with the reason
for every better one that does not. `planner` and `ladder` decide in pure Python; `device` is the thin CUDA layer;
`guard` finds work that is on nobody's stream. Memory bandwidth and L2 stay shared.
"""

from .device import CudaDevice
from .ladder import RUNGS, Isolation, IsolationMode, Mps, Surroundings, choose, find_mps
from .partitions import Partitions, Slot
from .planner import Grant, Granularity, PartitionError, Plan, Role, granularity, plan

__all__ = [
    "RUNGS", "CudaDevice", "Grant", "Granularity", "Isolation", "IsolationMode", "Mps", "PartitionError", "Partitions",
    "Plan", "Role", "Slot", "Surroundings", "choose", "find_mps", "granularity", "plan",
]
