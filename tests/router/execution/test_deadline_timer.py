"""One timer for the deadlines of all requests: every one passes, none early, and none that was removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.execution.deadline_timer import LEAST_PAUSE_S, DeadlineTimer


class Timer:
    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s, self.callback = at_s, callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The timers of an event loop on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(at_s, callback))
        return self.timers[-1]

    def go_to(self, until_s: float) -> None:
        while due := [t for t in self.timers if not t.cancelled and t.at_s <= until_s]:
            first = min(due, key=lambda timer: timer.at_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.at_s)
            first.callback()
        self.now_s = until_s


@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.booleans()), max_size=30),
)
def test_each_deadline_passes_in_time_unless_it_is_removed(
    requests: list[tuple[float, float, bool]],
) -> None:
    loop, passed = Loop(), dict[int, float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.router.execution.deadline_timer.asyncio.get_running_loop", lambda: loop)
        book: DeadlineTimer[int] = DeadlineTimer(lambda item: passed.update({item: loop.now_s}))
        began: dict[int, float] = {}
        for number, (gap_s, left_s, removed) in enumerate(requests):
            loop.go_to(loop.now_s + gap_s)
            began[number] = loop.now_s + left_s
            book.add(number, began[number])
            if removed:
                book.remove(number)
        loop.go_to(loop.now_s + 20.0)
    assert passed.keys() == {n for n, (_, _, removed) in enumerate(requests) if not removed}
    for number, at_s in passed.items():
        assert began[number] <= at_s <= began[number] + LEAST_PAUSE_S
    assert sum(not timer.cancelled for timer in loop.timers) == 0


async def test_nothing_is_left_when_it_is_closed() -> None:
    passed: list[str] = []
    book: DeadlineTimer[str] = DeadlineTimer(passed.append)
    book.add("r", asyncio.get_running_loop().time())
    book.close()
    await asyncio.sleep(0)
    assert not passed


def test_only_what_lasts_passes_of_many_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the writes of one answer: together longer than the limit, each of them far from it."""
    loop, passed = Loop(), list[float]()
    monkeypatch.setattr("services.router.execution.deadline_timer.asyncio.get_running_loop", lambda: loop)
    book: DeadlineTimer[str] = DeadlineTimer(lambda _: passed.append(loop.now_s))
    for _ in range(6):
        book.add("answer", loop.now_s + 1.0)
        loop.go_to(loop.now_s + 0.2)
        book.remove("answer")
    book.add("answer", loop.now_s + 1.0)
    loop.go_to(loop.now_s + 0.9)
    assert not passed
    loop.go_to(loop.now_s + 10.0)
    assert passed == [pytest.approx(2.2, abs=LEAST_PAUSE_S)]
