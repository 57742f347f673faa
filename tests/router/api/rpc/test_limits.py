"""RouterService at its limits: clients that read nothing, default deadlines, takeovers, leaving workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc
import pytest

from libs.common.telemetry.counters import Counters
from services.router.api.api_keys import DEFAULT_TENANT
from services.router.placement.worker_models import WorkerModels
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from services.router.workers.connection import WorkerConnection
from slipstream import bounds, errors
from slipstream.async_client import AsyncClient
from slipstream.calls.resume import ATTEMPT_HEADER
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import HELLO, WAIT_S, chat_of, eventually, hasten_writes, open_router, script
from tests.router.support.fake_cluster import FakeCluster


async def test_a_client_that_reads_nothing_is_cut_off_and_others_go_on(
    cluster: FakeCluster, card: ModelCard
) -> None:
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    script(cluster.model, [*letters * 200, card.stop_token_ids[0]])
    # A client with a fixed, small window, so that what it leaves unread fills the way soon.
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with (
        open_router(cluster, card, write_stall_s=WAIT_S) as router,
        grpc.aio.insecure_channel(router.host.endpoint, options=window) as channel,
        AsyncClient(router.host.endpoint) as other,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        sampling = router_pb2.Sampling(top_logprobs=20)
        call = stub.Generate(router_pb2.GenerateRequest(chat=chat_of(HELLO), sampling=sampling))
        await call.initial_metadata()
        reply = await other.chat([{"role": "user", "content": "hi"}], max_tokens=5)
        assert reply.finish_reason == "length"
        assert router.manager.held == 1
        # From now on a client may leave an answer unread for so long; no other one is there.
        router._grpc.generation.write_stall_s = 0.5
        await eventually(lambda: hasten_writes(stall_s=0.5) > 0)
        await eventually(lambda: not router.manager.held and not cluster.held)
        assert router.counters.snapshot()["slipstream_requests_aborted_total"] == 1
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for _ in call:
                pass
        told = from_rpc_error(cut.value)
        assert isinstance(told, errors.Aborted) and "read nothing for" in told.message


async def test_a_request_without_a_deadline_gets_the_default_one(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    async for _ in client._stub.Generate(router_pb2.GenerateRequest(chat=chat_of(HELLO))):
        pass
    (prefill,) = [request for worker in cluster.prefills for request in worker.requests]
    (start,) = [start for worker in cluster.decodes for start in worker.starts]
    default_ms = bounds.DEFAULT_DEADLINE_S * 1e3
    for left_ms in (prefill.deadline_ms, start.deadline_ms):
        assert default_ms - 60_000 < left_ms <= default_ms


async def test_a_client_that_leaves_as_it_is_refused_is_no_error(
    client: AsyncClient,
    router: RouterServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_begun = 0

    async def refuse_late(*_: Any, **__: Any) -> Any:
        nonlocal n_begun
        n_begun += 1
        time.sleep(timeout_s + 0.4)  # noqa: ASYNC251 - the deadline passes, and the loop does not see it
        raise errors.Overloaded("full", retry_after_ms=1)

    told: list[str] = []
    monkeypatch.setattr(Counters, "observe", lambda _, name, *values, **more: told.append(name))
    monkeypatch.setattr(router.manager, "begin", refuse_late)
    request = router_pb2.GenerateRequest(chat=chat_of(HELLO))
    for timeout_s in (0.1, 1.0, 10.0):  # until the call reaches the router in time
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in client._stub.Generate(request, timeout=timeout_s):
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if n_begun:
            break
    await eventually(lambda: "slipstream_refusal_seconds" in told)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def begin_and_hold(client: AsyncClient, cluster: FakeCluster) -> asyncio.Task[Any]:
    """A running request r-3 whose prefill answers neither it nor its abort before the gates open."""
    for prefill in cluster.prefills:
        prefill.gate.clear()
        prefill.abort_gate.clear()
    running = asyncio.create_task(client.chat(HELLO, request_id="r-3"))
    await eventually(lambda: any(worker.requests for worker in cluster.prefills))
    return running


def open_gates(cluster: FakeCluster) -> None:
    """Let the prefills go on and answer their aborts."""
    for prefill in cluster.prefills:
        prefill.gate.set()
        prefill.abort_gate.set()


async def take_over(client: AsyncClient, *, attempt: int = 0, resume_after_tokens: int = 0) -> None:
    """Ask for r-3 again, as a client that lost its connection does."""
    request = router_pb2.GenerateRequest(
        request_id="r-3", chat=chat_of(HELLO), resume_after_tokens=resume_after_tokens
    )
    metadata = ((ATTEMPT_HEADER, str(attempt)),)
    async for _ in client._stub.Generate(request, timeout=60, metadata=metadata):
        pass


async def test_a_takeover_is_refused_when_the_router_began_to_drain_meanwhile(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    running = await begin_and_hold(client, cluster)
    taking = asyncio.create_task(take_over(client, resume_after_tokens=1))
    await eventually(lambda: any(worker.aborted for worker in cluster.prefills))
    router.manager.drain()
    open_gates(cluster)
    with pytest.raises(grpc.aio.AioRpcError, match="draining"):
        await taking
    with pytest.raises(errors.Aborted):
        await running
    await eventually(lambda: not cluster.held and not router.manager.held)


async def test_no_request_takes_the_id_that_a_takeover_waits_for(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    running = await begin_and_hold(client, cluster)
    taking = asyncio.create_task(take_over(client, attempt=2))
    await eventually(lambda: any(worker.aborted for worker in cluster.prefills))
    assert not router.manager._runs and router.manager.held == 1
    with pytest.raises(errors.InvalidArgument, match="request_id: is in use"):
        await client.chat(HELLO, request_id="r-3")
    open_gates(cluster)
    await taking
    with pytest.raises(errors.Aborted):
        await running
    assert (await client.chat(HELLO, request_id="r-3")).text  # the id is free


async def test_the_newest_of_several_takeovers_runs(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    running = await begin_and_hold(client, cluster)
    former = asyncio.create_task(take_over(client, attempt=2))
    await eventually(lambda: any(worker.aborted for worker in cluster.prefills))
    newest = asyncio.create_task(take_over(client, attempt=3))
    await eventually(lambda: (DEFAULT_TENANT, "r-3") in router.manager._runs)
    open_gates(cluster)
    await newest
    with pytest.raises(errors.Aborted):
        await running
    with pytest.raises(grpc.aio.AioRpcError, match="a newer attempt of the request replaced this one"):
        await former
    await eventually(lambda: not cluster.held and not router.manager.held)


async def test_a_withdrawn_worker_keeps_its_connection_until_its_abort_is_answered(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[tuple[str, bool]] = []
    in_use = router.fleet._in_use

    def recorded(link: WorkerConnection) -> bool:
        polls.append((link.worker.instance, in_use(link)))
        return polls[-1][1]

    monkeypatch.setattr("services.router.workers.fleet._RETIRE_POLL_S", 0.01)
    # On a busy machine the load stream may break, which shortens the time of an abort.
    monkeypatch.setattr("services.router.execution.attempts.attempt._RELEASE_UNREACHABLE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(router.fleet, "_in_use", recorded)
    running = await begin_and_hold(client, cluster)
    aborting = asyncio.create_task(client.abort("r-3"))
    await eventually(lambda: any(worker.aborted for worker in cluster.prefills))
    withdrawn = next(worker for worker in cluster.prefills if worker.aborted)
    for other in cluster.prefills:
        if other is not withdrawn:  # a hedge may run there
            other.gate.set()
            other.abort_gate.set()
    await cluster.discovery.withdraw(withdrawn.worker)
    instance = withdrawn.worker.instance
    await eventually(lambda: sum(name == instance for name, _ in polls) > 2)
    assert all(used for name, used in polls if name == instance)
    withdrawn.abort_gate.set()
    await aborting
    await eventually(lambda: (instance, False) in polls)
    with pytest.raises(errors.Aborted):
        await running
    await eventually(lambda: not cluster.held and not router.manager.held)


async def test_nothing_is_kept_of_how_quick_a_worker_was_that_left(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Speeds(WorkerModels):
        def observe_pull(self, worker: str, *, n_bytes: int, transfer_ms: float) -> None:
            told.append(worker)
            super().observe_pull(worker, n_bytes=n_bytes, transfer_ms=transfer_ms)

    monkeypatch.setattr("services.router.workers.fleet._RETIRE_POLL_S", 0.01)
    models = router.fleet.worker_models = Speeds()
    for decode in cluster.decodes:
        decode.gate.clear()
    running = asyncio.create_task(client.chat(HELLO, max_tokens=8))
    await eventually(lambda: any(decode.held for decode in cluster.decodes))
    left = next(decode for decode in cluster.decodes if decode.held)
    key = next(link.key for link in router.fleet.links() if link.worker == left.worker)
    await cluster.discovery.withdraw(left.worker)
    await eventually(lambda: all(link.key != key for link in router.fleet.links()))
    left.gate.set()
    assert (await running).finish_reason == "length"
    assert told == [key]  # as it ended, after its worker was gone
    await eventually(lambda: key not in models.known())


async def test_calls_that_tokenize_take_slots_of_their_tenant(
    client: AsyncClient, router: RouterServer
) -> None:
    async with contextlib.AsyncExitStack() as slots:
        for _ in range(4):
            await slots.enter_async_context(router.manager.token_slots.serving(DEFAULT_TENANT, 0))
        ids = [5, 6]
        told = asyncio.gather(
            client._stub.Tokenize(
                router_pb2.TokenizeRequest(request=router_pb2.GenerateRequest(prompt="Hi"))
            ),
            client._stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=ids)),
        )
        await eventually(lambda: router.manager.token_slots._slots.waiting_or_running(DEFAULT_TENANT) == 6)
        assert not told.done()
    tokenized, detokenized = await told
    assert len(tokenized.token_ids) > 0 and len(detokenized.text) > 0
    assert not router.manager.texts.held_chars
