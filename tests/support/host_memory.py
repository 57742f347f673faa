"""The KV bytes of an engine in host memory, where every engine without a GPU keeps them."""

from __future__ import annotations

from typing import Protocol

from libs.engine.step.types import DeviceBytes


class _HasMemory(Protocol):
    @property
    def memory(self) -> memoryview | DeviceBytes: ...


def host_memory(of: _HasMemory) -> memoryview:
    """The writable memory of an engine, or of a worker's PageMemory."""
    memory = of.memory
    assert isinstance(memory, memoryview)
    return memory
