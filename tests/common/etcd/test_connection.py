"""Liveness checks of a connection to etcd, and when the client replaces it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.etcd import connection
from libs.common.etcd.connection import Connection, Connections
from libs.common.etcd.messages import EtcdUnavailable


class Channel:
    """A channel that carries no calls."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def deadline_exceeded() -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, metadata, metadata)


@asynccontextmanager
async def open_connections(
    probe: Callable[[Any, float], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Connections]:
    monkeypatch.setattr(connection, "PROBE_AFTER_S", 0.001)
    connections = Connections(Channels(probe), linger_s=0.001)
    yield connections
    await connections.close()


class Channels:
    """A source of such channels, with the probe of a test."""

    def __init__(self, probe: Callable[[Any, float], Awaitable[object]]) -> None:
        self.probe = probe

    def open(self) -> Any:
        return _channel()

    def credentials_version(self) -> object:
        return None


def _channel() -> Any:
    return Channel()


class MovedClock:
    """The clock of connections; `stand_still` moves it as a standstill of the process does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._late_s, now_s = 0.0, connection._now_s
        monkeypatch.setattr(connection, "_now_s", lambda: now_s() + self._late_s)

    def stand_still(self, late_s: float) -> None:
        self._late_s += late_s


async def answer() -> int:
    return 1


@pytest.mark.timeout(120)
async def test_a_slow_member_gets_longer_time_outs_instead_of_ever_new_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each new connection costs logins and watches, which would slow the member further."""
    answered = [0]
    slow_s = 5 * connection.PROBE_TIMEOUT_S

    async def probe(channel: Any, timeout_s: float) -> None:
        if timeout_s < slow_s:
            raise deadline_exceeded()
        answered[0] += 1
        monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", slow_s)  # the answer took that long

    async with open_connections(probe, monkeypatch) as connections, asyncio.timeout(60):
        while answered[0] < 20:
            if not connections.current.has_answered:  # some call uses each connection
                await connections.current.answer_of(answer())
            await asyncio.sleep(0.001)
        assert connections.n_replaced == 3  # after 1, 2 and 4 times the first time-out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("refuses", [False, True])
async def test_the_time_out_returns_to_its_minimum_after_an_answer(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With authentication on, a refused call counts as an answer."""
    asked: list[float] = []
    monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", 60.0)  # no answer takes half as long in this test
    monkeypatch.setattr(connection, "MAX_PROBE_TIMEOUT_S", 480.0)

    async def probe(channel: Any, timeout_s: float) -> None:
        asked.append(timeout_s)
        if len(asked) in (1, 3):
            raise deadline_exceeded()
        if refuses:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, metadata, metadata)

    async with open_connections(probe, monkeypatch) as connections, asyncio.timeout(60):
        while len(asked) < 4:
            if not connections.current.has_answered:
                await connections.current.answer_of(answer())
            await asyncio.sleep(0.001)
    least_s = connection.PROBE_TIMEOUT_S
    assert asked[:4] == [least_s, 2 * least_s, least_s, 2 * least_s]


@pytest.mark.timeout(120)
async def test_an_unanswered_probe_is_ignored_while_other_calls_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    async def probe(channel: Any, timeout_s: float) -> None:
        asked.append(timeout_s)
        await asyncio.sleep(0.002)
        if len(asked) < 8:
            await connections.current.answer_of(answer())
        raise deadline_exceeded()

    async with open_connections(probe, monkeypatch) as connections, asyncio.timeout(60):
        first = connections.current
        await first.answer_of(answer())
        while not connections.n_replaced:
            await asyncio.sleep(0.001)
        assert len(asked) == 8
        with pytest.raises(EtcdUnavailable):
            await first.answer_of(asyncio.get_running_loop().create_future())


@pytest.mark.timeout(120)
async def test_a_standstill_of_this_process_is_no_silence_of_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls end by their time-outs, and it sees that late; what ends on time counts."""
    monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", 0.01)
    clock, asked = MovedClock(monkeypatch), 0

    async def probe(channel: Any, timeout_s: float) -> None:
        nonlocal asked
        asked += 1
        if asked < 4:
            clock.stand_still(timeout_s + 2 * connection._STANDSTILL_S)
            assert not connections.n_replaced and connections.failed_s == float("-inf")
        raise deadline_exceeded()

    async with open_connections(probe, monkeypatch) as connections, asyncio.timeout(60):
        await connections.current.answer_of(answer())
        while not connections.n_replaced:
            await asyncio.sleep(0.001)
        assert asked == 4 and connections.failed_s > 0


@pytest.mark.parametrize("late_s", [0.0, 2 * connection._STANDSTILL_S])
async def test_a_time_out_that_is_seen_late_is_no_failure(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failures = MovedClock(monkeypatch), list[float]()
    one = Connection(_channel(), on_failure=lambda: failures.append(late_s))

    async def unsent() -> None:
        clock.stand_still(0.01 + late_s)
        raise deadline_exceeded()

    for wait in (one.answer_of, one.outcome_of):
        with pytest.raises(grpc.aio.AioRpcError):
            await wait(unsent(), timeout_s=0.01)
    assert failures == [late_s] * (0 if late_s else 2)
    assert not one.has_answered


async def test_a_call_on_a_closed_channel_raises_unavailable_instead_of_being_cancelled() -> None:
    one = Connection(_channel(), on_failure=lambda: None)
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(one.answer_of(asked))
    await asyncio.sleep(0)
    one.fail_reads()
    asked.cancel()  # a closed channel cancels its calls
    with pytest.raises(EtcdUnavailable):
        await waiting


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_error_of_a_call_that_is_given_up_is_not_logged(is_cancelled: bool) -> None:
    """gRPC may answer a cancellation with the call's own error."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise deadline_exceeded() from None

    silent = Connection(_channel(), on_failure=lambda: None)
    asked = asyncio.create_task(silent.answer_of(failing()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if is_cancelled:
        asked.cancel()
    else:
        silent.fail_reads()
    with pytest.raises(asyncio.CancelledError if is_cancelled else EtcdUnavailable):
        await asked
    del asked
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert said == []
