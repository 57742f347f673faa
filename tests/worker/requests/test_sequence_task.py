"""The task of a sequence: its lines in the log."""

from __future__ import annotations

import logging

import pytest

from libs.common.telemetry.logs import LogFormatter
from libs.worker.requests.attempts import client_request_id
from libs.worker.requests.sequence_task import SequenceTask
from slipstream.logs.lines import LineFormat


@pytest.mark.parametrize(
    ("of_worker", "of_client"),
    [("mine.0123456789ab", "mine"), ("a.b.0123456789ab", "a.b"), ("mine", "mine"), (".0123456789ab",) * 2],
)
def test_the_id_of_the_client_is_found_in_that_of_the_worker(of_worker: str, of_client: str) -> None:
    assert client_request_id(of_worker) == of_client


async def test_lines_of_the_task_name_the_request_of_the_client() -> None:
    lines: list[str] = []

    class Task(SequenceTask):
        async def _run(self) -> None:
            record = logging.LogRecord("x", logging.INFO, __file__, 1, "m", None, None)
            lines.append(LogFormatter(LineFormat("decode", "decode-0")).format(record))

    await Task("decode", request_id="mine.0123456789ab").start()
    assert lines[0].endswith(" decode/decode-0 x: m request_id=mine")
