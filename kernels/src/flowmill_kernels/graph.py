"""A training micro-batch as a CUDA graph: forward and backward recorded once, started again for every micro-batch.

In: a step (forward, loss, backward) and inputs of one size. Out: gradients in a `GradientLeaves`, the same bits as the
step called directly. A transformer's step is thousands of launches, and the host may issue them more slowly than the
GPU runs them; a graph is one. Without a GPU the step is called directly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .collector import GradientLeaves, _key


class MicroBatchGraph:
    """Forward and backward of micro-batches of one size; call it where you would call the step.

    ::

        def step(latents, weights):  # no .item(), no printing of tensors: nothing that waits for the GPU
            losses = loss_of(transformer(latents), weights)
            losses.sum().backward()
            return losses.detach()

        graph = MicroBatchGraph(leaves, 4, step, first_inputs)
        with leaves:
            for first, inputs in micro_batches:
                losses = graph(first, **inputs)
            norm = leaves.finish()

    What is recorded: kernels, addresses, and every number that Python computed. So weights may change in place (an
    optimizer's step), but a new learned scale, an adapter switched off, or another SM count needs a new graph. It is
    recorded on the current stream, or on a new one where that is the default: inside `Partitions.role` a graph keeps
    the role's SMs. Making one runs the step three times, leaves the collector empty, and keeps the memory of a step.

    Args:
        leaves: The collector; not entered.
        size: Samples of a micro-batch.
        step: ``step(**inputs)`` runs forward and backward; what it returns (tensors, or nothing) is what a call
            returns.
        inputs: Inputs of a micro-batch by name. Tensors keep shape, dtype and device from call to call; everything
            else keeps its value.

    Raises:
        RuntimeError: the step could not be recorded, with the reason.
        ValueError: a size that does not fit the rank's samples.
    """

    def __init__(self, leaves: GradientLeaves, size: int, step: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
        samples = leaves.plan.samples
        if not 1 <= size <= len(samples):
            raise ValueError(f"MicroBatchGraph: a micro-batch of {size} samples is none of rank {leaves.plan.rank}'s "
                             f"{len(samples)} samples")
        self.size = size
        self._leaves, self._step = leaves, step
        self._inputs = dict(inputs)
        self._graph: Any = None
        if leaves.parameters[0].device.type == "cuda":
            self._record(samples.start)

    def _record(self, first: int) -> None:
        leaves = self._leaves
        device = leaves.parameters[0].device
        self._inputs = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in self._inputs.items()}
        self._position = torch.full((1,), first, dtype=torch.int32, device=device)
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current
        stream.wait_stream(current)
        leaves._position = self._position
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and makes what outlives a step outside of the graph's memory
                    with leaves, leaves.micro_batch(first, self.size):
                        self._step(**self._inputs)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with leaves, leaves.micro_batch(first, self.size):
                    # thread_local: with the default, a cudaMalloc in another role's thread would break the capture.
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        self._result = self._step(**self._inputs)
                    self._count = dict(leaves._count)
        except Exception as error:
            raise RuntimeError(f"MicroBatchGraph: the step could not be recorded: {type(error).__name__}: {error}. A "
                               "step must not wait for the GPU (.item(), .cpu(), a printed tensor, a shape that "
                               "follows from values); call it without a graph to see it work") from error
        finally:
            leaves._position = None
        current.wait_stream(stream)
        self._graph = graph

    def __call__(self, first_sample: int, **inputs: Any) -> Any:
        """Add the gradients of samples ``first_sample .. first_sample + size - 1``, the rank's next ones.

        Returns:
            What the step returned; with a graph, tensors that the next call overwrites.

        Raises:
            ValueError: for inputs that are not those of the recording, and what `GradientLeaves.micro_batch` refuses.
            RuntimeError: a parameter's memory has moved since the recording.
        """
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"MicroBatchGraph: inputs {sorted(inputs)} came, but {sorted(self._inputs)} were recorded")
        for name, value in inputs.items():
            kept = self._inputs[name]
            if isinstance(kept, Tensor) and isinstance(value, Tensor):
                if (value.shape, value.dtype) != (kept.shape, kept.dtype):
                    raise ValueError(f"MicroBatchGraph: {name} is {value.dtype} {tuple(value.shape)}, but "
                                     f"{kept.dtype} {tuple(kept.shape)} was recorded; make a graph for each size")
            elif isinstance(kept, Tensor) or isinstance(value, Tensor) or value != kept:
                raise ValueError(f"MicroBatchGraph: {name} is {value!r}, but {kept!r} was recorded; only tensors may "
                                 "change. Make a graph for each value")
        leaves = self._leaves
        if self._graph is not None and any(_key(p) != key for key, (p, _) in leaves._place.items()):
            raise RuntimeError("MicroBatchGraph: a parameter's memory has moved since the recording; make a new "
                               "collector and a new graph after .to(), sharding or a load that replaces parameters")
        with leaves.micro_batch(first_sample, self.size):
            if self._graph is None:
                return self._step(**inputs)
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    self._inputs[name].copy_(value, non_blocking=True)
            self._position.fill_(first_sample)
            leaves._count.update(self._count)
            self._graph.replay()
        return self._result
