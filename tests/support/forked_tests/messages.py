"""Messages of a fork to its parent: JSON objects over one pipe a fork."""

from __future__ import annotations

import builtins
import warnings
from multiprocessing.connection import Connection
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


class ForkEnd(msgspec.Struct, frozen=True, tag="end"):
    """The fork has run all that it took."""


Message = TestBegin | ReportMessage | WarningMessage | ForkEnd
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def send(connection: Connection, message: Message) -> None:
    """Send one message. It may wait for the parent, without which the kernel kills the fork."""
    connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection) -> Message:
    """Wait for one message. Raises EOFError when the fork is gone, also amid a message."""
    try:
        data = connection.recv_bytes()
    except OSError:
        raise EOFError from None
    return _decoder.decode(data)


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
