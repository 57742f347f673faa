"""One router's stream: its sequences, and the deltas that wait for the next frame.

`DecodeSequence` puts the deltas; `MultiplexedServer.serve` takes the frames, one a step, or fewer where the
router asks for an interval. A frame holds what came since the last one, at most one delta for each sequence.
So a router that does not read costs the memory of its sequences' tokens only. Order within a sequence is kept
and nothing is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from libs.common.rpc.multiplexed_server import Cancel, ServerStream
from services.decode.sequence import Emit
from slipstream.errors import SlipstreamError
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, decode_pb2

# A router cannot slow its sequences down by more than this.
MAX_INTERVAL_S = 0.1

# Starts a sequence, which passes its deltas to the given function. Returns its task and what ends it. Raises
# SlipstreamError.
Admit = Callable[[decode_pb2.StartSequence, Emit], tuple[asyncio.Task[None], Cancel]]


class DecodeStream(ServerStream[decode_pb2.StartSequence, decode_pb2.SequenceDelta]):
    """See the module's text."""

    def __init__(self, admit: Admit) -> None:
        super().__init__()
        self._admit = admit
        self._waiting: dict[int, decode_pb2.SequenceDelta] = {}  # those of `events`, by handle
        self._step = 0
        self._loop = asyncio.get_running_loop()
        self._interval_s = 0.0
        self._next_s = 0.0

    # ---- ServerStream

    async def on_request(self, request: decode_pb2.DecodeRequest) -> None:
        for start in request.starts:
            self.begin(start)
        if request.HasField("frame_interval_ms"):
            self._interval_s = min(request.frame_interval_ms / 1e3, MAX_INTERVAL_S)
        self.cancel(request.aborts)

    def start(self, start: decode_pb2.StartSequence) -> tuple[asyncio.Task[None], Cancel]:
        return self._admit(start, self.put)

    def put(self, delta: decode_pb2.SequenceDelta) -> None:
        waiting = self._waiting.get(delta.handle)
        if waiting is None:
            self._waiting[delta.handle] = delta
            super().put(delta)
        else:
            merge(waiting, delta)

    async def join(self) -> None:
        """Keep the interval between frames. The deltas of one step come together anyway."""
        early_s = self._next_s - self._loop.time()
        if early_s > 0:
            await asyncio.sleep(early_s)
        self._next_s = self._loop.time() + self._interval_s

    def failure(self, handle: int, error: SlipstreamError) -> decode_pb2.SequenceDelta:
        return decode_pb2.SequenceDelta(
            handle=handle,
            finish_reason=common_pb2.FINISH_REASON_ERROR,
            failure=to_failure(error),
            stats=decode_pb2.SequenceStats(),
        )

    def frame(self, deltas: Sequence[decode_pb2.SequenceDelta]) -> decode_pb2.DecodeResponse:
        self._waiting.clear()
        self._step += 1
        return pack_frame(deltas, step=self._step)


def pack_frame(deltas: Sequence[decode_pb2.SequenceDelta], *, step: int) -> decode_pb2.DecodeResponse:
    """The frame of these deltas. Most hold tokens alone and become two numbers a token: reading these costs
    the router a fraction of reading a message."""
    rest, handles, tokens = [], [], []
    for delta in deltas:
        packed = delta.tokens
        has_rows = bool(delta.logprobs or delta.prompt_logprobs)
        is_more = has_rows or delta.running or delta.is_closing or bool(delta.finish_reason)
        if not packed or is_more:
            rest.append(delta)
            continue
        handles += [delta.handle] * (len(packed) // 4)
        tokens.append(packed)
    return decode_pb2.DecodeResponse(
        step=step,
        deltas=rest,
        packed_handles=np.asarray(handles, "<u4").tobytes(),
        packed_tokens=b"".join(tokens),
    )


def merge(earlier: decode_pb2.SequenceDelta, later: decode_pb2.SequenceDelta) -> None:
    """Append `later` to `earlier` of the same sequence; packed bytes join, everything else is set."""
    tokens = earlier.tokens + later.tokens
    earlier.MergeFrom(later)
    earlier.tokens = tokens
