"""`first_answer` repeats lost calls and accepts the answer of a slow peer."""

from __future__ import annotations

import asyncio

import pytest

from services.router.workers.connection import first_answer


class Peer:
    """Answers only the call of this number."""

    def __init__(self, answers: int, *, when_asked: int = 1, fails: int = 0) -> None:
        self.asked = self.dropped = 0
        self._answers, self._when_asked, self._fails = answers, when_asked, fails
        self._again = asyncio.Event()

    async def ask(self) -> str:
        self.asked += 1
        number = self.asked
        if self.asked >= self._when_asked:
            self._again.set()
        try:
            if number == self._fails:
                raise ConnectionError("refused")
            if number != self._answers:
                await asyncio.Event().wait()
            await self._again.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        return f"answer to {number}"


async def test_a_lost_call_is_repeated() -> None:
    peer = Peer(answers=3)
    assert await asyncio.wait_for(first_answer(peer.ask, every_s=0.001), 60) == "answer to 3"
    assert peer.dropped == peer.asked - 1


async def test_a_late_answer_to_an_earlier_call_counts() -> None:
    """The peer answers the first call after four more calls."""
    peer = Peer(answers=1, when_asked=5)
    assert await asyncio.wait_for(first_answer(peer.ask, every_s=0.001), 60) == "answer to 1"
    assert peer.dropped == peer.asked - 1 >= 4


async def test_a_failed_call_cancels_the_others() -> None:
    peer = Peer(answers=0, fails=2)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(first_answer(peer.ask, every_s=0.001), 60)
    assert peer.dropped == peer.asked - 1
