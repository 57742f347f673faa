"""A log line has no message of an unexpected exception."""

from __future__ import annotations

import logging

from libs.common.telemetry.logs import TracebackFormatter, log_format


def test_a_traceback_has_frames_and_classes_but_no_messages() -> None:
    secret = "-".join(("sk", "1"))  # the source lines of a traceback do not have it
    try:
        try:
            raise ExceptionGroup(secret, [KeyError(secret)])
        except ExceptionGroup as group:
            raise ValueError(secret) from group
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", None, failure)
    line = TracebackFormatter(log_format("router-0")).format(record)
    assert secret not in line
    classes = ["builtins.KeyError", "builtins.ExceptionGroup", "builtins.ValueError"]
    assert [text for text in line.split("\n") if text.startswith("builtins.")] == classes
    assert "ERROR router-0 x: it failed" in line and "in test_a_traceback_has" in line


def test_a_traceback_keeps_the_words_of_the_operating_system() -> None:
    error = FileNotFoundError(2, "No such file or directory")
    text = TracebackFormatter().formatException((type(error), error, None))
    assert text.endswith("builtins.FileNotFoundError: [Errno 2] No such file or directory")
