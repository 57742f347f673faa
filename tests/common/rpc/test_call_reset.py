"""Resets of gRPC calls: the tasks of a server are looked through once for many of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.rpc import call_reset
from libs.common.rpc.serve import LIVENESS, ServiceHost
from libs.common.service_bounds import GRPC_PUBLIC_CALLS


async def test_a_flood_of_watches_costs_few_looks_through_all_tasks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_resets = 3 * GRPC_PUBLIC_CALLS
    looks = resets = 0
    note_call_tasks, reset_call = call_reset._note_call_tasks, call_reset.reset_call

    def count_look(loop: asyncio.AbstractEventLoop) -> None:
        nonlocal looks
        looks += 1
        note_call_tasks(loop)

    def count_reset(handler: asyncio.Task[Any]) -> None:
        nonlocal resets
        resets += 1
        reset_call(handler)

    monkeypatch.setattr(call_reset, "_note_call_tasks", count_look)
    monkeypatch.setattr("libs.common.rpc.serve.reset_call", count_reset)
    host = ServiceHost("127.0.0.1:0")
    await host.start([])
    async with grpc.aio.insecure_channel(host.endpoint) as channel, asyncio.timeout(60):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(GRPC_PUBLIC_CALLS + n_resets):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(service=LIVENESS)))
            await watches[-1].read()
        ended = [await watch.code() for watch in watches[:n_resets]]
        assert ended == [grpc.StatusCode.CANCELLED] * n_resets
        assert not any(watch.done() for watch in watches[n_resets:])
    assert resets == n_resets
    assert looks <= 1 + n_resets // GRPC_PUBLIC_CALLS
    assert "keeps a call open" not in caplog.text
    await host.stop(grace_s=0)
