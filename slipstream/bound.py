"""The three kinds of input bounds and their error messages. slipstream/bounds.py has the table. Pure.

Range   a number from `low` to `high`            ROW.check(value) raises InvalidArgument
Size    a count of bytes or items                ROW.check(n)
Rule    anything else, in words                  raise ROW.refused(field, name=...)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeVar

from slipstream.errors import ContextExceeded, InvalidArgument

Api = Literal["both", "HTTP", "gRPC"]
# No range of a header goes further; int() of a long text takes time.
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included. NaN and infinities are outside every range."""

    field: str
    low: float
    high: float
    note: str = ""
    whole: bool = False
    apis: Api = "both"

    @property
    def words(self) -> str:
        """The rule in words: the error's message without the value."""
        if self.low == self.high:
            return f"must be {shown(self.low)}"
        kind = "whole number" if self.whole else "number"
        return f"must be a {kind} from {shown(self.low)} to {shown(self.high)}"

    def check(self, value: float, field: str | None = None) -> None:
        """Raises InvalidArgument naming `field` (the row's own by default)."""
        if not self.low <= value <= self.high:
            raise InvalidArgument(field or self.field, f"{self.words}, not {shown(value)}")

    def parse(self, text: str) -> int:
        """The whole number that a header states in decimal digits. Raises InvalidArgument."""
        if not (text.isascii() and text.isdecimal()) or len(text) > _MAX_DIGITS:
            raise InvalidArgument(self.field, f"{self.words}, not {shown(text)}")
        number = int(text)
        self.check(number)
        return number


@dataclass(frozen=True, slots=True)
class Size:
    """How many `unit` (bytes, messages, entries) there may be."""

    field: str
    low: int
    high: int
    unit: str
    note: str = ""
    apis: Api = "both"

    @property
    def words(self) -> str:
        """The rule in words: the error's message without the count."""
        many = f"{self.low} to {self.high}" if self.low else f"at most {self.high}"
        return f"must have {many} {self.unit}"

    def check(self, count: int, field: str | None = None) -> None:
        """Raises InvalidArgument naming `field` (the row's own by default)."""
        if not self.low <= count <= self.high:
            raise InvalidArgument(field or self.field, f"{self.words}, not {count}")


@dataclass(frozen=True, slots=True)
class Rule:
    """A bound that is no number. `words` may have {placeholders} that `refused` fills."""

    field: str
    words: str
    note: str = ""
    apis: Api = "both"

    def refused(self, field: str | None = None, **details: object) -> InvalidArgument:
        """The error to raise; `field` is the row's own by default."""
        return InvalidArgument(field or self.field, self.words.format(**details) if details else self.words)


@dataclass(frozen=True, slots=True)
class Overflow(Rule):
    """A rule about the length of a prompt and its answer together."""

    def refused(self, field: str | None = None, **details: object) -> InvalidArgument:
        """The error to raise, which clients know by its code."""
        return ContextExceeded(field or self.field, self.words.format(**details))


Bound = Range | Size | Rule
BoundT = TypeVar("BoundT", Range, Size, Rule, Overflow)


class Section:
    """Rows of the table under one heading, in order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Bound] = []

    def add(self, row: BoundT) -> BoundT:
        """Append a row; returns it."""
        self.rows.append(row)
        return row

    def markdown(self) -> list[str]:
        """The rows that state a number as a Markdown list; nothing without such rows."""
        lines = [_line(row) for row in self.rows if _states_number(row)]
        return ["", f"## {self.title}", "", *lines] if lines else []


def _states_number(row: Bound) -> bool:
    return not isinstance(row, Rule) or re.search(r"\b\d", row.words) is not None


def _line(row: Bound) -> str:
    api = "" if row.apis == "both" else f" ({row.apis})"
    note = f" *{row.note}*" if row.note else ""
    return f"- `{row.field}`{api}: {row.words}{note}"


def shown(value: object) -> str:
    """A client's value as it may stand in a message: at most 64 characters.

    Numbers get seven digits, so that a float32 of the wire reads as the client wrote it.
    """
    text = repr(value[:64] if isinstance(value, str) else value)
    if isinstance(value, float) and math.isfinite(value):
        text = f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.7g}"
    return text if len(text) <= 64 else text[:61] + "..."


def shown_name(name: str) -> str:
    """A client's field name as it may stand in a path: printable, at most 64 characters."""
    text = repr(name[:65])[1:-1]
    return text if len(text) <= 64 else text[:61] + "..."
