"""The console asks workers again, also those whose names resolve late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import grpc

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker
from services.router.console.worker_statuses import ASK_EVERY_S, WorkerStatuses
from slipstream.rpc.dial import Dial, dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.network.ports import own_ports
from tests.support.stubs.partial_servicer import partial_servicer

NAMED = Worker(Role.KVSTORE, "kvstore-0", "kvstore-0.test:7000", "first")


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A kvstore that has a status."""

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Any
    ) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse(instance=NAMED.instance, incarnation=NAMED.incarnation)


class _Names:
    """Dials what a name stands for at the moment."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known
        self.n_dialled = 0

    def __call__(self, endpoint: str) -> grpc.aio.Channel:
        self.n_dialled += 1
        return dial(self.known[endpoint])


async def test_a_named_worker_that_failed_is_dialled_again_and_one_that_answered_is_not() -> None:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(partial_servicer(_Worker), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (silent,) = own_ports(1)
    names = _Names({NAMED.endpoint: f"127.0.0.1:{silent}"})
    now_s = 0.0
    discovery = InMemoryDiscovery()
    discovery.announce(NAMED)
    async with Fleet(discovery) as fleet:
        await fleet.wait_snapshot()
        statuses = WorkerStatuses(fleet, dial=cast(Dial, names), clock=lambda: now_s)
        try:
            await statuses.refresh()
            assert statuses.status(NAMED) is None and names.n_dialled == 1
            names.known[NAMED.endpoint] = f"127.0.0.1:{port}"
            for _ in range(2):
                now_s += ASK_EVERY_S
                await statuses.refresh()
                answer = statuses.status(NAMED)
                assert answer is not None and answer.instance == NAMED.instance
                assert names.n_dialled == 2
        finally:
            await statuses.close()
            await server.stop(0)


async def test_workers_of_one_name_do_not_end_each_others_questions() -> None:
    """A node that starts again under another instance has the name of a record that is still there."""
    refuses = asyncio.Event()

    class Refusing(_Worker):
        async def GetStatus(self, request: Any, context: Any) -> Any:
            if not refuses.is_set():
                refuses.set()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            await asyncio.sleep(0.2)
            return await super().GetStatus(request, context)

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(partial_servicer(Refusing), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    names = _Names({NAMED.endpoint: f"127.0.0.1:{port}"})
    discovery = InMemoryDiscovery()
    discovery.announce(NAMED)
    discovery.announce(replace(NAMED, instance="kvstore-1"))
    async with Fleet(discovery) as fleet:
        await fleet.wait_snapshot()
        statuses = WorkerStatuses(fleet, dial=cast(Dial, names), clock=lambda: 0.0)
        try:
            await statuses.refresh()
            found = [statuses.status(worker) for worker in fleet.current.with_role(Role.KVSTORE)]
            assert sum(answer is not None for answer in found) == 1
        finally:
            await statuses.close()
            await server.stop(0)
