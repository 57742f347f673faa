"""Fuzzed messages to the services that every host has: load and drain, health, reflection."""

from __future__ import annotations

import random

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.rpc.serve import ServiceHost
from slipstream.rpc.dial import dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.logged_errors import logged_errors
from tests.support.stubs.idle_process import IdleProcess

SERVICES = {
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    "health": health_pb2.DESCRIPTOR.services_by_name["Health"],
    "reflection": reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
}


@pytest.mark.parametrize("name", SERVICES)
async def test_fuzzed_messages_are_refused_as_bad_input(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVICES)
async def test_a_million_fuzzed_messages_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog, inputs=1_000_000)


async def check(name: str, caplog: pytest.LogCaptureFixture, inputs: int | None = None) -> None:
    service = WorkerService(WorkerIdentity(Role.PREFILL, "prefill-0"), IdleProcess())
    host = ServiceHost("127.0.0.1:0")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, host.server)
    await host.start(["slipstream.v1.WorkerService"])
    try:
        async with dial(host.endpoint) as channel:
            await fuzz(RpcFuzzer(channel, SERVICES[name], random.Random(15)), inputs)
    finally:
        await host.stop(grace_s=0)
    assert host.malformed.count
    assert not logged_errors(caplog)
