"""A job that is held while its attempt waits for its turn to begin does not begin it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution.attempts import retry_loop


class HeldAmidSelection:
    """The state of a request that a hold meets while its workers are chosen."""

    def __init__(self) -> None:
        self.is_held = False
        self.n_waited = 0
        self.stats = SimpleNamespace(attempts=0)

    async def wait_for_client(self) -> None:
        self.n_waited += 1
        self.is_held = False


async def test_a_hold_amid_the_choice_of_workers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = HeldAmidSelection()
    n_chosen, held_at_begin, end = 0, list[bool](), object()

    async def select(_: Any) -> object:
        nonlocal n_chosen
        n_chosen += 1
        state.is_held = n_chosen == 1
        return object()

    async def attempt(_: Any, assignment: object) -> object:
        held_at_begin.append(state.is_held)
        return end

    state.caller = SimpleNamespace(tenant="a")
    state.context = SimpleNamespace(start_pacer=SimpleNamespace(acquire=lambda _: asyncio.sleep(0)))
    monkeypatch.setattr(retry_loop, "_select_safe_workers", select)
    monkeypatch.setattr(retry_loop, "_attempt", attempt)
    assert await retry_loop.run_attempts(state) is end
    assert (held_at_begin, state.n_waited, state.stats.attempts) == ([False], 1, 1)
