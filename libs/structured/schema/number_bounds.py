"""Bounds of numbers as llguidance holds them exactly; it computes with doubles. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

# Integers up to here are exact as doubles.
_EXACT = 2**53
# llguidance allows the bound itself where an exclusive bound is a whole number and the other is a fraction in
# the same unit. So (0, 0.5] has 0. A bound a little inside has no such case. llguidance rounds smaller steps.
_STEP = 1e-9
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def with_exact_bounds(part: dict[str, Any]) -> dict[str, Any]:
    """The schema with bounds that admit no number beyond those stated."""
    made = dict(part)
    for names, inward in ((_LOW, math.inf), (_HIGH, -math.inf)):
        for name in names:
            bound = part.get(name)
            if type(bound) is int and abs(bound) > _EXACT:
                made[name] = _rounded(bound, inward)
    if _may_have_fractions(part):
        _move_inside(made, *_LOW, other=_tightest(made, _HIGH, min), inward=1)
        _move_inside(made, *_HIGH, other=_tightest(made, _LOW, max), inward=-1)
    return made


def _rounded(bound: int, inward: float) -> int | float:
    """The nearest double that is not outside of the bound."""
    try:
        nearest = float(bound)
    except OverflowError:
        return bound
    is_outside = nearest < bound if inward > 0 else nearest > bound
    return int(math.nextafter(nearest, inward)) if is_outside else bound


def _move_inside(
    made: dict[str, Any], plain: str, exclusive: str, *, other: float | None, inward: int
) -> None:
    """Replace a whole exclusive bound by a plain one inside, where the other bound is near and a fraction."""
    bound = made.get(exclusive)
    if other is None or not _is_number(bound):
        return
    if float(bound).is_integer() and not float(other).is_integer() and 0 < (other - bound) * inward < 1:
        del made[exclusive]
        inside = bound + inward * min(_STEP, (other - bound) * inward / 2)
        stated = made.get(plain)
        made[plain] = max(inside * inward, stated * inward) * inward if _is_number(stated) else inside


def _tightest(made: Mapping[str, Any], names: tuple[str, str], choose: Callable[..., float]) -> float | None:
    bounds = [made[name] for name in names if _is_number(made.get(name))]
    return choose(bounds) if bounds else None


def _may_have_fractions(part: Mapping[str, Any]) -> bool:
    kinds = part.get("type", "number")
    return kinds == "number" or (isinstance(kinds, list) and "number" in kinds)


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)
