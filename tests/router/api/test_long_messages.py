"""The work on a long message stays off the event loop, and ends with its request, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common.service_bounds import MAX_TENANT_HELD_TEXT_CHARS
from libs.text.tokenizer import Tokenizer
from services.router.api.answers import exchange
from services.router.api.openai import request as openai_request
from services.router.api.rpc import call_reader, generate_message, token_methods
from services.router.execution import prompt_encoding, request_manager
from services.router.execution.request_manager import INLINE_BYTES
from services.router.request import prompt
from services.router.request.conversations import message_node
from services.router.request.types import Caller
from services.router.server import RouterServer
from slipstream import bounds, errors
from slipstream.requests import chat_request
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2
from tests.router.conftest import eventually

Ask = Callable[[RouterServer, Mapping[str, Any], str], Awaitable[str]]

# Together longer than what is parsed and checked on the event loop; the text is too long to be encoded there.
LONG_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "allOf": [True] * 9000}}}
LONG_TEXT = "Where is my order? " * 2000


async def over_http(router: RouterServer, parameters: Mapping[str, Any], text: str) -> str:
    """The message of the error, or "" """
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": text}], "tools": [tool], "max_tokens": 1}
    url = f"http://{router.http_endpoint}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        said = await answer.json()
        return str(said.get("error", {}).get("message", ""))


async def over_grpc(router: RouterServer, parameters: Mapping[str, Any], text: str) -> str:
    request = router_pb2.GenerateRequest()
    request.sampling.max_tokens = 1
    content = [router_pb2.ContentPart(text=text)]
    request.chat.messages.add(role=router_pb2.MESSAGE_ROLE_USER, content=content)
    request.chat.tools.add(name="f", parameters=json.dumps(parameters))
    async with dial(router.host.endpoint) as channel:
        generate: Any = channel.unary_stream("/slipstream.v1.RouterService/Generate")
        try:
            async for _ in generate(request.SerializeToString(), timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).message
    return ""


JSON = {"Content-Type": "application/json"}
BOTH = pytest.mark.parametrize("ask", [over_http, over_grpc])


class Threads:
    """Notes the threads on which functions run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.of: dict[str, set[int]] = {}

    def watch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def recorded(*args: Any, **named: Any) -> Any:
            self.of.setdefault(name, set()).add(threading.get_ident())
            return original(*args, **named)

        self._patch.setattr(owner, name, recorded)


@BOTH
async def test_each_heavy_step_of_a_long_message_runs_off_the_event_loop(
    ask: Ask, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    parse = (openai_request, "decode_body") if ask is over_http else (generate_message, "read_message")
    for owner, name in (
        parse,
        (request_manager, "check_values"),
        (prompt_encoding, "tools_text"),
        (Tokenizer, "_encode_piece"),
    ):
        threads.watch(owner, name)
    schema = {**LONG_SCHEMA, "title": ask.__name__}  # not cached
    # The answer is that the prompt does not fit, which is found after all steps.
    assert "leaves no room for an answer" in await ask(router, schema, LONG_TEXT)
    steps = {parse[1], "check_values", "tools_text"}
    assert steps < threads.of.keys()
    for name in steps:
        assert threading.get_ident() not in threads.of[name], name
    assert threads.of["_encode_piece"] - {threading.get_ident()}  # short texts are encoded where they are


@pytest.mark.parametrize(
    ("message", "n_messages"),
    [
        ({"role": "user", "content": "a"}, prompt_encoding.INLINE_MESSAGES + 1),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 128}, 2),
    ],
)
async def test_many_short_messages_are_rendered_and_encoded_off_the_event_loop(
    message: Mapping[str, Any], n_messages: int, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 messages with tool calls held the loop for 62 ms, with few characters to encode."""
    threads = Threads(monkeypatch)
    threads.watch(prompt, "render_chat")
    threads.watch(message_node, "message_bytes")
    content = [message] * n_messages
    url = f"http://{router.http_endpoint}/v1/chat/completions"
    body = {"messages": content, "max_tokens": 1}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        said = await answer.text()
        assert answer.status == 200 or "leaves no room for an answer" in said, said
    assert threads.of.keys() == {"render_chat", "message_bytes"}
    assert threading.get_ident() not in set.union(*threads.of.values())


async def test_messages_about_tokens_are_parsed_off_the_event_loop(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    threads.watch(token_methods, "read_message")
    threads.watch(call_reader, "parse_tokenized")
    long_text = router_pb2.TokenizeRequest()
    long_text.request.prompt = "Where is my order? " * (INLINE_BYTES // 10)
    ids = router_pb2.DetokenizeRequest(token_ids=[97] * INLINE_BYTES)
    async with dial(router.host.endpoint) as channel:
        for name, message in (("Tokenize", long_text), ("Detokenize", ids)):
            call: Any = channel.unary_unary(f"/slipstream.v1.RouterService/{name}")
            with contextlib.suppress(grpc.aio.AioRpcError):  # the prompt exceeds the context
                await call(message.SerializeToString(), timeout=60)
    assert threads.of.keys() == {"read_message", "parse_tokenized"}
    assert threading.get_ident() not in set.union(*threads.of.values())


async def test_a_long_text_is_parsed_and_checked_on_the_event_loop(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it takes less than the way to a thread and back."""
    threads = Threads(monkeypatch)
    threads.watch(generate_message, "read_message")
    threads.watch(request_manager, "check_values")
    text = "Where is my order? " * (INLINE_BYTES // 10)
    request = chat_request([{"role": "user", "content": text}], {"max_tokens": 1})
    async with dial(router.host.endpoint) as channel:
        generate: Any = channel.unary_stream("/slipstream.v1.RouterService/Generate")
        with contextlib.suppress(grpc.aio.AioRpcError):  # the prompt exceeds the context
            await generate(request.SerializeToString(), timeout=60).read()
    loop_thread = {threading.get_ident()}
    assert threads.of == {"read_message": loop_thread, "check_values": loop_thread}


@BOTH
@pytest.mark.parametrize("pattern", ["(" * 5000, "(" * 700 + ")" * 700, "(?i)" + "[a-\\uffff]" * 1500])
async def test_a_pattern_is_text_for_the_model(ask: Ask, pattern: str, router: RouterServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    said = await ask(router, schema, "hi")
    # The tokenizer of the tests makes more tokens of some patterns than the context holds.
    assert said == "" or "leaves no room for an answer" in said


@BOTH
async def test_a_schema_of_draft_4_is_answered(ask: Ask, router: RouterServer) -> None:
    properties = {"a": {"type": "number", "minimum": 0, "exclusiveMinimum": True}, "b": {"items": [{}]}}
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object"}
    assert await ask(router, {**schema, "properties": properties}, "hi") == ""


async def test_a_client_that_leaves_takes_its_waiting_work_along(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is neither parsed, checked nor encoded once a thread is free."""
    threads, release = router.manager.context.threads, threading.Event()
    recorded = Threads(monkeypatch)
    recorded.watch(openai_request, "decode_body")
    held = [asyncio.create_task(threads.run("other", lambda: release.wait(60))) for _ in range(threads.size)]
    try:
        asking = asyncio.create_task(over_http(router, LONG_SCHEMA, LONG_TEXT))
        await eventually(lambda: threads.waiting == 1)
        asking.cancel()
        await eventually(lambda: threads.waiting == 0)
    finally:
        release.set()
        await asyncio.gather(*held)
    assert not recorded.of


async def test_a_deadline_ends_the_wait_for_a_thread(router: RouterServer) -> None:
    threads, release = router.manager.context.threads, threading.Event()
    held = [asyncio.create_task(threads.run("other", lambda: release.wait(60))) for _ in range(threads.size)]
    try:
        url = f"http://{router.http_endpoint}/v1/chat/completions"
        body, headers = b" " * (INLINE_BYTES + 1), {**JSON, "x-request-timeout-ms": "20"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            assert answer.status == 504
        assert threads.waiting == 0
    finally:
        release.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda body: gzip.compress(body), 200),
        (lambda body: gzip.compress(body)[:-9], 400),  # cut short
        (lambda body: gzip.compress(body) + gzip.compress(body), 400),
        (lambda body: gzip.compress(b" " * bounds.MAX_BODY_BYTES + body), 413),
        (lambda body: body, 400),
    ],
)
async def test_a_compressed_body_is_decompressed_within_its_bound_off_the_event_loop(
    make: Callable[[bytes], bytes], status: int, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    threads.watch(exchange, "decompress")
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    url = f"http://{router.http_endpoint}/v1/chat/completions"
    headers = {**JSON, "Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=make(body), headers=headers) as answer,
    ):
        assert answer.status == status
    assert threads.of["decompress"]
    assert threading.get_ident() not in threads.of["decompress"]


async def test_a_long_message_counts_for_its_tenant_until_it_is_parsed(router: RouterServer) -> None:
    """Else a tenant's messages that wait for a thread could fill the memory."""
    manager, caller = router.manager, Caller(tenant="anna")
    n_bytes = MAX_TENANT_HELD_TEXT_CHARS
    assert await manager.read(caller, lambda: manager.texts.held_chars, n_bytes=n_bytes) == n_bytes
    with manager.texts.holding("anna", 1), pytest.raises(errors.Overloaded):
        await manager.read(caller, lambda: None, n_bytes=n_bytes)
    assert not manager.texts.held_chars
