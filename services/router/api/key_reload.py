"""Follows the file of API keys: a changed file counts within two seconds, without a restart.

A file that is rewritten in place, and not replaced, counts once two polls find it the same: in between it may
be cut anywhere, and a cut file without some keys is well-formed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.router.api.api_keys import ApiKeys
from slipstream.api_key_file import KeyRecord, read_keys

log = logging.getLogger(__name__)

POLL_S = 1.0
_Signature = tuple[int, int, int]


class KeyReload:
    """Reads the file again when its inode, time or size changed. A broken file changes no key."""

    def __init__(self, path: Path, keys: ApiKeys) -> None:
        """Raises ValueError when the file cannot be used at the start."""
        self._path = path
        self._keys = keys
        # Taken before the file is read: a change during the read is seen by the next poll.
        self._seen = self._signature()
        self._unsettled: _Signature | None = None
        keys.replace(read_keys(path))

    async def run(self, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Poll for ever."""
        while True:
            await sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Replace the keys if the file has changed since the last call."""
        signature = self._signature()
        if signature == self._seen:
            return
        if _is_rewritten(self._seen, signature) and signature != self._unsettled:
            self._unsettled = signature
            return
        self._seen = signature
        if signature is not None and not signature[2]:
            log.error("the API keys stay as they were: %s is empty", self._path)
            return
        try:
            records: tuple[KeyRecord, ...] = await asyncio.to_thread(read_keys, self._path)
        except ValueError as error:  # its text has no part of a key
            log.error("the API keys stay as they were: %s", error)
            return
        self._keys.replace(records)
        log.info("%s: %d API keys count now", self._path, len(records))

    def _signature(self) -> _Signature | None:
        """None while the file cannot be found."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _is_rewritten(before: _Signature | None, now: _Signature | None) -> bool:
    """Whether the file is the same one with another content."""
    return before is not None and now is not None and before[0] == now[0]
