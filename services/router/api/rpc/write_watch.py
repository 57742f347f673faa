"""Bounds the writes of a gRPC answer: first its request ends, then its call."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

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
    """Writes the responses of the call that the current task handles, until `cancel`. Times are in seconds.

    A request whose answer stays unread for `stall_s` ends. The call of a request that ended early, by any
    cause, is reset after `reset_s` more, in which a client that begins to read gets the status.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], run: Stoppable, *, stall_s: float, reset_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self._context = context
        self._run = run
        self._stall_s = stall_s
        self._reset_s = reset_s
        self._unread_since_s: float | None = None  # while a write waits for the client
        self._ended_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None  # one for many writes: most take microseconds

    async def write(self, response: bytes) -> None:
        """Write a response, and return when the client has read enough. The end of the call is a cancel."""
        self._unread_since_s, self._ended_since_s = self._loop.time(), None
        if self._timer is None:
            self._timer = self._loop.call_later(min(self._reset_s, self._stall_s), self._check)
        try:
            await self._context.write(response)
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None
        finally:
            self._unread_since_s = None

    def cancel(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._unread_since_s is None:
            return  # the next write begins a timer
        now_s = self._loop.time()
        unread_s = now_s - self._unread_since_s
        if self._ended_since_s is None:
            if unread_s >= self._stall_s:
                self._run.end(errors.Aborted(f"the client read nothing for {self._stall_s:g} s"))
            if self._run.is_stopped or unread_s >= self._stall_s:
                self._ended_since_s = now_s
        elif now_s - self._ended_since_s >= self._reset_s:
            assert self._handler is not None
            reset_call(self._handler)
            return
        left_s = self._stall_s - unread_s if self._ended_since_s is None else self._reset_s
        self._timer = self._loop.call_later(min(left_s, self._reset_s), self._check)
