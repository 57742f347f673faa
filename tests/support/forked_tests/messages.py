"""Messages of a fork to its parent: JSON objects over one pipe a fork, each after its length."""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest


class TestBegin(msgspec.Struct, frozen=True, tag="begin"):
    """The fork runs the item with this index in the session from now on."""

    __test__ = False
    item: int


class ReportMessage(msgspec.Struct, frozen=True, tag="report"):
    """A report of a set-up, a call or a teardown, in pytest's form for other processes."""

    report: dict[str, Any]


class WarningMessage(msgspec.Struct, frozen=True, tag="warning"):
    """A warning, as pytest's hook has it. `category` is the name of a class of Python's."""

    text: str
    category: str
    filename: str
    lineno: int
    nodeid: str


class SessionExit(msgspec.Struct, frozen=True, tag="exit"):
    """A test has called `pytest.exit` with these arguments."""

    reason: str
    returncode: int | None


class ForkEnd(msgspec.Struct, frozen=True, tag="end"):
    """The fork has run all that it took, and ends the fixtures of its session."""


Message = TestBegin | ReportMessage | WarningMessage | SessionExit | ForkEnd
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def send(pipe: int, message: Message) -> None:
    """Send one message. It may wait for the parent, without which the kernel kills the fork."""
    data = msgspec.json.encode(message)
    left = memoryview(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    while left:
        left = left[os.write(pipe, left) :]


class MessageReader:
    """The parent's end of a pipe. It never waits: what a lost fork started may hold the other end open."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._data = bytearray()

    def fileno(self) -> int:
        """What is readable when messages come."""
        return self._pipe

    def close(self) -> None:
        """Read no more."""
        os.close(self._pipe)

    def read(self) -> Iterator[Message]:
        """The messages that are there whole. What the caller does not take is lost."""
        while data := self._read_some():
            self._data += data
            while (message := self._take()) is not None:
                yield message

    def _read_some(self) -> bytes:
        try:
            return os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return b""

    def _take(self) -> Message | None:
        end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
        if len(self._data) < max(end, _LENGTH_BYTES + 1):
            return None
        message = _decoder.decode(self._data[_LENGTH_BYTES:end])
        del self._data[:end]
        return message


def replay(message: ReportMessage | WarningMessage, config: pytest.Config) -> None:
    """Call the hooks that the fork's message stands for."""
    if isinstance(message, ReportMessage):
        skipped_at = message.report["longrepr"]
        if isinstance(skipped_at, list):  # JSON has no tuples
            message.report["longrepr"] = tuple(skipped_at)
        report = config.hook.pytest_report_from_serializable(config=config, data=message.report)
        config.hook.pytest_runtest_logreport(report=report)
        return
    category = getattr(builtins, message.category, UserWarning)
    recorded = warnings.WarningMessage(message.text, category, message.filename, message.lineno)
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": recorded,
            "when": "runtest",
            "nodeid": message.nodeid,
            "location": None,
        }
    )
