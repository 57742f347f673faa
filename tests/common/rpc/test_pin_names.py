"""A pin that is ended by its name holds nothing afterwards, whichever of the two came first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.pins.names import MAX_NAME_CHARS, PinNames
from slipstream.errors import InvalidArgument


@given(st.permutations(["begin", "done", "end", "end again"]))
def test_in_any_order_nothing_is_held_after_the_end(order: list[str]) -> None:
    names, held = PinNames(), set[str]()
    begun = False
    for act in order:
        if act == "begin":
            begun = names.begin("n")
        elif act == "done" and begun:
            held.add("lease")
            if not names.done("n", "lease"):
                held.discard("lease")
        elif act.startswith("end"):
            held.discard(names.end("n"))
    if begun and order.index("done") < order.index("begin"):  # it is still being made
        held.add("lease")
        if not names.done("n", "lease"):
            held.discard("lease")
    assert not held


def test_pins_without_a_name_are_ended_by_their_lease() -> None:
    names = PinNames()
    for lease in ("a", "b"):
        assert names.begin("")
        assert names.done("", lease)
        assert names.end(lease) == lease
    assert names.begin("")


def test_a_name_is_for_one_pin_at_a_time() -> None:
    names = PinNames()
    assert names.begin("n")
    with pytest.raises(InvalidArgument):
        names.begin("n")
    assert names.done("n", "lease")
    with pytest.raises(InvalidArgument):
        names.begin("n")
    assert names.end("n") == "lease"
    with pytest.raises(InvalidArgument):
        names.begin("n" * (MAX_NAME_CHARS + 1))


def test_a_pin_that_held_nothing_leaves_no_name() -> None:
    names = PinNames()
    assert names.begin("n")
    assert names.done("n", "")
    assert len(names) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=200))
def test_memory_is_bounded(acts: list[tuple[bool, int]]) -> None:
    names = PinNames(remembered=8)
    for pins, number in acts:
        name = str(number)
        if not pins:
            names.end(name)
            continue
        try:
            begun = names.begin(name)
        except InvalidArgument:
            continue
        if begun:
            names.done(name, f"lease {name}")
    assert len(names) <= 16
