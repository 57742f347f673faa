"""Copies of pages: within the cache in the order of the engine's steps, and to the host beside them.

On a device a copy to the host runs on a stream of these copies alone. It waits for the copies within the
cache that came before it, and not for the steps that were launched since. The steps that wrote the page have
ended: the engine names its block to others only then.

A transport copies from the host on the device's default stream, and small copies go on when its call returns.
So the read of a page that has just landed waits for that stream, with the steps that are on it.

Where several processes have parts of the pages, each copy is theirs, and pages pass through the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from libs.engine.step.page_parts import PageParts
from libs.engine.step.types import DeviceBytes

log = logging.getLogger(__name__)


class PageCopies:
    """`memory`: as Engine.memory. Only the engine's thread calls `copy`; any thread reads and receives."""

    def __init__(
        self, memory: memoryview | DeviceBytes, page_bytes: int, parts: PageParts | None = None
    ) -> None:
        self._parts = parts
        self._memory: Any = memory  # slices of either are assigned alike
        self._page_bytes = page_bytes
        self._cuda: Any = None  # torch.cuda
        self._copied: Any = None
        self._stream: Any = None
        if not isinstance(memory, memoryview) and memory.device.type == "cuda":
            import torch

            self._cuda = torch.cuda
            self._copied = self._cuda.Event()
            self._stream = self._cuda.Stream(memory.device)  # never waits for another stream by itself
        self._pins = self._stream is not None

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second."""
        if self._parts is not None:
            self._parts.copy(pairs)
            return
        for source, target in pairs:
            self._memory[self._span(target)] = self._memory[self._span(source)]
        if self._copied is not None:
            self._copied.record(self._cuda.current_stream(self._memory.device))

    def read(self, page: int, *, has_landed: bool = False) -> memoryview:
        """The bytes of one page: a view of host memory, or a copy of device memory.

        `has_landed`: a transport wrote the page, by copies that may still run on the device.
        """
        if self._parts is not None:
            self._parts.collect([page])
        content = self._memory[self._span(page)]
        if isinstance(content, memoryview):
            return content
        with self._behind_copies(has_landed=has_landed):
            return memoryview(self._to_host(content).numpy())

    def receive(self, pages: Sequence[int]) -> None:
        """Let steps read pages that peers wrote to the memory; it may wait for a step."""
        if self._parts is not None:
            self._parts.scatter(pages)

    def _to_host(self, content: DeviceBytes) -> Any:
        """A copy in the host, made on the current stream: in pinned memory as long as the system has some."""
        if self._pins:
            try:
                found = content.to("cpu", non_blocking=True)  # torch pins the target of such a copy
            except RuntimeError as error:
                self._pins = False
                log.warning("pages of the device are copied through pageable memory: %s", error)
            else:
                self._stream.synchronize()
                return found
        return content.cpu()

    def _behind_copies(self, *, has_landed: bool) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        if has_landed:
            self._stream.wait_stream(self._cuda.default_stream(self._memory.device))
        self._stream.wait_event(self._copied)
        entered: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return entered

    def _span(self, page: int) -> slice:
        return slice(page * self._page_bytes, (page + 1) * self._page_bytes)
