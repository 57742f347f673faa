"""DrafterService: many decode streams, one head. The contract: protos/slipstream/v1/drafter.proto."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from libs.common.rpc.multiplexed_server import MultiplexedServer, ServerStream
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.recent_rate import RecentRate
from libs.engine.step.draft_head import ContextRows
from libs.worker.requests.messages import parse_features
from libs.worker.requests.request_spec import pack_tokens, parse_tokens
from services.drafter.batcher import Batcher, Proposal, Work
from services.drafter.draft_spans import DraftSpans
from slipstream.errors import Draining, InvalidArgument
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_SEQ_ID_CHARS = 512
MAX_SEQUENCES_PER_STREAM = 1024
MAX_POSITION = 1 << 30  # beyond any context; the positions of drafts after it fit the message, too
# Requests of one stream that are not answered yet; beyond this the stream is not read.
_MAX_WAITING = 8


class DraftStream(ServerStream[None, Sequence[Proposal]]):
    """One decode worker: its sequences, and the proposals on their way to it.

    `number` keeps its sequences apart from those of other streams, whatever their ids are.
    """

    def __init__(self, number: int, batcher: Batcher, counters: Counters, *, feature_width: int) -> None:
        super().__init__()
        self._counters = counters
        self.seq_ids: set[str] = set()
        self._prefix = f"{number}/"
        self._batcher = batcher
        self._feature_width = feature_width
        self._room = asyncio.Semaphore(_MAX_WAITING)
        self._spans = DraftSpans()

    # ---- ServerStream

    async def on_request(self, request: drafter_pb2.DraftRequest) -> None:
        await self._room.acquire()
        self._batcher.submit(self._work(request))

    def put(self, proposals: Sequence[Proposal]) -> None:
        if proposals:
            super().put(proposals)
        else:
            self._room.release()

    def frame(self, answers: Sequence[Sequence[Proposal]]) -> drafter_pb2.DraftResponse:
        response = drafter_pb2.DraftResponse()
        for proposals in answers:
            self._room.release()
            for proposal in proposals:
                self._spans.proposed(proposal)
                response.proposals.add(
                    seq_id=proposal.seq_id.removeprefix(self._prefix),
                    base_tokens=proposal.base_tokens,
                    tokens=pack_tokens(proposal.tokens),
                )
        n_tokens = sum(len(proposal.tokens) for proposals in answers for proposal in proposals)
        self._counters.add("slipstream_drafts_total", len(response.proposals))
        self._counters.add("slipstream_draft_tokens_total", n_tokens)
        return response

    def end(self) -> None:
        self._spans.close()
        self._batcher.submit(Work((), tuple(self.seq_ids), (), answer=lambda _: None))

    # ---- requests

    def _work(self, request: drafter_pb2.DraftRequest) -> Work:
        rows = [self._rows(extend) for extend in request.extends]
        closed = [self._prefix + seq_id for seq_id in request.closed]
        self.seq_ids.difference_update(closed)
        for seq_id in closed:
            self._spans.closed(seq_id)
        draft_tokens = [extend.draft_tokens for extend in request.extends]
        return Work(
            rows=rows,
            closed=closed,
            draft_tokens=draft_tokens,
            answer=self.put,
            min_confidence=request.min_confidence,
        )

    def _rows(self, extend: drafter_pb2.ExtendContext) -> ContextRows:
        seq_id = self._prefix + extend.seq_id
        if not extend.seq_id or len(extend.seq_id) > MAX_SEQ_ID_CHARS:
            raise InvalidArgument("seq_id", f"must have 1 to {MAX_SEQ_ID_CHARS} characters")
        if seq_id not in self.seq_ids and len(self.seq_ids) >= MAX_SEQUENCES_PER_STREAM:
            raise InvalidArgument("extends", f"has more than {MAX_SEQUENCES_PER_STREAM} sequences open")
        if extend.width != self._feature_width:
            raise InvalidArgument("width", f"must be {self._feature_width}, not {extend.width}")
        if extend.start_position > MAX_POSITION:
            raise InvalidArgument("start_position", f"must be at most {MAX_POSITION}")
        tokens = parse_tokens(extend.next_tokens, "next_tokens")
        features = parse_features(extend.features, extend.width, "features")
        if not len(tokens) or len(tokens) != len(features):
            raise InvalidArgument("features", f"{len(features)} rows for {len(tokens)} tokens")
        self.seq_ids.add(seq_id)
        self._spans.extended(seq_id, extend, tokens)
        return ContextRows(seq_id, extend.start_position, tokens, features)


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """One stream for each decode worker, all of them on one batcher."""

    def __init__(self, batcher: Batcher, *, feature_width: int, counters: Counters | None = None) -> None:
        self._batcher = batcher
        counters = counters or Counters()
        self._busy = RecentRate()
        numbers = itertools.count()
        self._decode_streams = MultiplexedServer(
            lambda: DraftStream(next(numbers), batcher, counters, feature_width=feature_width)
        )
        self._draining = False

    async def drain(self) -> None:
        """Refuse new streams and end those that run: decode workers go on without drafts."""
        self._draining = True
        self._decode_streams.close()

    def undrain(self) -> None:
        """Accept new streams again."""
        self._draining = False
        self._decode_streams.reopen()

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: _Context
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        if self._draining:
            raise Draining("this drafter is draining")
        async with aclosing(self._decode_streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    def ledger(self) -> worker_pb2.Ledger:
        """What is held for decode workers."""
        streams = self._decode_streams.streams
        return worker_pb2.Ledger(
            sequences=self._batcher.sequences, streams=sum(bool(stream.seq_ids) for stream in streams)
        )

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        busy_share = min(self._busy.per_s(time.monotonic(), self._batcher.busy_s), 1.0)
        return worker_pb2.LoadReport(requests_running=self._batcher.sequences, busy_share=busy_share)
