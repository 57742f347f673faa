"""The value of an expression at a time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.promql.functions import NUMBERS, OVER_TIME, VECTORS
from tests.support.promql.series import NAME, Labels, Series
from tests.support.promql.syntax import (
    COMPARISONS,
    SETS,
    Aggregation,
    Call,
    Expression,
    Number,
    Operation,
    Selector,
    parse,
)

Vector = dict[Labels, float]
_OPERATORS: Mapping[str, Callable[[float, float], float | bool]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "%": math.fmod},
    "/": lambda left, right: left / right if right else math.copysign(math.inf, left) if left else math.nan,
    **{"==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt},
    **{">=": operator.ge, "<=": operator.le},
}
_AGGREGATED: Mapping[str, Callable[[list[float]], float]] = {
    **{"sum": math.fsum, "max": max, "min": min},
    "avg": lambda values: math.fsum(values) / len(values),
    "count": lambda values: float(len(values)),
}


def evaluate(expression: str, series: Series, at_s: float) -> Vector:
    """The vector at that time, by labels; a scalar has none. Raises ValueError as Prometheus does."""
    found = _At(series, at_s).value(parse(expression))
    vector = found if isinstance(found, dict) else {frozenset(): found}
    return {_without_name(labels): value for labels, value in vector.items()}


@dataclass(frozen=True, slots=True)
class _At:
    series: Series
    at_s: float

    def value(self, tree: Expression) -> Vector | float:
        match tree:
            case Number():
                return tree.value
            case Selector():
                found = self.series.now(tree, self.at_s)
                return {labels | {(NAME, tree.name)}: value for labels, value in found.items()}
            case Call():
                return self._call(tree)
            case Aggregation():
                return _aggregated(tree, self.vector(tree.operand))
            case Operation():
                return self._operation(tree)

    def vector(self, tree: Expression) -> Vector:
        found = self.value(tree)
        if not isinstance(found, dict):
            raise ValueError(f"{tree} is no vector")
        return found

    def _call(self, call: Call) -> Vector | float:
        name, arguments = call.function, call.arguments
        if name == "time":
            return self.at_s
        if name == "vector":
            found = self.value(arguments[0])
            assert isinstance(found, float)
            return {frozenset(): found}
        if name in OVER_TIME:
            (selector,) = arguments
            assert isinstance(selector, Selector) and selector.range_s, call
            end_s = self.at_s - selector.offset_s
            ranges = self.series.ranges(selector, self.at_s)
            values = {
                labels: OVER_TIME[name](samples, end_s - selector.range_s, end_s)
                for labels, samples in ranges.items()
            }
            return {labels: value for labels, value in values.items() if value is not None}
        if name == "absent":
            return {} if self.vector(arguments[0]) else {frozenset(): 1.0}
        if name == "histogram_quantile":
            quantile = self.value(arguments[0])
            assert isinstance(quantile, float)
            return VECTORS[name](quantile, self.vector(arguments[1]))
        if name in NUMBERS:
            bound = self.value(arguments[1])
            assert isinstance(bound, float)
            return {
                _without_name(labels): NUMBERS[name](value, bound)
                for labels, value in self.vector(arguments[0]).items()
            }
        raise ValueError(f"the function {name} is not known")

    def _operation(self, tree: Operation) -> Vector | float:
        left, right = self.value(tree.left), self.value(tree.right)
        if tree.operator in SETS:
            assert isinstance(left, dict) and isinstance(right, dict), tree
            return _set_operation(tree, left, right)
        compute, compares = _OPERATORS[tree.operator], tree.operator in COMPARISONS
        if isinstance(left, dict) and isinstance(right, dict):
            return _matched(tree, left, right)
        if isinstance(left, dict) or isinstance(right, dict):
            vector = left if isinstance(left, dict) else right
            assert isinstance(vector, dict)
            found: Vector = {}
            for labels, value in vector.items():
                pair = (value, right) if vector is left else (left, value)
                computed = compute(*pair)
                if not compares:
                    found[_without_name(labels)] = float(computed)
                elif computed:
                    found[labels] = value
            return found
        if compares:
            raise ValueError(f"scalars are compared: {tree}")
        return float(compute(left, right))


def _aggregated(tree: Aggregation, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        kept = frozenset(
            pair for pair in labels if pair[0] != NAME and (pair[0] in tree.labels) != tree.is_without
        )
        groups.setdefault(kept, []).append(value)
    return {labels: _AGGREGATED[tree.function](values) for labels, values in groups.items()}


def _key(tree: Operation, labels: Labels) -> Labels:
    """The labels by which elements of both sides match."""
    if tree.on is not None:
        return frozenset(pair for pair in labels if pair[0] in tree.on)
    return frozenset(pair for pair in labels if pair[0] not in (NAME, *tree.ignoring))


def _set_operation(tree: Operation, left: Vector, right: Vector) -> Vector:
    there = {_key(tree, labels) for labels in (left if tree.operator == "or" else right)}
    if tree.operator == "or":
        return left | {labels: value for labels, value in right.items() if _key(tree, labels) not in there}
    wanted = tree.operator == "and"
    return {labels: value for labels, value in left.items() if (_key(tree, labels) in there) == wanted}


def _matched(tree: Operation, left: Vector, right: Vector) -> Vector:
    """Arithmetic, or a filter, of elements that match. Raises ValueError where several match one."""
    compute, compares = _OPERATORS[tree.operator], tree.operator in COMPARISONS
    ones: dict[Labels, float] = {}
    for labels, value in right.items():
        key = _key(tree, labels)
        if key in ones:
            raise ValueError(f"several of the right side match {dict(key)}: {tree}")
        ones[key] = value
    found: Vector = {}
    seen: set[Labels] = set()
    for labels, value in left.items():
        key = _key(tree, labels)
        if key not in ones:
            continue
        if key in seen and not tree.is_group_left:
            raise ValueError(f"several of the left side match {dict(key)}: {tree}")
        seen.add(key)
        computed = compute(value, ones[key])
        kept = labels if tree.is_group_left else key | {each for each in labels if each[0] == NAME}
        if not compares:
            found[_without_name(kept)] = float(computed)
        elif computed:
            found[kept] = value
    return found


def _without_name(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != NAME)
