"""A connection to etcd with a health check that replaces it when it is silent.

A network may drop a connection without notice to either end. gRPC's pings detect that, but etcd accepts at
most one in 5 s, so detection takes nine seconds. Instead, the check sends a small read after PROBE_AFTER_S
without an answer. If the read gets no answer either, pending reads fail and the next call opens another
connection. A change that was sent keeps its own time-out, because its answer may still arrive.
The check treats a stopped member like a dropped connection. gRPC itself reconnects to an unreachable one.

A time-out that this process sees late does not count against etcd: the process itself stood still, and may
not have sent the call in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc

from libs.common.etcd.messages import EtcdUnavailable

log = logging.getLogger(__name__)

# PROBE_AFTER_S, the time-outs of a probe and the first pause of a retry add up to less than HEAL_S.
PROBE_AFTER_S = 0.75
PROBE_TIMEOUT_S = 1.0
# The longest time-out of a probe, for slow members. gRPC's own pings detect silence as fast.
MAX_PROBE_TIMEOUT_S = 8.0
# A time-out is seen so much later only where the process stood still.
_STANDSTILL_S = 0.25
_T = TypeVar("_T")
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Connection:
    """One channel and the time of its last answer. Event loop only."""

    def __init__(self, channel: grpc.aio.Channel, *, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called for each call that the member did not answer."""
        self.channel = channel
        self._on_failure = on_failure
        self.has_answered = False
        self.heard_s = _now_s()
        self._replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer_of(self, asked: Awaitable[_T], *, timeout_s: float = math.inf) -> _T:
        """Await the answer of an idempotent call, which has begun just now with this time-out.

        Raises AioRpcError, or EtcdUnavailable when the connection is replaced before the answer.
        """
        answer, ends_s = asyncio.ensure_future(asked), _now_s() + timeout_s
        try:
            either: set[asyncio.Future[Any]] = {answer, self._replaced}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():  # a closed channel cancels its calls
                raise EtcdUnavailable("etcd: the connection is silent")
            self._heard(answer.exception(), ends_s)
            return answer.result()
        finally:
            answer.add_done_callback(_retrieve_error)
            answer.cancel()

    async def outcome_of(self, asked: Awaitable[_T], *, timeout_s: float = math.inf) -> _T:
        """Await the outcome of a change, even after the connection is replaced. Raises AioRpcError."""
        ends_s = _now_s() + timeout_s
        try:
            outcome = await asked
        except grpc.aio.AioRpcError as error:
            self._heard(error, ends_s)
            raise
        self._heard(None, ends_s)
        return outcome

    def fail_reads(self) -> None:
        """Fail all pending `answer_of` calls."""
        if not self._replaced.done():
            self._replaced.set_result(None)

    def _heard(self, error: BaseException | None, ends_s: float) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _SILENT:
            if not _stood_still(ends_s):
                self._on_failure()
            return
        self.heard_s = _now_s()
        self.has_answered = True


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _stood_still(ends_s: float) -> bool:
    """Whether this process stood still at the end of a call's time-out, just before now."""
    return _now_s() > ends_s + _STANDSTILL_S


def _retrieve_error(answer: asyncio.Future[Any]) -> None:
    """asyncio logs an error that nothing asks for. A call that fails as it is cancelled has one."""
    if not answer.cancelled():
        answer.exception()


class ChannelSource(Protocol):
    """Opens channels to etcd, and probes them."""

    def open(self) -> grpc.aio.Channel:
        """A new channel."""

    def probe(self, channel: grpc.aio.Channel, timeout_s: float) -> Awaitable[object]:
        """Make a call that any working member answers, if only with an error."""

    def credentials_version(self) -> object:
        """Changes when a file of the credentials does; None without files, and while one is missing."""


class Connections:
    """The connection in use. Event loop only."""

    def __init__(self, source: ChannelSource, *, linger_s: float) -> None:
        """A replaced channel is closed after `linger_s`.

        A connection that fails is replaced where the version of the credentials has changed since it was
        opened: gRPC itself connects with the old files.
        """
        self._linger_s = linger_s
        self._probe_timeout_s = PROBE_TIMEOUT_S
        self._source = source
        self._opened_with = source.credentials_version()
        self._failed_s = float("-inf")
        self.current = Connection(source.open(), on_failure=self._note_failure)
        self.n_replaced = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._checking = asyncio.create_task(self._check_health(), name="etcd-health-check")

    async def close(self) -> None:
        """Close all channels."""
        self._checking.cancel()
        await asyncio.gather(self._checking, return_exceptions=True)
        self.current.fail_reads()
        await self.current.channel.close()
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def failed_s(self) -> float:
        """When a call last got no answer, or a silent connection was replaced, on the event loop's clock."""
        return self._failed_s

    def dial_again(self) -> None:
        """Use another channel, where the one in use had no answer yet."""
        if not self.current.has_answered:
            self._replace(self.current)

    async def _check_health(self) -> None:
        while True:
            connection = self.current
            silent_s = _now_s() - connection.heard_s
            was_slow = self._probe_timeout_s > PROBE_TIMEOUT_S  # probed again, for a shorter time-out
            # Before the first answer, gRPC itself repeats its attempts to connect.
            if not connection.has_answered or not (silent_s >= PROBE_AFTER_S or was_slow):
                await asyncio.sleep(PROBE_AFTER_S - silent_s if silent_s < PROBE_AFTER_S else PROBE_AFTER_S)
                continue
            try:
                await self._probe_once(connection)
            except Exception:  # a defect here must not end the checks
                log.exception("etcd: the health check failed unexpectedly")
                await asyncio.sleep(PROBE_AFTER_S)

    async def _probe_once(self, connection: Connection) -> None:
        began_s, timeout_s = _now_s(), self._probe_timeout_s
        try:
            probe = self._source.probe(connection.channel, timeout_s)
            await connection.answer_of(probe, timeout_s=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                if _stood_still(began_s + timeout_s):
                    return
                # A longer time-out spares a slow member repeated connections, logins and watches.
                self._probe_timeout_s = min(MAX_PROBE_TIMEOUT_S, 2 * self._probe_timeout_s)
                if connection.heard_s < began_s:  # no other call got an answer either
                    self._replace(connection)
                return
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # gRPC has noticed, and reconnects
                if self._source.credentials_version() not in (None, self._opened_with):
                    self._replace(connection)
                await asyncio.sleep(PROBE_AFTER_S)
                return
        answer_s = _now_s() - began_s
        self._probe_timeout_s = min(MAX_PROBE_TIMEOUT_S, max(PROBE_TIMEOUT_S, 2 * answer_s))

    def _replace(self, connection: Connection) -> None:
        log.info("etcd: replacing a connection that does not answer")
        self.n_replaced += 1
        self._note_failure()
        self._opened_with = self._source.credentials_version()
        self.current = Connection(self._source.open(), on_failure=self._note_failure)
        connection.fail_reads()
        closing = asyncio.create_task(self._close_late(connection.channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _note_failure(self) -> None:
        self._failed_s = _now_s()

    async def _close_late(self, channel: grpc.aio.Channel) -> None:
        try:
            await asyncio.sleep(self._linger_s)
        finally:
            await channel.close()
