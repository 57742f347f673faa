"""One router's stream: its sequences and the frames that wait for it."""

from __future__ import annotations

import asyncio

from services.decode.frame_buffer import FrameBuffer
from services.decode.sequence import DecodeSequence
from slipstream.v1 import decode_pb2

# A router cannot slow its sequences down by more than this.
MAX_INTERVAL_S = 0.1


class DecodeStream:
    """Collects the deltas of a step into one frame."""

    def __init__(self) -> None:
        self.sequences: set[DecodeSequence] = set()
        self._outbox = FrameBuffer()
        self._frame: list[decode_pb2.SequenceDelta] = []
        self._changed = asyncio.Event()
        self._no_more_starts = False
        self._loop = asyncio.get_running_loop()
        self._interval_s = 0.0
        self._next_s = 0.0

    def pace(self, interval_ms: int) -> None:
        """The router wants frames no more often than this."""
        self._interval_s = min(interval_ms / 1e3, MAX_INTERVAL_S)

    def admit(self, sequence: DecodeSequence, *, handle: int) -> None:
        """It starts; `handle` is the router's short name for it on this stream."""
        self.sequences.add(sequence)
        key = sequence.plan.key
        self._outbox.name(key.request_id, key.attempt, handle)

    def emit(self, delta: decode_pb2.SequenceDelta) -> None:
        """Add to the frame that is being collected."""
        self._frame.append(delta)

    def flush(self) -> None:
        """The frame is complete."""
        if self._frame:
            self._outbox.push(self._frame, join=self._interval_s > 0)
            self._frame = []
            self._changed.set()

    def forget(self, sequence: DecodeSequence) -> None:
        """It ended."""
        self.sequences.discard(sequence)
        self._changed.set()

    def close_input(self) -> None:
        """The router will start nothing more: the stream ends with the last of its sequences."""
        self._no_more_starts = True
        self._changed.set()

    async def next_frame(self) -> decode_pb2.DecodeResponse | None:
        """The next frame when there is one; None at the end of the stream."""
        while True:
            self._changed.clear()
            if len(self._outbox):
                early_s = self._next_s - self._loop.time()
                if early_s > 0:  # what comes meanwhile joins the frame that waits
                    await asyncio.sleep(early_s)
                self._next_s = self._loop.time() + self._interval_s
                return self._outbox.take()
            if self._no_more_starts and not self.sequences:
                return None
            await self._changed.wait()
