"""The placements of sessions: read when a request arrives, recorded when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final

import msgspec

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import Placements

# The event loop looks up so many in less than a millisecond; a thread makes their messages in some ten.
PIECE_SESSIONS: Final = 512


class SessionPlacement(msgspec.Struct, frozen=True, gc=False):
    """A session's placement, and how many leading tokens of a prompt have KV there."""

    placement: Placement
    stored_tokens: int


NOTHING = SessionPlacement(Placement(), 0)


class Sessions:
    """The sessions of all tenants, by the name that clients give them."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements

    def look_up(
        self, tenant: str, session: str | None, hashes: Sequence[bytes], *, block_tokens: int
    ) -> SessionPlacement:
        """The session's placement for a prompt with these block hashes."""
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
        """Record which instances have the KV of the session's blocks with these hashes.

        Nothing is recorded without a full block: there is no KV to come back to.
        """
        if session and hashes:
            placement = Placement(
                kvstore=kvstore,
                prefill=prefill,
                decode=decode,
                block_count=len(hashes),
                tail_hash=hashes[-1],
            )
            self._placements.put(SessionId(tenant, session), placement)

    def pieces(self, tenant: str | None) -> Iterator[list[tuple[SessionId, Placement]]]:
        """The known placements of a tenant (None: of all), at most PIECE_SESSIONS at a time.

        They may change between two pieces: a session that is new then may be left out.
        """
        tenants = self._placements.tenants() if tenant is None else [tenant]
        names = chain.from_iterable(map(self._placements.sessions_of, tenants))
        while piece := list(islice(names, PIECE_SESSIONS)):
            yield [(name, found) for name in piece if (found := self._placements.peek(name)) is not None]

    def all(self) -> Mapping[SessionId, Placement]:
        """All known placements. It takes a tenth of a second for 100,000: keep it off the event loop."""
        return self._placements.all()
