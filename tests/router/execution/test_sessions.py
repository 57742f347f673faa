"""The placements of sessions: what is recorded, and what a later prompt finds."""

from __future__ import annotations

from collections.abc import Callable

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import InMemoryPlacements
from services.router.execution.sessions import NOTHING, Sessions

HASHES = [bytes([n]) * 16 for n in range(3)]


class CountedPlacements(InMemoryPlacements):
    """Keeps whose placements are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up: list[SessionId] = []

    def peek(self, session: SessionId) -> Placement | None:
        self.looked_up.append(session)
        return super().peek(session)


def record(sessions: Sessions, hashes: list[bytes], *, name: str | None = "s") -> None:
    sessions.record("anna", name, prefill="p-0", decode="d-0", kvstore="kv-0", hashes=hashes)


def test_a_session_without_a_full_block_is_not_recorded() -> None:
    sessions = Sessions(InMemoryPlacements())
    record(sessions, [])
    record(sessions, HASHES, name=None)
    assert sessions.all() == {}
    record(sessions, HASHES[:1])
    record(sessions, [])  # a short prompt does not erase what is known
    (placement,) = sessions.all().values()
    assert (placement.block_count, placement.tail_hash) == (1, HASHES[0])


def test_a_prompt_that_continues_the_session_finds_its_tokens() -> None:
    sessions = Sessions(InMemoryPlacements())
    record(sessions, HASHES[:2])
    found = sessions.look_up("anna", "s", HASHES, block_tokens=64)
    assert (found.placement.decode, found.stored_tokens) == ("d-0", 128)
    assert sessions.look_up("anna", "s", HASHES[1:], block_tokens=64).stored_tokens == 0
    assert sessions.look_up("bert", "s", HASHES, block_tokens=64) == NOTHING


async def test_a_page_of_sessions_looks_up_what_it_shows_and_no_more() -> None:
    placements = CountedPlacements()
    names = {tenant: [SessionId(tenant, f"s-{n:04}") for n in range(1200)] for tenant in ("anna", "bert")}
    for name in (*reversed(names["bert"]), *names["anna"]):
        placements.put(name, Placement(decode="d-0"))
    sessions, sorted_names = Sessions(placements), []

    async def run(piece: Callable[[], list[SessionId]]) -> list[SessionId]:
        sorted_names.append(piece)
        return piece()

    for tenant, expected in (("anna", names["anna"]), (None, [*names["anna"], *names["bert"]]), ("carl", [])):
        shown: list[SessionId] = []
        last: SessionId | None = None
        while True:
            page, last = await sessions.page(tenant, after=last, limit=500, run_piece=run)
            assert [name for name, _ in page] == placements.looked_up
            assert len(page) == 500 or last is None
            shown += placements.looked_up
            placements.looked_up.clear()
            if last is None:
                break
        assert shown == expected
    # Three pages of one tenant; five of two, of which the third has names of both; one of none.
    assert len(sorted_names) == 3 + (1 + 1 + 2 + 1 + 1) + 1
