"""What writes answers takes turns with the answers of other tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

import aiohttp
import pytest

from services.router.api.api_keys import DEFAULT_TENANT
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from services.router.workers.delivery.token_batcher import TokenBatcher
from tests.router.conftest import open_router, script, text_ids
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel


@pytest.fixture
async def server(cluster: FakeCluster, card: ModelCard) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card) as opened:
        yield opened


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 2, "stream": True}])
async def test_pieces_of_answers_take_turns_by_tenant(
    server: RouterServer,
    model: FakeModel,
    card: ModelCard,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    script(model, *[text_ids(card, "It is here.")] * 2)
    run, tenants = TokenBatcher.run, list[Hashable]()

    async def note(batcher: TokenBatcher, tenant: Hashable, work: Callable[[], Any]) -> Any:
        tenants.append(tenant)
        return await run(batcher, tenant, work)

    monkeypatch.setattr(TokenBatcher, "run", note)
    body = {"messages": [{"role": "user", "content": "Where?"}], **fields}
    async with (
        aiohttp.ClientSession(f"http://{server.http_endpoint}") as http,
        http.post("/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200 and "here" in await answer.text()
    assert set(tenants) == {server.manager.context.salts.of_tenant(DEFAULT_TENANT)}
