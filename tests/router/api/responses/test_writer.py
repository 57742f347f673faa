"""The events of a response: their order, their numbers, and that together they are the whole response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given

from libs.common.http.failure import failure_of
from services.router.api.answers.long_json import JSON_PIECE_BYTES, json_pieces
from services.router.api.responses.errors import response_error
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from slipstream import errors
from slipstream.v1 import router_pb2
from tests.router.support.answer_events import (
    STARTED,
    Delta,
    answers,
    call,
    finished,
    parts_of,
    sse_objects,
)

CALL = [call(0, "", call_id="functions.look:0", name="look"), call(0, '{"x"'), call(0, ":1}")]


def written(
    deltas: Sequence[Delta], end: router_pb2.Finished, *, has_summary: bool = False
) -> list[Mapping[str, Any]]:
    writer = ResponsesWriter(STARTED, ResponsesShape("k", {"store": True}, has_summary=has_summary))
    data = writer.opening() + b"".join([writer.delta_event(delta) for delta in deltas])
    return sse_objects(data + b"".join([*writer.before_closing(end), *writer.closing(end)]))


def whole(deltas: Sequence[Delta], end: router_pb2.Finished, *, has_summary: bool = False) -> dict[str, Any]:
    writer = ResponsesWriter(STARTED, ResponsesShape("k", {"store": True}, has_summary=has_summary))
    for delta in deltas:
        writer.add(delta)
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(writer.body(end)))
    return body


def test_the_order_of_all_events() -> None:
    deltas = [Delta(reasoning="Hm", text="Wait"), Delta(text="."), *CALL]
    events = written(deltas, finished("TOOL_CALLS"))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    response = events[-1]["response"]
    assert [item["id"] for item in response["output"]] == ["rs_k_0", "msg_k_1", "fc_k_2"]
    assert response["output"][2] == {
        "id": "fc_k_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "functions.look:0",
        "name": "look",
        "arguments": '{"x":1}',
    }
    assert response["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 49,
    }
    assert (response["id"], response["store"]) == ("resp_k", True)


def test_a_summary_is_the_reasoning_in_the_events_of_summaries() -> None:
    events = written([Delta(reasoning="Hm")], finished(), has_summary=True)
    assert [event["type"].removeprefix("response.") for event in events[2:8]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[7]["item"]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm"}]
    assert item["content"] == []


def test_an_answer_that_was_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    events = written([Delta(reasoning="Hm", text="Wai")], finished("LENGTH"))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Overloaded("busy"), "rate_limit_exceeded"),
        (errors.Internal("broken"), "server_error"),
        (errors.InvalidArgument("input", "is wrong"), "invalid_prompt"),
    ],
)
def test_a_failure_ends_the_stream_with_the_output_so_far(error: errors.SlipstreamError, code: str) -> None:
    writer = ResponsesWriter(STARTED, ResponsesShape("k", {}))
    data = (
        writer.opening()
        + writer.delta_event(Delta(text="Wai"))
        + b"".join(writer.failure(response_error(failure_of(error))))
    )
    last = sse_objects(data)[-1]
    assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert last["response"]["output"][0]["content"][0]["text"] == "Wai"


def test_log_probabilities_are_in_the_deltas_and_in_the_whole_text() -> None:
    tokens = [router_pb2.TextLogprob(token=text, token_bytes=text.encode(), logprob=-1.0) for text in "abc"]
    deltas = [
        Delta(logprobs=[router_pb2.TextLogprob(token="</think>")]),  # no part of the text
        Delta(logprobs=tokens[:1]),  # its text is held back
        Delta(text="ab", logprobs=tokens[1:2]),
        Delta(text="c", logprobs=tokens[2:]),
    ]
    events = written(deltas, finished())
    sent = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[item["token"] for item in items] for items in sent] == [["a", "b"], ["c"]]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [item["token"] for item in part["logprobs"]] == ["a", "b", "c"]


def test_the_end_of_a_long_answer_comes_in_pieces() -> None:
    rows = [router_pb2.TextLogprob(token="a", token_bytes=b"a", logprob=-1.0)] * 100
    deltas = [Delta(text="long " * 100, logprobs=rows)] * 400
    writer = ResponsesWriter(STARTED, ResponsesShape("k", {"store": True}))
    events = b"".join([writer.opening(), *[writer.delta_event(delta) for delta in deltas]])
    before, last = list(writer.before_closing(finished())), list(writer.closing(finished()))
    failed = list(writer.failure({"code": "server_error", "message": "broken"}))
    for pieces in (before, last, failed):
        assert len(pieces) > 10 and max(map(len, pieces)) < 3 * JSON_PIECE_BYTES
    objects = sse_objects(b"".join([events, *before, *last]))
    assert b"response.completed" not in b"".join(before)
    response = whole(deltas, finished())
    assert objects[-1]["response"] == response
    assert msgspec.json.decode(b"".join(json_pieces(writer.response))) == response


@given(deltas=answers())
def test_the_events_are_the_whole_response(deltas: list[Delta]) -> None:
    for has_summary in (False, True):
        end = finished("TOOL_CALLS" if any(delta.tool_calls for delta in deltas) else "STOP")
        events = written(deltas, end, has_summary=has_summary)
        response = whole(deltas, end, has_summary=has_summary)
        assert events[-1]["response"] == response
        opened: dict[str, Any] = {}
        text: dict[str, str] = {}
        closed: list[Any] = []
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            if event["type"] == "response.output_item.added":
                assert event["item"]["id"] not in opened
                assert len(opened) == len(closed) == event["output_index"]  # one at a time
                opened[event["item"]["id"]] = event["item"]
                text[event["item"]["id"]] = ""
            elif event["type"] == "response.output_item.done":
                assert event["item"]["id"] == list(opened)[-1]
                closed.append(event["item"])
            elif "item_id" in event:
                assert event["item_id"] == list(opened)[-1]
                assert len(closed) < len(opened)
                text[event["item_id"]] += event.get("delta", "")
        assert closed == response["output"]
        reasoning, content, arguments = parts_of(deltas)
        of_kind = {prefix: [text[i] for i in text if i.startswith(prefix)] for prefix in ("rs", "msg", "fc")}
        assert "".join(of_kind["rs"]) == reasoning
        assert "".join(of_kind["msg"]) == content
        assert of_kind["fc"] == arguments == [i["arguments"] for i in response["output"] if "arguments" in i]
