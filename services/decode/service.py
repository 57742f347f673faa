"""DecodeService: the gRPC face of sequences. The contract: protos/slipstream/v1/decode.proto."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from libs.worker.process.core import WorkerCore
from libs.worker.requests.attempts import AttemptKey, AttemptRegistry
from libs.worker.requests.clock import deadline_after
from services.decode.plan import plan_decode
from services.decode.sequence import DecodeSequence
from services.decode.speculation import Speculation
from services.decode.stream import DecodeStream
from slipstream.errors import Draining, Internal, InvalidArgument, SlipstreamError
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Admits sequences and sends their tokens, one frame a step for each router."""

    def __init__(self, core: WorkerCore, speculation: Speculation | None) -> None:
        self._core = core
        self._speculation = speculation
        self._attempts = AttemptRegistry()
        self._sequences: dict[AttemptKey, DecodeSequence] = {}
        self._streams: set[DecodeStream] = set()
        self._draining = False
        core.after_step = self._flush

    async def drain(self) -> None:
        """Refuse new sequences; what runs goes on."""
        self._draining = True

    async def close(self) -> None:
        """End everything. Routers are told that the worker is gone, so that they resume elsewhere."""
        self._draining = True
        sequences = list(self._sequences.values())
        for sequence in sequences:
            sequence.end(Draining("this worker stops"))
        await asyncio.gather(*(sequence.wait_ended() for sequence in sequences))
        for stream in self._streams:
            stream.close_input()

    # ---- rpcs

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: _Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        stream = DecodeStream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream), name="decode stream")
        try:
            while (frame := await stream.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._streams.discard(stream)
            for sequence in list(stream.sequences):
                sequence.end()

    async def AbortDecode(
        self, request: decode_pb2.AbortDecodeRequest, context: _Context
    ) -> decode_pb2.AbortDecodeResponse:
        await asyncio.gather(*(sequence.wait_ended() for sequence in self._abort(request.attempt)))
        return decode_pb2.AbortDecodeResponse()

    # ---- what is held

    def ledger(self) -> worker_pb2.Ledger:
        """What this worker holds for somebody. Idle streams of routers are no holdings."""
        ledger = self._core.ledger()
        ledger.sequences = max(ledger.sequences, self._attempts.running)
        ledger.streams = sum(bool(stream.sequences) for stream in self._streams)
        return ledger

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        return self._core.load()

    # ---- commands

    async def _read(self, requests: AsyncIterator[decode_pb2.DecodeRequest], stream: DecodeStream) -> None:
        try:
            async for request in requests:
                for start in request.starts:
                    self._start(start, stream)
                if request.HasField("frame_interval_ms"):
                    stream.pace(request.frame_interval_ms)
                for abort in request.aborts:
                    self._abort(abort.attempt)
        finally:
            stream.close_input()

    def _start(self, start: decode_pb2.StartSequence, stream: DecodeStream) -> None:
        """Admit, or answer with a failure of this sequence."""
        try:
            self._admit(start, stream)
        except Exception as error:
            # Whatever it is, it is this sequence's: the stream carries others.
            if not isinstance(error, SlipstreamError):
                log.exception("%s/%d is not admitted", start.attempt.request_id, start.attempt.attempt)
                error = Internal("internal error")
            delta = decode_pb2.SequenceDelta(
                request_id=start.attempt.request_id,
                attempt=start.attempt.attempt,
                finish_reason=common_pb2.FINISH_REASON_ERROR,
                failure=to_failure(error),
                stats=decode_pb2.SequenceStats(),
            )
            stream.emit(delta)
            stream.flush()

    def _admit(self, start: decode_pb2.StartSequence, stream: DecodeStream) -> None:
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
        sequence = DecodeSequence(self._core, plan, self._speculation, stream.emit)
        attempt = start.attempt
        for key in self._attempts.admit(attempt.request_id, attempt.attempt, attempt.epoch):
            self._sequences[key].end()
        self._sequences[plan.key] = sequence
        stream.admit(sequence, handle=start.handle)

        def forget(_: asyncio.Task[None]) -> None:
            self._sequences.pop(plan.key, None)
            self._attempts.end(plan.key)
            stream.forget(sequence)
            self._core.load_changed()

        sequence.start().add_done_callback(forget)
        self._core.counters.add("slipstream_requests_total")
        self._core.load_changed()

    def _abort(self, attempt: common_pb2.Attempt) -> list[DecodeSequence]:
        keys = self._attempts.abort(attempt.request_id, attempt.attempt)
        sequences = [self._sequences[key] for key in keys]
        for sequence in sequences:
            sequence.end()
        return sequences

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()
