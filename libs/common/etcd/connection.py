"""A connection to etcd with a health check that replaces it when it is silent.

A network may drop a connection without notice to either end. gRPC's pings detect that, but etcd accepts at
most one in 5 s, so detection takes nine seconds. Instead, the check sends a small read after PULSE_S without
an answer. If the read is not answered either, pending reads fail and the next call opens another connection.
A change that was sent keeps its own time-out, because it may still be answered.
A stopped member looks the same as a dropped connection; an unreachable one is left to gRPC's reconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from libs.common.etcd.messages import EtcdUnavailable

log = logging.getLogger(__name__)

# PULSE_S, a change sent just before and the first pause of its retry add up to less than HEAL_S.
PULSE_S = 0.75
PULSE_ANSWER_S = 1.0
# From a member that is slow: gRPC's own pings are quicker then.
LONGEST_ANSWER_S = 8.0
_T = TypeVar("_T")
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Connection:
    """One channel. Event loop only."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.has_answered = False
        self.heard_s = asyncio.get_running_loop().time()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer_of(self, asked: Awaitable[_T]) -> _T:
        """Await the answer of an idempotent call. Raises AioRpcError, or EtcdUnavailable when the connection
        is replaced before the answer."""
        answer = asyncio.ensure_future(asked)
        try:
            either: set[asyncio.Future[Any]] = {answer, self._gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():  # its channel may be closed by now
                raise EtcdUnavailable("etcd: its connection gives no sign of life")
            self._heard(answer.exception())
            return answer.result()
        finally:
            answer.cancel()

    async def outcome_of(self, asked: Awaitable[_T]) -> _T:
        """Await the outcome of a change, also while the connection is replaced. Raises AioRpcError."""
        try:
            outcome = await asked
        except grpc.aio.AioRpcError as error:
            self._heard(error)
            raise
        self._heard(None)
        return outcome

    def give_up(self) -> None:
        """Fail all pending `answer_of` calls."""
        if not self._gone.done():
            self._gone.set_result(None)

    def _heard(self, error: BaseException | None) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _SILENT:
            return
        self.heard_s = asyncio.get_running_loop().time()
        self.has_answered = True


class Connections:
    """The connection in use. Event loop only."""

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        ask: Callable[[grpc.aio.Channel, float], Awaitable[object]],
        *,
        linger_s: float,
    ) -> None:
        """`ask(channel, timeout_s)` is a question that any etcd answers, whatever with. A channel that was
        given up is closed after `linger_s`."""
        self._linger_s = linger_s
        self._answer_s = PULSE_ANSWER_S
        self._open_channel = open_channel
        self._ask = ask
        self.now = Connection(open_channel())
        self.given_up = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._pulse = asyncio.create_task(self._keep_pulse(), name="etcd-pulse")

    async def close(self) -> None:
        """Close all channels."""
        self._pulse.cancel()
        await asyncio.gather(self._pulse, return_exceptions=True)
        self.now.give_up()
        await self.now.channel.close()
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _keep_pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection = self.now
            silent_s = loop.time() - connection.heard_s
            due = silent_s >= PULSE_S or self._answer_s > PULSE_ANSWER_S  # is it as slow as it was?
            if not due or not connection.has_answered:  # a first contact is gRPC's to make
                await asyncio.sleep(PULSE_S - silent_s if silent_s < PULSE_S else PULSE_S)
                continue
            try:
                await self._take_pulse(connection)
            except Exception:  # a defect; the next look may see more
                log.exception("etcd: the health check failed unexpectedly")
                await asyncio.sleep(PULSE_S)

    async def _take_pulse(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            await connection.answer_of(self._ask(connection.channel, self._answer_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                # A slow member must not be asked for new connections, logins and watches over and over.
                self._answer_s = min(LONGEST_ANSWER_S, 2 * self._answer_s)
                if connection.heard_s < asked_s:  # no other call was answered either
                    self._replace(connection)
                return
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # which gRPC has noticed, and mends
                await asyncio.sleep(PULSE_S)
                return
        self._answer_s = min(LONGEST_ANSWER_S, max(PULSE_ANSWER_S, 2 * (loop.time() - asked_s)))

    def _replace(self, connection: Connection) -> None:
        log.info("etcd: a connection gives no sign of life and is given up")
        self.given_up += 1
        self.now = Connection(self._open_channel())
        connection.give_up()
        closing = asyncio.create_task(self._close_late(connection.channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_late(self, channel: grpc.aio.Channel) -> None:
        try:
            await asyncio.sleep(self._linger_s)
        finally:
            await channel.close()
