"""The setting a stage runs in: threads, determinism, lanes, and policies that stay loaded between tasks.

In: the recipe's `runtime` and a role of its `topology`. Out: a `Session`. Deliberately absent: anything that changes
a result's bits with the number of lanes. A lane is a thread that runs single-threaded operators: each micro-batch is
computed whole by one lane, and results are combined in micro-batch order.
"""

import gc
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tasks.contracts.config import Dtype, KernelMode, PolicyConfig, RoleConfig, RuntimeConfig, digest_of
from tasks.contracts.errors import CacheFolderError, ConfigError, MemoryLimitError
from tasks.contracts.refs import PolicyRef
from tasks.policies import base
from tasks.store import Store

log = logging.getLogger("flowmill.runtime")
Item = TypeVar("Item")
Result = TypeVar("Result")

_KEEP_WARM = 2
"""Policies kept loaded: the one that is trained and one that is evaluated."""
_warm: "OrderedDict[str, LoadedPolicy]" = OrderedDict()
_warm_lock = threading.Lock()


@dataclass
class LoadedPolicy:
    """A policy in memory, and which stored weights it holds now."""

    policy: base.Policy
    initial: base.Weights
    """The trainable weights of the base policy: the reference of every KL term."""
    holds: str = ""
    """Digest of the weights that are loaded; empty = the base."""


class Session:
    """Lanes and policies of one stage."""

    def __init__(self, runtime: RuntimeConfig, role: RoleConfig, pool: ThreadPoolExecutor) -> None:
        self.runtime = runtime
        self.role = role
        self.micro_batch_size = runtime.micro_batch_size
        """Rows of every forward pass from now on; see `shrinking`."""
        self._pool = pool

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Apply `function` on the lanes and yield the results in the order of `items`.

        At most two items a lane are in flight, so results that wait for their turn stay few.
        The first error stops the rest.
        """
        waiting: list[Any] = []
        try:
            for item in items:
                if len(waiting) >= 2 * self.role.parallelism:
                    yield waiting.pop(0).result()
                waiting.append(self._pool.submit(function, item))
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)  # after an error: what still runs holds memory

    def shrinking(self, action: Callable[[], Result], what: str, *, refuse_because: str = "") -> Result:
        """Do `action`, which runs micro-batches of `micro_batch_size`; again with half of it when memory runs out.

        Args:
            what: What is done, for messages.
            refuse_because: Why the size may not change here; empty = it may.

        Raises:
            MemoryLimitError: memory ran out and the size may not, or cannot, be halved.
        """
        while True:
            size = self.micro_batch_size
            try:
                return action()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if refuse_because or size == 1:
                    raise MemoryLimitError(
                        f"{what}: out of memory with micro-batches of {size} rows ({type(error).__name__}). "
                        f"{refuse_because or 'One row is the least there is: give the role more memory.'}") from None
            _free_memory()
            self.micro_batch_size = size // 2
            log.warning("%s: out of memory with micro-batches of %d rows; going on with %d", what, size, size // 2)

    def policy(self, config: PolicyConfig, ref: PolicyRef, store: Store, seed: int, dtype: Dtype,
               variant: str = "raw") -> LoadedPolicy:
        """The policy of `ref` with the runtime's kernels, loaded once and kept for the next task of this process.

        Args:
            variant: ``raw``, ``ema`` or ``old`` weights.

        Raises:
            CheckpointError: the base checkpoint is not the one the reference was trained from.
        """
        loaded = load_policy(config, seed, dtype, self.runtime.kernels)
        check_base(loaded, ref)
        source = ref.state if variant == "old" else ref.weights
        wanted = f"{source.digest}/{variant}" if source else ""
        if loaded.holds != wanted:
            loaded.holds = "unknown"
            base.set_weights(loaded.policy, load_weights(store, ref, variant) if ref.weights else loaded.initial)
            loaded.holds = wanted
        return loaded


def load_policy(config: PolicyConfig, seed: int, dtype: Dtype, kernels: KernelMode = "reference") -> LoadedPolicy:
    """Build a policy, or find it still loaded from an earlier task.

    Raises:
        ConfigError: kernels are asked for that this environment does not have.
    """
    from tasks.plugins import load

    key = digest_of({"policy": config.model_dump(mode="json"), "seed": seed, "dtype": dtype, "kernels": kernels})
    with _warm_lock:
        if key not in _warm:
            policy = load("policies", config.name).build(config, dtype)
            base.prepare_trainable(policy, seed)
            if kernels != "reference":
                _apply_kernels(policy, kernels)
            _warm[key] = LoadedPolicy(policy, base.copy_weights(policy))
            while len(_warm) > _KEEP_WARM:
                _warm.popitem(last=False)
        _warm.move_to_end(key)
        return _warm[key]


def _apply_kernels(policy: base.Policy, mode: KernelMode) -> None:
    """Replace the arithmetic of a policy's components by that of `flowmill-kernels`."""
    import torch

    try:
        import flowmill_kernels
    except ImportError as error:
        raise ConfigError(
            f"runtime.kernels: {mode} needs the package flowmill-kernels, which is not installed here ({error}). Use "
            "an image that is built on flowmill-kernels (`make images`), install it with `pip install --no-deps "
            "./kernels`, or set runtime.kernels: reference.") from None
    for name, module in policy.components.items():
        device = next(module.parameters()).device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        try:
            flowmill_kernels.apply_kernels(module, mode, num_sms=num_sms)
        except ValueError as error:
            raise ConfigError(f"runtime.kernels: {mode} does not fit component {name!r} of policy "
                              f"{policy.config.name!r}: {error}. Set runtime.kernels: reference.") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the GPU or of the process ran out."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        # torch's CPU allocator has no class of its own for it.
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_base(loaded: LoadedPolicy, ref: PolicyRef) -> None:
    """Raise unless `ref` was trained from the base checkpoint that is loaded."""
    from tasks.contracts.errors import CheckpointError

    if ref.base_digest != loaded.policy.base_digest:
        raise CheckpointError(f"policy {loaded.policy.config.name!r}: the base checkpoint has SHA-256 "
                              f"{loaded.policy.base_digest[:12]}, the stored policy was trained from "
                              f"{ref.base_digest[:12]}. Restore that checkpoint, or start a new run.")


def load_weights(store: Store, ref: PolicyRef, variant: str) -> dict[str, dict[str, Any]]:
    """Component -> name -> tensor of a stored policy's ``raw``, ``ema`` or (from its train state) ``old`` weights."""
    assert ref.weights is not None
    assert ref.state is not None
    return unflatten(store.load(ref.state if variant == "old" else ref.weights, variant))


def flatten(weights: base.Weights) -> dict[str, Any]:
    """``{part: {name: t}}`` -> ``{"part/name": t}``, for safetensors."""
    return {f"{part}/{name}": value for part, values in weights.items() for name, value in values.items()}


def unflatten(tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The inverse of `flatten`."""
    weights: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        part, name = key.split("/", 1)
        weights.setdefault(part, {})[name] = value
    return weights


_CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
"""Environment variables that name a library's cache folder; where one cannot be written, the library says so late,
each in its own words, or compiles everything again in every task."""


def check_cache_folders() -> None:
    """Make the cache folders that the environment names.

    Raises:
        CacheFolderError: one cannot be made or written to; names the variable, the folder and the user.
    """
    for name in _CACHES:
        folder = os.environ.get(name)
        if not folder:
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise CacheFolderError(f"cache folder {name}={folder} cannot be written to by user {os.getuid()}. On "
                                   "Kubernetes mount an emptyDir there (k8s/base/tasks/pod-templates.yaml does, at "
                                   f"/var/cache/flowmill); elsewhere set {name} to a folder of yours.")


@contextmanager
def session(runtime: RuntimeConfig, role: RoleConfig) -> Iterator[Session]:
    """Set threads and determinism for a stage, and put everything back afterwards, also after an error.

    Raises:
        CacheFolderError: a cache folder that the environment names cannot be written to.
    """
    import torch

    check_cache_folders()
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    # One thread an operator: how a sum is split must not depend on the number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # nn.MultiheadAttention's fused path runs only without gradients: rollout and update would differ by 1e-7.
    torch.backends.mha.set_fastpath_enabled(False)
    pool = ThreadPoolExecutor(role.parallelism, thread_name_prefix="lane", initializer=torch.set_num_threads,
                              initargs=(1,))
    try:
        yield Session(runtime, role, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.mha.set_fastpath_enabled(fast_attention)


def micro_batches(count: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Split 0..count-1 into lists of exactly `size` positions; the last is padded by repeating its last position.

    Yields:
        (positions [size], number of real ones).
    """
    for start in range(0, count, size):
        real = list(range(start, min(start + size, count)))
        yield real + [real[-1]] * (size - len(real)), len(real)


def progress(iterable: Iterable[Item], total: int, label: str) -> Iterable[Item]:
    """A progress bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(iterable, total=total, desc=label, leave=False, disable=None, unit="batch")
