"""Large pieces of draft features on their way to the drafter, in memory that it reads by the KV transport.

A slot is free again when the drafter has answered the rows or its stream ends, and after a time-out at the
latest. Rows that get no slot travel in the message. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from libs.common.worker_bounds import EXPORTED_ROWS_S, MAX_EXPORTED_PIECES
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory
from slipstream.enum_names import TRANSPORTS
from slipstream.v1 import common_pb2, drafter_pb2

log = logging.getLogger(__name__)

# After rows that the drafter could not read, the next ones travel in messages for so long.
_UNREAD_PAUSE_S = 30.0
_BYTES = "slipstream_draft_feature_bytes_total"


@dataclass(frozen=True, slots=True)
class _Held:
    base_tokens: int
    exported: ExportedFeatures
    timer: asyncio.TimerHandle


class DraftExports:
    """Exported rows of one decode worker, for the drafter of the open stream."""

    def __init__(
        self,
        memory: FeatureMemory,
        transport: KvTransport,
        counters: Counters,
        *,
        least_bytes: int,
        most_pieces: int = MAX_EXPORTED_PIECES,
        timeout_s: float = EXPORTED_ROWS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pieces smaller than `least_bytes` go in messages, and so do those beyond `most_pieces` at once.

        The slots that these leave are for features of prompts that this worker reads."""
        self._memory = memory
        self._transport = transport
        self._counters = counters
        self._least_bytes = least_bytes
        self._most_pieces = most_pieces
        self._timeout_s = timeout_s
        self._clock = clock
        self._is_readable = False  # by the drafter of this stream
        self._paused_until_s = float("-inf")
        self._held: dict[str, _Held] = {}  # by sequence

    @property
    def session_id(self) -> str:
        """What the drafter reads from."""
        return self._transport.session_id

    def __len__(self) -> int:
        """Pieces that are not answered."""
        return len(self._held)

    def opened(self, transport: common_pb2.Transport.ValueType) -> None:
        """The drafter of the stream reads by this transport."""
        kind = TRANSPORTS.name(transport)
        self._is_readable = kind == self._transport.kind
        if not self._is_readable:
            log.info("draft features travel in messages: %s here, %s there", self._transport.kind, kind)

    def fill(self, extend: drafter_pb2.ExtendContext, packed: bytes, *, base_tokens: int) -> bool:
        """Put the features of a sequence's extend into memory or into the message itself. Returns whether
        they are in memory, until `answered`."""
        exported = self._export(extend.seq_id, base_tokens, packed)
        self._counters.add(_BYTES, len(packed), ("transport" if exported else "message",))
        if exported is None:
            extend.features = packed
            return False
        extend.exported.address, extend.exported.checksum = exported.address, exported.checksum
        return True

    def answered(self, seq_id: str, base_tokens: int, *, is_unread: bool) -> None:
        """The drafter has answered rows, of whatever way, and read them before unless `is_unread`."""
        if is_unread:
            log.warning("the drafter could not read draft features of %s", seq_id)
            self._paused_until_s = self._clock() + _UNREAD_PAUSE_S
        held = self._held.get(seq_id)
        if held is not None and held.base_tokens == base_tokens:
            self._release(seq_id)

    def close(self) -> None:
        """The stream ended, and with it the drafter's reads."""
        self._is_readable = False
        for seq_id in list(self._held):
            self._release(seq_id)

    def _export(self, seq_id: str, base_tokens: int, packed: bytes) -> ExportedFeatures | None:
        """A piece in memory. One of a sequence: a second one would wait at the drafter beyond its time."""
        is_possible = self._is_readable and self._clock() >= self._paused_until_s
        if not is_possible or len(packed) < self._least_bytes or seq_id in self._held:
            return None
        exported = self._memory.export(packed) if len(self._held) < self._most_pieces else None
        if exported is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._release, seq_id)
            self._held[seq_id] = _Held(base_tokens, exported, timer)
        return exported

    def _release(self, seq_id: str) -> None:
        held = self._held.pop(seq_id, None)
        if held is not None:
            held.timer.cancel()
            self._memory.release(held.exported)
