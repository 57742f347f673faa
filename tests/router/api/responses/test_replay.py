"""The events of responses in the background: the same in each stream, and whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.api.answers.long_json import JSON_PIECE_BYTES
from services.router.api.responses.stored.items import read_response
from services.router.api.responses.stored.replay import pieces_of
from slipstream.errors import InvalidArgument
from tests.router.support.answer_events import sse_objects

MESSAGE = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
ITEMS: list[dict[str, Any]] = [
    {"id": "rs_0", "type": "reasoning", "status": "completed", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]},
    {"id": "rs_1", "type": "reasoning", "status": "completed", "content": [], "summary": [
        {"type": "summary_text", "text": "Hm."}]},
    {"id": "msg_2", "type": "message", "status": "completed", "role": "assistant", "content": [MESSAGE]},
    {"id": "fc_3", "type": "function_call", "status": "completed", "call_id": "c", "name": "f",
     "arguments": '{"x": 1}'},
]  # fmt: skip


def response(status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "output": items, "usage": None, "error": None}


def read(status: str, items: list[dict[str, Any]], after: int = -1) -> list[dict[str, Any]]:
    found = list(pieces_of(response(status, items), after=after))
    objects = [dict(each) for each in sse_objects(b"".join([piece for _, piece in found]))] if found else []
    assert [each["sequence_number"] for each in objects] == [number for number, _ in found]
    return objects


@given(
    st.lists(st.sampled_from(ITEMS), max_size=4),
    st.sampled_from(["completed", "failed", "incomplete", "cancelled"]),
    st.integers(-1, 60),
)
def test_a_stream_goes_on_after_any_event(items: list[dict[str, Any]], status: str, after: int) -> None:
    whole = read(status, items)
    assert [each["sequence_number"] for each in whole] == list(range(len(whole)))
    if after < len(whole):
        assert read(status, items, after) == whole[after + 1 :]
    else:
        with pytest.raises(InvalidArgument, match=f"has number {len(whole) - 1}") as refused:
            read(status, items, after)
        assert refused.value.field == "starting_after"
    assert read("queued", [], after) == read("queued", [])[after + 1 :]  # more may come
    for earlier in ("queued", "in_progress"):
        begun = read(earlier, [])
        assert [each["type"] for each in begun] == [each["type"] for each in whole[: len(begun)]]
    assert whole[-1]["response"] == response(status, items)


def test_log_probabilities_stay_json_on_their_way_from_the_store() -> None:
    row = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    message = {**ITEMS[2], "content": [{**MESSAGE, "logprobs": [row] * 3}]}
    stored = response("completed", [*ITEMS, message])
    body = read_response(msgspec.json.encode(stored))
    assert list(body) == list(stored)
    assert type(body["output"][-1]["content"][0]["logprobs"]) is msgspec.Raw
    assert list(pieces_of(body, after=-1)) == list(pieces_of(stored, after=-1))


def test_long_events_come_in_pieces() -> None:
    text, rows = "x" * (3 * JSON_PIECE_BYTES), msgspec.Raw(b"[" + b" " * (3 * JSON_PIECE_BYTES) + b"]")
    message = {**ITEMS[2], "content": [{**MESSAGE, "text": text, "logprobs": rows}]}
    found = list(pieces_of(response("completed", [message]), after=-1))
    assert max(len(piece) for _, piece in found) < 3 * JSON_PIECE_BYTES
    objects = sse_objects(b"".join([piece for _, piece in found]))
    numbers = [number for number, _ in found]
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(objects)))
    assert objects[-1]["response"]["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("item", "delta"),
    [
        (ITEMS[0], "response.reasoning_text.delta"),
        (ITEMS[1], "response.reasoning_summary_text.delta"),
        (ITEMS[2], "response.output_text.delta"),
        (ITEMS[3], "response.function_call_arguments.delta"),
    ],
)
def test_an_item_is_added_grows_and_ends(item: dict[str, Any], delta: str) -> None:
    events = read("completed", [item])[3:-1]
    types = [each["type"] for each in events]
    assert types[0] == "response.output_item.added" and types[-1] == "response.output_item.done"
    assert delta in types and delta.replace(".delta", ".done") in types
    assert events[-1]["item"] == item
    assert events[0]["item"]["status"] == "in_progress"
    assert not any(events[0]["item"].get(name) for name in ("content", "summary", "arguments"))
