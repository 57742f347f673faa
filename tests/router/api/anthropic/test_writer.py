"""The events of an Anthropic message: their order, and that together they are the whole message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given

from services.router.api.anthropic.signature import carried
from services.router.api.anthropic.writer import MessageShape, MessageWriter
from slipstream.v1 import router_pb2
from tests.router.support.answer_events import STARTED, Delta, answers, call, finished, parts_of, sse_objects

CALL = [call(0, "", call_id="functions.look:0", name="look"), call(0, '{"x"'), call(0, ":1}")]


def written(
    deltas: Sequence[Delta], end: router_pb2.Finished, *, shows_thinking: bool = True
) -> list[Mapping[str, Any]]:
    writer = MessageWriter(STARTED, MessageShape(9, shows_thinking=shows_thinking))
    data = writer.opening() + b"".join([writer.delta_event(delta) for delta in deltas])
    return sse_objects(data + b"".join(writer.closing(end)))


def whole(deltas: Sequence[Delta], end: router_pb2.Finished) -> dict[str, Any]:
    writer = MessageWriter(STARTED, MessageShape(9))
    for delta in deltas:
        writer.add(delta)
    return writer.body(end)


def test_the_order_of_all_events() -> None:
    events = written([Delta(reasoning="Hm", text="Wait"), Delta(text="."), *CALL], finished("TOOL_CALLS"))
    shown = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    assert shown == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 40
    assert events[10]["content_block"] == {
        "type": "tool_use",
        "id": "functions.look:0",
        "name": "look",
        "input": {},
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 32,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 3},
    }


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (finished("STOP"), "end_turn", None),
        (finished("STOP", stop_string="###"), "stop_sequence", "###"),
        (finished("LENGTH"), "max_tokens", None),
        (
            finished("LENGTH", usage=router_pb2.Usage(completion_tokens=8)),
            "model_context_window_exceeded",
            None,
        ),
        (finished("TOOL_CALLS"), "tool_use", None),
    ],
)
def test_why_an_answer_ended(end: router_pb2.Finished, reason: str, sequence: str | None) -> None:
    body = whole([Delta(text="x")], end)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_thinking_that_is_not_shown_is_in_the_signature() -> None:
    events = written(
        [Delta(reasoning="Hm"), Delta(reasoning=" so", text="Wait")], finished(), shows_thinking=False
    )
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["signature_delta", "text_delta"]
    assert carried(deltas[0]["signature"]) == "Hm so"
    assert carried("omitted.%%%") == carried("EqQBCgIYAhIM") == carried(None) == ""


def test_arguments_that_were_cut_off_are_no_input() -> None:
    (block,) = whole(CALL[:2], finished("LENGTH"))["content"]
    assert block["input"] == {}


@given(deltas=answers())
def test_the_events_are_the_whole_message(deltas: list[Delta]) -> None:
    end = finished("TOOL_CALLS" if any(delta.tool_calls for delta in deltas) else "STOP")
    events, body = written(deltas, end), whole(deltas, end)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            for field, text in event["delta"].items():
                if field != "type":
                    field = "json" if field == "partial_json" else field
                    blocks[-1][field] += text
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
    assert not is_open
    arguments = [block.pop("json") for block in blocks]
    reasoning, text, calls = parts_of(deltas)
    assert [
        given for given, block in zip(arguments, blocks, strict=True) if block["type"] == "tool_use"
    ] == calls
    assert "".join([block.get("text", "") for block in blocks]) == text
    assert "".join([block.get("thinking", "") for block in blocks]) == reasoning
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = body["content"][blocks.index(block)]["input"]
    assert json.dumps(blocks) == json.dumps(body["content"])
