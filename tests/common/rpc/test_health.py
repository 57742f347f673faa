"""Health statuses: each watcher hears of each change, whatever other watchers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.rpc.health import HealthService
from libs.common.rpc.serve import ServiceHost
from slipstream.errors import NotFound
from slipstream.rpc.dial import dial

STATUS = health_pb2.HealthCheckResponse
WAIT_S = 100.0


def watch(health: HealthService, name: str) -> AsyncIterator[Any]:
    return health.Watch(health_pb2.HealthCheckRequest(service=name), None)


async def next_status(watcher: AsyncIterator[Any]) -> int:
    async with asyncio.timeout(WAIT_S):
        return int((await anext(watcher)).status)


async def test_a_watcher_that_ends_takes_no_change_from_the_others() -> None:
    host = ServiceHost("127.0.0.1:0")
    await host.start([])
    request = health_pb2.HealthCheckRequest()
    async with dial(host.endpoint) as channel, asyncio.timeout(WAIT_S):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stays, leaves = stub.Watch(request), stub.Watch(request)
        for watcher in (stays, leaves):
            assert (await watcher.read()).status == STATUS.NOT_SERVING
        leaves.cancel()
        probe = stub.Watch(request)
        await probe.read()
        probe.cancel()
        await host.set_ready(True)
        assert (await stays.read()).status == STATUS.SERVING
    await host.stop(grace_s=0)


async def test_a_name_that_is_set_later_is_unknown_before() -> None:
    health = HealthService()
    watcher = watch(health, "later")
    assert await next_status(watcher) == STATUS.SERVICE_UNKNOWN
    with pytest.raises(NotFound):
        await health.Check(health_pb2.HealthCheckRequest(service="later"), None)
    health.set_serving("later", True)
    assert await next_status(watcher) == STATUS.SERVING


async def test_nothing_serves_after_the_end() -> None:
    health = HealthService()
    health.set_serving("a", True)
    health.end()
    health.set_serving("a", True)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="a"), None)
    assert answer.status == STATUS.NOT_SERVING
