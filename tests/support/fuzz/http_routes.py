"""Routes of a router's two HTTP ports with valid requests, from which a fuzzer makes others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from services.router.console.page_guard import CONSOLE_HEADER

Body = Mapping[str, Any] | bytes


class HttpRoute(NamedTuple):
    """A path with its bodies; without any it is read by GET.

    `@file@` and the like in a path or a body stand for an id of an earlier answer, by its prefix.
    """

    path: str
    bodies: Sequence[Body] = ()
    method: str = ""
    status: int = 200  # of a valid request
    content_type: str = "application/json"


class HttpPort(NamedTuple):
    """What a port serves, and what every request to it has."""

    routes: Sequence[HttpRoute]
    odd_paths: Sequence[str] = ()
    headers: Sequence[str] = ()


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": False}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
_HI = {"role": "user", "content": "hi"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_BOUNDARY = "b0undary"
_EXPIRY = {"anchor": "created_at", "seconds": 3600}

CHATS: tuple[Body, ...] = (
    {"messages": [_HI], "max_tokens": 2, "temperature": 0.5, "seed": 1},
    {"messages": [_PARTS], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": [_HI],
        "max_tokens": 2,
        "tools": [_TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    },
    {
        "messages": [_HI, {"role": "assistant", "tool_calls": [_CALL]}, {**_HI, "role": "tool"}],
        "max_tokens": 2,
        "thinking": {"type": "enabled", "keep": "all"},
        "chat_template_kwargs": {"enable_thinking": False},
        "logit_bias": {"1": 1},
        "metadata": {"a": "b"},
    },
    {
        "messages": [_HI],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        "structured_outputs": None,
        "n": 2,
    },
)
COMPLETIONS: tuple[Body, ...] = (
    {"prompt": "once", "max_tokens": 2, "stop": ["x"], "logprobs": 1},
    {"prompt": [[1, 2], [3]], "max_tokens": 2, "guided_json": None, "echo": False},
)
RESPONSES: tuple[Body, ...] = (
    {"input": "hi", "max_output_tokens": 2, "store": True, "metadata": {"a": "b"}},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "q"}]},
        ],
        "max_output_tokens": 2,
        "stream": True,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "none", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
    },
    {"input": "go on", "previous_response_id": "@resp@", "max_output_tokens": 2},
    {"input": [{"type": "item_reference", "id": "@msg@"}, _HI], "max_output_tokens": 2},
    {"input": "hi", "background": True, "store": True, "max_output_tokens": 2},
)
MESSAGES: tuple[Body, ...] = (
    {"messages": [_HI], "max_tokens": 2, "stream": True},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [_PARTS]}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "z"}]},
        ],
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "type": "custom", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stop_sequences": ["a"],
    },
)
RUNS: tuple[Body, ...] = (
    {"prompt": "a", "max_tokens": 2, "stream": False},
    {"messages": [_HI], "tools": [{"name": "f", "description": "d", "parameters": _SCHEMA}], "max_tokens": 2},
    {"requests": [{"prompt": "a", "external_reference": "r", "max_tokens": 2}, {"messages": [_HI]}]},
    {"messages": [_HI], "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    {"request_id": "@request@"},
)
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHATS[0]}


def _form(**fields: str) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
        + ('; filename="f.jsonl"' if name == "file" else "")
        + f"\r\n\r\n{text}\r\n"
        for name, text in fields.items()
    ]
    return ("".join(parts) + f"--{_BOUNDARY}--\r\n").encode()


_FILES: tuple[Body, ...] = (
    _form(purpose="batch", file=json.dumps(_LINE) + "\n"),
    _form(purpose="batch", file=(json.dumps(_LINE) + "\n").replace('"hi"', '"\\ud800"')),
    _form(purpose="user_data", file="\x00" * 300, **{"expires_after[anchor]": "created_at"}),
)
BATCHES: tuple[Body, ...] = (
    {"input_file_id": "@file@", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    {
        "input_file_id": "@file@",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": _EXPIRY,
    },
)
_ODD_PATHS = (
    *(
        "/",
        "*",
        "//",
        "/v1/../v1/models",
        "/v1/models/%ff%00",
        "/v1/responses/resp_%00",
        "/v1/files?after=%00",
    ),
    *("http://x/v1/models", "/" + "a" * 9000, "/v1/\u00e9", "/%", "/?" + "&" * 2000, "", "/docs"),
    *("/v1/chat/completions?rejectIfBusy=x", "/v1/usage?from=x", "/v1/files?limit=-1&order=x", "/healthz"),
    *("/client/v4/accounts/%ff/ai/v1/models", "/client/v4/accounts/a/ai/run/x", "/v1/batches/x/cancel"),
    *("/v1/files/file-0/content", "/v1/responses/resp_x?stream=true&starting_after=-1", "/metrics"),
)


def public_port(model: str) -> HttpPort:
    """The port of clients. `model` is served there."""
    account = "/client/v4/accounts/a/ai"
    run = f"{account}/run/{quote(model)}"
    tokens = {"model": "", "tokens": [1, 2]}
    return HttpPort(
        [
            *[HttpRoute(path, CHATS) for path in ("/v1/chat/completions", f"{account}/v1/chat/completions")],
            HttpRoute("/v1/completions", COMPLETIONS),
            *[HttpRoute(path, RESPONSES) for path in ("/v1/responses", f"{account}/v1/responses")],
            HttpRoute("/v1/responses/input_tokens", RESPONSES),
            HttpRoute("/v1/responses/@resp@"),
            HttpRoute("/v1/responses/@resp@?stream=true&starting_after=1", status=400),
            HttpRoute("/v1/responses/@resp@/input_items?limit=2&order=asc"),
            HttpRoute("/v1/responses/@resp@/cancel", [b"", {}], status=400),
            HttpRoute("/v1/responses/@resp@", method="DELETE"),
            *[HttpRoute(path, MESSAGES) for path in ("/v1/messages", "/v1/messages/count_tokens")],
            *[HttpRoute(path, RUNS) for path in (run, f"{run}?queueRequest=true")],
            HttpRoute(f"{account}/v1/embeddings", [{"model": "m", "input": "a"}], status=400),
            HttpRoute("/tokenize", [{"prompt": "a"}, {"messages": [_HI], "tools": [_TOOL]}]),
            HttpRoute("/detokenize", [tokens]),
            HttpRoute("/tokenizer_info"),
            HttpRoute("/v1/files", _FILES, content_type=f"multipart/form-data; boundary={_BOUNDARY}"),
            HttpRoute("/v1/files?limit=2&order=asc&purpose=batch&after=@file@"),
            HttpRoute("/v1/files/@file@/content"),
            HttpRoute("/v1/batches", BATCHES),
            HttpRoute("/v1/batches?limit=2&after=@batch@"),
            HttpRoute("/v1/batches/@batch@/cancel", [b"", {}], status=409),
            HttpRoute("/v1/files/@file@", method="DELETE"),
            HttpRoute("/v1/usage?from=2027-01-01&to=2027-01-31&group_by=day,model&tenant=a"),
            HttpRoute("/v1/models"),
            HttpRoute(f"/v1/models/{quote(model)}"),
        ],
        odd_paths=_ODD_PATHS,
    )


def admin_port() -> HttpPort:
    """A router's port of operators. Its workers are drained by no request: only names of none are here."""
    api = "/console/api"
    return HttpPort(
        [
            HttpRoute(f"{api}/chat", CHATS),
            HttpRoute(f"{api}/workers/decode/none/drain", [b"", {}], status=404),
            HttpRoute(f"{api}/workers/decode/none/undrain", [b"", {}], status=404),
            HttpRoute(f"{api}/jobs/@job@/cancel", [b"", {}], status=404),
            HttpRoute(f"{api}/jobs/@job@", status=404),
            HttpRoute(f"{api}/jobs?limit=2&status=queued&before=1&tenant=a"),
            HttpRoute(f"{api}/requests?limit=2&before=1&tenant=a&status=failed"),
            HttpRoute(f"{api}/requests/@request@"),
            HttpRoute(f"{api}/cache?limit=2&tenant=a"),
            HttpRoute(f"{api}/events"),
            HttpRoute(f"{api}/fleet"),
            HttpRoute("/console/"),
            HttpRoute("/console/static/main.js"),
            HttpRoute("/metrics"),
            HttpRoute("/healthz"),
        ],
        odd_paths=(
            *_ODD_PATHS,
            *(
                "/console/static/../x",
                "/console/static/%2e%2e/x",
                f"{api}/requests/%ff",
                f"{api}/cache?a=%00",
            ),
            *(f"{api}/requests?limit=x", f"{api}/jobs?limit=-1&status=x", f"{api}/jobs/%00"),
            *(
                f"{api}/requests/x?seq={'9' * 30}",
                f"{api}/workers/%ff/%00/drain",
                f"{api}/cache?limit=\u0661&sessions_after=x",
            ),
        ),
        headers=(f"{CONSOLE_HEADER}: 1",),
    )
