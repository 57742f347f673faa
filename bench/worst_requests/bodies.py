"""The most expensive bodies of each kind over HTTP, at most 8 MiB each. Pure."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slipstream import bounds

MOST = bounds.MAX_BODY_BYTES
_CHAT = "/v1/chat/completions"
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
DETOKENIZE = "/detokenize"
RUN = "/client/v4/accounts/a/ai/run/model"  # the name of bench.router.rig's model
_ROOM = 200  # bytes of a body around its long part
_USER: dict[str, Any] = {"role": "user", "content": "hi"}


class HttpRequest(NamedTuple):
    """A body and where it goes. `is_chunked`: it is in chunks already."""

    body: bytes
    path: str = _CHAT
    encoding: str = ""
    is_chunked: bool = False


def chat(messages: list[dict[str, Any]], **more: Any) -> HttpRequest:
    """A chat body of one token."""
    return HttpRequest(_json({"messages": messages, "max_tokens": 1, **more}))


def _json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _content(raw: bytes) -> HttpRequest:
    """A message whose content is these raw bytes of a JSON string, as often as they fit."""
    text = raw * ((MOST - _ROOM) // len(raw))
    return HttpRequest(b'{"max_tokens":1,"messages":[{"role":"user","content":"' + text + b'"}]}')


def _raw_tools(item: bytes, most: int = MOST) -> HttpRequest:
    """Tools that are this raw JSON, as often as it fits."""
    items = b",".join([item] * ((most - _ROOM) // (len(item) + 1)))
    return HttpRequest(
        b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],"tools":[' + items + b"]}"
    )


def tool(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI-shaped tool."""
    parameters = {"type": "object", "properties": {"x": dict(schema)}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _tools(count: int, schema: Mapping[str, Any]) -> HttpRequest:
    return chat([_USER], tools=[tool(f"f{n}", schema) for n in range(count)])


def nested(depth: int) -> dict[str, Any]:
    """A schema within the bound of depth, two levels for each step."""
    schema: dict[str, Any] = {"type": "object", "description": "a\n" * 2400}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def calling(n_messages: int, n_calls: int, arguments: str) -> list[dict[str, Any]]:
    """Messages of an assistant, each with tool calls."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "functions.f:0", "type": "function", "function": function}
    return [{"role": "assistant", "tool_calls": [call] * n_calls}] * n_messages


def _gzip(n_bytes: int) -> HttpRequest:
    plain = b'{"max_tokens":1,"messages":[{"role":"user","content":"' + b" " * n_bytes + b'"}]}'
    return HttpRequest(gzip.compress(plain, 9), encoding="gzip")


def _parts(n_messages: int, n_parts: int) -> HttpRequest:
    part = {"type": "text", "text": "a"}
    return chat([{"role": "user", "content": [part] * n_parts}] * n_messages)


# Deep and wide JSON, which the bound of structure refuses or just admits.
_STRUCTURE: dict[str, Callable[[], HttpRequest]] = {
    "lists, 8 MiB": lambda: _raw_tools(b"[]"),
    "lists, most allowed": lambda: _raw_tools(b"[]", bounds.MAX_STRUCTURE_BYTES),
    "empty strings, 8 MiB": lambda: _raw_tools(b'""'),
    "nesting, 8 MiB": lambda: HttpRequest(b'{"messages":' + b"[" * (MOST - _ROOM)),
    "numbers of 4300 digits": lambda: _raw_tools(b"1" * 4300, bounds.MAX_STRUCTURE_BYTES),
    "fractions of 700 digits": lambda: _raw_tools(b"0." + b"1" * 700 + b"e-300", bounds.MAX_STRUCTURE_BYTES),
    "an unknown field, then lists": lambda: HttpRequest(
        _raw_tools(b"[]", bounds.MAX_STRUCTURE_BYTES).body[:-1] + b',"x":1}'
    ),
    "logit_bias of 40,000 tokens": lambda: chat([_USER], logit_bias={str(n): 1 for n in range(40_000)}),
    "logit_bias of 1000 tokens": lambda: chat([_USER], logit_bias={str(n): 1 for n in range(1000)}),
    "stop of 40,000 strings": lambda: chat([_USER], stop=["a"] * 40_000),
}
_TOOLS: dict[str, Callable[[], HttpRequest]] = {
    "one tool, 1500 classes": lambda: _tools(1, {"type": "string", "pattern": "(?i)" + "[a-\\uffff]" * 1500}),
    "128 tools of classes": lambda: _tools(128, {"type": "string", "pattern": "[a-\\uffff]" * 720}),
    "128 tools of parentheses": lambda: _tools(128, {"type": "string", "pattern": "(" * 7900}),
    "128 tools, allOf": lambda: _tools(128, {"allOf": [True] * 240}),
    "128 tools, empty properties": lambda: _tools(
        128, {"type": "object", "properties": {f"p{n}": {} for n in range(220)}}
    ),
    "128 tools, deep descriptions": lambda: _tools(128, nested(12)),
    "tools of 8 MiB": lambda: _tools(128, {"type": "string", "description": "d" * 65_000}),
}
_MESSAGES: dict[str, Callable[[], HttpRequest]] = {
    "100,000 messages": lambda: chat([_USER] * 100_000),
    "4096 messages": lambda: chat([_USER] * 4096),
    "4096 messages, reasoning": lambda: chat(
        [{"role": "assistant", "content": "a", "reasoning_content": "b"}] * 4096,
        chat_template_kwargs={"enable_thinking": True},
    ),
    "4096 tool calls": lambda: chat(calling(4096, 1, "{}")),
    "20,000 tool calls": lambda: chat(calling(200, 100, "{}")),
    "arguments, 8 MiB of lists": lambda: chat(calling(1, 1, '{"a":[' + "[]," * (MOST // 3 - 99) + "0]}")),
    "arguments, 4 MiB of escapes": lambda: chat(
        calling(1, 1, '{"a":"' + "\\u0001" * (MOST // 7 - 99) + '"}')
    ),
    "16,384 content parts": lambda: _parts(4, 4096),
    "100,000 content parts": lambda: _parts(25, 4000),
}
_TEXTS: dict[str, Callable[[], HttpRequest]] = {
    "text that fills the context": lambda: chat([{"role": "user", "content": "word " * 120_000}]),
    "one character": lambda: _content(b"a"),
    "words": lambda: _content(b"lorem ipsum dolor sit amet "),
    "spaces": lambda: _content(b" "),
    "newlines": lambda: _content(b"\\n"),
    "control characters": lambda: _content(b"\\u0001"),
    "backslashes": lambda: _content(b"\\\\"),
    "Han": lambda: _content("天".encode()),
    "rare characters": lambda: _content("\U0001f9a9\U00012345".encode()),
    "digits": lambda: _content(b"1"),
    "combining marks": lambda: _content("\u0301".encode()),
    "no UTF-8": lambda: _content(b"\xff"),
    "lone surrogates": lambda: _content(b"\\ud800"),
    "a name of 8 MiB": lambda: HttpRequest(b'{"' + b"\\u0001" * (MOST // 6 - 40) + b'":1}'),
    "a prompt": lambda: HttpRequest(
        b'{"max_tokens":1,"prompt":"' + b"aA" * (MOST // 2 - 99) + b'"}', COMPLETIONS
    ),
    "white space around": lambda: HttpRequest(b" " * (MOST - _ROOM) + chat([_USER]).body),
    "gzip, 8 MiB inside": lambda: _gzip(MOST - _ROOM),
    "a million chunks of a byte": lambda: HttpRequest(b"1\r\n \r\n" * (1 << 20), is_chunked=True),
    "gzip, 1 GiB inside": lambda: HttpRequest(_gzip_bomb(1 << 30), encoding="gzip"),
}

# Schemas and grammars that take long to compile, or to mask.
_GRAMMARS: dict[str, Callable[[], HttpRequest]] = {
    "schema of 2000 properties": lambda: _schema(
        {"type": "object", "properties": {f"p{n}": {"type": "integer", "minimum": n} for n in range(2000)}}
    ),
    "schema, multipleOf 999983": lambda: _schema({"type": "integer", "multipleOf": 999_983}),
    "schema, 5000 choices": lambda: _schema({"enum": [f"v{n:08d}xyz" for n in range(5000)]}),
    "schema, most bytes": lambda: _schema({"description": "x" * (bounds.MAX_GRAMMAR_BYTES - _ROOM)}),
    "schema, most bytes, 128 choices": lambda: _schema(
        {"description": "x" * (bounds.MAX_GRAMMAR_BYTES - _ROOM)}, n=bounds.CHOICES.high
    ),
    "regex of nested counts": lambda: chat([_USER], guided_regex="(a{1000}){1000}"),
    "regex, most bytes": lambda: chat([_USER], guided_regex="[a-\\uffff]" * 40_000),
    "128 strict tools": lambda: chat(
        [_USER],
        tools=[
            {"type": "function", "function": {**tool(f"f{n}", nested(3))["function"], "strict": True}}
            for n in range(128)
        ],
    ),
}


def _schema(schema: Mapping[str, Any], **more: Any) -> HttpRequest:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat([_USER], response_format=form, **more)


def _items(items: list[dict[str, Any]]) -> HttpRequest:
    return HttpRequest(_json({"input": items, "max_output_tokens": 1}), RESPONSES)


def _item_of_call(arguments: bytes) -> bytes:
    """A body of Responses with one call that has these raw arguments."""
    call = b'{"type":"function_call","call_id":"c","name":"f","arguments":"' + arguments + b'"}'
    output = b'{"type":"function_call_output","call_id":"c","output":"x"}'
    return b'{"max_output_tokens":1,"input":[{"role":"user","content":"a"},' + call + b"," + output + b"]}"


def _tool_uses(count: int, raw_input: bytes) -> bytes:
    """A body of Messages with so many uses of a tool and their results."""
    use = (
        b'{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":' + raw_input + b"}]}"
    )
    result = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"x"}]}'
    turns = b",".join([b'{"role":"user","content":"a"}', *[use, result] * count])
    return b'{"max_tokens":1,"messages":[' + turns + b"]}"


def _gzip_bomb(n_bytes: int) -> bytes:
    """So much white space, compressed."""
    stream, piece = zlib.compressobj(1, wbits=31), b" " * MOST
    return b"".join([*[stream.compress(piece) for _ in range(n_bytes // MOST)], stream.flush()])


_ESCAPES = b"\\u0001" * (MOST // 7)
_OTHER_APIS: dict[str, Callable[[], HttpRequest]] = {
    "/v1/responses, 4000 items": lambda: _items(
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}] * 4000
    ),
    "/v1/responses, 100,000 items": lambda: _items([_USER] * 100_000),
    "/v1/responses, control characters": lambda: HttpRequest(
        b'{"max_output_tokens":1,"input":"' + b"\\u0001" * (MOST // 6 - _ROOM) + b'"}', RESPONSES
    ),
    "/v1/responses, arguments of escapes": lambda: HttpRequest(
        _item_of_call(b'{\\"a\\":\\"' + b"\\\\u0001" * (MOST // 8) + b'\\"}'), RESPONSES
    ),
    "/v1/messages, 1300 uses of a tool": lambda: HttpRequest(_tool_uses(1300, b"{}"), MESSAGES),
    "/v1/messages, an input of escapes": lambda: HttpRequest(
        _tool_uses(1, b'{"a":"' + _ESCAPES + b'"}'), MESSAGES
    ),
    "/v1/messages, a text of escapes": lambda: HttpRequest(
        b'{"max_tokens":1,"messages":[{"role":"user","content":"' + _ESCAPES + b'"}]}', MESSAGES
    ),
    "run, 64 prompts of 100 KB": lambda: HttpRequest(
        _json({"requests": [{"prompt": "x" * 100_000, "max_tokens": 1}] * 64}), RUN
    ),
    "run, 64 conversations of 60 messages": lambda: HttpRequest(
        _json({"requests": [{"messages": [_USER] * 60, "max_tokens": 1}] * 64}), RUN
    ),
    "run, a prompt of escapes": lambda: HttpRequest(b'{"max_tokens":1,"prompt":"' + _ESCAPES + b'"}', RUN),
    "/detokenize, 100,000 ids": lambda: HttpRequest(_json({"tokens": [1] * 100_000}), DETOKENIZE),
}

# Answers whose log probabilities take long to write: the end of some repeats all of them.
_LOGPROBS: dict[str, Any] = {"messages": [_USER], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
_LONG_ANSWERS: dict[str, Callable[[], HttpRequest]] = {
    "chat, logprobs of 2000 tokens": lambda: HttpRequest(_json({**_LOGPROBS, "max_tokens": 2000})),
    "chat, logprobs of 128 choices": lambda: HttpRequest(_json({**_LOGPROBS, "max_tokens": 200, "n": 128})),
    "/v1/completions, logprobs of 128 choices": lambda: HttpRequest(
        _json({"prompt": "a", "logprobs": 20, "ignore_eos": True, "max_tokens": 200, "n": 128}), COMPLETIONS
    ),
    "/v1/responses, logprobs of 2000 tokens": lambda: HttpRequest(
        _json(
            {
                "input": "a",
                "max_output_tokens": 2000,
                "top_logprobs": 20,
                "include": ["message.output_text.logprobs"],
                "stream": True,
            }
        ),
        RESPONSES,
    ),
    "run, logprobs of 64 answers": lambda: HttpRequest(
        _json({"requests": [{**_LOGPROBS, "max_tokens": 400}] * 64}), RUN
    ),
}

KINDS: dict[str, Callable[[], HttpRequest]] = {
    **_TOOLS,
    **_GRAMMARS,
    **_STRUCTURE,
    **_MESSAGES,
    **_TEXTS,
    **_OTHER_APIS,
    **_LONG_ANSWERS,
}
