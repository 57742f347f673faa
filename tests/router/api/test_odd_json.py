"""Values of any type and depth, and bytes of no UTF-8, at any place of a body: read, or refused by name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from services.router.api.anthropic.request import parse_messages_body
from services.router.api.batches.batch_body import parse_batch
from services.router.api.openai.request import parse_chat, parse_completion
from services.router.api.openai.token_bodies import parse_detokenize, parse_tokenize
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.api.workers_ai.run_body import BatchBody, RunBody, parse_run
from slipstream import bounds
from slipstream.errors import InvalidArgument, NotFound
from tests.support.fuzz.http_routes import BATCHES, CHATS, COMPLETIONS, MESSAGES, RESPONSES, RUNS

# Below the depth at which Python's decoders end, and above that of what reads their results.
DEPTHS = (bounds.MAX_JSON_DEPTH - 20, bounds.MAX_JSON_DEPTH, *range(890, 1000, 10), 990, 992, 30_000)


def read_run(data: bytes) -> None:
    body = parse_run(data, "m").body
    for run in body.runs if isinstance(body, BatchBody) else [body]:
        if isinstance(run, RunBody):  # other bodies ask for the answer of a queued run
            parse_chat(run.chat)


def read_response(data: bytes) -> None:
    draft = decode_response(data)
    if not draft.references and draft.previous_id is None:  # else the store comes first
        parse_response(draft, EarlierItems(), is_stored=False)


USER = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
PARSERS: dict[str, tuple[Callable[[bytes], object], Sequence[Any]]] = {
    "chat": (parse_chat, CHATS),
    "completion": (parse_completion, COMPLETIONS),
    "run": (read_run, RUNS),
    "response": (read_response, RESPONSES),
    "messages": (parse_messages_body, MESSAGES),
    "tokenize": (parse_tokenize, [{"messages": USER, "tools": []}, {"prompt": "a"}]),
    "detokenize": (parse_detokenize, [{"tokens": [1]}]),
    "batch": (lambda data: parse_batch(data, ["/v1/chat/completions"]), BATCHES),
}
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**400, "", "x", [], {}, [[]], [{}], {"a": 1}, [1], [None], [None] * 50),
    *("\x00", "\ud800", 2**31, 2**63, {"type": "text", "text": "x"}, {"role": "user"}, [1, "a", {}]),
)
RAW = (b'"\x91"', b'{"na\x91me": 1}', b'[{"\xff": 1}]', b'"a\xed\xa0\x80"', b"NaN", b"[-Infinity]", b"1e999")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def with_gap(body: dict[str, Any], path: tuple[Any, ...]) -> bytes:
    """The text of the body with `"@"` as the value at that place."""
    made: Any = copy.deepcopy(body)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = "@"
    return json.dumps(made).encode()


def refusal_of(parse: Callable[[bytes], object], data: bytes) -> InvalidArgument | NotFound | None:
    try:
        parse(data)
    except (InvalidArgument, NotFound) as error:
        return error
    return None


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_values_at_any_place_are_refused_by_name(name: str, opened: bytes, closed: bytes) -> None:
    parse, bodies = PARSERS[name]
    texts = {depth: opened * depth + b"1" + closed * depth for depth in DEPTHS}
    for body in bodies:
        for path in places(body):
            gap = with_gap(body, path)
            for depth, text in texts.items():
                refusal = refusal_of(parse, gap.replace(b'"@"', text))
                assert refusal is None or refusal.field, (path, depth)
                if depth >= bounds.MAX_JSON_DEPTH:  # with the brackets around it
                    assert refusal is not None and bounds.BODY_DEPTH.words in refusal.message, (path, depth)


@pytest.mark.parametrize("name", PARSERS)
def test_odd_values_at_any_place_are_read_or_refused_by_name(name: str) -> None:
    """No other exception leaves a parser; over HTTP it would be a 500."""
    parse, bodies = PARSERS[name]
    texts = (*(json.dumps(value).encode() for value in ODD), *RAW)
    for body in bodies:
        for path in places(body):
            gap = with_gap(body, path)
            for text in texts:
                refusal = refusal_of(parse, gap.replace(b'"@"', text))
                assert refusal is None or refusal.field, (path, text)


@pytest.mark.parametrize("name", PARSERS)
def test_names_of_no_utf8_are_refused(name: str) -> None:
    parse, bodies = PARSERS[name]
    for body in bodies:
        data = json.dumps(body).encode()
        for end in [found.end() for found in re.finditer(rb'[a-z]": ', data)]:
            broken = data[: end - 3] + b"\x91" + data[end - 3 :]
            assert refusal_of(parse, broken), broken
