"""Captures steps and runs them again: as CUDA graphs on a device, by a plain call elsewhere.

A step reads and writes tensors that stay where they are, asks the host for nothing, and gives the same result
when it runs twice. It then costs one launch in place of hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

# What all graphs of a worker may hold, and more where the largest step needs it: graphs share their memory.
MAX_GRAPH_BYTES = 3 << 29
# What a driver keeps of a graph, beside the pool. Other processes take memory of the device at the same time.
_MOST_DRIVER_BYTES = 4 << 20
_WARM_RUNS = 2  # programs are compiled, and libraries allocate, outside of a capture


class StepGraph(Protocol):
    def replay(self) -> None:
        """Run the step on what its tensors hold now."""
        ...


class StepGraphs(Protocol):
    def capture(self, name: str, step: Callable[[], None]) -> StepGraph:
        """The step in a form that runs again. `step` may run here any number of times."""
        ...


class PlainStep:
    """A step that is called."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class PlainSteps:
    """For devices without graphs, and for tests: every replay calls the step."""

    def capture(self, name: str, step: Callable[[], None]) -> StepGraph:
        return PlainStep(step)


class CudaGraphs:
    """Graphs of one CUDA device, in one pool of memory. One thread uses them, and replays one at a time."""

    def __init__(self, device: torch.device, *, max_bytes: int = MAX_GRAPH_BYTES) -> None:
        self._device = device
        self._max_bytes = max_bytes
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._failed: list[Any] = []
        self.held_bytes = 0
        self.n_graphs = 0

    def capture(self, name: str, step: Callable[[], None]) -> StepGraph:
        """A graph; a plain step when the memory of graphs is used up, or the step cannot be captured."""
        if self.held_bytes >= self._max_bytes:
            log.warning("no CUDA graph of %s: graphs hold %d bytes already", name, self.held_bytes)
            return PlainStep(step)
        current: Any = torch.cuda.current_stream(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            self._warm_up(step, current)
            # A capture begins so. What the warm runs left would hide what the graph takes.
            torch.cuda.empty_cache()
            before = self._taken_bytes()
            # Other threads copy pages meanwhile: their calls must not end the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        except RuntimeError as error:
            log.warning("no CUDA graph of %s, its programs are launched one by one: %s", name, error)
            self._end_failed_capture(graph, current)
            return PlainStep(step)
        pool_bytes, device_bytes = (now - then for now, then in zip(self._taken_bytes(), before, strict=True))
        self.held_bytes += pool_bytes + min(max(device_bytes - pool_bytes, 0), _MOST_DRIVER_BYTES)
        self.n_graphs += 1
        captured: StepGraph = graph
        return captured

    def _taken_bytes(self) -> tuple[int, int]:
        """By the allocator of this process, and by all processes of the device."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device), all_bytes - free_bytes

    def _end_failed_capture(self, graph: Any, current: Any) -> None:
        """End what a capture leaves that fails at its end: its stream in use, and allocations to its pool.

        While the allocator counts a capture, it frees no cached memory where memory is short.
        """
        torch.cuda.set_stream(current)
        allocator: Any = torch._C
        with suppress(RuntimeError, AttributeError):  # no capture is counted, or another torch
            allocator._cuda_endAllocateToPool(self._device.index, self._pool)
        self._failed.append(graph)  # the allocator of pinned memory still asks it
        self._pool = torch.cuda.graph_pool_handle()

    def _warm_up(self, step: Callable[[], None], current: Any) -> None:
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_RUNS):
                    step()
        finally:
            current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
