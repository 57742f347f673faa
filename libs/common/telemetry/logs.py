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
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from libs.common.telemetry import tracing
from slipstream.logs.lines import LineFormat, RecordFormatter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoggedRequest:
    """The request of a task and of the tasks that it starts. The id may become known, or change, later."""

    request_id: str = ""


_request: contextvars.ContextVar[LoggedRequest | None] = contextvars.ContextVar("request", default=None)


RequestToken: TypeAlias = contextvars.Token[LoggedRequest | None]


def begin_request(request: LoggedRequest) -> RequestToken:
    """Lines of the current task, and of tasks that it starts, name the request until `end_request`."""
    return _request.set(request)


def end_request(token: RequestToken) -> None:
    """Lines name what they named before `begin_request`, which returned `token`."""
    _request.reset(token)


@contextlib.contextmanager
def log_request(request: LoggedRequest) -> Iterator[None]:
    """Lines of the block, and of tasks that start in it, name the request."""
    token = begin_request(request)
    try:
        yield
    finally:
        end_request(token)


def log_no_request() -> None:
    """Lines of the current task name no request: the task outlives the one that started it."""
    _request.set(None)


class LogFormatter(RecordFormatter):
    """Formats records as lines that name the request and the trace of the current task."""

    def fields(self) -> Mapping[str, str]:
        """The request and the trace, as far as they are known."""
        fields = {}
        request = _request.get()
        if request is not None and request.request_id:
            fields["request_id"] = request.request_id
        if trace_id := tracing.trace_id():
            fields["trace_id"] = trace_id
        return fields


def configure_logging(service: str, instance: str, *, level: str = "info", form: str = "text") -> None:
    """Log to stderr. Exceptions that nothing handles are lines too. `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(LineFormat(service, instance, form == "json")))
    logging.basicConfig(handlers=[handler], level=level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    sys.unraisablehook = _log_unraisable
    # grpc.aio logs a harmless traceback for each cancelled stream handler.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)


def log_form() -> str:
    """The form of this process's lines, for the processes that it starts: text or json."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    is_json = any(isinstance(each, LogFormatter) and each.lines.is_json for each in formatters)
    return "json" if is_json else "text"


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


def _log_unraisable(failure: sys.UnraisableHookArgs) -> None:
    """Log what no caller can get, as of a finalizer, or of gRPC's callbacks at the end of a process."""
    if failure.exc_value is not None:
        source = getattr(failure.object, "__qualname__", None) or type(failure.object).__qualname__
        log.warning("an exception in %s is ignored", source, exc_info=failure.exc_value)
