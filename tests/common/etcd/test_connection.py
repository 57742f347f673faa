"""Signs of life of a connection to etcd, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.etcd import connection
from libs.common.etcd.connection import Connection, Connections
from libs.common.etcd.messages import EtcdUnavailable


class Channel:
    """Nothing goes over it."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def late() -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, metadata, metadata)


@asynccontextmanager
async def opened(
    ask: Callable[[Any, float], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Connections]:
    monkeypatch.setattr(connection, "PROBE_AFTER_S", 0.001)
    connections = Connections(lambda: _channel(), ask, linger_s=0.001)
    yield connections
    await connections.close()


def _channel() -> Any:
    return Channel()


async def answer() -> int:
    return 1


@pytest.mark.timeout(120)
async def test_a_slow_member_is_given_more_time_and_not_new_connections_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them costs logins and watches, which would make it slower yet."""
    answered = [0]
    slow_s = 5 * connection.PROBE_TIMEOUT_S

    async def ask(channel: Any, timeout_s: float) -> None:
        if timeout_s < slow_s:
            raise late()
        answered[0] += 1
        monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", slow_s)  # as its answer took so long

    async with opened(ask, monkeypatch) as connections, asyncio.timeout(60):
        while answered[0] < 20:
            if not connections.current.has_answered:  # somebody uses each connection
                await connections.current.answer_of(answer())
            await asyncio.sleep(0.001)
        assert connections.n_replaced == 3  # after 1, 2 and 4 times the first patience


@pytest.mark.timeout(120)
@pytest.mark.parametrize("refuses", [False, True])
async def test_after_one_connection_was_given_up_the_next_has_as_little_time(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where etcd knows users: what it refuses it answers."""
    asked: list[float] = []
    monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", 60.0)  # half of which no answer takes here
    monkeypatch.setattr(connection, "MAX_PROBE_TIMEOUT_S", 480.0)

    async def ask(channel: Any, timeout_s: float) -> None:
        asked.append(timeout_s)
        if len(asked) in (1, 3):
            raise late()
        if refuses:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, metadata, metadata)

    async with opened(ask, monkeypatch) as connections, asyncio.timeout(60):
        while len(asked) < 4:
            if not connections.current.has_answered:
                await connections.current.answer_of(answer())
            await asyncio.sleep(0.001)
    least_s = connection.PROBE_TIMEOUT_S
    assert asked[:4] == [least_s, 2 * least_s, least_s, 2 * least_s]


@pytest.mark.timeout(120)
async def test_while_others_are_answered_a_pulse_that_is_not_means_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    async def ask(channel: Any, timeout_s: float) -> None:
        asked.append(timeout_s)
        await asyncio.sleep(0.002)
        if len(asked) < 8:
            await connections.current.answer_of(answer())
        raise late()

    async with opened(ask, monkeypatch) as connections, asyncio.timeout(60):
        first = connections.current
        await first.answer_of(answer())
        while not connections.n_replaced:
            await asyncio.sleep(0.001)
        assert len(asked) == 8
        with pytest.raises(EtcdUnavailable):
            await first.answer_of(asyncio.get_running_loop().create_future())


async def test_whose_channel_is_closed_under_an_answer_is_told_so_and_not_cancelled() -> None:
    one = Connection(_channel())
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(one.answer_of(asked))
    await asyncio.sleep(0)
    one.fail_reads()
    asked.cancel()  # what a channel that is closed does to its calls
    with pytest.raises(EtcdUnavailable):
        await waiting
