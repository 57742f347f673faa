"""The placements of sessions: read when a request arrives, recorded when it ends."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import Placements

# Runs a piece of work off the event loop.
RunNames = Callable[[Callable[[], list[SessionId]]], Awaitable[list[SessionId]]]


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

    async def page(
        self, tenant: str | None, *, after: SessionId | None, limit: int, run_piece: RunNames
    ) -> tuple[list[tuple[SessionId, Placement]], SessionId | None]:
        """At most `limit` known placements behind `after`, in the order of tenant and session.

        They are those of one tenant (None: of all). The second value is the name after which others follow.
        `run_piece` sorts the names of a tenant, of which there may be 50,000, off the event loop.
        """
        tenants = sorted(self._placements.tenants()) if tenant is None else [tenant]
        names: list[SessionId] = []
        for each in tenants:
            if len(names) < limit and (after is None or each >= after.tenant):
                known = self._placements.sessions_of(each)
                names += await run_piece(partial(_first_names, known, after, limit - len(names)))
        found = [(name, placed) for name in names if (placed := self._placements.peek(name)) is not None]
        return found, names[-1] if len(names) == limit else None

    def all(self) -> Mapping[SessionId, Placement]:
        """All known placements. It takes a tenth of a second for 100,000: keep it off the event loop."""
        return self._placements.all()


def _first_names(names: Sequence[SessionId], after: SessionId | None, limit: int) -> list[SessionId]:
    if after is not None:
        last = _order(after)
        names = [name for name in names if _order(name) > last]
    return heapq.nsmallest(limit, names, key=_order)


def _order(name: SessionId) -> tuple[str, str]:
    return name.tenant, name.session
