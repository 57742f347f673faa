"""What is known of sessions when a request comes, and what is written down when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import Placements


class SessionPlacement(msgspec.Struct, frozen=True, gc=False):
    """A session's placement as far as it matters to a prompt: its first `stored_tokens` have KV there."""

    placement: Placement
    stored_tokens: int


NOTHING = SessionPlacement(Placement(), 0)


class Sessions:
    """Sessions of all tenants by their affinity name."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements

    def look_up(
        self, tenant: str, session: str | None, hashes: Sequence[bytes], *, block_tokens: int
    ) -> SessionPlacement:
        """What is known of the session for a prompt with these block hashes."""
        placement = self._placements.get(SessionId(tenant, session)) if session else None
        if placement is None:
            return NOTHING
        blocks = placement.block_count
        continues = 0 < blocks <= len(hashes) and hashes[blocks - 1] == placement.tail_hash
        return SessionPlacement(placement, blocks * block_tokens if continues else 0)

    def record(
        self,
        tenant: str,
        session: str | None,
        *,
        prefill: str,
        decode: str,
        kvstore: str,
        hashes: Sequence[bytes],
    ) -> None:
        """The session's KV now is here, up to the blocks with these hashes."""
        if session:
            placement = Placement(
                kvstore=kvstore,
                prefill=prefill,
                decode=decode,
                block_count=len(hashes),
                tail_hash=hashes[-1] if hashes else b"",
            )
            self._placements.put(SessionId(tenant, session), placement)

    def all(self) -> Mapping[SessionId, Placement]:
        """Every placement known."""
        return self._placements.all()
