"""The exporter's handoffs: their states, leases and what watchers may see of them. Pure; time is given.

    RESERVED -> STREAMING -> COMPLETE -> RELEASED
         \\____________\\___________\\_> FAILED | CANCELLED | EXPIRED

Pages of a handoff are held exactly while it is live (the first three states). An ended one is
remembered for a while so that a late watcher learns why it ended. It keeps neither checksums nor a result
that no watcher may see any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from libs.worker.requests.attempts import AttemptKey
from slipstream.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    NotFound,
    SlipstreamError,
    Unavailable,
)

DEFAULT_LEASE_MS = 15_000
MAX_LEASE_MS = 120_000

ResultT = TypeVar("ResultT")


class HandoffState(Enum):
    RESERVED = "reserved"
    STREAMING = "streaming"
    COMPLETE = "complete"
    RELEASED = "released"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def live(self) -> bool:
        return self in (HandoffState.RESERVED, HandoffState.STREAMING, HandoffState.COMPLETE)


def granted_lease_ms(asked_ms: int) -> int:
    """The lease a peer gets: what it asks for within bounds, the default for 0."""
    return min(asked_ms, MAX_LEASE_MS) if asked_ms > 0 else DEFAULT_LEASE_MS


@dataclass(slots=True)
class Handoff(Generic[ResultT]):
    """One export. `checksums[k]` is there exactly when block k can be read."""

    handoff_id: str
    key: AttemptKey
    n_blocks: int
    lease_ms: int
    expires_ms: float
    state: HandoffState = HandoffState.RESERVED
    checksums: list[bytes] = field(default_factory=list)
    result: ResultT | None = None  # with COMPLETE
    needs_blocks: bool = True  # without the blocks the result is of no use
    error: SlipstreamError | None = None  # with an end other than RELEASED
    holders: int = 0  # open calls that keep the lease alive


class HandoffTable(Generic[ResultT]):
    """All handoffs of one exporter. The methods that end handoffs return those that ended just now."""

    def __init__(self, *, remembered: int = 1024) -> None:
        self._live: dict[str, Handoff[ResultT]] = {}
        self._ended: OrderedDict[str, Handoff[ResultT]] = OrderedDict()
        self._remembered = remembered

    @property
    def live(self) -> int:
        """Handoffs that hold pages."""
        return len(self._live)

    def open(
        self, handoff_id: str, key: AttemptKey, *, n_blocks: int, lease_ms: int, now_ms: float
    ) -> Handoff[ResultT]:
        """A new handoff in RESERVED; `handoff_id` must be fresh."""
        if handoff_id in self._live or handoff_id in self._ended:
            raise Internal(f"handoff id {handoff_id} is used twice")
        if n_blocks < 1:
            raise Internal("a handoff exports at least one block")
        granted = granted_lease_ms(lease_ms)
        handoff: Handoff[ResultT] = Handoff(handoff_id, key, n_blocks, granted, now_ms + granted)
        self._live[handoff_id] = handoff
        return handoff

    def get(self, handoff_id: str) -> Handoff[ResultT]:
        """Live or lately ended; raises NotFound otherwise."""
        handoff = self._live.get(handoff_id) or self._ended.get(handoff_id)
        if handoff is None:
            raise NotFound(f"handoff {handoff_id} is unknown or ended", field="handoff_id")
        return handoff

    def publish(self, handoff_id: str, checksums: list[bytes]) -> None:
        """The next `len(checksums)` blocks can be read. Raises FailedPrecondition once it ended."""
        handoff = self._require_live(handoff_id)
        if (
            handoff.state is HandoffState.COMPLETE
            or len(handoff.checksums) + len(checksums) > handoff.n_blocks
        ):
            raise Internal(f"handoff {handoff_id} publishes more than its {handoff.n_blocks} blocks")
        handoff.checksums += checksums
        handoff.state = HandoffState.STREAMING

    def complete(self, handoff_id: str, result: ResultT, *, needs_blocks: bool = True) -> None:
        """The first token is known, and all blocks are published unless no reader needs them."""
        handoff = self._require_live(handoff_id)
        if needs_blocks and len(handoff.checksums) != handoff.n_blocks:
            raise Internal(f"handoff {handoff_id} is complete at {len(handoff.checksums)}/{handoff.n_blocks}")
        handoff.result, handoff.needs_blocks = result, needs_blocks
        handoff.state = HandoffState.COMPLETE

    def hold(self, handoff_id: str, now_ms: float) -> None:
        """An open call depends on the handoff: it does not expire while held. Counted."""
        handoff = self._require_live(handoff_id)
        handoff.holders += 1
        self._extend(handoff, handoff.lease_ms, now_ms)

    def unhold(self, handoff_id: str, now_ms: float) -> None:
        """Undo one `hold`; the lease runs from now. Ended handoffs are fine."""
        handoff = self._live.get(handoff_id)
        if handoff is not None:
            handoff.holders -= 1
            self._extend(handoff, handoff.lease_ms, now_ms)

    def renew(self, handoff_id: str, lease_ms: int, now_ms: float) -> None:
        """Extend the lease. Raises NotFound when the handoff has ended, also when only by the clock."""
        handoff = self._live.get(handoff_id)
        if handoff is None or self._overdue(handoff, now_ms):
            raise NotFound(f"handoff {handoff_id} is unknown or ended", field="handoff_id")
        handoff.lease_ms = granted_lease_ms(lease_ms)
        self._extend(handoff, handoff.lease_ms, now_ms)

    def release(self, handoff_id: str) -> list[Handoff[ResultT]]:
        """The reader is done. Unknown or ended ones are fine."""
        return self._end(handoff_id, HandoffState.RELEASED, None)

    def fail(self, handoff_id: str, error: SlipstreamError) -> list[Handoff[ResultT]]:
        """The export cannot be completed; watchers get `error`."""
        return self._end(handoff_id, HandoffState.FAILED, error)

    def cancel(self, key: AttemptKey) -> list[Handoff[ResultT]]:
        """The attempt was aborted."""
        mine = [h.handoff_id for h in self._live.values() if h.key == key]
        error = Aborted(f"{key} was aborted")
        return [ended for i in mine for ended in self._end(i, HandoffState.CANCELLED, error)]

    def expire(self, now_ms: float) -> list[Handoff[ResultT]]:
        """End those whose lease ran out and that no open call holds."""
        overdue = [h.handoff_id for h in self._live.values() if self._overdue(h, now_ms)]
        error = Unavailable("the lease of the handoff ran out")
        return [ended for i in overdue for ended in self._end(i, HandoffState.EXPIRED, error)]

    def next_expiry_ms(self) -> float | None:
        """When `expire` is due at the earliest."""
        return min((h.expires_ms for h in self._live.values() if not h.holders), default=None)

    @staticmethod
    def _overdue(handoff: Handoff[ResultT], now_ms: float) -> bool:
        return handoff.holders == 0 and now_ms >= handoff.expires_ms

    @staticmethod
    def _extend(handoff: Handoff[ResultT], lease_ms: int, now_ms: float) -> None:
        handoff.expires_ms = max(handoff.expires_ms, now_ms + lease_ms)

    def _require_live(self, handoff_id: str) -> Handoff[ResultT]:
        handoff = self.get(handoff_id)
        if not handoff.state.live:
            raise handoff.error or FailedPrecondition(f"handoff {handoff_id} was released")
        return handoff

    def _end(
        self, handoff_id: str, state: HandoffState, error: SlipstreamError | None
    ) -> list[Handoff[ResultT]]:
        handoff = self._live.pop(handoff_id, None)
        if handoff is None:
            return []
        handoff.state, handoff.error = state, error
        handoff.checksums.clear()
        if handoff.needs_blocks:
            handoff.result = None
        self._ended[handoff_id] = handoff
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        return [handoff]
