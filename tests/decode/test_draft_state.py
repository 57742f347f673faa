"""DraftState: only fresh proposals count, waits are bounded, a silent drafter is not waited for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.common.worker_bounds import MAX_DRAFT_MESSAGE_BYTES
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from libs.worker.requests.messages import bfloat16_features, pack_features
from services.decode.draft_state import DraftLimits, DraftMessage, DraftState

LIMITS = DraftLimits(draft_tokens=3, wait_cap_ms=20.0, max_in_flight=2, patience_ms=100.0)


def rows(start: int, n: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Row i: token 1000 + i + 1, feature filled with i."""
    positions = np.arange(start, start + n)
    return start, (1000 + positions + 1).astype("<u4"), np.repeat(positions[:, None], 2, 1).astype("<f4")


def connected_state(*seq_ids: str) -> DraftState:
    state = DraftState(LIMITS)
    state.connect()
    for seq_id in seq_ids:
        state.open(seq_id)
    return state


def test_proposal_for_the_committed_length_is_used_once_it_comes() -> None:
    state = connected_state("s")
    state.extend("s", *rows(0, 5))
    message = state.pop_message(0.0)
    assert message is not None
    assert message.draft_tokens == 3
    assert message.rows[0].base_tokens == 6
    assert state.step_drafts() == ({}, ("s",))
    state.answer("s", 6, [7, 8, 9], 4.0)
    assert state.step_drafts() == ({"s": (7, 8, 9)}, ())
    assert state.round_trip_ms == 4.0


def test_stale_proposals_are_dropped() -> None:
    state = connected_state("s")
    state.extend("s", *rows(0, 5))
    state.pop_message(0.0)
    state.extend("s", *rows(5, 1))
    state.answer("s", 6, [7], 1.0)
    assert state.step_drafts() == ({}, ("s",))
    message = state.pop_message(1.0)
    assert message is not None
    assert message.rows[0].base_tokens == 7
    state.answer("s", 7, [8], 2.0)
    state.answer("other", 7, [8], 2.0)
    assert state.step_drafts()[0] == {"s": (8,)}


def test_an_answer_measures_the_request_that_has_its_sequence() -> None:
    state = connected_state("a", "b")
    for seq_id, sent_ms in (("a", 0.0), ("b", 10.0)):
        state.extend(seq_id, *rows(0, 1))
        state.pop_message(sent_ms)
    state.answer("b", 2, [1], 13.0)
    assert state.round_trip_ms == 3.0
    assert state.step_drafts() == ({"b": (1,)}, ("a",))


def test_waits_only_for_a_drafter_that_has_answered() -> None:
    state = connected_state("s")
    state.extend("s", *rows(0, 1))
    state.pop_message(0.0)
    assert state.wait_ms(0.0) == 0.0  # it has never answered
    state.answer("s", 2, [1], 5.0)
    state.extend("s", *rows(1, 1))
    state.pop_message(10.0)
    assert state.wait_ms(10.0) == 15.0  # of one sample: three times the round trip
    assert state.wait_ms(10.0 + LIMITS.patience_ms) == 15.0
    assert state.wait_ms(10.1 + LIMITS.patience_ms) == 0.0  # overdue
    state.answer("s", 3, [1], 200.0)
    assert state.wait_ms(200.0) == 0.0  # nothing to wait for
    state.extend("s", *rows(2, 1))
    assert state.wait_ms(200.0) == LIMITS.wait_cap_ms
    state.disconnect()
    assert state.wait_ms(200.0) == 0.0


def test_after_silence_an_idle_drafter_is_trusted_again() -> None:
    state = connected_state("s")
    state.extend("s", *rows(0, 1))
    state.pop_message(0.0)
    state.answer("s", 2, [1], 2.0)
    state.extend("s", *rows(1, 1))
    state.pop_message(1_000_000.0)
    assert state.wait_ms(1_000_000.0) == 6.0


def test_steady_round_trips_are_waited_for_tightly_and_not_below_the_floor() -> None:
    state = connected_state("s")
    for i in range(100):
        state.extend("s", *rows(i, 1))
        state.pop_message(10.0 * i)
        state.answer("s", i + 2, [1], 10.0 * i + 3.0)
    state.extend("s", *rows(100, 1))
    assert 3.0 <= state.wait_ms(1000.0) <= 3.01
    for i in range(100, 200):
        state.extend("s", *rows(i, 1))
        state.pop_message(10.0 * i)
        state.answer("s", i + 2, [1], 10.0 * i + 0.1)
    state.extend("s", *rows(200, 1))
    assert state.wait_ms(2000.0) == LIMITS.wait_floor_ms


def test_a_resumed_step_waits_for_drafts_of_the_rows_that_waited() -> None:
    state = connected_state("a", "b")
    state.extend("a", *rows(0, 1))
    assert state.pop_message(0.0) is not None
    state.answer("a", 2, [1], 5.0)
    state.pause(True)
    state.extend("a", *rows(1, 1))
    assert state.pop_message(10.0) is None and state.complete
    state.pause(False)
    assert state.has_message and not state.complete
    assert state.wait_ms(10.0) > 0
    message = state.pop_message(10.0)
    assert message is not None and message.draft_tokens == LIMITS.draft_tokens
    state.answer("a", 3, [7], 12.0)
    assert state.complete
    assert state.step_drafts() == ({"a": (7,)}, ())


def test_slow_drafter_gets_joined_rows() -> None:
    state = connected_state("s")
    taken: list[DraftMessage] = []
    for position in range(10):
        state.extend("s", *rows(position, 1))
        message = state.pop_message(float(position))
        if message is not None:
            taken.append(message)
    assert len(taken) == LIMITS.max_in_flight
    for position in range(LIMITS.max_in_flight):
        state.answer("s", position + 2, [], 10.0)
    message = state.pop_message(10.0)
    assert message is not None
    assert message.rows[0].start_position == 2
    assert message.rows[0].next_tokens.tolist() == [1000 + i + 1 for i in range(2, 10)]


def test_pending_rows_are_bounded_without_a_drafter() -> None:
    state = DraftState(LIMITS)
    state.open("s")
    for position in range(3 * FEATURE_WINDOW_TOKENS):
        state.extend("s", *rows(position, 1))
    state.connect()
    message = state.pop_message(0.0)
    assert message is not None
    assert len(message.rows[0].next_tokens) == FEATURE_WINDOW_TOKENS
    assert message.rows[0].base_tokens == 3 * FEATURE_WINDOW_TOKENS + 1


def test_closed_sequences_are_sent_and_not_waited_for() -> None:
    state = connected_state("a", "b")
    for seq_id in "ab":
        state.extend(seq_id, *rows(0, 1))
    state.pop_message(0.0)
    state.answer("a", 2, [5], 1.0)
    state.close("b")
    assert state.complete
    message = state.pop_message(1.0)
    assert message is not None
    assert message.closed == ("b",)
    assert state.step_drafts() == ({"a": (5,)}, ())
    state.close("b")
    assert state.pop_message(2.0) is None
    state.answer("b", 2, [6], 3.0)
    assert state.step_drafts() == ({"a": (5,)}, ())
    assert not state._in_flight


_events = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "extend", "send", "answer", "drop", "connect", "disconnect"]),
        st.sampled_from("abcdef"),
        st.integers(1, 3),
    ),
    max_size=80,
)


@given(_events)
def test_random_histories(events: list[tuple[str, str, int]]) -> None:
    """Whatever happens: a draft follows its sequence's committed length, waits and requests are bounded."""
    state = DraftState(LIMITS)
    length: dict[str, int] = {}  # committed
    out: list[tuple[str, int]] = []  # (sequence, base) the drafter has not answered
    now = 0.0
    for event, seq_id, n in events:
        now += n
        if event == "open":
            state.open(seq_id)
            length.setdefault(seq_id, 1)
        elif event == "close":
            state.close(seq_id)
            length.pop(seq_id, None)
        elif event == "extend" and seq_id in length:
            state.extend(seq_id, *rows(length[seq_id] - 1, n))
            length[seq_id] += n
        elif event == "send":
            message = state.pop_message(now)
            if message is not None:
                out += [(r.seq_id, r.base_tokens) for r in message.rows]
                assert all(len(r.next_tokens) == len(r.features) for r in message.rows)
        elif event == "answer" and out:
            answered, base = out.pop(0)
            state.answer(answered, base, [base, base + 1], now)
        elif event == "connect":
            state.connect()
            out.clear()
        elif event == "disconnect":
            state.disconnect()
            out.clear()
        drafts, missed = state.step_drafts()
        for drafted, tokens in drafts.items():
            assert list(tokens) == [length[drafted], length[drafted] + 1]
        assert set(missed) <= length.keys()
        assert not set(missed) & drafts.keys()
        assert 0.0 <= state.wait_ms(now) <= LIMITS.wait_cap_ms
        assert len(state._in_flight) <= LIMITS.max_in_flight
        if not state.connected:
            assert not drafts
            assert state.wait_ms(now) == 0.0


def test_the_drafter_hears_of_no_sequence_that_it_does_not_know() -> None:
    state = connected_state("paused", "sent")
    state.pause(True)
    state.extend("paused", *rows(0, 4))
    state.close("paused")
    assert not state.has_message and state.pop_message(0) is None
    state.pause(False)
    state.extend("sent", *rows(0, 4))
    assert state.has_message
    sent = state.pop_message(0)
    assert sent is not None and [r.seq_id for r in sent.rows] == ["sent"] and not state.has_message
    state.close("sent")
    assert state.has_message
    last = state.pop_message(1)
    assert last is not None and last.closed == ("sent",)


def wide_rows(start: int, n: int, width: int) -> tuple[int, np.ndarray, np.ndarray]:
    return start, np.ones(n, "<u4"), np.zeros((n, width), "<u2")


def test_a_message_is_about_a_bounded_number_of_bytes_and_leaves_nothing_out() -> None:
    width = 7168
    names = [f"s{n}" for n in range(9)]
    state = DraftState(DraftLimits(draft_tokens=3, max_in_flight=100))
    state.connect()
    for name in names:
        state.open(name)
        state.extend(name, *wide_rows(0, FEATURE_WINDOW_TOKENS if name != "s8" else 1, width))
    seen: list[str] = []
    while state.has_message:
        message = state.pop_message(0.0)
        assert message is not None and message.rows
        assert sum(rows.features.nbytes for rows in message.rows) <= MAX_DRAFT_MESSAGE_BYTES
        seen += [rows.seq_id for rows in message.rows]
    assert sorted(seen) == names
    assert seen.index("s8") == 2  # a step does not wait for the prompts before it
    state.close("s0")
    state.close("s7")
    assert state.has_message  # the drafter knows both


def test_rows_that_are_larger_than_a_message_travel_alone() -> None:
    state = connected_state("a", "b")
    state.extend("b", *wide_rows(0, 1, 40_000))
    state.extend("a", *wide_rows(0, FEATURE_WINDOW_TOKENS, 40_000))
    sent = [state.pop_message(0.0) for _ in range(2)]
    assert [[rows.seq_id for rows in message.rows] for message in sent if message] == [["a"], ["b"]]


def test_rows_of_a_prompt_and_of_steps_join_in_bfloat16() -> None:
    state = connected_state("s")
    start, tokens, features = rows(0, 5)
    state.extend("s", start, tokens, bfloat16_features(features))
    for position in (5, 6):
        state.extend("s", *rows(position, 1))
    message = state.pop_message(0.0)
    assert message is not None
    (joined,) = message.rows
    assert joined.base_tokens == 8
    assert pack_features(joined.features) == pack_features(rows(0, 7)[2])
