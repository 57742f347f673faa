"""Texts of errors fit into gRPC's metadata, whatever a client sent."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.serve import ServiceHost
from slipstream import errors
from slipstream.bounds import BODY, PROMPT_TOKENS
from slipstream.errors import MAX_FIELD_BYTES, MAX_MESSAGE_BYTES, BodyTooLarge, InvalidArgument, shortened
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error

WAIT_S = 60.0
LONG = {
    "ascii": "q" * 120_000,
    "wide": "\u00e9\U0001f600" * 20_000,
    "surrogates": "\ud800" * 50_000,
    "nul": "\x00" * 9000,
}


@given(st.text(st.characters(), max_size=40), st.integers(10, 60))
def test_a_shortened_text_is_valid_and_bounded(text: str, most: int) -> None:
    short = shortened(text, most)
    assert len(short.encode()) <= most
    if text.isascii() and len(text) <= most:
        assert short == text


@pytest.mark.parametrize("name", LONG)
async def test_an_error_of_any_length_keeps_its_status(name: str) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise InvalidArgument(LONG[name], LONG[name])

    host = ServiceHost("127.0.0.1:0")
    handlers: dict[str, Any] = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    host.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", handlers),))
    await host.start([])
    async with dial(host.endpoint) as channel:
        refusing: Any = channel.unary_unary("/t.Test/Refuse")
        for _ in range(20):  # beyond its soft limit gRPC refuses metadata at random
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refusing(b"", timeout=WAIT_S)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgument)
            assert len(error.field.encode()) <= MAX_FIELD_BYTES
            assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
    await host.stop(grace_s=0)


async def test_a_message_beyond_the_limit_is_a_body_too_large() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    host = ServiceHost("127.0.0.1:0", options=[("grpc.max_receive_message_length", 1000)])
    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    host.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", handlers),))
    await host.start([])
    async with dial(host.endpoint) as channel:
        echoing: Any = channel.unary_unary("/t.Test/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echoing(b"x" * 2000, timeout=WAIT_S)
    error = from_rpc_error(caught.value)
    assert isinstance(error, BodyTooLarge) and error.field == BODY.field
    assert not isinstance(error, errors.Overloaded)  # which clients send again
    await host.stop(grace_s=0)


def test_client_libraries_recognize_a_prompt_that_is_too_long() -> None:
    """litellm looks for the first words; langchain-openai and clients of Anthropic's API for the last."""
    error = PROMPT_TOKENS.refused(max_context_tokens=16_384, prompt_tokens=20_000)
    assert "This model's maximum context length is 16384 tokens." in error.message
    assert "prompt is too long" in error.message
