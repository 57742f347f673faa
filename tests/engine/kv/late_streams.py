"""Streams whose work runs as late as it may: when someone waits for it, and no more than is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


class LateStream:
    def __init__(self, device: object = None) -> None:
        self._work: list[Callable[[], object]] = []
        self._n_done = 0

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    @property
    def n_waiting(self) -> int:
        return len(self._work) - self._n_done

    def run_to(self, end: int) -> None:
        while self._n_done < end:
            self._n_done += 1
            self._work[self._n_done - 1]()

    def synchronize(self) -> None:
        self.run_to(len(self._work))

    def wait_stream(self, other: LateStream) -> None:
        end = len(other._work)
        self.launch(lambda: other.run_to(end))

    def wait_event(self, event: LateEvent) -> None:
        stream, end = event.stream, event.end
        if stream is not None:
            self.launch(lambda: stream.run_to(end))


class LateEvent:
    """Names a place in a stream when it is recorded."""

    def __init__(self) -> None:
        self.stream: LateStream | None = None
        self.end = 0

    def record(self, stream: LateStream) -> None:
        self.stream, self.end = stream, len(stream._work)


class LateCuda:
    """What torch.cuda has of streams. `steps`: the stream of the engine's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self._current = LateStream()
        self.pinned_bytes, self.pinnable_bytes = 0, 1 << 30
        for name, value in (("Stream", LateStream), ("Event", LateEvent), ("stream", self.stream)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self.steps)

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def memory(self, n_bytes: int) -> LateMemory:
        return LateMemory(self, np.zeros(n_bytes, np.uint8))

    @property
    def current(self) -> LateStream:
        return self._current


class LateMemory:
    """A flat tensor of a device: assignments run on the current stream, and `cpu` waits for that one.

    `to` makes its target at once, if memory can be pinned, and fills it on that stream.
    """

    def __init__(self, cuda: LateCuda, values: np.ndarray[Any, Any]) -> None:
        self._cuda, self._values = cuda, values
        self.device = SimpleNamespace(type="cuda", index=0)
        self.nbytes = values.nbytes

    def __getitem__(self, span: slice) -> LateMemory:
        return LateMemory(self._cuda, self._values[span])

    def __setitem__(self, span: slice, content: LateMemory | int) -> None:
        def write() -> None:
            self._values[span] = content._values if isinstance(content, LateMemory) else content

        self._cuda.current.launch(write)

    def cpu(self) -> torch.Tensor:
        self._cuda.current.synchronize()
        return torch.from_numpy(self._values.copy())

    def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking
        self._cuda.pinned_bytes += self.nbytes
        if self._cuda.pinned_bytes > self._cuda.pinnable_bytes:
            raise RuntimeError("CUDA error: out of memory")
        target = torch.full((self.nbytes,), 255, dtype=torch.uint8)
        self._cuda.current.launch(lambda: target.copy_(torch.from_numpy(self._values)))
        return target

    def data_ptr(self) -> int:
        raise NotImplementedError

    def is_contiguous(self) -> bool:
        return True
