"""Bounds one write of a gRPC answer: first its request ends, then its call."""

from __future__ import annotations

import asyncio
from typing import Protocol

from libs.common.rpc.call_reset import reset_call
from slipstream import errors


class Stoppable(Protocol):
    """A request that a watch may end."""

    def end(self, error: errors.SlipstreamError | None = None) -> None:
        """Stop the request."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped before it was over."""


class WriteWatch:
    """Watches the write that the current task begins, until `cancel`. Times are in seconds.

    A request whose answer stays unread for `stall_s` ends. The call of a request that ended early, by any
    cause, is reset after `reset_s` more, in which a client that begins to read gets the status.
    """

    def __init__(self, run: Stoppable, *, stall_s: float, reset_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self._run = run
        self._stall_s = stall_s
        self._reset_s = reset_s
        self._unread_since_s = self._loop.time()
        self._ended_since_s: float | None = None
        self._timer = self._loop.call_later(min(reset_s, stall_s), self._check)

    def cancel(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _check(self) -> None:
        now_s = self._loop.time()
        if self._ended_since_s is None:
            if now_s - self._unread_since_s >= self._stall_s:
                self._run.end(errors.Aborted(f"the client read nothing for {self._stall_s:g} s"))
                self._ended_since_s = now_s
            elif self._run.is_stopped:
                self._ended_since_s = now_s
        elif now_s - self._ended_since_s >= self._reset_s:
            assert self._handler is not None
            reset_call(self._handler)
            return
        wait_s = self._reset_s if self._ended_since_s is not None else min(self._reset_s, self._stall_s)
        self._timer = self._loop.call_later(wait_s, self._check)
