"""Follows a file: a changed one counts within two seconds, without a restart.

A file that is rewritten in place, and not replaced, counts once two polls find it the same. In between it may
be cut anywhere, and a cut file without some of its tables is well-formed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

POLL_S = 1.0
_Signature = tuple[int, int, int]


class FollowedFile:
    """Reads a file again when its inode, time or size changed. A broken file changes nothing."""

    def __init__(
        self, path: Path, read: Callable[[Path], Any], apply: Callable[[Any], None], *, noun: str
    ) -> None:
        """Read the file and apply it. Raises the ValueError of either.

        `read` runs in a thread later on. `noun` is what the file holds, for the log: "API keys".
        """
        self._path = path
        self._read = read
        self._apply = apply
        self._noun = noun
        # Taken before the file is read: a change during the read is seen by the next poll.
        self._seen = self._signature()
        self._unsettled: _Signature | None = None
        apply(read(path))

    async def run(self, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Poll for ever."""
        while True:
            await sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Apply the file if it has changed since the last call."""
        signature = self._signature()
        if signature == self._seen:
            return
        if _is_rewritten(self._seen, signature) and signature != self._unsettled:
            self._unsettled = signature
            return
        self._seen = signature
        if signature is not None and not signature[2]:
            log.error("the %s stay as they were: %s is empty", self._noun, self._path)
            return
        try:
            self._apply(await asyncio.to_thread(self._read, self._path))
        except ValueError as error:  # its text has no part of a key
            log.error("the %s stay as they were: %s", self._noun, error)
            return
        log.info("%s: new %s count now", self._path, self._noun)

    def _signature(self) -> _Signature | None:
        """What changes with each version of the file; None while the file cannot be found."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _is_rewritten(before: _Signature | None, now: _Signature | None) -> bool:
    """Whether the file is the same one with another content."""
    return before is not None and now is not None and before[0] == now[0]
