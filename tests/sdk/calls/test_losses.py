"""Which failed calls are made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from slipstream import AsyncClient, Client
from slipstream.calls import losses as limits
from slipstream.errors import DeadlineExceeded, Draining, Internal, NotFound, SlipstreamError, Unavailable
from slipstream.rpc.rpc_errors import to_status
from slipstream.v1 import batches_pb2, batches_pb2_grpc
from tests.sdk.calls.either_client import KINDS, EitherClient
from tests.support.stubs.partial_servicer import partial_servicer

PIECES = [b"first", b"second", b"third"]


class Faulty(batches_pb2_grpc.BatchServiceServicer):
    """Fails the first calls as a test asks; a download fails after two pieces."""

    def __init__(self, failures: list[SlipstreamError | grpc.StatusCode]) -> None:
        self.failures = failures
        self.n_calls = 0

    def CreateBatch(self, request: Any, context: Any) -> batches_pb2.CreateBatchResponse:
        self._fail(context)
        return batches_pb2.CreateBatchResponse(batch=batches_pb2.Batch(id="batch_1"))

    def GetBatch(self, request: Any, context: Any) -> batches_pb2.GetBatchResponse:
        self._fail(context)
        return batches_pb2.GetBatchResponse(batch=batches_pb2.Batch(id="batch_1"))

    def DeleteFile(self, request: Any, context: Any) -> batches_pb2.DeleteFileResponse:
        self._fail(context)
        return batches_pb2.DeleteFileResponse()

    def UploadFile(self, request_iterator: Any, context: Any) -> batches_pb2.UploadFileResponse:
        n_bytes = sum([len(message.content) for message in request_iterator])
        self._fail(context)
        return batches_pb2.UploadFileResponse(file=batches_pb2.File(id="file-1", n_bytes=n_bytes))

    def DownloadFile(self, request: Any, context: Any) -> Iterator[batches_pb2.DownloadFileResponse]:
        for index, piece in enumerate(PIECES):
            if index == 2:
                self._fail(context)
            yield batches_pb2.DownloadFileResponse(content=piece)

    def _fail(self, context: Any) -> None:
        self.n_calls += 1
        if not self.failures:
            return
        failure = self.failures.pop(0)
        if isinstance(failure, grpc.StatusCode):
            context.abort(failure, "Socket closed")
        else:
            context.abort_with_status(to_status(failure))


@contextmanager
def _serving(failures: list[Any]) -> Iterator[tuple[Faulty, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), partial_servicer(Faulty, failures)
    batches_pb2_grpc.add_BatchServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAUSE_S", 0.0)


async def _made(
    kind: type[Client | AsyncClient], failures: list[Any], method: str, *given: Any
) -> tuple[Any, int]:
    """The result of a call or its error, and how often the server had it."""
    with _serving(failures) as (servicer, endpoint):
        client = EitherClient(kind(endpoint))
        try:
            found = await client(method, *given)
        except SlipstreamError as error:
            found = error
        finally:
            await client.close()
        return found, servicer.n_calls


ONCE = [("batches.create", "file-1"), ("files.upload", b"content"), ("files.delete", "file-1")]
LOST = grpc.StatusCode.UNAVAILABLE


@KINDS
async def test_an_idempotent_call_outlasts_its_router(kind: type[Client | AsyncClient]) -> None:
    found, n_calls = await _made(kind, [LOST, Unavailable("lost")], "batches.get", "batch_1")
    assert (found.id, n_calls) == ("batch_1", 3)


@KINDS
@pytest.mark.parametrize(("method", "given"), ONCE)
@pytest.mark.parametrize(
    "failure", [LOST, Unavailable("the database is unavailable")], ids=["lost", "unavailable"]
)
async def test_what_may_be_done_already_is_not_done_twice(
    kind: type[Client | AsyncClient], method: str, given: Any, failure: Any
) -> None:
    found, n_calls = await _made(kind, [failure], method, given)
    assert isinstance(found, Unavailable) and n_calls == 1


@KINDS
@pytest.mark.parametrize(("method", "given"), ONCE)
async def test_a_router_that_drains_has_done_nothing(
    kind: type[Client | AsyncClient], method: str, given: Any
) -> None:
    found, n_calls = await _made(kind, [Draining("it stops")], method, given)
    assert not isinstance(found, SlipstreamError) and n_calls == 2
    if method == "files.upload":
        assert found.n_bytes == len(given)  # the second try had all


@KINDS
@pytest.mark.parametrize("failure", [NotFound("none"), Internal("defect"), DeadlineExceeded("late")])
async def test_a_routers_own_word_is_final(
    kind: type[Client | AsyncClient], failure: SlipstreamError
) -> None:
    found, n_calls = await _made(kind, [failure], "batches.get", "batch_1")
    assert type(found) is type(failure) and n_calls == 1


@KINDS
async def test_a_download_goes_on_where_its_router_was_lost(kind: type[Client | AsyncClient]) -> None:
    found, n_calls = await _made(kind, [LOST, LOST], "files.content", "file-1")
    assert b"".join(found) == b"".join(PIECES) and n_calls == 3


@KINDS
async def test_a_wait_that_finds_no_router_ends_with_its_time_out(
    kind: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAUSE_S", 0.05)
    monkeypatch.setattr(limits, "LOST_S", 1e6)
    client = EitherClient(kind("127.0.0.1:1"))
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await client("batches.wait", "batch_1", timeout_s=0.1)
    await client.close()
