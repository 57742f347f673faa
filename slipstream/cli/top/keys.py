"""The effects of keys on the fleet view. Pure: the answer to a question is acted on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.cli.top.rows import SORTS, ProcessRow
from slipstream.cli.top.screen import DrainQuestion, ScreenState


def changed_state(state: ScreenState, key: str, rows: Sequence[ProcessRow], *, page: int) -> ScreenState:
    """The state after a key. `rows`: the processes in the order of the screen, which shows `page` of them.

    Any key ends a question. `is_yes` says whether the key was its answer yes.
    """
    asked, state = state.question is not None, replace(state, question=None, note="")
    if asked:
        return state
    steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -len(rows), "end": len(rows)}
    if key in steps and rows:
        return _moved(state, key, steps[key], rows, page)
    if key == "p":
        return replace(state, is_paused=not state.is_paused)
    if key == "s":
        following = SORTS[(SORTS.index(state.sort) + 1) % len(SORTS)]
        return replace(state, sort=following, offset=0)
    if key in ("d", "u"):
        return _asked(state, rows, drains=key == "d")
    return state


def is_yes(state: ScreenState, key: str) -> bool:
    """Whether the key answers the question of this state with yes."""
    return state.question is not None and key in ("y", "Y")


def _moved(state: ScreenState, key: str, step: int, rows: Sequence[ProcessRow], page: int) -> ScreenState:
    """Another process is chosen, and shown. The first step chooses one that is shown."""
    at = next((number for number, row in enumerate(rows) if row.key == state.chosen), None)
    if at is None:
        at = state.offset - (key == "down")
    number = min(max(at + step, 0), len(rows) - 1)
    offset = min(max(state.offset, number - page + 1), number)
    return replace(state, offset=offset, chosen=rows[number].key)


def _asked(state: ScreenState, rows: Sequence[ProcessRow], *, drains: bool) -> ScreenState:
    row = next((row for row in rows if row.key == state.chosen), None)
    if row is None:
        return replace(state, note="choose a process with the arrows first")
    if drains == (row.state == "draining"):
        already = "drains already" if drains else "takes work already"
        return replace(state, note=f"{row.instance} {already}")
    return replace(state, question=DrainQuestion(row, drains))
