"""Each row of the table of bounds refuses a bad value on each of its APIs, in the same words."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import bounds, errors
from slipstream.bounds import BOUNDS
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.sampling import SAMPLING_RANGES
from slipstream.v1 import router_pb2
from tests.router.conftest import MAX_CONTEXT_TOKENS, VOCAB_SIZE, open_router
from tests.router.support.bound_case import OTHER_CASES, USER, Case, both, messages, output_schema, tools
from tests.router.support.fake_cluster import FakeCluster

BAD_UTF8 = b"caf\xe9"
TOOL = {"name": "look", "parameters": json.dumps({"type": "object"})}
OPENAI_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}
CALL = {"id": "functions.look:0", "name": "look", "arguments": "{}"}
OPENAI_CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


_LEAP = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "leap"}]}
# A third of the values that all tools together may have.
_ENUM = {"type": "object", "enum": [0] * 11_000}


def _tool(**function: Any) -> Any:
    return {"type": "function", "function": {**OPENAI_TOOL["function"], **function}}


def _assistant(**call: Any) -> tuple[Any, Any]:
    """An assistant message with one tool call, in both shapes."""
    made = {**CALL, **call}
    function = {"name": made["name"], "arguments": made["arguments"]}
    http = {"role": "assistant", "tool_calls": [{"id": made["id"], "type": "function", "function": function}]}
    return http, {"role": "assistant", "toolCalls": [made]}


def _call_case(path: str, **call: Any) -> Case:
    http, proto = _assistant(**call)
    return Case(path, http={"messages": [USER, http]}, grpc={"chat": {"messages": [USER, proto]}})


def _proto(**fields: Any) -> router_pb2.GenerateRequest:
    return _parse(fields, router_pb2.GenerateRequest())


def _parse(given: Mapping[str, Any], message: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """Fields in JSON names; roles, modes and priorities in OpenAI's words, content as text."""
    fields = copy.deepcopy(dict(given))
    if "priority" in fields:
        fields["priority"] = _value(router_pb2.Priority, "PRIORITY", fields["priority"])
    chat = fields.get("chat", {})
    for item in chat.get("messages", ()):
        item["role"] = _value(router_pb2.MessageRole, "MESSAGE_ROLE", item["role"])
        if isinstance(item.get("content"), str):
            item["content"] = [{"text": item["content"]}]
    choice = chat.get("toolChoice")
    if choice is not None:
        choice["mode"] = _value(router_pb2.ToolChoiceMode, "TOOL_CHOICE_MODE", choice["mode"])
    return ParseDict(fields, message)


def _value(enum: Any, prefix: str, word: str) -> int:
    """99 for a word that the enum does not have."""
    name = f"{prefix}_{word.upper()}"
    return enum.Value(name) if name in dict(enum.items()) else 99


_GOOD = _proto(chat={"messages": [USER]})
# Field 99 is in no version of the schema; the text of a content part holds bytes that are no UTF-8.
_UNKNOWN_IN_MESSAGE = b"\x12\x07\x0a\x05\x08\x03\x9a\x06\x00"
_NOT_UTF8 = b"\x12\x0c\x0a\x0a\x08\x03\x12\x06\x0a\x04" + BAD_UTF8
_LONG = "x" * (bounds.MAX_BODY_BYTES + 1)

CASES: dict[str, Case] = {
    "BODY": Case("body", http=_LONG.encode(), grpc={"prompt": _LONG}),
    "BODY_STRUCTURE": messages(
        "body", *[USER] * 100_000, grpc=[{"role": "user", "content": [{}] * 40} for _ in range(4000)]
    ),
    "BODY_FORMAT": Case("body", http=b'"text"', grpc=b"\x12\xff"),
    "BODY_JSON": Case(
        "body", http=b'{"messages": [\n  1,]}', words="is not JSON: expecting value at line 2 column 5"
    ),
    "UTF8": Case(
        "messages[0].content",
        http=b'{"messages": [{"role": "user", "content": "' + BAD_UTF8 + b'"}]}',
        grpc=_NOT_UTF8,
    ),
    "UNKNOWN_FIELD": Case("messages[0].99", grpc=_UNKNOWN_IN_MESSAGE),
    "UNSUPPORTED": Case("echo", http={"echo": True}, grpc={"echo": True}),
    "TYPE": Case("temperature", http={"temperature": "hot"}, words="must be a number"),
    "MODEL": Case("model", http={"model": "gpt-9"}, grpc={"model": "gpt-9"}, words="served: tiny"),
    "INPUT": Case("messages", http={"messages": None}, grpc=b"\x0a\x04tiny"),
    "REQUEST_ID": both("request_id"),
    "SESSION": Case("x-session-affinity", http={}, grpc={}, headers={"x-session-affinity": "s" * 257}),
    "TIMEOUT": Case("x-request-timeout-ms", http={}, headers={"x-request-timeout-ms": "soon"}),
    "PINNING": Case("x-slipstream-prefill", http={}, grpc={}, headers={"x-slipstream-prefill": "prefill-0"}),
    "PRIORITY": Case("x-slipstream-priority", http={}, grpc={}, headers={"x-slipstream-priority": "vip"}),
    "METADATA": Case(
        "metadata",
        http={"metadata": {str(i): "" for i in range(17)}},
        grpc={"metadata": {str(i): "" for i in range(17)}},
    ),
    "METADATA_KEY": Case(
        f"metadata.{'k' * 61}...", http={"metadata": {"k" * 65: ""}}, grpc={"metadata": {"k" * 65: ""}}
    ),
    "METADATA_VALUE": Case(
        "metadata.k", http={"metadata": {"k": "v" * 513}}, grpc={"metadata": {"k": "v" * 513}}
    ),
    "RESUME": Case("resume_after_tokens", grpc={"resumeAfterTokens": (1 << 20) + 1}),
    "RESUME_ONE": Case("resume_after_tokens", grpc={"n": 2, "resumeAfterTokens": 3}),
    "SERVICE_TIER": Case("service_tier", http={"service_tier": "gold"}),
    "N": Case("n", http={"n": 129}, grpc={"n": 129}),
    "CHOICES": Case("n", http={"prompt": ["a", "b"], "n": 65}),
    "REASONING_EFFORT": Case("reasoning_effort", http={"reasoning_effort": "extreme"}),
    "THINKING": Case("thinking", http={"thinking": {"type": "perhaps"}}),
    "RESPONSE_FORMAT": Case("response_format.type", http={"response_format": {"type": "xml"}}),
    "OUTPUT_ONCE": Case(
        "response_format", http={"response_format": {"type": "json_object"}, "guided_regex": "a"}
    ),
    "OUTPUT_NAMED": Case("structured_outputs", http={"structured_outputs": {"rexeg": "a"}}),
    "OUTPUT_TEXT": Case("guided_regex", http={"guided_regex": ""}, grpc={"output": {"regex": ""}}),
    "OUTPUT_CHOICES": Case("guided_choice", http={"guided_choice": []}, grpc={"output": {"choice": {}}}),
    "OUTPUT_SCHEMA_BYTES": output_schema({"description": "x" * (512 << 10)}),
    "OUTPUT_SCHEMA_DEPTH": output_schema(_nested(150)),
    "OUTPUT_SCHEMA": output_schema([1]),
    "MESSAGES": messages("messages"),
    "ROLE": messages("messages[1].role", USER, {"role": "wizard", "content": "hi"}),
    "CONTENT_PARTS": messages(
        "messages[0].content",
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 4097},
        grpc=[{"role": "user", "content": [{"text": "a"}] * 4097}],
    ),
    "NAME": messages("messages[0].name", {**USER, "name": "n" * 129}),
    "ASSISTANT_ONLY": Case(
        "messages[0].tool_calls",
        http={"messages": [{**USER, "tool_calls": [OPENAI_CALL]}]},
        grpc={"chat": {"messages": [{**USER, "toolCalls": [CALL]}]}},
    ),
    **OTHER_CASES,
    "TOOL_ONLY": messages(
        "messages[0].tool_call_id", {**USER, "tool_call_id": "x"}, grpc=[{**USER, "toolCallId": "x"}]
    ),
    "TOOL_CALL_ID": messages("messages[1].tool_call_id", USER, {"role": "tool", "content": "21 degrees"}),
    "TOOL_RESULT": messages(
        "messages[1].tool_call_id",
        USER,
        {"role": "tool", "content": "21", "tool_call_id": "functions.look:7"},
        grpc=[USER, {"role": "tool", "content": "21", "toolCallId": "functions.look:7"}],
    ),
    "TOOL_CALLS": Case(
        "messages[0].tool_calls",
        http={"messages": [{"role": "assistant", "tool_calls": [OPENAI_CALL] * 129}]},
        grpc={"chat": {"messages": [{"role": "assistant", "toolCalls": [CALL] * 129}]}},
    ),
    "TOOL_CALLS_TOGETHER": Case(
        "messages",
        http={"messages": [{"role": "assistant", "tool_calls": [OPENAI_CALL] * 128}] * 33},
        grpc={"chat": {"messages": [{"role": "assistant", "toolCalls": [CALL] * 128} for _ in range(33)]}},
        words="at most 4096 tool calls",
    ),
    "TOOL_CALL_NAME": _call_case("messages[1].tool_calls[0].function.name", name="n" * 257),
    "PROMPT": Case("prompt", http={"prompt": ""}, grpc={"prompt": ""}),
    "PROMPTS": Case("prompt", http={"prompt": ["a"] * 129}),
    "PROMPT_IDS": Case("prompt", http={"prompt": [VOCAB_SIZE]}, grpc={"tokenIds": {"ids": [VOCAB_SIZE]}}),
    "PROMPT_EMPTY": Case("prompt", grpc={"tokenIds": {}}),
    "TOOLS": tools("tools", [OPENAI_TOOL] * 129, [TOOL] * 129),
    "TOOL_BYTES": tools(
        "tools[0]", [_tool(description="d" * 70_000)], [{**TOOL, "description": "d" * 70_000}]
    ),
    "TOOL_DEPTH": tools(
        "tools[0]", [_tool(parameters=_nested(40))], [{**TOOL, "parameters": json.dumps(_nested(40))}]
    ),
    "TOOL_NAME": tools("tools[0].function.name", [_tool(name="no spaces")], [{**TOOL, "name": "no spaces"}]),
    "TOOL_TWICE": tools("tools[1].function.name", [OPENAI_TOOL] * 2, [TOOL] * 2, "'look' is declared twice"),
    "TOOL_STRICT": Case("tools[0].function.strict", http={"tools": [_tool(strict="yes")]}),
    "TOOL_JSON": tools(
        "tools[0].function.parameters", [_tool(parameters="{not json")], [{**TOOL, "parameters": "{not json"}]
    ),
    "TOOLS_BYTES": tools(
        "tools",
        [_tool(name=f"f{n}", description="d" * 60_000) for n in range(18)],
        [{**TOOL, "name": f"f{n}", "description": "d" * 60_000} for n in range(18)],
    ),
    "TOOL_VALUES": tools(
        "tools",
        [_tool(name=f"f{n}", parameters=_ENUM) for n in range(4)],
        [{**TOOL, "name": f"f{n}", "parameters": json.dumps(_ENUM)} for n in range(4)],
    ),
    "TOOL_CHOICE": Case(
        "tool_choice",
        http={"tool_choice": "perhaps"},
        grpc={"chat": {"messages": [USER], "toolChoice": {"mode": "perhaps"}}},
    ),
    "TOOL_CHOICE_FUNCTION": Case(
        "tool_choice.function.name",
        http={"tools": [OPENAI_TOOL], "tool_choice": {"type": "function", "function": {"name": "leap"}}},
        grpc={
            "chat": {
                "messages": [USER],
                "tools": [TOOL],
                "toolChoice": {"mode": "function", "function": "leap"},
            }
        },
    ),
    "TOOL_CHOICE_TOOLS": Case(
        "tool_choice",
        http={"tool_choice": "required"},
        grpc={"chat": {"messages": [USER], "toolChoice": {"mode": "required"}}},
    ),
    "LOGIT_BIAS": both("logit_bias", logit_bias={str(i): 1 for i in range(1001)}),
    "LOGIT_BIAS_VALUE": both("logit_bias.7", logit_bias={"7": 101}),
    "LOGIT_BIAS_TOKEN": both(f"logit_bias.{VOCAB_SIZE}", logit_bias={str(VOCAB_SIZE): 1}),
    "SEED": Case("seed", http={"seed": 1 << 63}),
    "TOP_LOGPROBS": Case(
        "top_logprobs", http={"logprobs": True, "top_logprobs": 21}, grpc={"sampling": {"topLogprobs": 21}}
    ),
    "PROMPT_LOGPROBS": both("prompt_logprobs", prompt_logprobs=21),
    "TOP_LOGPROBS_OFF": Case("top_logprobs", http={"top_logprobs": 3}),
    "STOP": Case("stop", http={"stop": ["a"] * 17}, grpc={"stop": ["a"] * 17}),
    "STOP_STRING": Case("stop[1]", http={"stop": ["a", "b" * 257]}, grpc={"stop": ["a", "b" * 257]}),
    "STOP_TOKENS": both("stop_token_ids", stop_token_ids=[1] * 65),
    "STOP_TOKEN": both("stop_token_ids[1]", stop_token_ids=[1, VOCAB_SIZE]),
    "MIN_TOKENS": both("min_tokens", min_tokens=5, max_tokens=4),
    "MAX_TOKENS": both("max_tokens", max_tokens=0),
    "PROMPT_TOKENS": messages("messages", {"role": "user", "content": "zq" * MAX_CONTEXT_TOKENS}),
    "CONTEXT": both("max_tokens", max_tokens=MAX_CONTEXT_TOKENS),
    "COMPLETION": both("max_tokens", max_tokens=1 << 62),
}
# A plain sampling field needs no case here: the next number above its range is refused.
CASES |= {name.upper(): both(name, **{name: row.high + 1}) for name, row in SAMPLING_RANGES.items()}
CASES["REQUEST_ID"] = Case("request_id", http={"request_id": "no spaces"}, grpc={"requestId": "no spaces"})
# More of the same rows: what the words promise about infinities, negatives and huge numbers.
MORE: list[tuple[str, Case]] = [
    *[(name.upper(), both(name, **{name: row.low - 1})) for name, row in SAMPLING_RANGES.items() if row.low],
    ("TEMPERATURE", both("temperature", temperature=-0.5)),
    ("TEMPERATURE", both("temperature", temperature=float("nan"))),
    ("TEMPERATURE", both("temperature", temperature=float("inf"))),
    ("TOP_P", both("top_p", top_p=float("-inf"))),
    ("UNSUPPORTED", Case("functions", http={"functions": [{"name": "f"}]})),
    ("MAX_TOKENS", both("max_tokens", max_tokens=-1)),
    ("MAX_TOKENS", Case("max_completion_tokens", http={"max_completion_tokens": 0})),
    ("CONTEXT", Case("max_completion_tokens", http={"max_completion_tokens": MAX_CONTEXT_TOKENS})),
    ("LOGIT_BIAS_TOKEN", Case("logit_bias.-1", grpc={"sampling": {"logitBias": {"-1": 1}}})),
    ("LOGIT_BIAS_VALUE", both("logit_bias.7", logit_bias={"7": float("nan")})),
    ("THINKING", Case("thinking.keep", http={"thinking": {"type": "enabled", "keep": "some"}})),
    ("UTF8", Case("stop[0]", http=b'{"messages": [], "stop": ["\\ud800"]}')),
    ("BODY_DEPTH", Case("body", http=b"[" * 100_000)),
    ("BODY_FORMAT", Case("body", http=b"[]")),
    ("TYPE", Case("guided_choice", http={"guided_choice": [1]}, words="must be a list of strings")),
    (
        "TOOL_CHOICE_FUNCTION",
        Case("tool_choice.function.name", http={"tools": [OPENAI_TOOL], "tool_choice": _LEAP}),
    ),
    ("TYPE", Case("top_k", http={"top_k": "3"}, words="must be a whole number")),
    ("TYPE", Case("messages", http={"messages": "hi"}, words="must be a list")),
    ("TYPE", Case("messages[0]", http={"messages": ["hi"]}, words="must be an object")),
    ("SESSION", Case("x-session-affinity", http={}, grpc={}, headers={"x-session-affinity": ""})),
    ("SESSION", Case("x-session-affinity", http={}, headers={"x-session-affinity": "ü" * 128 + "!"})),
    ("SESSION", Case("x-session-affinity", grpc={}, headers={"x-session-affinity-bin": b"\xff"})),
    ("SESSION", Case("x-session-affinity", grpc={}, headers={"x-session-affinity-bin": b"a\nb"})),
    ("PRIORITY", Case("priority", grpc={"priority": "vip"})),
    *(
        (
            "TIMEOUT",
            Case("x-request-timeout-ms", http={}, headers={"x-request-timeout-ms": text}, words=words),
        )
        for text, words in (
            ("soon", "whole number from 1 to 3600000, not 'soon'"),
            ("1" * 20, f"not '{'1' * 20}'"),
            *((digit, "whole number from 1 to 3600000") for digit in ("0", "\u0661")),
        )
    ),
]
# Refused in test_bounds_running.py and, of a slow client, in http/test_robustness.py.
# Many log probabilities of prompts: tests/router/execution/test_prompt_delivery.py.
# Of an answer: tests/router/api/answers/test_logprob_rows.py.
# Those of usage are no fields of a generation: tests/router/metering/test_usage_store.py.
ELSEWHERE = {"REQUEST_ID_IN_USE", "REQUESTED_WORKER", "BODY_TIME", "PROMPT_ROWS", "USAGE_DAY"}
ELSEWHERE |= {"USAGE_DAYS", "USAGE_GROUP", "ANSWER_ROWS"}
ALL = [*CASES.items(), *MORE]


def test_every_row_has_a_case_on_each_of_its_apis() -> None:
    assert set(CASES) | ELSEWHERE == set(BOUNDS)
    for name, case in CASES.items():
        apis = BOUNDS[name].apis
        assert (case.http is not None) == (apis in ("both", "HTTP")), name
        assert (case.grpc is not None) == (apis in ("both", "gRPC")), name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(card: ModelCard) -> AsyncIterator[RouterServer]:
    """One router for all cases: none of them may reach a worker."""
    from tests.router.support.fake_model import FakeModel

    def never(*_: Any) -> Any:
        raise AssertionError("a refused request reached a worker")

    async with FakeCluster(FakeModel(never)) as cluster, open_router(cluster, card) as server:
        yield server
        assert not cluster.held
        assert not any(worker.requests for worker in cluster.prefills)


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{n}-{c.field}" for n, c in ALL])
@pytest.mark.asyncio(loop_scope="module")
async def test_refused_in_the_same_words(name: str, case: Case, router: RouterServer) -> None:
    said: list[tuple[str, str]] = []
    if case.http is not None:
        said.append(await _refused_over_http(router, case))
    if case.grpc is not None:
        said.append(await _refused_over_grpc(router, case))
    row = BOUNDS[name]
    expected = case.words or row.words.split("{")[0]
    for path, message in said:
        assert path == case.field
        assert message.startswith(f"{case.field}: ")
        assert expected in message
    assert len({message for _, message in said}) == 1, said


async def _refused_over_http(router: RouterServer, case: Case) -> tuple[str, str]:
    body = case.http
    path = "/v1/chat/completions"
    if isinstance(body, Mapping):
        if "prompt" in body:
            path = "/v1/completions"
        else:
            body = {"messages": [USER], **body}
        body = json.dumps(body).encode()
    url = f"http://{router.http_endpoint}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers={"Content-Type": "application/json", **case.headers}) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == {"body": 400, "model": 404}.get(case.field, 400) or answer.status == 413
        assert error["type"] == "invalid_request_error"
        return error["param"], error["message"]


async def _refused_over_grpc(router: RouterServer, case: Case) -> tuple[str, str]:
    data = case.grpc
    if isinstance(data, Mapping):
        message = router_pb2.GenerateRequest()
        if not {"chat", "prompt", "tokenIds"} & data.keys():
            message.CopyFrom(_GOOD)
        data = _parse(data, message).SerializeToString()
    assert data is not None
    async with dial(router.host.endpoint) as channel:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, router_pb2.GenerateResponse] = (
            channel.unary_stream(
                "/slipstream.v1.RouterService/Generate",
                response_deserializer=router_pb2.GenerateResponse.FromString,
            )
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in generate(data, metadata=tuple(case.headers.items()), timeout=60):
                pass
    error = from_rpc_error(raised.value)
    assert isinstance(error, (errors.InvalidArgument, errors.NotFound))
    return str(error.field), error.message
