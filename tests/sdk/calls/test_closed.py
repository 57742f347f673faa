"""Calls after `close`."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest

from slipstream import AsyncClient, Client
from slipstream.endpoints import Endpoints
from slipstream.errors import FailedPrecondition
from slipstream.v1 import router_pb2
from slipstream.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import HELLO
from tests.sdk.calls.either_client import KINDS, EitherClient

CALLS: list[tuple[str, Any]] = [
    ("chat", (HELLO,)),
    ("stream_chat", (HELLO,)),
    ("complete", ("Once",)),
    ("models", ()),
    ("usage", ()),
    ("abort", ("r1",)),
    ("tokenize", ("Once",)),
    ("detokenize", ([1],)),
    ("jobs.get", ("job-1",)),
    ("jobs.follow", ("job-1",)),
    ("jobs.submit", ([{}],)),
    ("responses.get", ("resp_1",)),
    ("responses.input_items", ("resp_1",)),
    ("files.upload", (b"{}",)),
    ("files.content", ("file-1",)),
    ("files.list_files", ()),
    ("batches.create", ("file-1",)),
    ("batches.wait", ("batch_1",)),
    ("batches.answers", ("batch_1",)),
]


@KINDS
@pytest.mark.parametrize(("method", "arguments"), CALLS, ids=[name for name, _ in CALLS])
async def test_a_closed_client_says_so(
    kind: type[Client | AsyncClient], method: str, arguments: tuple[Any, ...]
) -> None:
    client = EitherClient(kind("127.0.0.1:1"))
    await client.close()
    with pytest.raises(FailedPrecondition, match=r"^the client is closed$"):
        await client(method, *arguments)


def test_another_thread_closes_no_channel_whose_stub_is_made() -> None:
    endpoints = Endpoints("127.0.0.1:1", grpc.insecure_channel)

    def close() -> None:
        for channel in endpoints.close():
            channel.close()

    closer = threading.Thread(target=close)

    def make_stub(channel: grpc.Channel) -> RouterServiceStub:
        closer.start()
        closer.join(0.5)  # it waits for this function
        return RouterServiceStub(channel)

    _, stub = endpoints.current(make_stub)
    closer.join(60)
    with pytest.raises(FailedPrecondition, match=r"^the client is closed$"), endpoints.calling():
        stub.ListModels(router_pb2.ListModelsRequest(), timeout=5)


def test_another_error_of_a_call_stays_what_it_is() -> None:
    endpoints = Endpoints("127.0.0.1:1", grpc.insecure_channel)
    with pytest.raises(ValueError, match="odd"), endpoints.calling():
        raise ValueError("odd")
