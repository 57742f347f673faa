"""A pool client without a master: values by key in this process, optionally wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.kvstore.pool.agent.protocol import MISSING
from services.kvstore.pool.agent.staging import Extents, SharedMemory
from services.kvstore.pool.agent_client import PoolListener, Staged
from services.kvstore.pool.config import PoolOptions
from slipstream.errors import Unavailable

MAX_VALUES = 96


class MemoryPool:
    """A pool client over a dict. `swap` maps a key to another one whose value is returned for it."""

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self.memory = SharedMemory(options.staging_bytes)
        self.values: dict[str, bytes] = {}
        self.swap: Callable[[str], str] = lambda key: key
        self.available = True
        self.segment = "memory"
        self.staged_bytes = self.quarantined_bytes = self.restarts = 0
        self.listener: PoolListener | None = None
        self._extents = Extents(options.staging_bytes)

    def start(self) -> None:
        """The pool is available."""

    async def close(self) -> None:
        self.memory.close()

    async def stage(self, sizes: Sequence[int], *, timeout_s: float) -> Staged:
        taken = [self._extents.allocate(n_bytes) for n_bytes in sizes]
        return Staged([extent for extent in taken if extent is not None])

    def release(self, staged: Staged, user: str) -> None:
        staged.users.discard(user)
        if not staged.users:
            for extent in staged.extents:
                self._extents.free(extent)

    async def call(
        self, kind: str, *, timeout_s: float, staged: Staged | None = None, **fields: Any
    ) -> dict[str, Any]:
        if not self.available:
            raise Unavailable("unavailable")
        try:
            answer: dict[str, Any] = getattr(self, f"_{kind}")(**fields)
            return answer
        finally:
            if staged is not None:
                self.release(staged, "agent")

    def _find(self, keys: list[str]) -> dict[str, Any]:
        return {"sizes": [len(self.values.get(key, b"")) for key in keys]}

    def _put(self, keys: list[str], at: list[int], sizes: list[int]) -> dict[str, Any]:
        for key, offset, n_bytes in zip(keys, at, sizes, strict=True):
            self.values.setdefault(key, bytes(self.memory.view(offset, n_bytes)))
        while len(self.values) > MAX_VALUES:  # evicts like a real pool
            del self.values[next(iter(self.values))]
        return {"outcome": [0] * len(keys)}

    def _get(self, keys: list[str], at: list[int], sizes: list[int]) -> dict[str, Any]:
        outcome = []
        for key, offset, n_bytes in zip(keys, at, sizes, strict=True):
            value = self.values.get(self.swap(key))
            if value is not None and len(value) == n_bytes:
                self.memory.view(offset, n_bytes)[:] = value
            outcome.append(MISSING if value is None else n_bytes)  # like an agent that does not verify
        return {"outcome": outcome, "late": False, "failovers": 0, "removed": 0}

    def _drop(self, keys: list[str]) -> dict[str, Any]:
        return {"dropped": sum(self.values.pop(key, None) is not None for key in keys)}

    def _clear(self) -> dict[str, Any]:
        dropped, self.values = len(self.values), {}
        return {"dropped": dropped}
