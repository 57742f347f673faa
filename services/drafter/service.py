"""DrafterService: many decode streams, one head. The contract: protos/slipstream/v1/drafter.proto."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from libs.common.rpc.telemetry import Counters
from libs.worker.requests.messages import parse_features
from libs.worker.requests.request_spec import pack_tokens, parse_tokens
from services.drafter.batcher import Batcher, Proposal, Work
from services.drafter.draft_spans import DraftSpans
from services.drafter.drafts import ContextRows
from slipstream.errors import Draining, InvalidArgument
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_SEQ_ID_CHARS = 512
MAX_SEQUENCES_PER_STREAM = 1024
# Requests of one stream that are not answered yet; beyond this the stream is not read.
_MAX_WAITING = 8


class _Stream:
    """One decode worker: its sequences and the answers on their way to it."""

    def __init__(self, number: int) -> None:
        self.prefix = f"{number}/"
        self.seq_ids: set[str] = set()
        self.answers: asyncio.Queue[list[Proposal] | None] = asyncio.Queue()
        self.room = asyncio.Semaphore(_MAX_WAITING)
        self.spans = DraftSpans()


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """Sequences of different streams never meet, whatever they are called."""

    def __init__(self, batcher: Batcher, *, feature_width: int) -> None:
        self._batcher = batcher
        self._feature_width = feature_width
        self._numbers = itertools.count()
        self._streams: set[_Stream] = set()
        self._draining = False
        self.counters = Counters()

    async def drain(self) -> None:
        """Refuse new streams and end those that run: decode workers go on without drafts."""
        self._draining = True
        for stream in self._streams:
            stream.answers.put_nowait(None)

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: _Context
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        if self._draining:
            raise Draining("this drafter is draining")
        stream = _Stream(next(self._numbers))
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream), name="draft stream")
        try:
            while (proposals := await stream.answers.get()) is not None:
                stream.room.release()
                if proposals:
                    for proposal in proposals:
                        stream.spans.proposed(proposal)
                    yield self._respond(stream, proposals)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._streams.discard(stream)
            stream.spans.close()
            self._batcher.submit(Work((), tuple(stream.seq_ids), (), answer=lambda _: None))

    def ledger(self) -> worker_pb2.Ledger:
        """What is held for decode workers."""
        return worker_pb2.Ledger(
            sequences=self._batcher.sequences, streams=sum(bool(stream.seq_ids) for stream in self._streams)
        )

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        return worker_pb2.LoadReport(requests_running=self._batcher.sequences)

    async def _read(self, requests: AsyncIterator[drafter_pb2.DraftRequest], stream: _Stream) -> None:
        try:
            async for request in requests:
                await stream.room.acquire()
                self._batcher.submit(self._work(request, stream))
        finally:
            stream.answers.put_nowait(None)

    def _work(self, request: drafter_pb2.DraftRequest, stream: _Stream) -> Work:
        rows = [self._rows(extend, stream) for extend in request.extends]
        closed = [stream.prefix + seq_id for seq_id in request.closed]
        stream.seq_ids.difference_update(closed)
        for seq_id in closed:
            stream.spans.closed(seq_id)
        return Work(
            rows=rows,
            closed=closed,
            draft_tokens=[extend.draft_tokens for extend in request.extends],
            answer=stream.answers.put_nowait,
        )

    def _rows(self, extend: drafter_pb2.ExtendContext, stream: _Stream) -> ContextRows:
        seq_id = stream.prefix + extend.seq_id
        if not extend.seq_id or len(extend.seq_id) > MAX_SEQ_ID_CHARS:
            raise InvalidArgument("seq_id", f"must have 1 to {MAX_SEQ_ID_CHARS} characters")
        if seq_id not in stream.seq_ids and len(stream.seq_ids) >= MAX_SEQUENCES_PER_STREAM:
            raise InvalidArgument("extends", f"has more than {MAX_SEQUENCES_PER_STREAM} sequences open")
        if extend.width != self._feature_width:
            raise InvalidArgument("width", f"must be {self._feature_width}, not {extend.width}")
        tokens = parse_tokens(extend.next_tokens, "next_tokens")
        features = parse_features(extend.features, extend.width, "features")
        if not len(tokens) or len(tokens) != len(features):
            raise InvalidArgument("features", f"{len(features)} rows for {len(tokens)} tokens")
        stream.seq_ids.add(seq_id)
        stream.spans.extended(seq_id, extend, tokens)
        return ContextRows(seq_id, extend.start_position, tokens, features)

    def _respond(self, stream: _Stream, proposals: list[Proposal]) -> drafter_pb2.DraftResponse:
        return drafter_pb2.DraftResponse(
            proposals=[
                drafter_pb2.Proposal(
                    seq_id=p.seq_id.removeprefix(stream.prefix),
                    base_tokens=p.base_tokens,
                    tokens=pack_tokens(p.tokens),
                )
                for p in proposals
            ]
        )
