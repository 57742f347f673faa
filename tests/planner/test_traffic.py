"""Traces are read strictly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libs.common.fleet_bounds import MAX_TRACE_LINE_BYTES
from libs.planner import traffic
from libs.planner.traffic import Traffic, read_trace
from slipstream.errors import InvalidArgument


def test_mean_request_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}\n'
        '{"timestamp": 4000, "input_length": 1536, "output_length": 30, "hash_ids": [1, 2, 3]}\n'
    )
    assert read_trace(trace) == Traffic(1280.0, 512.0, 20.0, 0.5)
    assert (read_trace(trace).computed_tokens, Traffic(5.0, 5.0).computed_tokens) == (768.0, 1.0)
    epoch_ms = 1_700_000_000_000
    moved = trace.read_text().replace('"timestamp": 0', f'"timestamp": {epoch_ms}')
    trace.write_text(moved.replace('"timestamp": 4000', f'"timestamp": {epoch_ms + 4000}'))
    assert read_trace(trace) == Traffic(1280.0, 512.0, 20.0, 0.5)
    trace.write_text('{"timestamp": 7, "input_length": 1, "output_length": 0}')
    assert read_trace(trace) == Traffic(1.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("text", ["\ufeff{line}\n", "{line}\n\n", "\r\n{line}\r\n \r\n", "\ufeff\n{line}"])
def test_a_mark_of_utf8_and_blank_lines_are_no_requests(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 9, "output_length": 3}'
    trace.write_bytes(text.replace("{line}", line).encode())
    assert read_trace(trace) == Traffic(9.0, 0.0, 3.0, 0.0)
    trace.write_bytes(text.replace("{line}", "[]").encode())
    number = 1 + text[: text.index("{line}")].count("\n")
    with pytest.raises(InvalidArgument, match=f"line {number}: is not an object"):
        read_trace(trace)


def test_a_trace_with_more_lines_than_its_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MAX_TRACE_LINES", 2)
    trace, line = tmp_path / "trace.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
    trace.write_text(2 * line)
    assert read_trace(trace).prompt_tokens == 1
    trace.write_text(3 * line)
    with pytest.raises(InvalidArgument, match="has more than 2 lines"):
        read_trace(trace)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "is not an object"),
        ("{}", "timestamp is missing"),
        ('{"timestamp": 0, "input_length": 1}', "output_length is missing: a whole number from 0"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}', "input_length is not a whole number"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "input_length is not a whole number"),
        ('{"timestamp": 0, "input_length": 1, "output_length": true}', "output_length is not a whole number"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}', "hash_ids is not a list"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [[]]}', "hash_ids is not a"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_refused_by_number_and_field(tmp_path: Path, line: str, why: str) -> None:
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
    trace.write_text(f"{good}{line}\n")
    with pytest.raises(InvalidArgument, match=f"--traffic.*line 2: {why}"):
        read_trace(trace)


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(InvalidArgument, match="no request"):
        read_trace(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_trace_without_end_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(InvalidArgument, match=r"--traffic: cannot read .*: is no regular file"):
        read_trace(path)


def test_a_line_beyond_its_bound_is_refused_without_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = b'{"timestamp": 0, "input_length": 1, "output_length": 1}'
    path.write_bytes(line.ljust(MAX_TRACE_LINE_BYTES) + b"\n" + line)
    assert read_trace(path).prompt_tokens == 1
    os.truncate(path, 1 << 40)  # a hole of a tebibyte behind the second line
    with pytest.raises(InvalidArgument, match=f"line 2: has more than {MAX_TRACE_LINE_BYTES} bytes"):
        read_trace(path)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=["none", "unix", "dos"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_the_end_of_a_line_does_not_count(tmp_path: Path, end: bytes, beyond: int) -> None:
    path = tmp_path / "trace.jsonl"
    line = b'{"timestamp": 0, "input_length": 7, "output_length": 1}'.ljust(MAX_TRACE_LINE_BYTES + beyond)
    path.write_bytes(line + end)
    if beyond:
        with pytest.raises(InvalidArgument, match=f"line 1: has more than {MAX_TRACE_LINE_BYTES} bytes"):
            read_trace(path)
    else:
        assert read_trace(path).prompt_tokens == 7
