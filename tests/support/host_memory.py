"""The KV bytes of an engine that keeps them in the host, as every engine in tests without a GPU does."""

from __future__ import annotations

from typing import Protocol

from libs.engine.step.types import DeviceBytes


class _HasMemory(Protocol):
    @property
    def memory(self) -> memoryview | DeviceBytes: ...


def host_memory(of: _HasMemory) -> memoryview:
    """Of an engine, or of a worker's PageMemory; writable."""
    memory = of.memory
    assert isinstance(memory, memoryview)
    return memory
