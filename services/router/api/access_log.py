"""The access log: one line for each call of a client over HTTP or gRPC, refused calls included.

A line has the request id, the tenant, the route or RPC, the status, token counts and times. It never has a
header value other than a valid request id, and nothing of a body or a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from services.router.execution.event_queue import ResponseQueue
from slipstream import errors

log = logging.getLogger(__name__)

ACCESS_LOG_FORMS = ("off", "text", "json")
_MAX_NAME_CHARS = 64
# Such a value stands in a text line as it is; any other one is quoted as JSON.
_PLAIN = re.compile(r"[!#-<>-~]+")


@dataclass(slots=True)
class AccessRecord:
    """One call. Its handler fills the fields as it learns them; `AccessLog.call` writes the line."""

    api: str  # http or grpc
    call: str  # the route or the RPC, never a path as the client wrote it
    request_id: str = ""
    tenant: str = ""
    status: str = ""
    error: str = ""  # the class of the error that ended the call
    answer: ResponseQueue | None = None  # of a generation: it counts the tokens
    is_logged: bool = True

    def fail(self, error: BaseException) -> None:
        """Note what ended the call; the first error counts."""
        is_gone = isinstance(error, (asyncio.CancelledError, ConnectionResetError))
        self.error = self.error or (errors.Aborted if is_gone else type(error)).__name__


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Writes the lines. `write` None writes none. `clock` returns seconds of a monotonic clock."""

    write: Callable[[str], None] | None = None
    as_json: bool = False
    instance: str = ""
    clock: Callable[[], float] = time.monotonic
    wall_clock_s: Callable[[], float] = time.time

    def call(self, api: str, call: str) -> LoggedCall:
        """A context that writes the line of one call at its end. It yields the call's record."""
        return LoggedCall(self, AccessRecord(api, call))

    def end(self, record: AccessRecord, *, duration_s: float) -> None:
        """Write the line of a call."""
        if self.write is None or not record.is_logged:
            return
        fields = _fields(record, duration_s)
        at = datetime.fromtimestamp(self.wall_clock_s(), UTC if self.as_json else None)
        if self.as_json:
            head = {"time": at.isoformat(timespec="milliseconds"), "instance": self.instance, "log": "access"}
            self.write(json.dumps({**head, **fields}))
        else:
            time_shown = at.isoformat(" ", timespec="milliseconds").replace(".", ",")
            shown = " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])
            self.write(f"{time_shown} INFO {self.instance} access: {shown}")


@dataclass(slots=True)
class LoggedCall:
    """The time of one call. See `AccessLog.call`."""

    _log: AccessLog
    _record: AccessRecord
    _began_s: float = field(default=0.0)

    def __enter__(self) -> AccessRecord:
        self._began_s = self._log.clock()
        return self._record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._record.fail(error)
        self._log.end(self._record, duration_s=self._log.clock() - self._began_s)


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


def open_access_log(form: str, *, instance: str) -> AccessLog:
    """The access log of a process, on stderr like its other lines, whatever their level.

    `form` is one of ACCESS_LOG_FORMS.
    """
    if form == "off":
        return AccessLog()
    writer = LineWriter(sys.stderr.fileno())
    return AccessLog(write=writer.write, as_json=form == "json", instance=instance)


def _fields(record: AccessRecord, duration_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": record.request_id,
        "api": record.api,
        "call": record.call,
        "tenant": record.tenant[:_MAX_NAME_CHARS],
        "status": record.status,
    }
    if record.error:
        fields["error"] = record.error
    if (answer := record.answer) is not None:
        fields["prompt_tokens"] = answer.prompt_tokens
        fields["cached_tokens"] = answer.cached_tokens
        fields["completion_tokens"] = answer.completion_tokens
        fields["ttft_ms"] = round(answer.ttft_ms, 1)
    fields["ms"] = round(duration_s * 1e3, 1)
    return fields


def _shown(value: object) -> str:
    if not isinstance(value, str):
        return str(value)
    text = value or "-"
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
