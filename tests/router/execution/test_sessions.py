"""The placements of sessions: what is recorded, and what a later prompt finds."""

from __future__ import annotations

from libs.common.cluster.placements import InMemoryPlacements
from services.router.execution.sessions import NOTHING, Sessions

HASHES = [bytes([n]) * 16 for n in range(3)]


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
