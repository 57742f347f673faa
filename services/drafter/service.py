"""DrafterService: many decode streams, one head. The contract: protos/slipstream/v1/drafter.proto."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from libs.common.block_hash import TokenArray
from libs.common.checksum import CHECKSUM_BYTES
from libs.common.rpc.multiplexed_server import MultiplexedServer, ServerStream
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.recent_rate import RecentRate
from libs.engine.step.draft_head import ContextRows, HeadRows
from libs.engine.step.types import FloatArray
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureReader
from libs.worker.requests.messages import FEATURE_BYTES, parse_features
from libs.worker.requests.request_spec import pack_tokens, parse_tokens
from services.drafter.batcher import Batcher, DraftWork, Proposal
from services.drafter.draft_spans import DraftSpans
from services.drafter.sequence_order import SequenceOrder
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import Draining, InvalidArgument
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_SEQ_ID_CHARS = 512
MAX_SEQUENCES_PER_STREAM = 1024
MAX_POSITION = 1 << 30  # beyond any context; the positions of drafts after it fit the message, too
# Requests of one stream that are not answered yet; beyond this the stream is not read.
_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class _Extend:
    """A checked extend; its features are here, or where the decode worker exported them."""

    seq_id: str  # on this drafter
    start_position: int
    tokens: TokenArray
    draft_tokens: int
    min_confidence: float
    features: FloatArray | None
    exported: ExportedFeatures | None = None
    session_id: str = ""

    def as_rows(self, features: FloatArray) -> HeadRows:
        return ContextRows(self.seq_id, self.start_position, self.tokens, features)

    @property
    def unread(self) -> Proposal:
        """The answer where the features cannot be had."""
        return Proposal(self.seq_id, self.start_position + len(self.tokens) + 1, (), is_unread=True)


class DraftStream(ServerStream[None, Sequence[Proposal] | None]):
    """One decode worker: its sequences, and the proposals on their way to it.

    `number` keeps its sequences apart from those of other streams, whatever their ids are.
    """

    def __init__(
        self,
        number: int,
        batcher: Batcher,
        counters: Counters,
        *,
        feature_width: int,
        reader: FeatureReader | None = None,
    ) -> None:
        super().__init__()
        self._reader = reader
        self._order = SequenceOrder()
        if reader is not None:
            super().put(None)  # the first frame names the transport
        self._counters = counters
        self.seq_ids: set[str] = set()
        self._prefix = f"{number}/"
        self._batcher = batcher
        self._feature_width = feature_width
        self._room = asyncio.Semaphore(_MAX_WAITING)
        self._spans = DraftSpans()

    # ---- ServerStream

    async def on_request(self, request: drafter_pb2.DraftRequest) -> None:
        extends = [self._checked(extend, request) for extend in request.extends]
        waiting: dict[str, None] = {}  # sequences of this request that wait for a read
        for extend in extends:
            if extend.exported is not None or extend.seq_id in self._order:
                waiting[extend.seq_id] = None
        ready = [
            (extend, extend.features)
            for extend in extends
            if extend.seq_id not in waiting and extend.features is not None
        ]
        await self._room.acquire()
        closed = self._closed(request.closed, waiting)
        self._submit(ready, closed, request.min_confidence)
        for extend in extends:
            if extend.seq_id in waiting:
                await self._room.acquire()
                self._order.add(extend.seq_id, partial(self._read_waiting, extend))
        for seq_id in request.closed:
            if (seq_id := self._prefix + seq_id) not in closed:
                self._order.add(seq_id, partial(self._close, seq_id))

    def put(self, proposals: Sequence[Proposal] | None) -> None:
        if proposals:
            super().put(proposals)
        else:
            self._room.release()

    def frame(self, answers: Sequence[Sequence[Proposal] | None]) -> drafter_pb2.DraftResponse:
        response = drafter_pb2.DraftResponse()
        for proposals in answers:
            if proposals is None:
                assert self._reader is not None
                response.transport = TRANSPORTS.value(self._reader.transport.kind)
                continue
            self._room.release()
            for proposal in proposals:
                self._spans.proposed(proposal)
                response.proposals.add(
                    seq_id=proposal.seq_id.removeprefix(self._prefix),
                    base_tokens=proposal.base_tokens,
                    tokens=pack_tokens(proposal.tokens),
                    unread=proposal.is_unread,
                )
        n_tokens = sum(len(proposal.tokens) for proposals in answers for proposal in proposals or ())
        self._counters.add("slipstream_drafts_total", len(response.proposals))
        self._counters.add("slipstream_draft_tokens_total", n_tokens)
        return response

    def end(self) -> None:
        self._order.cancel()
        self._spans.close()
        held = self.seq_ids | self._order.names
        self._batcher.submit(DraftWork((), tuple(held), (), answer=lambda _: None))

    # ---- requests

    def _closed(self, names: Sequence[str], waiting: Container[str]) -> list[str]:
        """The sequences that end now; those whose rows wait end after them."""
        closed = []
        for seq_id in (self._prefix + name for name in names):
            self._spans.closed(seq_id)
            if seq_id not in waiting and seq_id not in self._order:
                self.seq_ids.discard(seq_id)
                closed.append(seq_id)
        return closed

    def _submit(
        self,
        extends: Sequence[tuple[_Extend, FloatArray]],
        closed: Sequence[str],
        min_confidence: float,
    ) -> None:
        self._batcher.submit(
            DraftWork(
                rows=[extend.as_rows(features) for extend, features in extends],
                closed=closed,
                draft_tokens=[extend.draft_tokens for extend, _ in extends],
                answer=self.put,
                min_confidence=min_confidence,
            )
        )

    async def _read_waiting(self, extend: _Extend) -> None:
        """Rows that waited: their features are read now, unless they came with the message."""
        features = extend.features
        if extend.exported is not None:
            features = await self._read(extend, extend.exported)
        self.seq_ids.add(extend.seq_id)  # a close may have gone before
        if features is None:
            self.put([extend.unread])
        else:
            self._submit([(extend, features)], (), extend.min_confidence)

    async def _read(self, extend: _Extend, exported: ExportedFeatures) -> FloatArray | None:
        if self._reader is None:
            return None
        n_bytes = len(extend.tokens) * self._feature_width * FEATURE_BYTES
        packed = await self._reader.read(extend.session_id, exported, n_bytes)
        if packed is None:
            self._counters.add("slipstream_draft_rows_unread_total")
            return None
        return parse_features(packed, self._feature_width, "exported")

    async def _close(self, seq_id: str) -> None:
        self.seq_ids.discard(seq_id)
        self._batcher.submit(DraftWork((), (seq_id,), (), answer=lambda _: None))

    def _checked(self, extend: drafter_pb2.ExtendContext, request: drafter_pb2.DraftRequest) -> _Extend:
        """Raises InvalidArgument, which ends the stream."""
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
        features, exported = None, None
        if extend.HasField("exported"):
            exported = ExportedFeatures(extend.exported.address, extend.exported.checksum)
            if len(exported.checksum) != CHECKSUM_BYTES:
                raise InvalidArgument("checksum", f"must have {CHECKSUM_BYTES} bytes")
        else:
            features = parse_features(extend.features, extend.width, "features")
        n_rows = len(tokens) if features is None else len(features)
        if not len(tokens) or len(tokens) != n_rows:
            raise InvalidArgument("features", f"{n_rows} rows for {len(tokens)} tokens")
        self.seq_ids.add(seq_id)
        self._spans.extended(seq_id, extend, tokens)
        return _Extend(
            seq_id=seq_id,
            start_position=extend.start_position,
            tokens=tokens,
            draft_tokens=extend.draft_tokens,
            min_confidence=request.min_confidence,
            features=features,
            exported=exported,
            session_id=request.transport_session,
        )


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """One stream for each decode worker, all of them on one batcher."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        feature_width: int,
        counters: Counters | None = None,
        reader: FeatureReader | None = None,
    ) -> None:
        """`reader`: of rows that decode workers export; without it those are never read."""
        self._batcher = batcher
        self._reader = reader
        counters = counters or Counters()
        self._busy = RecentRate()
        numbers = itertools.count()
        self._decode_streams = MultiplexedServer(
            lambda: DraftStream(next(numbers), batcher, counters, feature_width=feature_width, reader=reader)
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
        """The sequences, streams and reads of decode workers."""
        streams = self._decode_streams.streams
        return worker_pb2.Ledger(
            sequences=self._batcher.sequences,
            streams=sum(bool(stream.seq_ids) for stream in streams),
            transfers=self._reader.transport.reads_in_flight if self._reader is not None else 0,
        )

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        busy_share = min(self._busy.per_s(time.monotonic(), self._batcher.busy_s), 1.0)
        return worker_pb2.LoadReport(requests_running=self._batcher.sequences, busy_share=busy_share)
