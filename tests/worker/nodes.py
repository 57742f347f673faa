"""Workers in this process with real gRPC, real sockets and the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from libs.common.block_hash import chain_hashes
from libs.common.checksum import KvChecksum
from libs.common.cluster.worker_service import held
from libs.common.rpc.serve import ServiceHost
from libs.common.transport.socket import SocketTransport
from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import build_fake_engine
from libs.worker.engine.engine_thread import DraftSource
from libs.worker.process.core import WorkerCore
from libs.worker.process.identity import worker_fingerprint
from services.decode.service import DecodeService
from services.decode.speculation import Speculation
from services.prefill.handoff_state import MAX_LEASE_MS
from services.prefill.service import PrefillService
from slipstream.block_hashes import pack_hashes
from slipstream.errors import SlipstreamError
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.sampling import SAMPLING_DEFAULTS
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_events_pb2_grpc,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)
from tests.support.stubs.remote_prompt import RemotePrompt

BLOCK_TOKENS = 4
_handles = itertools.count(1)
_sequence_of: dict[int, common_pb2.Attempt] = {}  # handle -> sequence
SALT = b"tenant"
CHECKSUM = KvChecksum(b"key of the nodes")
WAIT_S = 100.0


async def eventually(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Poll until the condition holds; fail after WAIT_S."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"{what} does not hold after {WAIT_S:g} s"
        await asyncio.sleep(0.005)


def script(history: Any, _params: Any) -> int:
    """Return a next token that a drafter can predict from the last one."""
    return int(history[-1] * 7 + 3) % 1000


class Gate:
    """Blocks the steps of a fake engine, as its `sleep`, until they are allowed."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False
        self.arrived = 0

    def __call__(self, _seconds: float) -> None:
        self.arrived += 1
        if not self._open:
            assert self._steps.acquire(timeout=WAIT_S)

    def allow(self, steps: int) -> None:
        """Allow `steps` more steps."""
        for _ in range(steps):
            self._steps.release()

    def open(self) -> None:
        """Allow all further steps."""
        self._open = True
        self._steps.release()


async def step_until(gate: Gate, condition: Callable[[], bool]) -> None:
    """Allow one step after the other until the condition holds."""

    def holds() -> bool:
        if condition():
            return True
        gate.allow(1)
        return False

    await eventually(holds)


@dataclass
class Node:
    """One worker: its core, its service, its address and a channel to it."""

    core: WorkerCore
    engine: PagedEngine
    service: Any
    host: ServiceHost
    channel: grpc.aio.Channel

    @property
    def ledger(self) -> worker_pb2.Ledger:
        ledger: worker_pb2.Ledger = self.service.ledger()
        return ledger

    async def wait_idle(self) -> None:
        """Wait until the service and the engine hold nothing for any request."""
        await eventually(lambda: held(self.ledger) == 0, f"an empty ledger, {self.ledger!r}")
        # The service may release a sequence shortly before the engine reports the release.
        own = self.core.thread
        await eventually(lambda: not self.core.exporter.staged_bytes, "no staged copies")
        await eventually(lambda: not self.core.features.held_bytes, "no features of prompts")
        await eventually(lambda: own.ledger.sequences == own.ledger.pages_held == 0, "an engine without work")
        await self.core.thread.call(lambda engine: engine.check())  # type: ignore[attr-defined]


class Nodes:
    """Starts workers, and stops all of them at the end."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    async def prefill(self, instance: str = "prefill-0", **engine: Any) -> Node:
        core, built = await self._core(instance, None, engine)
        host = ServiceHost("127.0.0.1:0")
        service = PrefillService(core, endpoint=host.endpoint)
        service.start()
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(service, host.server)
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(core.lender, host.server)
        return await self._serve(core, built, service, host)

    async def decode(
        self, instance: str = "decode-0", speculation: Speculation | None = None, **engine: Any
    ) -> Node:
        core, built = await self._core(instance, speculation, engine)
        host = ServiceHost("127.0.0.1:0")
        if speculation is not None:
            speculation.start()
            self._stack.push_async_callback(speculation.close)
        service = DecodeService(core, speculation)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, host.server)
        return await self._serve(core, built, service, host)

    async def _core(
        self, instance: str, draft_source: DraftSource | None, engine: dict[str, Any]
    ) -> tuple[WorkerCore, PagedEngine]:
        max_waiting = engine.pop("max_waiting", 16)
        # Restores wait long enough for their sources, even on slow machines.
        floor_ms = engine.pop("restore_floor_ms", WAIT_S * 1e3)
        kv_staging_bytes = engine.pop("kv_staging_bytes", None)
        checksum = engine.pop("checksum", CHECKSUM)
        settings = {"n_pages": 128, "block_tokens": BLOCK_TOKENS, "step_tokens": 64, **engine}
        built: list[PagedEngine] = []

        def build() -> PagedEngine:
            built.append(build_fake_engine(**settings))
            return built[0]

        core = WorkerCore(
            build,
            SocketTransport(),
            instance=instance,
            draft_source=draft_source,
            restore_floor_ms=floor_ms,
            checksum=checksum,
            kv_staging_bytes=kv_staging_bytes,
        )
        self._stack.push_async_callback(core.close)
        await core.open(lambda info: worker_fingerprint(info, None), max_waiting=max_waiting, max_running=32)
        return core, built[0]

    async def _serve(self, core: WorkerCore, engine: PagedEngine, service: Any, host: ServiceHost) -> Node:
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(core.events, host.server)
        await host.start([])
        channel = dial(host.endpoint)
        self._stack.push_async_callback(host.stop, grace_s=0)
        self._stack.push_async_callback(service.close)
        self._stack.push_async_callback(channel.close)
        return Node(core, engine, service, host, channel)


@contextlib.asynccontextmanager
async def running_nodes() -> AsyncIterator[Nodes]:
    async with contextlib.AsyncExitStack() as stack:
        yield Nodes(stack)


def greedy(max_tokens: int = 8, **fields: Any) -> common_pb2.SamplingParams:
    """Return complete parameters of a greedy request."""
    values: dict[str, Any] = {**SAMPLING_DEFAULTS, "temperature": 0.0, "ignore_eos": True, **fields}
    return common_pb2.SamplingParams(max_tokens=max_tokens, **values)


def prompt_tokens(n: int, *, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 1000, n).tolist()
    return tokens


def packed(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpacked(raw: bytes) -> list[int]:
    return np.frombuffer(raw, dtype="<u4").tolist()  # type: ignore[no-any-return]


def unpacked_deltas(frame: decode_pb2.DecodeResponse) -> Iterator[decode_pb2.SequenceDelta]:
    """Unpack the tokens of a frame, one list for each delta."""
    handles, tokens = unpacked(frame.packed_handles), unpacked(frame.packed_tokens)
    for handle, token in zip(handles, tokens, strict=True):
        yield decode_pb2.SequenceDelta(handle=handle, tokens=packed([token]))


def hashes_of(node: Node, tokens: list[int]) -> list[bytes]:
    return chain_hashes(
        tokens,
        root=node.core.fingerprint.digest,
        salt=SALT,
        block_tokens=node.core.info.block_tokens,
    )


def attempt(request_id: str = "r", number: int = 1, epoch: int = 0) -> common_pb2.Attempt:
    return common_pb2.Attempt(request_id=request_id, attempt=number, epoch=epoch)


def prefill_request(node: Node, tokens: list[int], **fields: Any) -> prefill_pb2.StartPrefill:
    return prefill_pb2.StartPrefill(**_common_fields(node, tokens) | {"lease_ms": MAX_LEASE_MS, **fields})


def start_request(node: Node, tokens: list[int], **fields: Any) -> decode_pb2.DecodeRequest:
    start = decode_pb2.StartSequence(**_common_fields(node, tokens) | fields)
    start.handle = next(_handles)
    _sequence_of[start.handle] = start.attempt
    return decode_pb2.DecodeRequest(starts=[start])


def abort_request(request_id: str = "r", number: int = 1) -> decode_pb2.DecodeRequest:
    """Abort the sequences that `start_request` made of this attempt."""
    name = (request_id, number)
    handles = [handle for handle, a in _sequence_of.items() if (a.request_id, a.attempt) == name]
    return decode_pb2.DecodeRequest(aborts=handles)


def _common_fields(node: Node, tokens: list[int]) -> dict[str, Any]:
    """Return the fields that prefill and decode requests for a prompt share."""
    return {
        "attempt": attempt(),
        "fingerprint": node.core.fingerprint.to_proto(),
        "prompt": packed(tokens),
        "block_hashes": pack_hashes(hashes_of(node, tokens)),
        "sampling": greedy(),
        "salt": SALT,
    }


class PrefillCall:
    """One prompt on a separate Prefill stream: iterate over its events."""

    def __init__(self, node: Node, start: prefill_pb2.StartPrefill) -> None:
        self.events: list[prefill_pb2.PrefillEvent] = []
        self._prompt = RemotePrompt(node.channel, start)
        self.call = self._prompt.call

    async def opened(self) -> prefill_pb2.HandoffOpened:
        event = await anext(aiter(self._prompt))
        assert event.HasField("opened")
        self.events.append(event)
        return event.opened

    async def error(self) -> SlipstreamError:
        """Return the error of the prompt."""
        try:
            async for event in self._prompt:
                self.events.append(event)
        except SlipstreamError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError("the prompt did not fail")

    async def first_token(self) -> prefill_pb2.FirstToken:
        async for event in self._prompt:
            self.events.append(event)
        assert self.events[-1].HasField("first_token")
        return self.events[-1].first_token


class RouterStream:
    """One Decode stream of a router, with the received deltas by request id."""

    def __init__(self, node: Node) -> None:
        self.call = decode_pb2_grpc.DecodeServiceStub(node.channel).Decode()
        self.deltas: dict[str, list[decode_pb2.SequenceDelta]] = {}
        self.frames: list[decode_pb2.DecodeResponse] = []
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._writing = asyncio.Lock()

    async def write(self, request: decode_pb2.DecodeRequest) -> None:
        """Write a request; any task may call this, although gRPC takes one write at a time."""
        async with self._writing:
            await self.call.write(request)

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for frame in self.call:
                self.frames.append(frame)
                for delta in (*frame.deltas, *unpacked_deltas(frame)):
                    self.deltas.setdefault(_sequence_of[delta.handle].request_id, []).append(delta)
                self._changed.set()

    def tokens(self, request_id: str = "r") -> list[int]:
        return [t for delta in self.deltas.get(request_id, ()) for t in unpacked(delta.tokens)]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def last(self, request_id: str = "r") -> decode_pb2.SequenceDelta:
        """Wait for the delta with the finish reason."""
        await self.until(lambda: request_id in self.deltas and self.deltas[request_id][-1].finish_reason)
        return self.deltas[request_id][-1]

    async def running(self, request_id: str = "r") -> None:
        await self.until(lambda: any(d.running for d in self.deltas.get(request_id, ())))

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
