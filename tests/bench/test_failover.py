"""The moment of detection, in a router's log as the router writes it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bench.failover import _detected_after_ms
from slipstream.logs.lines import LineFormat, RecordFormatter


def test_detection_is_the_first_failed_attempt_after_the_signal(tmp_path: Path) -> None:
    name = "services.router.execution.attempts.retry_loop"
    formatter = RecordFormatter(LineFormat("router", "router-0"))
    lines = []
    for at_s, text in (
        (99.0, "req-1 attempt 1: gone"),
        (100.02, "a link"),
        (100.05, "req-2 attempt 1: gone"),
    ):
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)
        record.created, record.msecs = at_s, at_s % 1 * 1e3
        lines.append(formatter.format(record))
    log = tmp_path / "router-0.log"
    log.write_text("\n".join(lines))
    assert _detected_after_ms(log, 100.0) == pytest.approx(50, abs=1.1)
    assert _detected_after_ms(log, 101.0) is None
