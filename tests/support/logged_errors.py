"""The errors that a test logged."""

from __future__ import annotations

import logging

import pytest

_OF_CLOSED_LOOP = "Event loop is closed"


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of all errors, but for gRPC's of another test.

    All loops of a process share gRPC's poller. A call that outlives its test ends in the loop of a later one.
    """
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR
        if not _is_late(record)
    ]


def _is_late(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    of_poller = record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage()
    return of_poller and isinstance(error, RuntimeError) and str(error) == _OF_CLOSED_LOOP
