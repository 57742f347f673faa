"""Lines of logs, one for each record, as text or as JSON.

    LineFormat("router", "router-0", is_json=True).line("WARNING", "x", "is slow", at_s=0.0, fields={})
    {"time":"1970-01-01T00:00:00.000Z","level":"warning","service":"router","instance":"router-0",
     "logger":"x","message":"is slow"}

As text: `1970-01-01T00:00:00.000Z WARNING router/router-0 x: is slow`.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

LOG_FORMATS = ("text", "json")
# Of one line. What others send may be as large as a message.
MAX_MESSAGE_CHARS = 4096
MAX_FIELD_CHARS = 512
MAX_EXCEPTION_CHARS = 16_384
# Such a value stands in a text line as it is; any other one is quoted as JSON.
_is_plain = re.compile(rf"[!#-<>-~]{{1,{MAX_FIELD_CHARS}}}").fullmatch
# What a terminal obeys, or takes for the end of a line. Below it, what has no width or turns the direction of
# what follows: a line could look like another one.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True, slots=True)
class LineFormat:
    """The form of all lines of a process. `service` is its role."""

    service: str
    instance: str
    is_json: bool = False

    def line(
        self,
        level: str,
        logger: str,
        message: str,
        *,
        at_s: float,
        fields: Mapping[str, object],
        exception: str = "",
    ) -> str:
        """The line of one event. `at_s` is a Unix time. In text, an exception's lines are below it.

        What is too long is cut, an exception at its beginning.
        """
        message = _cut(message, MAX_MESSAGE_CHARS)
        exception = exception[-MAX_EXCEPTION_CHARS:]
        time = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if not self.is_json:
            shown = "".join(
                [
                    f" {name}={_quoted(value) if isinstance(value, str) and not _is_plain(value) else value}"
                    for name, value in fields.items()
                ]
            )
            below = "".join([f"\n{_escaped(row)}" for row in exception.split("\n")]) if exception else ""
            words = _escaped(message)
            return f"{time} {level.upper()} {self.service}/{self.instance} {logger}: {words}{shown}{below}"
        head = {"time": time, "level": level.lower(), "service": self.service, "instance": self.instance}
        rest: dict[str, object] = {"logger": logger, "message": message}
        rest |= {name: _cut(value, MAX_FIELD_CHARS) for name, value in fields.items()}
        if exception:
            rest["exception"] = exception
        return json.dumps({**head, **rest}, separators=(",", ":"))


class RecordFormatter(logging.Formatter):
    """Formats records as lines, and exceptions as their frames and classes, without their messages.

    The message of an unexpected exception may hold what it failed on: a client's text or key. Messages of the
    operating system stay.
    """

    def __init__(self, lines: LineFormat) -> None:
        super().__init__()
        self.lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        failure = record.exc_info
        return self.lines.line(
            record.levelname,
            record.name,
            record.getMessage(),
            at_s=record.created,
            fields=self.fields(),
            exception=self.formatException(failure) if failure and failure[1] else "",
        )

    def fields(self) -> Mapping[str, str]:
        """What lines name beside the record."""
        return {}

    def formatException(self, ei: Any) -> str:
        """The frames of the exception and of its causes, the first cause first."""
        return "\n".join(_without_messages(ei[1]))


def _without_messages(error: BaseException) -> Iterator[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _without_messages(cause)
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _without_messages(part)
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    yield f"{name}: {error}" if isinstance(error, OSError) else name


_Value = TypeVar("_Value")


def _cut(value: _Value, most_chars: int) -> _Value | str:
    if not isinstance(value, str) or len(value) <= most_chars:
        return value
    return f"{value[:most_chars]}.. ({len(value)} characters)"


def _escaped(text: str) -> str:
    """The text with its control characters as Python writes them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _quoted(text: str) -> str:
    return json.dumps(_cut(text, MAX_FIELD_CHARS)) if text else "-"
