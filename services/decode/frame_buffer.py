"""What waits to be sent to one router: one frame a step, coalesced when the router is slow. Pure.

A router that does not read costs at most `max_frames` frames and its sequences' tokens: beyond that,
new tokens join the last waiting frame. Order within a sequence is kept and nothing is dropped.

Most deltas of a step are one token and nothing else. These travel packed, two numbers a token, which costs
the router's side a fraction of a message each.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from slipstream.v1 import decode_pb2

MAX_FRAMES = 16

_Key = tuple[str, int]


class FrameBuffer:
    """Frames in order. Not thread-safe."""

    def __init__(self, *, max_frames: int = MAX_FRAMES) -> None:
        self._max_frames = max_frames
        self._frames: collections.deque[list[decode_pb2.SequenceDelta]] = collections.deque()
        self._handles: dict[_Key, int] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._frames)

    def name(self, request_id: str, attempt: int, handle: int) -> None:
        """Until its last delta the sequence's plain tokens travel under this handle."""
        self._handles[request_id, attempt] = handle

    def push(self, deltas: Sequence[decode_pb2.SequenceDelta], *, join: bool = False) -> None:
        """One step's deltas, at most one for each sequence. `join`: into the frame that waits, if any."""
        if not deltas:
            return
        if not self._frames or (len(self._frames) < self._max_frames and not join):
            self._frames.append(list(deltas))
            return
        last = {(d.request_id, d.attempt): d for d in self._frames[-1]}
        for delta in deltas:
            waiting = last.get((delta.request_id, delta.attempt))
            if waiting is None:
                self._frames[-1].append(delta)
            else:
                merge(waiting, delta)

    def take(self) -> decode_pb2.DecodeResponse | None:
        """The next frame to send; None when nothing waits."""
        if not self._frames:
            return None
        self._step += 1
        deltas = self._frames.popleft()
        return self._pack(deltas)

    def _pack(self, deltas: Sequence[decode_pb2.SequenceDelta]) -> decode_pb2.DecodeResponse:
        rest, handles, tokens = [], [], []
        for delta in deltas:
            key = (delta.request_id, delta.attempt)
            handle = self._handles.get(key)
            if handle is None or not delta.tokens or delta.running or delta.finish_reason or delta.logprobs:
                rest.append(delta)
                if delta.finish_reason:
                    self._handles.pop(key, None)
                continue
            handles += [handle] * (len(delta.tokens) // 4)
            tokens.append(delta.tokens)
        return decode_pb2.DecodeResponse(
            step=self._step,
            deltas=rest,
            packed_handles=np.asarray(handles, "<u4").tobytes(),
            packed_tokens=b"".join(tokens),
        )


def merge(earlier: decode_pb2.SequenceDelta, later: decode_pb2.SequenceDelta) -> None:
    """Append `later` to `earlier` of the same sequence; packed bytes join, everything else is set."""
    tokens = earlier.tokens + later.tokens
    earlier.MergeFrom(later)
    earlier.tokens = tokens
