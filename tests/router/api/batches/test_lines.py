"""Lines of a batch: however a file is cut, the same requests; each defect by its code and line."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common import batch_bounds
from services.router.api.batches.lines import (
    BatchLine,
    LineDefect,
    LineReader,
    LineSplitter,
    SeenIds,
    parse_line,
)
from slipstream import bounds
from tests.router.api.batches.conftest import CHAT, line


def read(content: bytes, *sizes: int, skipped: int = 0) -> list[BatchLine | LineDefect]:
    reader, found, begin = LineReader(CHAT, skipped=skipped), list[BatchLine | LineDefect](), 0
    for size in sizes:
        found += reader.feed(content[begin : begin + size])
        begin += size
    return [*found, *reader.feed(content[begin:]), *reader.finish()]


def defect(data: bytes) -> LineDefect:
    found = parse_line(7, data, CHAT)
    assert isinstance(found, LineDefect)
    assert found.line == 7
    return found


def test_a_file_reads_the_same_however_it_is_cut() -> None:
    content = line("a") + b"\n  \r\n" + line("bä") + line("c").rstrip(b"\n").replace(b"}", b"}", 1)
    whole = read(content)
    assert [item.custom_id for item in whole if isinstance(item, BatchLine)] == ["a", "bä", "c"]
    assert [item.number for item in whole if isinstance(item, BatchLine)] == [1, 4, 5]
    rng = random.Random(5)
    for _ in range(50):
        sizes = [rng.randrange(1, 60) for _ in range(rng.randrange(30))]
        assert read(content, *sizes) == whole
    assert read(content, 3, 100, skipped=2) == whole[2:]


def test_the_body_stays_as_it_was_written() -> None:
    body = '{"messages": [],   "seed": 123456789012345678901234567890, "x": 1.50}'
    data = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {body}}}'.encode()
    found = parse_line(1, data, CHAT)
    assert isinstance(found, BatchLine) and found.body == body.encode()


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 3}, "invalid_type", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "a\0b"}, "invalid_custom_id", "custom_id"),
        ({"method": None}, "missing_required_parameter", "method"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "mismatched_url", "url"),
        ({"body": "x"}, "invalid_type", "body"),
        ({"body": [1]}, "invalid_type", "body"),
        ({"body": {"stream": True}}, "invalid_request", "body.stream"),
        ({"body": {"background": True}}, "invalid_request", "body.background"),
        ({"body": {"messages": "x" * bounds.MAX_BODY_BYTES}}, "invalid_request", "body"),
    ],
)
def test_a_defect_names_the_parameter(changes: dict[str, Any], code: str, param: str) -> None:
    found = defect(line("a", **changes))
    assert (found.code, found.param) == (code, param)


@pytest.mark.parametrize("data", [b"{", b"[]", b"3", b'{"custom_id": "\xff"}', b'{"body": NaN}', b"\x00"])
def test_what_is_no_object_is_no_request(data: bytes) -> None:
    assert defect(data).code in ("invalid_json_line", "missing_required_parameter")


def test_a_line_without_end_is_refused_before_it_is_kept() -> None:
    reader = LineReader(CHAT)
    piece, found = b"x" * (1 << 20), list[Any]()
    for _ in range(batch_bounds.MAX_LINE_BYTES // len(piece) + 1):
        found = list(reader.feed(piece))
        if found:
            break
    assert [item.code for item in found] == ["invalid_json_line"]


def test_an_id_names_one_line_and_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_bounds, "MAX_BATCH_LINES", 2)
    seen = SeenIds()
    lines = [BatchLine(number, custom_id, b"{}") for number, custom_id in enumerate("abca")]
    defects = [seen.defect(item) for item in (lines[0], lines[3], lines[1], lines[2])]
    assert [item.code if item else None for item in defects] == [
        None,
        "duplicate_custom_id",
        None,
        "too_many_requests",
    ]
    assert len(seen) == 2
    assert defects[1] is not None and "'a' is in lines 0 and 3" in defects[1].message


def test_structure_is_bounded_before_a_line_is_parsed() -> None:
    body = json.dumps({"messages": [[]] * bounds.MAX_STRUCTURE_BYTES}).encode()
    assert defect(b'{"custom_id": "a", "body": ' + body + b"}").code == "invalid_json_line"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"prompt": "\xff"}', "body.prompt"),
        (b'{"pro\xffmpt": "a"}', "body"),
        (b'{"stream": "\xff"}', "body.stream"),
    ],
)
def test_a_line_of_no_utf8_is_a_defect(body: bytes, place: str) -> None:
    found = defect(line("a").replace(json.dumps(json.loads(line("a"))["body"]).encode(), body))
    assert found.code == "invalid_json_line"
    assert found.message == f"{place}: {bounds.UTF8.words}"


def test_a_piece_names_no_more_defects_than_a_batch_does() -> None:
    assert len(LineReader(CHAT).feed(b"{\n" * 8000)) == batch_bounds.MAX_BATCH_ERRORS


_PIECES = st.lists(st.text("a \n\t\v\r", max_size=12).map(str.encode), max_size=8)


@given(_PIECES)
def test_a_file_in_pieces_has_the_lines_of_the_whole(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    found = [line for piece in pieces for line in splitter.feed(piece)] + [*splitter.finish()]
    lines = b"".join(pieces).split(b"\n")
    assert found == [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def test_empty_lines_are_passed_over_without_a_list_of_them() -> None:
    splitter, piece = LineSplitter(), b"\n" * (1 << 20)
    tracemalloc.start()
    try:
        assert not list(splitter.feed(piece))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000  # as a list of lines 9 MB
    assert list(splitter.feed(b"x\n")) == [((1 << 20) + 1, b"x")]
