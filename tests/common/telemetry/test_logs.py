"""Lines of a log in both forms: what they name, and that they hold no message of an unexpected exception."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from libs.common.telemetry import tracing
from libs.common.telemetry.logs import (
    LogFormatter,
    LoggedRequest,
    log_loop_errors,
    log_no_request,
    log_request,
)
from slipstream.logs.lines import MAX_EXCEPTION_CHARS, MAX_FIELD_CHARS, MAX_MESSAGE_CHARS, LineFormat

AS_TEXT = LineFormat("decode", "decode-0")
AS_JSON = LineFormat("decode", "decode-0", is_json=True)
SECRET = "-".join(("sk", "1"))  # the source lines of a traceback do not have it


def record_of(message: str, error: BaseException | None = None) -> logging.LogRecord:
    failure = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, message, None, failure)
    record.created = 1.5
    return record


def as_json(record: logging.LogRecord) -> Any:
    line = LogFormatter(AS_JSON).format(record)
    assert "\n" not in line
    return json.loads(line)


def nested_failure() -> BaseException:
    try:
        try:
            raise ExceptionGroup(SECRET, [KeyError(SECRET)])
        except ExceptionGroup as group:
            raise ValueError(SECRET) from group
    except ValueError as error:
        return error


def test_text_lines_have_no_control_characters() -> None:
    line = LogFormatter(AS_TEXT).format(record_of("\x1b]0;owned\x07 \r\n\x9b2J\u2028\ud800 é"))
    assert line.endswith(r"x: \x1b]0;owned\x07 \r\n\x9b2J\u2028\ud800 é")


@pytest.mark.parametrize(
    "character",
    [
        *("\u202e", "\u2066", "\u061c", "\u200b", "\u200d", "\ufe0e", "\ufeff", "\xad", "\u3164"),
        *("\U0001bca0", "\U000e0041"),
    ],
)
def test_text_lines_have_no_characters_without_width_or_that_turn_the_direction(character: str) -> None:
    line = LogFormatter(AS_TEXT).format(record_of(f"user{character}nimda"))
    assert line.endswith(f"user{character.encode('unicode_escape').decode()}nimda") and line.isascii()


def test_a_line_has_time_level_service_instance_logger_and_message() -> None:
    record = record_of("is\nslow")
    shown = "1970-01-01T00:00:01.500Z WARNING decode/decode-0 x: is\\nslow"
    assert LogFormatter(AS_TEXT).format(record) == shown
    assert as_json(record) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "service": "decode",
        "instance": "decode-0",
        "logger": "x",
        "message": "is\nslow",
    }


async def test_a_line_names_the_request_of_its_task_and_of_the_tasks_that_started_there() -> None:
    request = LoggedRequest()

    async def line(*, is_background: bool = False) -> Any:
        if is_background:
            log_no_request()
        return as_json(record_of("m"))

    with log_request(request):
        started = asyncio.create_task(line())
        background = asyncio.create_task(line(is_background=True))
        request.request_id = "mine"  # known only after the task has begun
        assert LogFormatter(AS_TEXT).format(record_of("m")).endswith(" x: m request_id=mine")
        assert (await started)["request_id"] == "mine"
        assert "request_id" not in await background
        assert as_json(record_of("m"))["request_id"] == "mine"
    assert "request_id" not in as_json(record_of("m"))


def test_a_line_names_the_trace_of_the_current_span() -> None:
    tracing.trace_to(TracerProvider(shutdown_on_exit=False))
    try:
        parent = f"00-{'4b' * 16}-{'01' * 8}-01"
        with tracing.server_span("decode", {"traceparent": parent}):
            assert as_json(record_of("m"))["trace_id"] == "4b" * 16
        assert "trace_id" not in as_json(record_of("m"))
    finally:
        tracing.trace_to(None)


@pytest.mark.parametrize("lines", [AS_TEXT, AS_JSON])
def test_a_traceback_has_frames_and_classes_but_no_messages(lines: LineFormat) -> None:
    text = LogFormatter(lines).format(record_of("it failed", nested_failure()))
    assert SECRET not in text
    if lines is AS_JSON:
        text = json.loads(text)["exception"]
    classes = ["builtins.KeyError", "builtins.ExceptionGroup", "builtins.ValueError"]
    assert [line for line in text.split("\n") if line.startswith("builtins.")] == classes
    assert "in nested_failure" in text


def test_a_traceback_keeps_the_words_of_the_operating_system() -> None:
    error = FileNotFoundError(2, "No such file or directory")
    text = LogFormatter(AS_TEXT).formatException((type(error), error, None))
    assert text.endswith("builtins.FileNotFoundError: [Errno 2] No such file or directory")


def test_exceptions_that_nothing_handles_are_lines_too() -> None:
    code = (
        "import sys, threading; from libs.common.telemetry.logs import configure_logging\n"
        "configure_logging('decode', 'decode-0', form='json')\n"
        "def fail(): raise ValueError('-'.join(('sk', '1')))\n"
        "thread = threading.Thread(target=fail, name='engine'); thread.start(); thread.join()\n"
        "fail()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and SECRET not in ended.stderr
    of_thread, of_process = (json.loads(line) for line in ended.stderr.splitlines())
    assert (of_thread["level"], of_process["level"]) == ("error", "critical")
    assert "the thread engine ends" in of_thread["message"]
    assert "ValueError" in of_thread["exception"] and "ValueError" in of_process["exception"]


def test_exceptions_that_have_no_caller_are_lines_too() -> None:
    code = (
        "from libs.common.telemetry.logs import configure_logging\n"
        "configure_logging('decode', 'decode-0', form='json')\n"
        "class Held:\n"
        "    def __del__(self): raise ValueError('-'.join(('sk', '1')))\n"
        "Held()\n"
        "kept = Held()  # until the end of the process\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and SECRET not in ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    words = "an exception in Held.__del__ is ignored"
    assert [(line["level"], line["message"]) for line in lines] == [("warning", words)] * 2
    assert all("ValueError" in line["exception"] for line in lines)


async def test_what_a_callback_raises_has_one_line_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ValueError(SECRET)

    log_loop_errors()
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert SECRET not in LogFormatter(AS_JSON).format(record)


@pytest.mark.parametrize("form", [AS_TEXT, AS_JSON], ids=["text", "json"])
@pytest.mark.parametrize("character", ["x", "\n", "\x1b", "\ud800", "\u2028", "\U0001f600"])
def test_a_line_is_bounded_whatever_it_is_about(form: LineFormat, character: str) -> None:
    huge = character * 1_000_000
    line = form.line("info", "x", huge, at_s=1.5, fields={"request_id": huge, "ms": 1}, exception="x" * 10**6)
    assert len(line) < 12 * (MAX_MESSAGE_CHARS + MAX_FIELD_CHARS) + MAX_EXCEPTION_CHARS + 1000
    if form.is_json:
        assert "\n" not in line
        assert json.loads(line)["message"].endswith(".. (1000000 characters)")
