"""JSON of any depth at any place of a body is refused by name, or read: no parser runs out of calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.router.api.anthropic.request import parse_messages_body
from services.router.api.batches.batch_body import parse_batch
from services.router.api.openai.request import parse_chat, parse_completion
from services.router.api.openai.token_bodies import parse_detokenize, parse_tokenize
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.api.workers_ai.run_body import BatchBody, RunBody, parse_run
from slipstream import bounds
from slipstream.errors import InvalidArgument

# Below the depth at which Python's decoders end, and above that of what reads their results.
DEPTHS = (bounds.MAX_JSON_DEPTH - 20, bounds.MAX_JSON_DEPTH, *range(890, 1000, 10), 990, 992, 30_000)
USER = {"role": "user", "content": [{"type": "text", "text": "a"}]}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "thinking": {"type": "enabled"},
    "other": 1,
}
RUN = {**CHAT, "messages": [USER], "tools": [FUNCTION]}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
MESSAGES: dict[str, Any] = {
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}


def read_run(data: bytes) -> None:
    body = parse_run(data, "m").body
    for run in body.runs if isinstance(body, BatchBody) else [body]:
        assert isinstance(run, RunBody)
        parse_chat(run.chat)


def read_response(data: bytes) -> None:
    parse_response(decode_response(data), EarlierItems(), is_stored=False)


PARSERS: dict[str, tuple[Callable[[bytes], object], dict[str, Any]]] = {
    "chat": (parse_chat, CHAT),
    "completion": (parse_completion, {"prompt": "a", "guided_json": {}, "logit_bias": {"1": 1}}),
    "run": (read_run, RUN),
    "runs": (read_run, {"requests": [RUN]}),
    "response": (read_response, {"input": ITEMS, "tools": [{"type": "function", **FUNCTION}]}),
    "messages": (parse_messages_body, MESSAGES),
    "tokenize": (parse_tokenize, {"messages": [USER], "tools": CHAT["tools"]}),
    "detokenize": (parse_detokenize, {"tokens": [1]}),
    "batch": (lambda data: parse_batch(data, ["/x"]), {"endpoint": "/x", "metadata": {"a": "b"}}),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], text: bytes) -> bytes:
    made: Any = copy.deepcopy(body)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = "@"
    return json.dumps(made).encode().replace(b'"@"', text)


def refusal_of(parse: Callable[[bytes], object], data: bytes) -> InvalidArgument | None:
    try:
        parse(data)
    except InvalidArgument as error:
        return error
    return None


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_values_at_any_place_are_refused_by_name(name: str, opened: bytes, closed: bytes) -> None:
    parse, body = PARSERS[name]
    for path in places(body):
        for depth in DEPTHS:
            data = replaced(body, path, opened * depth + b"1" + closed * depth)
            refusal = refusal_of(parse, data)
            assert refusal is None or refusal.field, (path, depth)
            if depth >= bounds.MAX_JSON_DEPTH:  # with the brackets around it
                assert refusal is not None and refusal.reason == bounds.BODY_DEPTH.words, (path, depth)
