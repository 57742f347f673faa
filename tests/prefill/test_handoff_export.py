"""HandoffExport: blocks in order, once final, watched and with room; nothing is held after its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.worker.engine.page_exporter import ExportedPage
from services.prefill.handoff_export import HandoffExport


class SlotsOnly:
    """A page exporter without memory."""

    page_bytes = 1 << 20  # eight blocks a batch

    def __init__(self, n_slots: int) -> None:
        self.free = self.n_slots = n_slots
        self._waiting: set[asyncio.Event] = set()

    async def export(self, pages: Sequence[int], *, is_read: bool = False) -> list[ExportedPage]:
        assert is_read, "the reader waits"
        await asyncio.sleep(0)
        taken = pages[: self.free]
        self.free -= len(taken)
        return [ExportedPage(page, bytes(16), 0) for page in taken]

    def release(self, exported: Sequence[ExportedPage]) -> None:
        self.free += len(exported)
        for waiting in self._waiting:
            waiting.set()

    async def wait_for_room(self, changed: asyncio.Event) -> None:
        self._waiting.add(changed)
        await changed.wait()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("final"), st.integers(0, 30)), st.tuples(st.just("read"), st.integers(0, 30))
    ),
    max_size=40,
)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 31), steps)
def test_blocks_are_published_in_order_within_the_room(
    n_slots: int, n_blocks: int, first_read: int, todo: list[tuple[str, int]]
) -> None:
    asyncio.run(_exported(n_slots, n_blocks, first_read, todo))


async def _exported(n_slots: int, n_blocks: int, first_read: int, todo: list[tuple[str, int]]) -> None:
    slots, published = SlotsOnly(n_slots), list[ExportedPage | None]()
    made: Any = slots
    export = HandoffExport(made, range(100, 100 + n_blocks), published.extend)
    running = asyncio.create_task(export.run())
    export.advance(n_blocks // 2)
    await _settled()
    assert not published, "nobody watches"
    export.on_watched(first_read)
    n_final, read = n_blocks // 2, set[int]()
    for what, number in todo:
        if what == "final":
            n_final = max(n_final, min(number, n_blocks))
            export.advance(n_final)
        elif number < len(published):
            export.on_read([number, number])
            read.add(number)
        await _settled()
        skipped = min(first_read, n_blocks)
        assert len(published) <= max(n_final, skipped)
        pages = [page.address if page is not None else None for page in published]
        assert pages == [100 + n if n >= skipped else None for n in range(len(published))]
        n_held = len([n for n in range(skipped, len(published)) if n not in read])
        assert slots.free == n_slots - n_held
        if n_held < n_slots and not running.done():
            assert len(published) >= max(min(n_final, n_blocks), skipped)
    export.advance(n_blocks)
    while not running.done():
        export.on_read(range(len(published)))
        await _settled()
    assert len(published) == n_blocks
    export.close()
    assert slots.free == n_slots


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_cancelled_export_holds_nothing_after_its_close() -> None:
    slots = SlotsOnly(4)
    made: Any = slots
    export = HandoffExport(made, range(10), lambda exported: None)
    running = asyncio.create_task(export.run())
    export.on_watched(0)
    export.advance(10)
    await _settled()
    assert slots.free == 0
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    export.close()
    assert slots.free == 4
