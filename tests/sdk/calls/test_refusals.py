"""Calls that routers refuse for lack of capacity are made again after the pause that the refusal names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from slipstream import AsyncClient, Client
from slipstream.calls.refusals import Refusals
from slipstream.endpoints import Endpoints
from slipstream.errors import (
    FailedPrecondition,
    NotFound,
    Overloaded,
    QuotaExceeded,
    RateLimited,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.rpc_errors import from_failure, names_pause, to_failure, to_status
from slipstream.v1 import router_pb2
from tests.router.conftest import HELLO
from tests.sdk.calls.either_client import KINDS, EitherClient

SOON = RateLimited("too many", retry_after_ms=20)
HOUR_MS = 3_600_000
CALLS: list[tuple[str, Any]] = [
    ("chat", (HELLO,)),
    ("complete", ("Once",)),
    ("models", ()),
    ("usage", ()),
    ("abort", ("r1",)),
    ("tokenize", ("Once",)),
    ("detokenize", ([1],)),
    ("jobs.get", ("job-1",)),
    ("jobs.cancel", ("job-1",)),
    ("jobs.follow", ("job-1",)),
    ("jobs.submit", ([{}],)),
    ("responses.get", ("resp_1",)),
    ("responses.delete", ("resp_1",)),
    ("responses.input_items", ("resp_1",)),
    ("files.upload", (b"{}",)),
    ("files.content", ("file-1",)),
    ("files.delete", ("file-1",)),
    ("files.list_files", ()),
    ("batches.create", ("file-1",)),
    ("batches.wait", ("batch_1",)),
]


class RefusingRouter(grpc.GenericRpcHandler):
    """Fails all calls of all services with a status; after `n_failures` it serves them an empty answer."""

    def __init__(self, status: grpc.Status, n_failures: float) -> None:
        self._status = status
        self._n_failures = n_failures
        self.n_calls = 0

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    def _answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.n_calls += 1
        if self.n_calls <= self._n_failures:
            context.abort_with_status(self._status)
        for _ in requests:
            pass
        yield b""


@contextmanager
def _refusing(
    error: SlipstreamError | grpc.Status, n_failures: float
) -> Iterator[tuple[RefusingRouter, str]]:
    status = to_status(error) if isinstance(error, SlipstreamError) else error
    server, router = grpc.server(ThreadPoolExecutor(2)), RefusingRouter(status, n_failures)
    server.add_generic_rpc_handlers((router,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


async def _called(client: Client | AsyncClient, method: str, *given: Any, **options: Any) -> Any:
    """What a call returns, or the error that it raises."""
    either = EitherClient(client)
    try:
        return await either(method, *given, **options)
    except SlipstreamError as error:
        return error
    finally:
        await either.close()


def test_a_refusal_is_worth_as_many_tries_as_the_client_says() -> None:
    refusals = Refusals(2)
    assert refusals.pause_s(SOON, left_s=60) == 0.02
    assert refusals.pause_s(Overloaded("full", retry_after_ms=700), left_s=60) == 0.7
    assert refusals.pause_s(SOON, left_s=60) is None
    assert Refusals(0).pause_s(SOON, left_s=60) is None


def test_a_pause_that_reaches_the_deadline_takes_no_try() -> None:
    refusals = Refusals(1)
    for late_ms in (60_000, HOUR_MS):
        assert refusals.pause_s(QuotaExceeded("spent", retry_after_ms=late_ms), left_s=60) is None
    assert refusals.pause_s(QuotaExceeded("spent", retry_after_ms=59_999), left_s=60) == 59.999


@pytest.mark.parametrize("error", [NotFound("none"), Unavailable("lost"), FailedPrecondition("no")])
def test_another_error_is_no_refusal(error: SlipstreamError) -> None:
    assert Refusals(9).pause_s(error, left_s=60) is None


@KINDS
@pytest.mark.parametrize(("method", "given"), CALLS, ids=[name for name, _ in CALLS])
async def test_each_call_is_made_again_as_often_as_the_client_says(
    kind: type[Client | AsyncClient], method: str, given: tuple[Any, ...]
) -> None:
    with _refusing(RateLimited("too many", retry_after_ms=1), n_failures=float("inf")) as (router, endpoint):
        found = await _called(kind(endpoint, max_retries=3), method, *given)
    assert isinstance(found, RateLimited) and router.n_calls == 4


@KINDS
@pytest.mark.parametrize("method", ["models", "batches.list_batches"])
async def test_a_call_that_was_refused_succeeds(kind: type[Client | AsyncClient], method: str) -> None:
    with _refusing(SOON, n_failures=2) as (router, endpoint):
        assert await _called(kind(endpoint), method) == []
    assert router.n_calls == 3


@KINDS
@pytest.mark.parametrize(("method", "given"), CALLS, ids=[name for name, _ in CALLS])
async def test_no_call_waits_beyond_its_time_out(
    kind: type[Client | AsyncClient], method: str, given: tuple[Any, ...]
) -> None:
    with _refusing(QuotaExceeded("spent", retry_after_ms=HOUR_MS), n_failures=9) as (router, endpoint):
        found = await _called(kind(endpoint), method, *given)
    assert isinstance(found, QuotaExceeded) and found.retry_after_ms == HOUR_MS
    assert router.n_calls == 1


@KINDS
@pytest.mark.parametrize(
    ("method", "given"), [("models", ()), ("files.upload", (b"{}",)), ("batches.wait", ("batch_1",))]
)
async def test_refused_tries_share_the_time_out_that_the_caller_gives(
    kind: type[Client | AsyncClient], method: str, given: tuple[Any, ...]
) -> None:
    with _refusing(Overloaded("full", retry_after_ms=15_000), n_failures=1) as (router, endpoint):
        found = await _called(kind(endpoint), method, *given, timeout_s=10.0)
    assert isinstance(found, Overloaded) and router.n_calls == 1


@KINDS
@pytest.mark.parametrize(("method", "given"), [("models", ()), ("batches.create", ("file-1",))])
async def test_what_names_no_pause_is_final(
    kind: type[Client | AsyncClient], method: str, given: tuple[Any, ...]
) -> None:
    """Such a status is not the router's: the call may have run."""
    full = to_status(Overloaded("full"))
    bare = full._replace(trailing_metadata=())  # type: ignore[attr-defined]
    with _refusing(bare, n_failures=9) as (router, endpoint):
        found = await _called(kind(endpoint), method, *given)
    assert isinstance(found, Overloaded) and router.n_calls == 1


@KINDS
async def test_the_next_router_takes_what_the_first_one_refuses(kind: type[Client | AsyncClient]) -> None:
    with _refusing(SOON, n_failures=9) as (full, first), _refusing(SOON, n_failures=0) as (idle, second):
        assert await _called(kind([first, second]), "batches.list_batches") == []
    assert (full.n_calls, idle.n_calls) == (1, 1)


@pytest.mark.parametrize("method", ["models", "batches.list_batches"])
async def test_closing_the_client_ends_a_pause(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, is_pausing, pause = [], threading.Event(), Endpoints.pause

    def seen_pause(endpoints: Endpoints[Any], pause_s: float) -> None:
        pauses.append(pause_s)
        is_pausing.set()
        pause(endpoints, pause_s)

    monkeypatch.setattr(Endpoints, "pause", seen_pause)
    with _refusing(Overloaded("full", retry_after_ms=9_000), n_failures=9) as (router, endpoint):
        client = Client(endpoint)
        call = asyncio.create_task(EitherClient(client)(method))
        assert await asyncio.to_thread(is_pausing.wait, 60)
        client.close()
        with pytest.raises(FailedPrecondition, match=r"^the client is closed$"):
            await call
    assert (router.n_calls, pauses) == (1, [9.0])


def test_only_a_routers_refusal_names_a_pause() -> None:
    with _refusing(SOON, n_failures=9) as (_, endpoint), grpc.insecure_channel(endpoint) as channel:
        call: Any = channel.unary_unary("/slipstream.v1.RouterService/ListModels")
        with pytest.raises(grpc.RpcError) as refused:
            call(router_pb2.ListModelsRequest().SerializeToString(), timeout=60)
    assert names_pause(refused.value)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/slipstream.v1.RouterService/ListModels")
        with pytest.raises(grpc.RpcError) as lost:
            call(b"", timeout=60)
    assert not names_pause(lost.value)


def test_a_call_that_never_fits_is_not_made_again() -> None:
    error = RateLimited("the prompt is longer than the limit", retry_after_ms=0)
    assert Refusals(2).pause_s(error, left_s=60.0) is None
    copied = from_failure(to_failure(error))
    assert isinstance(copied, RateLimited) and copied.retry_after_ms == 0
    details = to_status(error).trailing_metadata or ()
    assert b"RetryInfo" not in b"".join(value for _, value in details if isinstance(value, bytes))
