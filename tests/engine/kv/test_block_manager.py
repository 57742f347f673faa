"""Each page is free, cached or held, and a hash finds only its own block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.engine.kv.block_manager import BlockManager
from slipstream.errors import Internal, OutOfPages

N_PAGES = 6


class Pages(RuleBasedStateMachine):
    """Owners reserve and release chains of blocks; a model tracks which owner holds which pages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(N_PAGES)
        self.owners: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}  # page -> the hash last committed to it
        self.findable: set[bytes] = set()  # blocks that are cached according to the changes

    @rule(chain=st.integers(0, 3), n_known=st.integers(0, 3), n_fresh=st.integers(0, 4))
    def reserve(self, chain: int, n_known: int, n_fresh: int) -> None:
        hashes = [bytes([chain, i]) for i in range(n_known)]
        hit = self.blocks.match(hashes)
        for block_hash, page in zip(hashes, hit, strict=False):
            assert self.content[page] == block_hash
        available = N_PAGES - len(set(self.held()) | set(hit))
        try:
            pages = self.blocks.reserve(hit, n_fresh)
        except OutOfPages:
            assert n_fresh > available
            return
        assert n_fresh <= available
        assert pages[: len(hit)] == hit
        assert not set(pages[len(hit) :]) & set(self.held())
        names = [bytes([chain, i]) for i in range(len(pages))]
        for page, name in zip(pages[len(hit) :], names[len(hit) :], strict=True):
            if self.blocks.commit(page, name):
                self.content[page] = name
        self.owners.append((pages, names))

    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        if self.owners:
            pages, _ = self.owners.pop(index % len(self.owners))
            self.blocks.release(pages)

    @rule(index=st.integers(0, 100))
    def share(self, index: int) -> None:
        if self.owners:
            pages, names = self.owners[index % len(self.owners)]
            self.blocks.acquire(pages)
            self.owners.append((pages, names))

    @invariant()
    def accounting_is_consistent(self) -> None:
        self.blocks.check()
        assert self.blocks.held_pages == len(set(self.held()))
        assert self.blocks.free_pages + self.blocks.cached_pages + self.blocks.held_pages == N_PAGES

    @rule()
    def watcher_knows_the_cached_blocks(self) -> None:
        for change in self.blocks.poll_changes():
            assert (change.hash in self.findable) is not change.stored
            (self.findable.add if change.stored else self.findable.remove)(change.hash)
        names = [bytes([chain, i]) for chain in range(4) for i in range(8)]
        assert self.findable == {name for name in names if self.blocks.match([name])}

    def held(self) -> list[int]:
        return [page for pages, _ in self.owners for page in pages]


TestPages = Pages.TestCase
TestPages.settings = settings(stateful_step_count=40, deadline=None)


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    blocks = BlockManager(3)
    pages = blocks.allocate(3)
    for i, page in enumerate(pages):
        blocks.commit(page, bytes([i]))
    blocks.release(pages)
    blocks.allocate(1)
    assert blocks.match([b"\x00", b"\x01", b"\x02"]) == pages[:2]


def test_the_least_recently_used_block_is_evicted() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.commit(first, b"a")
    blocks.commit(second, b"b")
    blocks.release([second])
    blocks.release([first])
    blocks.acquire([second])
    blocks.release([second])
    blocks.allocate(1)
    assert blocks.match([b"a"]) == []
    assert blocks.match([b"b"]) == [second]
    assert blocks.evicted_blocks == 1


def test_spent_blocks_are_evicted_before_older_ones_from_the_end_of_a_prefix() -> None:
    blocks = BlockManager(4)
    old, *spent = blocks.allocate(4)
    for page, block_hash in zip((old, *spent), (b"old", b"s0", b"s1", b"s2"), strict=True):
        blocks.commit(page, block_hash)
    blocks.release([old])
    blocks.acquire(spent[:1])  # a second owner of the first one
    blocks.release(spent, evict_first=True)
    blocks.allocate(1)
    assert blocks.match([b"s0", b"s1", b"s2"]) == spent[:2]
    blocks.release(spent[:1])
    blocks.allocate(2)
    assert (blocks.match([b"s0"]), blocks.match([b"old"])) == ([spent[0]], [])


def test_a_refused_reservation_takes_nothing() -> None:
    blocks = BlockManager(4)
    (page,) = blocks.allocate(1)
    blocks.commit(page, b"a")
    blocks.release([page])
    with pytest.raises(OutOfPages):
        blocks.reserve([page], 4)
    with pytest.raises(OutOfPages):
        blocks.reserve([page], 3, leave=1)
    assert (blocks.free_pages, blocks.cached_pages, blocks.held_pages) == (3, 1, 0)


def test_check_finds_inconsistent_accounting() -> None:
    blocks = BlockManager(2)
    with pytest.raises(Internal):
        blocks.release([0])
    with pytest.raises(Internal):
        blocks.acquire([0])
    with pytest.raises(Internal):
        blocks.commit(0, b"a")
