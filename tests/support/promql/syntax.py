"""Expressions of PromQL as trees. What the rules and dashboards do not use raises ValueError."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<duration>\d+(?:ms|[smhdw])\b)|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_:][\w:]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%(){}\[\],<>=]))""",
    re.VERBOSE,
)
AGGREGATIONS = frozenset({"sum", "max", "min", "avg", "count"})
COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
SETS = frozenset({"and", "or", "unless"})
# Operators by how loosely they bind, the loosest first.
_LEVELS = (("or",), ("and", "unless"), tuple(COMPARISONS), ("+", "-"), ("*", "/", "%"))


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar."""

    value: float


@dataclass(frozen=True, slots=True)
class Selector:
    """Series by name and matchers (label, operator, value); of the last `range_s`, if that is not 0."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    range_s: float = 0.0
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """A function of arguments."""

    function: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`sum by (labels) (operand)` and its like; `is_without`: by all other labels."""

    function: str
    operand: Expression
    labels: tuple[str, ...] = ()
    is_without: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Two operands. `on` None: all labels but those of `ignoring` match. `is_group_left`: many to one."""

    operator: str
    left: Expression
    right: Expression
    on: tuple[str, ...] | None = None
    ignoring: tuple[str, ...] = ()
    is_group_left: bool = False


Expression = Number | Selector | Call | Aggregation | Operation


@functools.cache
def parse(text: str) -> Expression:
    """The tree of an expression. Raises ValueError."""
    return _Parser(text).whole()


def selectors(tree: Expression) -> list[Selector]:
    """Every selector of the tree, in order."""
    match tree:
        case Selector():
            return [tree]
        case Call():
            return [found for argument in tree.arguments for found in selectors(argument)]
        case Aggregation():
            return selectors(tree.operand)
        case Operation():
            return selectors(tree.left) + selectors(tree.right)
    return []


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise ValueError(f"{text[at:]!r} in {text!r}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._tokens.append(("end", ""))
        self._at = 0

    def whole(self) -> Expression:
        tree = self._binary(0)
        if self._kind != "end":
            raise ValueError(f"{self._next!r} after a whole expression: {self._text!r}")
        return tree

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _next(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, *wanted: str) -> str:
        """The next token, which must be one of `wanted`, if there are any."""
        token = self._next
        if wanted and token not in wanted:
            raise ValueError(f"{token!r} instead of {' or '.join(wanted)}: {self._text!r}")
        self._at += 1
        return token

    def _has(self, token: str) -> bool:
        """Take the token, if it is the next one."""
        found = self._next == token
        self._at += found
        return found

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._single()
        left = self._binary(level + 1)
        while self._kind in ("sign", "name") and self._next in _LEVELS[level]:
            operator, on, many = self._take(), None, False
            ignoring: tuple[str, ...] = ()
            if self._has("on"):
                on = self._names()
            elif self._has("ignoring"):
                ignoring = self._names()
            if self._has("group_left"):
                many = True
                if self._next == "(" and self._names():
                    raise ValueError(f"labels of group_left: {self._text!r}")
            right = self._binary(level + 1)
            left = Operation(operator, left, right, on, ignoring, many)
        return left

    def _single(self) -> Expression:
        if self._has("("):
            tree = self._binary(0)
            self._take(")")
            return tree
        if self._kind == "number":
            return Number(float(self._take()))
        if self._kind != "name":
            raise ValueError(f"{self._next!r} begins no expression: {self._text!r}")
        name = self._take()
        if name in AGGREGATIONS:
            return self._aggregation(name)
        if self._next == "(":
            return Call(name, self._listed(lambda: self._binary(0)))
        return self._selector(name)

    def _aggregation(self, function: str) -> Aggregation:
        labels: tuple[str, ...] = ()
        grouping = ""
        for _ in range(2):  # the labels may stand before or after the operand
            if self._next in ("by", "without"):
                grouping, labels = self._take(), self._names()
            elif self._next == "(":
                (operand,) = self._listed(lambda: self._binary(0))
        return Aggregation(function, operand, labels, grouping == "without")

    def _selector(self, name: str) -> Selector:
        matchers: list[tuple[str, str, str]] = []
        if self._has("{"):
            while not self._has("}"):
                label, operator = self._take(), self._take("=", "!=", "=~", "!~")
                matchers.append((label, operator, self._take()[1:-1]))
                self._has(",")
        range_s = offset_s = 0.0
        if self._has("["):
            range_s = _seconds(self._take())
            self._take("]")
        if self._has("offset"):
            offset_s = _seconds(self._take())
        return Selector(name, tuple(matchers), range_s, offset_s)

    def _names(self) -> tuple[str, ...]:
        return self._listed(self._take)

    def _listed(self, read: Callable[[], _T]) -> tuple[_T, ...]:
        """What stands between parentheses, with commas."""
        found: list[_T] = []
        self._take("(")
        while not self._has(")"):
            found.append(read())
            if self._next != ")":
                self._take(",")
        return tuple(found)


def _seconds(duration: str) -> float:
    found = re.fullmatch(r"(\d+)(\D+)", duration)
    if found is None:
        raise ValueError(f"{duration!r} is no duration")
    return int(found[1]) * _UNITS_S[found[2]]
