"""What keys do to the state of the fleet view."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.top.keys import changed_state, is_yes
from slipstream.cli.top.rows import SORTS, ProcessRow
from slipstream.cli.top.screen import DrainQuestion, ScreenState
from slipstream.cli.top.terminal import split_keys

ROWS = [ProcessRow("decode", f"decode-{n}", "ready", running=float(n)) for n in range(30)]
MOVES = ("up", "down", "page-up", "page-down", "home", "end")


def after(state: ScreenState, *keys: str, page: int = 10) -> ScreenState:
    for key in keys:
        state = changed_state(state, key, ROWS, page=page)
    return state


def test_keys_change_the_state() -> None:
    assert split_keys("s\x1b[B\x1bOA\x1b[6~q") == ["s", "down", "up", "page-down", "q"]
    state = after(ScreenState("", ""), "p")
    assert state.is_paused and not after(state, "p").is_paused
    seen = [state.sort]
    for _ in SORTS:
        state = after(state, "s")
        seen.append(state.sort)
    assert seen == [*SORTS, SORTS[0]]
    assert after(state, "x") == state


def test_arrows_choose_from_the_first_shown_process_on_and_scroll() -> None:
    start = ScreenState("", "")
    assert after(start, "down").chosen == "decode/decode-0"
    assert after(start, "down", "down", "up").chosen == "decode/decode-0"
    assert after(replace(start, offset=7), "down").chosen == "decode/decode-7"
    paged = after(start, "down", "page-down")
    assert (paged.chosen, paged.offset) == ("decode/decode-10", 1)
    last = after(start, "end")
    assert (last.chosen, last.offset) == ("decode/decode-29", 20)
    assert after(last, "home").offset == 0
    assert changed_state(start, "down", [], page=10) == start


@given(st.lists(st.sampled_from(MOVES), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 29))
def test_the_chosen_process_is_always_shown(keys: list[str], page: int, offset: int) -> None:
    state = after(ScreenState("", "", offset=offset), *keys, page=page)
    shown = ROWS[state.offset : state.offset + page]
    assert state.chosen in [row.key for row in shown]


def test_a_choice_follows_its_process_into_another_order() -> None:
    chosen = after(ScreenState("", ""), "down", "down")
    asked = changed_state(chosen, "d", ROWS[::-1], page=10)
    assert asked.question == DrainQuestion(ROWS[1], drains=True)


def test_a_drain_asks_first_and_only_yes_is_yes() -> None:
    asked = after(ScreenState("", ""), "down", "d")
    assert asked.question == DrainQuestion(ROWS[0], drains=True)
    assert [key for key in ("y", "Y", "n", "d", "u", "q", "down", "\x1b") if is_yes(asked, key)] == ["y", "Y"]
    for key in ("n", "d", "down", "s"):
        left = after(asked, key)
        assert left.question is None and (left.chosen, left.sort) == (asked.chosen, asked.sort)
    assert not is_yes(after(ScreenState("", ""), "down"), "y")


def test_what_cannot_be_drained_is_said_and_not_asked() -> None:
    unchosen = after(ScreenState("", ""), "d")
    assert unchosen.question is None and "choose a process" in unchosen.note
    gone = after(ScreenState("", "", chosen="decode/decode-99"), "d")
    assert gone.question is None and gone.note
    ready = after(ScreenState("", "", chosen="decode/decode-3"), "u")
    assert ready.question is None and ready.note == "decode-3 takes work already"
    drained = [replace(row, state="draining") for row in ROWS]
    state = ScreenState("", "", chosen="decode/decode-3")
    assert changed_state(state, "d", drained, page=10).note == "decode-3 drains already"
    assert changed_state(state, "u", drained, page=10).question == DrainQuestion(drained[3], drains=False)
    assert after(ready, "p").note == ""
