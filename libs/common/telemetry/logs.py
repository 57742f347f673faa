"""Logs of a process: one line for each record, to stderr, as text or as JSON.

    configure_logging("router", "router-0", form="json")
    log.warning("is slow")
    {"time":"2026-11-23T06:37:09.123Z","level":"warning","service":"router","instance":"router-0",
     "logger":"x","message":"is slow","request_id":"mine","trace_id":"4bf9.."}

As text: `2026-11-23T06:37:09.123Z WARNING router/router-0 x: is slow request_id=mine trace_id=4bf9..`. The
request is that of `log_request` in the current task, the trace that of the current span.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar

from libs.common.telemetry import tracing

log = logging.getLogger(__name__)

# Of one line. What others send may be as large as a message.
MAX_MESSAGE_CHARS = 4096
MAX_FIELD_CHARS = 512
MAX_EXCEPTION_CHARS = 16_384
# Such a value stands in a text line as it is; any other one is quoted as JSON.
_PLAIN = re.compile(r"[!#-<>-~]+")
# What a terminal obeys, or takes for the end of a line. Below it, what has no width or turns the direction of
# what follows: a line could look like another one.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(slots=True)
class LoggedRequest:
    """The request of a task and of the tasks that it starts. The id may become known, or change, later."""

    request_id: str = ""


_request: contextvars.ContextVar[LoggedRequest | None] = contextvars.ContextVar("request", default=None)


@contextlib.contextmanager
def log_request(request: LoggedRequest) -> Iterator[None]:
    """Lines of the block, and of tasks that start in it, name the request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def log_no_request() -> None:
    """Lines of the current task name no request: the task outlives the one that started it."""
    _request.set(None)


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
        fields = {name: _cut(value, MAX_FIELD_CHARS) for name, value in fields.items()}
        exception = exception[-MAX_EXCEPTION_CHARS:]
        time = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if not self.is_json:
            shown = "".join([f" {name}={_shown(value)}" for name, value in fields.items()])
            below = "".join([f"\n{_escaped(row)}" for row in exception.split("\n")]) if exception else ""
            words = _escaped(message)
            return f"{time} {level.upper()} {self.service}/{self.instance} {logger}: {words}{shown}{below}"
        head = {"time": time, "level": level.lower(), "service": self.service, "instance": self.instance}
        rest: dict[str, object] = {"logger": logger, "message": message, **fields}
        if exception:
            rest["exception"] = exception
        return json.dumps({**head, **rest}, separators=(",", ":"))


class LogFormatter(logging.Formatter):
    """Formats records as lines, and exceptions as their frames and classes, without their messages.

    The message of an unexpected exception may hold what it failed on: a client's text or key. Messages of the
    operating system stay.
    """

    def __init__(self, lines: LineFormat) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        failure = record.exc_info
        return self._lines.line(
            record.levelname,
            record.name,
            record.getMessage(),
            at_s=record.created,
            fields=_current(),
            exception=self.formatException(failure) if failure and failure[1] else "",
        )

    def formatException(self, ei: Any) -> str:
        """The frames of the exception and of its causes, the first cause first."""
        return "\n".join(_without_messages(ei[1]))


def configure_logging(service: str, instance: str, *, level: str = "info", form: str = "text") -> None:
    """Log to stderr. Exceptions that nothing handles are lines too. `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(LineFormat(service, instance, form == "json")))
    logging.basicConfig(handlers=[handler], level=level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    # grpc.aio logs a harmless traceback for each cancelled stream handler.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)


def log_loop_errors() -> None:
    """Log what tasks and callbacks of the running loop raise, in place of asyncio.

    asyncio's own line has the message of the exception.
    """
    asyncio.get_running_loop().set_exception_handler(_log_loop_error)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.error("%s", context["message"], exc_info=context.get("exception"))


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        log.critical("the process ends by an exception", exc_info=(kind, error, trace))


def _log_uncaught_of_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        name = failure.thread.name if failure.thread is not None else "that has ended"
        log.error("the thread %s ends by an exception", name, exc_info=failure.exc_value)


def _current() -> dict[str, str]:
    """The request and the trace of the current task, as far as they are known."""
    fields = {}
    request = _request.get()
    if request is not None and request.request_id:
        fields["request_id"] = request.request_id
    if trace_id := tracing.trace_id():
        fields["trace_id"] = trace_id
    return fields


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


def _shown(value: object) -> str:
    if not isinstance(value, str):
        return str(value)
    text = value or "-"
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
