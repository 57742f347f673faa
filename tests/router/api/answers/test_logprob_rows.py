"""Log probabilities of a long answer are encoded once, as they come, and are bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from libs.common import api_bounds
from services.router.api.answers import logprob_rows
from services.router.api.answers.answer_format import AnswerWriter
from services.router.api.answers.logprob_rows import LogprobBudget, LogprobRows
from services.router.api.answers.long_json import JSON_PIECE_BYTES, json_pieces
from services.router.api.openai.response import ResponseShape, ResponseWriter
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from slipstream import bounds
from slipstream.errors import InvalidArgument
from slipstream.v1 import router_pb2
from tests.router.support.answer_events import STARTED, Delta, finished, sse_objects

N_TOKENS = 30
ROW = router_pb2.TextLogprob(token="a", token_bytes=b"a", logprob=-0.25)
ROW.top.append(ROW)


def writers() -> Mapping[str, Callable[[], AnswerWriter]]:
    shape = ResponsesShape("k", {"store": True})
    return {
        "responses": lambda: ResponsesWriter(STARTED, shape),
        "chat": lambda: ResponseWriter(STARTED, ResponseShape(chat=True)),
        "completions": lambda: ResponseWriter(STARTED, ResponseShape(chat=False)),
    }


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that were made."""
    rows: list[Any] = []
    make = logprob_rows.row_object

    def note(item: router_pb2.TextLogprob) -> dict[str, Any]:
        rows.append(item)
        return make(item)

    monkeypatch.setattr(logprob_rows, "row_object", note)
    return rows


def test_a_stream_of_responses_makes_each_row_once(made: list[Any]) -> None:
    """Its last four events repeat all rows."""
    writer = writers()["responses"]()
    deltas = [writer.delta_event(Delta(text="a", logprobs=[ROW])) for _ in range(N_TOKENS)]
    end = [*writer.before_closing(finished()), *writer.closing(finished())]
    assert len(made) == N_TOKENS
    assert len(end) == 4 and all(piece.count(b'"top_logprobs"') == N_TOKENS for piece in end[:-1])
    events = sse_objects(b"".join([writer.opening(), *deltas, *end]))
    rows = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    row = msgspec.json.decode(msgspec.json.encode(logprob_rows.row_object(ROW)))
    assert rows == [row] * N_TOKENS
    said = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert said == [[row]] * N_TOKENS


@pytest.mark.parametrize("kind", writers())
def test_the_end_of_a_whole_answer_makes_no_rows(kind: str, made: list[Any]) -> None:
    writer = writers()[kind]()
    for offset in range(N_TOKENS):
        row = router_pb2.TextLogprob(text_offset=offset)
        row.MergeFrom(ROW)
        writer.add(Delta(text="a", logprobs=[row]))
    made.clear()
    body = writer.body(finished())
    rows = (
        body["choices"][0]["logprobs"] if kind != "responses" else body["output"][0]["content"][0]["logprobs"]
    )
    if kind == "completions":
        assert all(type(row) is msgspec.Raw for row in rows["top_logprobs"])
        assert rows["text_offset"] == list(range(N_TOKENS))
    else:
        assert type(rows["content"] if kind == "chat" else rows) is msgspec.Raw
    assert not made and msgspec.json.encode(body).count(b"-0.25") >= N_TOKENS


@pytest.mark.parametrize("kind", writers())
def test_too_many_rows_end_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "ANSWER_ROWS", replace(bounds.ANSWER_ROWS, high=100))
    monkeypatch.setattr(api_bounds, "RESPONSE_ROWS", replace(api_bounds.RESPONSE_ROWS, high=100))
    writer = writers()[kind]()
    long = Delta(text="a", logprobs=[ROW] * N_TOKENS)
    with pytest.raises(InvalidArgument) as refused:
        writer.add(long)
    assert refused.value.field == ("top_logprobs" if kind == "responses" else "logprobs")


def test_rows_since_the_last_call_and_all_rows() -> None:
    rows = LogprobRows(LogprobBudget())
    assert not rows and rows.json() == rows.next_json() == msgspec.Raw(b"[]")
    rows.add([ROW])
    one = bytes(rows.next_json())
    rows.add([ROW, ROW])
    two = bytes(rows.next_json())
    assert len(msgspec.json.decode(one)) == 1 and len(msgspec.json.decode(two)) == 2
    assert bytes(rows.json()) == bytes(rows.json()) == b"[" + one[1:-1] + b"," + two[1:-1] + b"]"
    assert b"".join(json_pieces(rows.long_json())) == bytes(rows.json())


def test_rows_of_several_pieces() -> None:
    rows, row = LogprobRows(LogprobBudget()), msgspec.json.encode(logprob_rows.row_object(ROW))
    n_rows = 3 * JSON_PIECE_BYTES // len(row)
    for n_added in (1, n_rows, 0, 1, n_rows):
        rows.add([ROW] * n_added)
        assert bytes(rows.next_json()) == b"[" + b",".join([row] * n_added) + b"]"
    pieces = list(json_pieces(rows.long_json()))
    assert b"".join(pieces) == bytes(rows.json()) == b"[" + b",".join([row] * (2 * n_rows + 2)) + b"]"
    assert len(pieces) > 4 and max(map(len, pieces)) < 2 * JSON_PIECE_BYTES
