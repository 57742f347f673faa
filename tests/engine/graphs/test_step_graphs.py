"""What is done around a capture, on a recorded CUDA: tests/gpu/test_step_graphs.py captures on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from libs.engine.graphs.step_graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)
GRAPH_BYTES, DRIVER_BYTES, LEFT_BYTES = 100, 20, 300
ALL_BYTES = 1 << 40


class RecordedStream:
    def __init__(self, device: torch.device) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


class RecordedGraph:
    def __init__(self) -> None:
        self.step: Callable[[], None] | None = None

    def replay(self) -> None:
        pass


class RecordedCuda:
    """Each capture takes GRAPH_BYTES of the pool. A step that raises spoils the pool of its capture."""

    def __init__(self) -> None:
        self.free_bytes = ALL_BYTES
        self.reserved_bytes = 0
        self.is_capturing = False
        self.left_bytes = 0  # of warm runs, until the allocator gives them back
        self.current = RecordedStream(DEVICE)
        self.streams: list[object] = []
        self.pools: list[object] = []
        self.spoiled: list[object] = []
        self.ended: list[object] = []

    def graph_pool_handle(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    @contextmanager
    def graph(self, graph: Any, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert pool not in self.spoiled
        assert capture_error_mode == "thread_local"
        self.empty_cache()
        self.is_capturing = True
        try:
            yield
            self.free_bytes -= GRAPH_BYTES + DRIVER_BYTES
            self.reserved_bytes += GRAPH_BYTES
        except BaseException:
            self.spoiled.append(pool)
            raise
        finally:
            self.is_capturing = False

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield
        self.free_bytes -= LEFT_BYTES
        self.left_bytes += LEFT_BYTES

    def empty_cache(self) -> None:
        self.free_bytes, self.left_bytes = self.free_bytes + self.left_bytes, 0

    def set_stream(self, stream: object) -> None:
        self.streams.append(stream)

    def end_allocations(self, device: int, pool: object) -> None:
        if pool not in self.spoiled:
            raise RuntimeError("not currently recording to mempool_id")
        self.ended.append(pool)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    cuda = RecordedCuda()
    for name in ("graph_pool_handle", "graph", "stream", "empty_cache", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocations, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (cuda.free_bytes, ALL_BYTES))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cuda.reserved_bytes)
    return cuda


def test_a_step_runs_before_it_is_captured(recorded: RecordedCuda) -> None:
    """Programs are compiled outside of the capture, which cannot load them."""
    seen: list[bool] = []
    graphs = CudaGraphs(DEVICE)
    graph = graphs.capture("a step", lambda: seen.append(recorded.is_capturing))
    assert seen == [False, False, True]
    assert isinstance(graph, RecordedGraph)
    assert (graphs.n_graphs, graphs.held_bytes) == (1, GRAPH_BYTES + DRIVER_BYTES)


def test_memory_that_another_process_takes_is_not_that_of_graphs(recorded: RecordedCuda) -> None:
    """Workers of one device load at the same time."""

    def beside_a_load() -> None:
        recorded.free_bytes -= 1 << 30

    graphs = CudaGraphs(DEVICE)
    for _ in range(4):
        assert isinstance(graphs.capture("a step", beside_a_load), RecordedGraph)
    assert graphs.held_bytes <= 4 * (GRAPH_BYTES + (4 << 20))


def test_beyond_its_memory_nothing_is_captured(recorded: RecordedCuda) -> None:
    seen: list[bool] = []
    graphs = CudaGraphs(DEVICE, max_bytes=2 * (GRAPH_BYTES + DRIVER_BYTES))
    for _ in range(3):
        graph = graphs.capture("a step", lambda: seen.append(recorded.is_capturing))
    assert (graphs.n_graphs, graphs.held_bytes) == (2, 2 * (GRAPH_BYTES + DRIVER_BYTES))
    seen.clear()
    graph.replay()
    assert seen == [False]


def test_a_step_that_cannot_be_captured_is_called_and_the_next_one_is_captured(
    recorded: RecordedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    n_calls = 0

    def waits() -> None:
        nonlocal n_calls
        if recorded.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        n_calls += 1

    graphs = CudaGraphs(DEVICE)
    graph = graphs.capture("a step that waits", waits)
    assert "no CUDA graph of a step that waits" in caplog.text
    before = n_calls
    graph.replay()
    assert n_calls == before + 1
    assert graphs.n_graphs == 0
    assert recorded.streams == [recorded.current], "steps go on where they ran"
    assert recorded.ended == recorded.spoiled == recorded.pools[:1], "the allocator counts no capture"
    assert isinstance(graphs.capture("another", lambda: None), RecordedGraph)
    assert graphs.n_graphs == 1


def test_a_step_without_memory_to_warm_up_is_called(recorded: RecordedCuda) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    graphs = CudaGraphs(DEVICE)
    assert not isinstance(graphs.capture("a large step", fails), RecordedGraph)
    assert recorded.current.waited == [graphs._stream], "what the failed run launched comes first"
    assert graphs.n_graphs == 0
