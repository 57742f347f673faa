"""An argument that is None counts as left out, in all calls of both clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest

from services.router.request.model_card import ModelCard
from slipstream import AsyncClient, Client
from slipstream.errors import InvalidArgument
from slipstream.requests import ChatArguments, GenerateArguments, chat_request, prompt_request
from tests.router.conftest import HELLO, script, text_ids
from tests.router.support.fake_cluster import FakeCluster
from tests.sdk.calls.either_client import KINDS, EitherClient

CHAT: Any = dict.fromkeys(get_type_hints(ChatArguments))
COMPLETE: Any = dict.fromkeys(get_type_hints(GenerateArguments))


@dataclass
class Place:
    """An answer of one field."""

    city: str


def test_a_request_of_nones_is_one_of_no_arguments() -> None:
    assert {"tools", "headers", "timeout_s", "n", "max_tokens"} <= CHAT.keys()
    assert chat_request(HELLO, CHAT) == chat_request(HELLO, {})
    assert prompt_request("a", COMPLETE) == prompt_request("a", {})


@pytest.mark.parametrize("name", CHAT)
async def test_each_argument_of_chat_may_be_none(client: EitherClient, name: str) -> None:
    assert (await client("chat", HELLO, **{"max_tokens": 2, "seed": 1, name: None})).text


async def test_all_arguments_may_be_none(client: EitherClient) -> None:
    assert (await client("chat", HELLO, **CHAT)).text
    assert (await client("complete", "Where is", **COMPLETE)).text
    assert await client("tokenize", HELLO, **CHAT) == await client("tokenize", HELLO)
    assert await client("models", timeout_s=None)
    assert await client("detokenize", [97], timeout_s=None) == "a"
    await client("abort", "no-such-request", timeout_s=None)


async def test_a_typed_answer_takes_no_number_of_choices(
    client: EitherClient, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, text_ids(card, '{"city": "Oslo"}'))
    assert await client("chat", HELLO, response_format=Place, n=None) == Place("Oslo")
    for n in (0, 2):
        with pytest.raises(InvalidArgument, match="must be 1"):
            await client("chat", HELLO, response_format=Place, n=n)
    run = await client("run_tools", HELLO, [], tools=None, n=None, headers=None, timeout_s=None)
    assert run.reply.text


@KINDS
async def test_a_client_without_a_time_out_has_the_default_one(kind: type[Client | AsyncClient]) -> None:
    client, usual = kind(timeout_s=None), kind()
    assert client._timeout_s == usual._timeout_s
    for each in (client, usual):
        await EitherClient(each).close()
