"""Logs of a process: one line for each record, to stderr."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any


class TracebackFormatter(logging.Formatter):
    """Formats exceptions as their frames and classes, without their messages.

    The message of an unexpected exception may hold what it failed on: a client's text or key. Messages of the
    operating system stay.
    """

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


def log_format(service: str) -> str:
    """The form of a log line, with the name of the service."""
    return f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s"


def configure_logging(service: str, level: str = "info", *, hides_messages: bool = False) -> None:
    """Log to stderr, one line for each record, with the name of the service.

    `hides_messages`: for processes that hold secrets of clients, see TracebackFormatter.
    """
    handler = logging.StreamHandler(sys.stderr)
    kind = TracebackFormatter if hides_messages else logging.Formatter
    handler.setFormatter(kind(log_format(service)))
    logging.basicConfig(handlers=[handler], level=level.upper())
    # grpc.aio logs a harmless traceback for each cancelled stream handler.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
