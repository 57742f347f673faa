"""Schemas that are rewritten for llguidance: bounds of numbers, places of arrays, keys of patterns."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.structured.schema import key_count
from libs.structured.schema.array_places import has_items_as_places, with_one_form
from libs.structured.schema.distinct_keys import count_distinct_keys, find_few_keys, find_most_keys
from libs.structured.schema.key_count import may_lack_keys
from libs.structured.schema.number_bounds import with_exact_bounds
from libs.structured.schema.schema_walk import Path

BOUND = st.none() | st.integers(-3, 3) | st.integers(-6, 6).map(lambda half: half / 2)
NAMES = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def allows(schema: dict[str, Any], value: float) -> bool:
    least, above, most, below = (schema.get(name) for name in NAMES)
    return (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )


@given(st.tuples(BOUND, BOUND, BOUND, BOUND), st.sampled_from(["number", ["null", "number"], None]))
def test_exact_bounds_allow_what_the_stated_ones_do_but_for_a_billionth(
    bounds: tuple[float | None, ...], kind: Any
) -> None:
    schema = {name: bound for name, bound in zip(NAMES, bounds, strict=True) if bound is not None}
    schema |= {"type": kind} if kind else {}
    made = with_exact_bounds(schema)
    for quarter in range(-13, 14):
        assert allows(made, quarter / 4) == allows(schema, quarter / 4)
    low, high = made.get("exclusiveMinimum", 0.5), made.get("exclusiveMaximum", 0.5)
    least, most = tightest(made, NAMES[:2], max), tightest(made, NAMES[2:], min)
    for bound, gap in ((low, most - low), (high, high - least)):
        # llguidance would allow the bound.
        assert not (float(bound).is_integer() and 0 < gap < 1 and not float(gap).is_integer())


def tightest(made: dict[str, Any], names: tuple[str, ...], choose: Any) -> float:
    """The bound of one side; one without a near fraction where none is stated."""
    bounds = [made[name] for name in names if name in made]
    return choose(bounds) if bounds else (math.inf if choose is min else -math.inf)


def test_an_exclusive_bound_beside_a_near_fraction_moves_inside() -> None:
    assert with_exact_bounds({"exclusiveMinimum": 0, "maximum": 0.5}) == {"minimum": 1e-9, "maximum": 0.5}
    assert with_exact_bounds({"exclusiveMaximum": 0, "minimum": -1e-9}) == {
        "maximum": -5e-10,
        "minimum": -1e-9,
    }
    both = {"exclusiveMinimum": 2, "minimum": 2.25, "maximum": 2.5}
    assert with_exact_bounds(both) == {"minimum": 2.25, "maximum": 2.5}
    for untouched in ({"exclusiveMinimum": 0, "maximum": 1.5}, {"exclusiveMinimum": 0, "maximum": 1}):
        assert with_exact_bounds(untouched) == untouched
    for kind in ("integer", ["integer", "null"]):
        integers = {"type": kind, "exclusiveMinimum": 0, "maximum": 0.5}
        assert with_exact_bounds(integers) == integers
    fractions = {"type": ["null", "number"], "exclusiveMinimum": 2, "maximum": 2.5}
    assert with_exact_bounds(fractions)["minimum"] == 2 + 1e-9


@pytest.mark.parametrize("step", [-1, 0, 1, 2**60])
def test_integers_that_no_double_equals_are_rounded_inward(step: int) -> None:
    bound = 2**53 + step
    low, high = (
        with_exact_bounds({"minimum": bound})["minimum"],
        with_exact_bounds({"maximum": bound})["maximum"],
    )
    assert float(high) <= bound <= float(low)
    assert (low, high) == ((2**53 + 2, bound) if step == 1 else (bound, bound))
    assert with_exact_bounds({"minimum": 10**400}) == {"minimum": 10**400}


def test_places_have_one_form() -> None:
    a, b, c = {"type": "null"}, {"const": 1}, {"const": 2}

    def made(**stated: Any) -> dict[str, Any]:
        return with_one_form(stated, is_old=False)

    assert made(items=[a]) == {"items": [a]}
    assert made(prefixItems=[a], additionalItems=b) == {"prefixItems": [a]}
    assert made(prefixItems=[a], items=b, additionalItems=c) == {"prefixItems": [a], "items": b}
    assert made(prefixItems=[a, True, c, b, True], items=[b, c, False, True], additionalItems=a) == {
        "prefixItems": [{"allOf": [a, b]}, c, False, b, a],
        "items": False,
    }
    assert made(prefixItems=[False, True], items=[a, True, b]) == {
        "prefixItems": [False, True, b],
        "items": False,
    }
    assert with_one_form({"prefixItems": [a], "items": [b]}, is_old=True) == {"items": [b]}
    drafts = ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", 7]
    assert [has_items_as_places({"$schema": draft}) for draft in drafts] == [True, False, False]
    assert not has_items_as_places(True)


@pytest.mark.parametrize(
    ("patterns", "n_keys", "lacks"),
    [
        (["^[ab]$"], 2, False),
        (["^[ab]$"], 3, True),
        (["^[ab]$", "^c$"], 3, False),
        (["^(a|b)$"], 3, True),
        (["^a{2,}$"], 9, False),
        (["^a+$"], 9, False),
        (["a"], 9, False),  # it begins anywhere in a key
        (["^a$|b$"], 9, False),
        (["^[a-z]{3}$"], 9, True),  # 17,576 keys, of which no more than 8 are counted
        (["^[a+]{4}$"], 9, True),  # a class is no repeat
        (["^([a-z]){3}$"], 9, True),
        (["^[a-z]{3}$", "^b+$"], 9, False),
    ],
)
def test_closed_objects_may_lack_keys(
    monkeypatch: pytest.MonkeyPatch, patterns: list[str], n_keys: int, lacks: bool
) -> None:
    monkeypatch.setattr(key_count, "_MAX_COUNTED", 8)
    schema = {"patternProperties": dict.fromkeys(patterns, True), "additionalProperties": False}
    assert may_lack_keys(schema, n_keys) == lacks
    assert may_lack_keys({**schema, "type": ["object", "null"]}, n_keys) == lacks
    others: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": ["string"]},
        {"additionalProperties": True},
        {"patternProperties": {}},
    ]
    assert not any(may_lack_keys({**schema, **other}, n_keys) for other in others)


def test_distinct_keys_are_those_beyond_the_declared_ones() -> None:
    least = {"minProperties": 4, "required": ["a", "b"]}
    assert count_distinct_keys([(Path(), least), (Path(), {}), (Path(), {"minProperties": 9})]) == 9
    assert count_distinct_keys([(Path(), least)]) == 4
    assert count_distinct_keys([(Path(), {**least, "minProperties": 3})]) == 0
    assert count_distinct_keys([(Path(), {**least, "additionalProperties": False})]) == 0
    closed = {"patternProperties": {"^[ab]$": True}, "additionalProperties": False}
    assert count_distinct_keys([(Path(), {**least, **closed})]) == 4
    assert count_distinct_keys([(Path(), {"minProperties": "4"})]) == 0
    parts: list[tuple[Path, dict[str, Any]]] = [(Path(steps=("x",)), closed), (Path(), {"maxProperties": 3})]
    assert (find_few_keys(parts, 3), find_few_keys(parts, 2), find_few_keys(parts, 0)) == (
        "x.patternProperties",
        None,
        None,
    )
    assert (find_most_keys(parts, 1), find_most_keys(parts, 0)) == ("maxProperties", None)
    assert find_most_keys([*parts[1:], (Path(), {**closed, "additionalProperties": True})], 1) is None
