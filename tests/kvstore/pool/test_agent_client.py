"""A hanging pool agent: calls time out, its memory stays allocated, and the client kills it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.config import PoolOptions
from slipstream.errors import Unavailable
from tests.support.processes.process_checks import all_gone, eventually

WAIT_S = 60.0
KILLED_WHEN_IT_HANGS = pytest.mark.parametrize("hang_s", [4.0], ids=[""])


@pytest.fixture
def hang_s() -> float:
    """Long limits for slow machines, except in tests with a hanging agent."""
    return 200.0


@pytest.fixture
async def client(hang_s: float) -> AsyncIterator[AgentClient]:
    made = AgentClient(
        PoolOptions("127.0.0.1:1", staging_bytes=1 << 20),
        agent="tests.support.stubs.hanging_agent",
        hang_s=hang_s,
    )
    made.start()
    await eventually(lambda: made.available, timeout_s=WAIT_S)
    pid = made.pid
    assert pid is not None
    yield made
    await made.close()
    await all_gone([pid])
    assert made.staged_bytes == 0


@KILLED_WHEN_IT_HANGS
async def test_a_call_that_hangs_keeps_its_memory_until_the_agent_is_dead(client: AgentClient) -> None:
    hanging = client.pid
    assert hanging is not None
    staged = await client.stage([100_000], timeout_s=WAIT_S)
    with pytest.raises(Unavailable):
        await client.call("put", timeout_s=0.1, staged=staged)
    client.release(staged, "caller")
    assert client.staged_bytes == client.quarantined_bytes > 0  # the agent may still read it
    assert client.available  # a put that hangs does not mark the pool as unavailable
    with pytest.raises(Unavailable):
        await client.stage([1 << 20], timeout_s=0.1)
    with pytest.raises(Unavailable):
        await client.call("find", timeout_s=0.1, keys=["ff"])
    assert not client.available  # a hanging lookup does
    await all_gone([hanging], timeout_s=WAIT_S)
    await eventually(lambda: client.pid != hanging and client.available, timeout_s=WAIT_S)
    assert client.restarts == 1
    assert client.staged_bytes == client.quarantined_bytes == 0


async def test_memory_of_late_reads_is_freed_after_their_end(client: AgentClient) -> None:
    staged = await client.stage([4096], timeout_s=WAIT_S)
    answer = await client.call("get", timeout_s=WAIT_S, staged=staged)
    assert answer["outcome"] == [-1]
    client.release(staged, "caller")
    assert client.staged_bytes == client.quarantined_bytes == 4096
    await client.call("drop", timeout_s=WAIT_S, keys=[])
    assert client.staged_bytes == client.quarantined_bytes == 0


@KILLED_WHEN_IT_HANGS
async def test_late_reads_that_never_end_end_with_the_agent(client: AgentClient) -> None:
    hanging = client.pid
    assert hanging is not None
    staged = await client.stage([4096], timeout_s=WAIT_S)
    await client.call("get", timeout_s=WAIT_S, staged=staged)
    client.release(staged, "caller")
    assert client.staged_bytes == 4096
    await all_gone([hanging], timeout_s=WAIT_S)
    await eventually(lambda: client.pid != hanging and client.available, timeout_s=WAIT_S)
    assert client.staged_bytes == 0


async def test_an_agent_that_dies_ends_its_calls_at_once(client: AgentClient) -> None:
    staged = await client.stage([4096, 8192], timeout_s=WAIT_S)
    call = asyncio.create_task(client.call("put", timeout_s=60, staged=staged))
    await asyncio.sleep(0)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="ended"):
        await asyncio.wait_for(call, WAIT_S)
    client.release(staged, "caller")
    assert client.staged_bytes == 0
    with pytest.raises(Unavailable):
        await client.call("find", timeout_s=1, keys=["ff"])


async def test_an_agent_with_invalid_messages_is_restarted(client: AgentClient) -> None:
    first = client.pid
    with pytest.raises(Unavailable, match="ended"):
        await client.call("clear", timeout_s=WAIT_S)
    await eventually(lambda: client.available, timeout_s=WAIT_S)
    assert client.pid != first and client.restarts == 1
