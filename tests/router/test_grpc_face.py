"""RouterService end to end before fake workers: the SDK is the client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.router.model_card import ModelCard
from services.router.service import RouterServer
from slipstream.async_client import AsyncClient
from tests.router.conftest import eventually, script
from tests.router.fake_workers import FakeCluster

HELLO = [{"role": "user", "content": "Where is my order?"}]


@pytest.fixture
async def client(router: RouterServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.host.endpoint) as client:
        yield client


async def test_an_answer_is_the_models_and_everything_is_released(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, [*card.tokenizer.encode_text("It is on its way."), *card.stop_token_ids[-1:]])
    reply = await client.chat(HELLO, temperature=0)
    assert reply.text == "It is on its way."
    assert reply.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.trail is not None
    assert reply.trail.prefill_worker.startswith("prefill-")
    assert reply.trail.kvstore == "kvstore-0"
    assert reply.trail.attempts == 1
    assert reply.trail.decode_steps > 0
    await eventually(lambda: not cluster.held)
