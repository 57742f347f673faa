"""The Decode stream of a router: what it sends, and how often it asks for frames."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from libs.common.block_hash import as_tokens
from services.router.workers.decode_client import LEAST_INTERVAL_MS, DecodeClient
from services.router.workers.delivery.token_batcher import TokenBatcher
from services.router.workers.prompt_delta import OutgoingPrompt
from services.router.workers.remote_sequence import RemoteSequence
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.support.listeners import SequenceReader

PROMPT = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)


class QuietDecodeClient(DecodeClient):
    """A client without a peer, which keeps what it would send."""

    def __init__(self) -> None:
        class Channel:
            def __getattr__(self, name: str) -> Any:
                return lambda *_args, **_options: None

        self.batcher = TokenBatcher()
        super().__init__(Channel(), instance="decode-0", batcher=self.batcher)  # type: ignore[arg-type]
        self.sent: list[Any] = []
        self.opened = True

    def send(self, command: Any) -> None:
        self.sent.append(command)

    @property
    def is_open(self) -> bool:
        return self.opened

    def begin(self, request_id: str = "r") -> RemoteSequence:
        attempt = common_pb2.Attempt(request_id=request_id, attempt=1)
        return self.start(decode_pb2.StartSequence(attempt=attempt, ticket=b"t"), PROMPT, SequenceReader())

    def intervals_ms(self, *pauses_s: float) -> list[int]:
        """What it asks for after a frame at each of these pauses between rounds."""
        self.sent.clear()
        for pause_s in pauses_s:
            self.batcher.pause_s = pause_s
            self.dispatch(decode_pb2.DecodeResponse())
        return [command.frame_interval_ms for command in self.sent]


async def test_a_frame_carries_starts_aborts_and_the_newest_interval() -> None:
    client = QuietDecodeClient()
    first, second = client.begin("a"), client.begin("b")
    client.abort(first)
    client.remove(second)
    client.abort(second)  # it has ended: nothing is to be stopped
    assert client.sent[2:] == [first.handle] and first.handle != second.handle
    intervals = [decode_pb2.DecodeRequest(frame_interval_ms=n) for n in (8, 16)]
    [packed] = client.pack([*client.sent, *intervals])
    assert [start.handle for start in packed.starts] == [first.handle, second.handle]
    assert (list(packed.aborts), packed.frame_interval_ms) == ([first.handle], 16)


async def test_the_worker_is_asked_once_for_each_interval_and_again_by_a_new_stream() -> None:
    client = QuietDecodeClient()
    assert client.intervals_ms(0.0, 0.001, 0.0) == [LEAST_INTERVAL_MS]
    assert client.intervals_ms(0.05, 0.05, 0.06, 0.03) == [25]
    client.on_broken()
    client.opened = False
    assert client.intervals_ms(0.05) == []
    client.opened = True
    assert client.intervals_ms(0.05, 0.05) == [25]
    assert client.intervals_ms(0.0) == [LEAST_INTERVAL_MS]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_abort_waits_for_the_worker_and_accepts_that_it_cannot_be_asked(fails: bool) -> None:
    client, asked, may_end = QuietDecodeClient(), list[Any](), asyncio.Event()

    async def abort(request: decode_pb2.AbortDecodeRequest, *, timeout: float, metadata: Any) -> None:
        asked.append((request.attempt.request_id, timeout))
        await may_end.wait()
        if fails:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details="gone")

    client._stub = type("Stub", (), {"AbortDecode": staticmethod(abort)})()
    waiting = asyncio.create_task(
        client.abort_and_wait(common_pb2.Attempt(request_id="r", attempt=1), timeout_s=2.5)
    )
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == [("r", 2.5)] and not waiting.done()
    may_end.set()
    await waiting


async def test_tokens_of_several_steps_reach_their_sequences_and_those_of_removed_ones_none() -> None:
    client, reader = QuietDecodeClient(), SequenceReader()
    start = decode_pb2.StartSequence(attempt=common_pb2.Attempt(request_id="a", attempt=1), ticket=b"t")
    kept, gone = client.start(start, PROMPT, reader), client.begin("b")
    kept.resume()
    client.remove(gone)
    handles = as_tokens([kept.handle, gone.handle, kept.handle]).tobytes()
    client.dispatch(
        decode_pb2.DecodeResponse(packed_handles=handles, packed_tokens=as_tokens([5, 6, 7]).tobytes())
    )
    assert (await reader.next()).tokens == [5, 7]
    client.dispatch(decode_pb2.DecodeResponse(deltas=[decode_pb2.SequenceDelta(handle=gone.handle)]))
