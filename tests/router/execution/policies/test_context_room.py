"""The room that an attempt asks of its workers, and the cap of its answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.execution.policies.context_room import (
    OPEN_OUTPUT_TOKENS,
    OutputRoom,
    capped_output_tokens,
    list_output_lengths,
    list_rooms,
)

COUNTS = st.integers(1, 1 << 20)


@given(COUNTS, st.none() | COUNTS, st.booleans(), st.integers(0, 1 << 20))
def test_output_lengths_fall_and_stay_within_the_bound(
    max_tokens: int, stated: int | None, is_capped: bool, least: int
) -> None:
    lengths = list_output_lengths(max_tokens, stated_tokens=stated, is_capped=is_capped, least_tokens=least)
    assert list(lengths) == sorted(set(lengths), reverse=True)
    assert lengths[-1] >= 1 and lengths[0] <= max_tokens
    assert lengths[-1] >= min(max_tokens, least)
    if stated is not None:
        assert lengths[0] == max_tokens and (is_capped or lengths == (max_tokens,))
    else:
        assert lengths[0] <= max(1, least) - 1 + OPEN_OUTPUT_TOKENS


@given(st.lists(COUNTS, max_size=3), COUNTS, st.integers(0, 1 << 20), COUNTS)
def test_each_room_takes_at_least_another_token_and_never_more_than_the_cap(
    lengths: list[int], prompt: int, emitted: int, left: int
) -> None:
    max_tokens = emitted + left
    output_room = OutputRoom(tuple(length for length in lengths if length <= max_tokens))
    asked = list_rooms(output_room, prompt_tokens=prompt, emitted_tokens=emitted, max_tokens=max_tokens)
    for room in asked:
        assert prompt + emitted < room.decode_tokens <= prompt + max_tokens
        assert prompt + emitted < room.prefill_tokens <= min(room.decode_tokens, prompt + emitted + 2)
    if emitted or not output_room.lengths_tokens:
        assert asked[0].decode_tokens == prompt + max_tokens
    if emitted:
        assert asked[-1].decode_tokens == prompt + emitted + 1


@given(COUNTS, st.integers(0, 1 << 20), COUNTS, st.lists(st.none() | COUNTS, max_size=6))
def test_a_cap_only_falls_and_never_below_what_the_room_of_its_worker_holds(
    prompt: int, emitted: int, left: int, bounds: list[int | None]
) -> None:
    max_tokens = emitted + left
    for bound in bounds:
        asked = list_rooms(OutputRoom(), prompt_tokens=prompt, emitted_tokens=emitted, max_tokens=max_tokens)
        taken = [room for room in asked if bound is None or room.decode_tokens <= bound]
        if not taken:
            continue
        before = max_tokens
        max_tokens = capped_output_tokens(max_tokens, prompt_tokens=prompt, worker_tokens=bound)
        assert emitted < max_tokens <= before
        assert taken[0].decode_tokens <= prompt + max_tokens
        if taken[0] == asked[0]:
            assert max_tokens == before


def test_lengths_and_caps_of_usual_requests() -> None:
    assert list_output_lengths(9000, stated_tokens=None, is_capped=False) == (OPEN_OUTPUT_TOKENS, 1)
    lengths = list_output_lengths(9000, stated_tokens=9000, is_capped=True, least_tokens=100)
    assert lengths == (9000, OPEN_OUTPUT_TOKENS + 99, 100)
    (room,) = list_rooms(OutputRoom(), prompt_tokens=50, emitted_tokens=0, max_tokens=9)
    assert (room.prefill_tokens, room.decode_tokens) == (52, 59)
    caps = [capped_output_tokens(9, prompt_tokens=50, worker_tokens=tokens) for tokens in (None, 59, 58, 50)]
    assert caps == [9, 9, 8, 1]
