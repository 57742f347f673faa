"""DecodeService: admits sequences and streams their tokens. Contract: protos/slipstream/v1/decode.proto."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from libs.common.rpc.multiplexed_server import Cancel, MultiplexedServer
from libs.common.telemetry.recent_rate import RecentRate
from libs.worker.process.core import WorkerCore
from libs.worker.requests.attempts import AttemptKey, AttemptRegistry
from libs.worker.requests.clock import deadline_after
from services.decode.plan import plan_decode
from services.decode.sequence import DecodeSequence, Emit
from services.decode.speculation import Speculation
from services.decode.stream import DecodeStream
from slipstream.errors import Draining, InvalidArgument
from slipstream.v1 import decode_pb2, decode_pb2_grpc, worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Admits sequences and sends each router one frame a step, or fewer if it asks so."""

    def __init__(self, core: WorkerCore, speculation: Speculation | None) -> None:
        self._core = core
        self._speculation = speculation
        self._attempts = AttemptRegistry()
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._router_streams = MultiplexedServer(lambda: DecodeStream(self._admit))
        self._draining = False
        self._drafts_due, self._drafts_missed = RecentRate(), RecentRate()

    async def drain(self) -> None:
        """Refuse new sequences; what runs goes on."""
        self._draining = True

    def undrain(self) -> None:
        """Accept new sequences again."""
        self._draining = False

    async def close(self) -> None:
        """End everything. The sequences fail with Draining, so that routers resume them elsewhere."""
        self._draining = True
        sequences = list(self._sequences.values())
        for sequence in sequences:
            sequence.end(Draining("this worker stops"))
        await asyncio.gather(*(sequence.wait_ended() for sequence in sequences))
        self._router_streams.close()

    # ---- rpcs

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: _Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        async with aclosing(self._router_streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def AbortDecode(
        self, request: decode_pb2.AbortDecodeRequest, context: _Context
    ) -> decode_pb2.AbortDecodeResponse:
        keys = self._attempts.abort(request.attempt.request_id, request.attempt.attempt)
        sequences = [self._sequences[key] for key in keys]
        for sequence in sequences:
            sequence.end()
        await asyncio.gather(*(sequence.wait_ended() for sequence in sequences))
        return decode_pb2.AbortDecodeResponse()

    # ---- what is held

    def ledger(self) -> worker_pb2.Ledger:
        """This worker's holdings for requests. Idle streams of routers do not count."""
        ledger = self._core.ledger()
        ledger.sequences = max(ledger.sequences, self._attempts.running)
        ledger.streams = sum(bool(stream.running) for stream in self._router_streams.streams)
        return ledger

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        load = self._core.load()
        if self._speculation is not None:
            now_s = time.monotonic()
            load.drafts_due_per_s = self._drafts_due.per_s(now_s, self._speculation.drafts_due)
            load.drafts_missed_per_s = self._drafts_missed.per_s(now_s, self._speculation.drafts_missed)
        return load

    # ---- admission

    def _admit(self, start: decode_pb2.StartSequence, emit: Emit) -> tuple[asyncio.Task[None], Cancel]:
        """See `Admit`."""
        if self._draining:
            raise Draining("this worker is draining")
        if not start.handle:
            raise InvalidArgument("handle", "must not be 0")
        plan = plan_decode(
            start,
            self._core.fingerprint,
            self._core.info,
            memory=self._core.prompts,
            transport_kind=self._core.transport.kind,
            deadline_s=deadline_after(start.deadline_ms),
        )
        sequence = DecodeSequence(self._core, plan, self._speculation, emit, handle=start.handle)
        attempt = start.attempt
        for key in self._attempts.admit(attempt.request_id, attempt.attempt, attempt.epoch):
            self._sequences[key].end()
        self._sequences[plan.key] = sequence
        task = sequence.start()
        task.add_done_callback(lambda _: self._remove(plan.key))
        self._core.counters.add("slipstream_requests_total")
        self._core.load_changed()
        return task, sequence.end

    def _remove(self, key: AttemptKey) -> None:
        self._sequences.pop(key, None)
        self._attempts.end(key)
        self._core.load_changed()
