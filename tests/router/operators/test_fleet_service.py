"""FleetService on the admin port of a real router, before workers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import DRAIN_ANSWER_MARGIN_S
from services.router.operators import process_calls
from services.router.operators.process_calls import OPERATOR_METHODS
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.cli.fleet.fleet_client import FleetClient, key_of, state_name
from slipstream.enum_names import ROLES
from slipstream.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial, dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.router.autoscale.test_scaler import running_router
from tests.router.conftest import WAIT_S, eventually
from tests.router.support.fake_workers import FakeWorker
from tests.router.workers.test_lying_workers import GarbageWorker, serving

SECRET = ClusterSecret(b"0123456789abcdef0123456789abcdef")


@asynccontextmanager
async def running_fleet(card: ModelCard, **options: Any) -> AsyncIterator[tuple[RouterServer, FakeWorker]]:
    """A router and one decode worker that it sees."""
    discovery = InMemoryDiscovery()
    worker = FakeWorker(Role.DECODE, "decode-0", discovery)
    worker.held.update({"a", "b", "c"})
    worker.process.stated_load = worker_pb2.LoadReport(requests_running=3)
    async with running_router(card, discovery, **options) as router:
        await worker.start()
        await eventually(lambda: any(link.ready for link in router.fleet.links()))
        yield router, worker
        await worker.stop()


def client_of(router: RouterServer, opening: Dial | None = None) -> FleetClient:
    return FleetClient([router.admin.endpoint], opening or Dial())


async def test_the_fleet_has_each_process_with_its_load(card: ModelCard) -> None:
    async with running_fleet(card) as (router, worker):
        fleet = await client_of(router).get(timeout_s=WAIT_S)
        assert (fleet.router, fleet.model) == ("router-0", card.name)
        found = {key_of(process): process for process in fleet.processes}
        assert sorted(found) == ["decode/decode-0", "router/router-0"]
        assert found["decode/decode-0"].load.requests_running == 3
        assert found["decode/decode-0"].endpoint == worker.host.endpoint
        assert found["router/router-0"].endpoint == router.admin.endpoint
        assert {state_name(process) for process in fleet.processes} == {"ready"}


async def test_a_drained_process_stays_in_view_and_is_undrained_through_the_router(card: ModelCard) -> None:
    async with running_fleet(card) as (router, worker):
        client = client_of(router)
        await client.get(timeout_s=WAIT_S)
        async with client.process_dial()("decode/decode-0") as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S)
            assert status.instance == "decode-0" and not status.draining
            worker.held.clear()
            await stub.Drain(worker_pb2.DrainRequest(), timeout=WAIT_S)
            await router._discovery.withdraw(worker.worker)
            await eventually(lambda: not list(router.fleet.links()))
            (drained,) = [each for each in (await client.get()).processes if each.role == status.role]
            assert state_name(drained) == "draining" and drained.load.draining
            await stub.Undrain(worker_pb2.UndrainRequest(), timeout=WAIT_S)
            assert not worker.service.draining


async def test_errors_of_the_process_come_through_and_wrong_calls_are_refused(card: ModelCard) -> None:
    async with running_fleet(card) as (router, _), dial(router.admin.endpoint) as channel:
        stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)

        async def refusal(role: str, instance: str, method: str, message: bytes = b"") -> Exception:
            value = fleet_pb2.CallProcessRequest(
                role=ROLES.value(role), instance=instance, method=method, message=message
            )
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in stub.CallProcess(value, timeout=WAIT_S):
                    pass
            return from_rpc_error(failed.value)

        status = "/slipstream.v1.WorkerService/GetStatus"
        assert isinstance(await refusal("decode", "decode-1", status), NotFound)
        assert isinstance(await refusal("prefill", "decode-0", status), NotFound)
        assert isinstance(await refusal("decode", "", status), InvalidArgument)
        decode = await refusal("decode", "decode-0", "/slipstream.v1.DecodeService/Decode")
        assert isinstance(decode, InvalidArgument) and "method" in str(decode)
        assert isinstance(await refusal("decode", "decode-0", status, b"\xff"), InvalidArgument)


async def test_operators_reach_the_router_itself_and_no_peer_gets_in(card: ModelCard) -> None:
    operator = Dial(tokens=TokenMinter(SECRET, "anna", CallerClass.OPERATOR))
    peer = Dial(tokens=TokenMinter(SECRET, "prefill-9"))
    async with running_router(card, InMemoryDiscovery(), secret=SECRET) as router:
        async with client_of(router, operator).process_dial()("router/router-0") as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(worker_pb2.DrainRequest(), timeout=WAIT_S)
        assert router.manager.draining
        with pytest.raises(Unauthenticated, match="class operator"):
            await client_of(router, peer).get()
        with pytest.raises(Unauthenticated):
            await client_of(router).get()


def test_only_methods_of_operators_and_reads_of_peers_are_passed_on() -> None:
    """An operator may call them all at the process itself."""
    assert {method.rpartition("/")[2] for method in OPERATOR_METHODS} == {
        "GetStatus",
        "Drain",
        "Undrain",
        "WatchBlocks",
        "VerifyBlocks",
        "DropBlocks",
    }


async def test_a_change_reaches_no_other_process_than_the_named_one(card: ModelCard) -> None:
    """The record of a worker that has ended names an address that another one has now, or a false one."""
    async with running_fleet(card) as (router, worker):
        worker.held.clear()
        stale = replace(worker.worker, instance="decode-1", incarnation="another")
        router._discovery.announce(stale)
        client = client_of(router)
        members = router.pipeline.members
        await eventually(lambda: stale.key in {each.key for each in members.current.with_role(Role.DECODE)})
        async with client.process_dial()("decode/decode-1") as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            for method, request in (
                (stub.Drain, worker_pb2.DrainRequest(exit=True)),
                (stub.Undrain, worker_pb2.UndrainRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await method(request, timeout=WAIT_S)
                error = from_rpc_error(failed.value)
                assert isinstance(error, Unavailable)
                assert "'decode/decode-0' answers at" in error.message
            status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S)
            assert status.instance == "decode-0", "a read says who answers"
        assert not worker.service.draining


async def in_time(stub: Any) -> worker_pb2.DrainResponse:
    """The answer of a Drain shortly before its deadline; a slow machine may miss it."""
    for _ in range(10):
        try:
            answer: worker_pb2.DrainResponse = await stub.Drain(worker_pb2.DrainRequest(), timeout=4.0)
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
    raise AssertionError("every answer came after its deadline")


async def test_a_process_that_is_slow_to_say_who_it_is_answers_before_the_callers_deadline(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds requests, so it answers a drain shortly before the deadline, with what it holds."""
    status = process_calls._status

    async def slowly(*arguments: Any, **named: Any) -> worker_pb2.GetStatusResponse:
        await asyncio.sleep(2 * DRAIN_ANSWER_MARGIN_S)
        return await status(*arguments, **named)

    monkeypatch.setattr(process_calls, "_status", slowly)
    async with running_fleet(card) as (router, worker):
        async with client_of(router).process_dial()("decode/decode-0") as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            answer = await in_time(stub)
        assert answer.ledger.sequences == len(worker.held) == 3


async def test_false_records_hide_no_router_and_keep_no_answer_back(card: ModelCard) -> None:
    """The first one replaces this router's record; the others leave, and send what is no message."""
    async with (
        running_fleet(card) as (router, _),
        serving(GarbageWorker(Worker(Role.DECODE, "x", "h:1", "i"))) as evil,
    ):
        discovery = router._discovery
        for number in range(200):
            false = Worker(Role.DECODE, f"false-{number}", evil, "i")
            discovery.announce(false)
            await discovery.withdraw(false)
        discovery.announce(Worker(Role.ROUTER, "router-0", evil, "another", admin=evil))
        known = router.pipeline.members
        await known.wait_until(lambda fleet: len(fleet.leaving) == 200, timeout_s=WAIT_S)
        found = {key_of(each): each for each in (await client_of(router).get(timeout_s=WAIT_S)).processes}
        assert len(found) == 202
        assert found["router/router-0"].client_endpoint == router.host.endpoint
        assert found["router/router-0"].endpoint == router.admin.endpoint
        async with client_of(router).process_dial()("router/router-0") as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            assert (
                await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S)
            ).instance == "router-0"
