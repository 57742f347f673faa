"""Each row of the bounds of responses and /v1/messages refuses a bad value, by its path and its words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from libs.common import api_bounds
from services.router.api.anthropic.request import parse_messages_body
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.api.responses.stored.items import page_of
from services.router.api.rpc.generate_message import parse_call
from slipstream.bound import Bound
from slipstream.errors import InvalidArgument
from slipstream.v1 import router_pb2

USER = {"role": "user", "content": "hi"}
ROWS: Mapping[str, Bound] = {
    name: row for name, row in vars(api_bounds).items() if any(row in s.rows for s in api_bounds.API_SECTIONS)
}
# Rows that need a database, or its lack: test_answer_apis.py, test_store.py, test_background.py and
# test_replay.py.
ELSEWHERE = {"NO_STORE", "STORED", "REFERENCES", "REFERRED", "CONVERSATION", "RESPONSE_ROWS"}
ELSEWHERE |= {name for name in ROWS if name.startswith(("BACKGROUND", "STARTING_AFTER"))}


def response(**body: Any) -> Callable[[], object]:
    def parse() -> object:
        draft = decode_response(json.dumps({"input": "hi", **body}).encode())
        return parse_response(draft, EarlierItems(), is_stored=False)

    return parse


def message(**body: Any) -> Callable[[], object]:
    given = {"max_tokens": 4000, "messages": [USER], **body}
    return lambda: parse_messages_body(json.dumps(given).encode())


def page(**query: Any) -> Callable[[], object]:
    return lambda: page_of([], **{"after": None, "order": "asc", "limit": 20, **query})


def stored(**fields: Any) -> Callable[[], object]:
    chat = router_pb2.Chat(messages=[router_pb2.Message(role=router_pb2.MESSAGE_ROLE_USER, name="ann")])
    given = {"chat": chat, "store": True, **fields}
    return lambda: parse_call(router_pb2.GenerateRequest(**given).SerializeToString())


CASES: Mapping[str, tuple[str, Callable[[], object]]] = {
    "INPUT": ("input", response(input=5)),
    "INPUT_ITEMS": ("input", response(input=[USER] * 4097)),
    "ITEM_TYPE": ("input[0].type", response(input=[{"type": "web_search_call", "id": "ws_1"}])),
    "ITEM_ROLE": ("input[0].role", response(input=[{"role": "tool", "content": "x"}])),
    "PART_TYPE": (
        "input[0].content[0].type",
        response(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ),
    "HOSTED_TOOL": ("tools[0].type", response(tools=[{"type": "file_search"}])),
    "RESPONSES_CHOICE": ("tool_choice", response(tool_choice={"type": "mcp"})),
    "TEXT_FORMAT": ("text.format.type", response(text={"format": {"type": "xml"}})),
    "EFFORT": ("reasoning.effort", response(reasoning={"effort": "huge"})),
    "SUMMARY": ("reasoning.summary", response(reasoning={"summary": "long"})),
    "TRUNCATION": ("truncation", response(truncation="auto")),
    "STORED_CHAT": ("store", stored(chat=None, prompt="x")),
    "STORED_ONE": ("store", stored(n=2)),
    "STORED_WHOLE": ("resume_after_tokens", stored(resume_after_tokens=3)),
    "STORED_MESSAGE": ("messages[0].name", stored()),
    "PAGE_LIMIT": ("limit", page(limit=0)),
    "PAGE_ORDER": ("order", page(order="up")),
    "MESSAGES_ROLE": ("messages[0].role", message(messages=[{"role": "tool", "content": "x"}])),
    "BLOCK": (
        "messages[0].content[0].type",
        message(messages=[{"role": "user", "content": [{"type": "image"}]}]),
    ),
    "PREFILL": ("messages[1].content", message(messages=[USER, {"role": "assistant", "content": "It "}])),
    "PREFILL_THINKING": (
        "thinking",
        message(messages=[USER, {"role": "assistant", "content": "It"}], thinking={"type": "adaptive"}),
    ),
    "MAX_TOKENS": ("max_tokens", message(max_tokens=None)),
    "THINKING": ("thinking.type", message(thinking={"type": "on"})),
    "BUDGET": ("thinking.budget_tokens", message(thinking={"type": "enabled", "budget_tokens": 9})),
    "SERVER_TOOL": ("tools[0].type", message(tools=[{"type": "web_search_20250305"}])),
    "MESSAGES_CHOICE": ("tool_choice.type", message(tool_choice={"type": "some"})),
    "OUTPUT_FORMAT": ("output_config.format.type", message(output_config={"format": {"type": "xml"}})),
    "OUTPUT_EFFORT": ("output_config.effort", message(output_config={"effort": "huge"})),
    "EDITS": (
        "context_management.edits[0].type",
        message(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ),
}


def test_every_row_has_a_case() -> None:
    assert set(CASES) | ELSEWHERE == set(ROWS)


@pytest.mark.parametrize("name", CASES)
def test_refused_in_the_words_of_the_row(name: str) -> None:
    field, call = CASES[name]
    with pytest.raises(InvalidArgument) as refused:
        call()
    assert refused.value.field == field
    words = re.sub(r"\\{\w+\\}", ".+", re.escape(ROWS[name].words))
    assert re.match(words, refused.value.reason)
