"""The access log: one line for each call of a client over HTTP or gRPC, refused calls included.

A line has the request id, the tenant, the name of the API key, the route or RPC, the status, token counts and
times. It never has a header value other than a valid request id, and nothing of a body or a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.logs import LoggedRequest, RequestToken, begin_request, end_request
from slipstream import errors
from slipstream.logs.lines import LineFormat

log = logging.getLogger(__name__)

LOGGER = "access"
_MAX_NAME_CHARS = 64
_NO_LINES = LineFormat("router", "")


class AnswerCounts(Protocol):
    """The tokens of an answer so far."""

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt."""

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens whose KV a cache supplied."""

    @property
    def completion_tokens(self) -> int:
        """The generated tokens."""

    @property
    def ttft_ms(self) -> float:
        """The time to the first token."""


@dataclass(slots=True)
class AccessRecord:
    """One call. Its handler fills the fields as it learns them; `AccessLog.call` writes the line."""

    api: str  # http or grpc
    call: str  # the route or the RPC, never a path as the client wrote it
    tenant: str = ""
    key_name: str = ""  # of the API key in the operator's file; never the key
    status: str = ""
    error: str = ""  # what ended the call: the class of an error, or the code of a refusal
    trace_id: str = ""
    answer: AnswerCounts | None = None  # of a generation
    key_sha256: bytes | None = None  # of the API key, whose limits the answer's headers state
    is_logged: bool = True
    # Other lines of the call's tasks name the same request.
    logged: LoggedRequest = field(default_factory=LoggedRequest)

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.logged.request_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        self.logged.request_id = request_id

    def fail(self, error: BaseException, *, code: str = "") -> None:
        """Note what ended the call, by `code` or else by the error's class; the first error counts."""
        is_gone = isinstance(error, (asyncio.CancelledError, ConnectionResetError))
        self.error = self.error or code or (errors.Aborted if is_gone else type(error)).__name__


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Writes the lines, and counts the calls. `write` None writes none. `clock` is a monotonic clock."""

    write: Callable[[str], None] | None = None
    lines: LineFormat = _NO_LINES
    clock: Callable[[], float] = time.monotonic
    wall_clock_s: Callable[[], float] = time.time
    counters: Counters | None = None

    def call(self, api: str, call: str) -> LoggedCall:
        """A context that writes the line of one call at its end. It yields the call's record."""
        return LoggedCall(self, AccessRecord(api, call))

    def end(self, record: AccessRecord, *, duration_s: float) -> None:
        """Count a call, and write its line."""
        if self.counters is not None:
            labels = (record.api, record.call, record.status or errors.Internal.code)
            self.counters.add("slipstream_api_requests_total", labels=labels)
        if self.write is None or not record.is_logged:
            return
        line = self.lines.line(
            "info",
            LOGGER,
            record.call,
            at_s=self.wall_clock_s(),
            fields=_fields(record, duration_s),
        )
        self.write(line)


@dataclass(slots=True)
class LoggedCall:
    """The time of one call. See `AccessLog.call`."""

    _log: AccessLog
    _record: AccessRecord
    _began_s: float = field(default=0.0)
    _token: RequestToken | None = None

    def __enter__(self) -> AccessRecord:
        self._began_s = self._log.clock()
        self._token = begin_request(self._record.logged)
        return self._record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._record.fail(error)
        self._log.end(self._record, duration_s=self._log.clock() - self._began_s)
        if self._token is not None:
            end_request(self._token)


class LineWriter:
    """Writes lines to a descriptor, and drops those for which it has no room.

    A log that nothing reads must not stop the requests: a write to a full pipe would block the event loop.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._n_dropped = 0

    def write(self, line: str) -> None:
        """Write a line. A pipe with room takes PIPE_BUF bytes at once, and lines are shorter."""
        if not self._room.poll(0):
            self._n_dropped += 1
            return
        if self._n_dropped:
            log.warning("%d access lines are missing: stderr had no room", self._n_dropped)
            self._n_dropped = 0
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line.encode(errors="backslashreplace")[: select.PIPE_BUF - 1] + b"\n")


def open_access_log(lines: LineFormat) -> AccessLog:
    """The access log of a process, on stderr like its other lines, whatever their level."""
    return AccessLog(write=LineWriter(sys.stderr.fileno()).write, lines=lines)


def _fields(record: AccessRecord, duration_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "api": record.api,
        "tenant": record.tenant[:_MAX_NAME_CHARS],
        "key_name": record.key_name,
        "status": record.status,
    }
    if record.trace_id:
        fields["trace_id"] = record.trace_id
    if record.error:
        fields["error"] = record.error
    if (answer := record.answer) is not None:
        fields["prompt_tokens"] = answer.prompt_tokens
        fields["cached_tokens"] = answer.cached_tokens
        fields["completion_tokens"] = answer.completion_tokens
        fields["ttft_ms"] = round(answer.ttft_ms, 1)
    fields["ms"] = round(duration_s * 1e3, 1)
    return fields
