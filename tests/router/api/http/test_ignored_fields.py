"""Fields without effect are named and counted by calls that run no model, and by calls of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.database.database import open_database
from services.router.api.workers_ai.endpoint import RUN_PATH
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

HI: Any = [{"role": "user", "content": "hi"}]
COUNTER = "slipstream_ignored_fields_total"
BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"messages": HI},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_calls_that_run_no_model_name_and_count_them(router: RouterServer, path: str) -> None:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        async with http.post(path, json=BODIES[path]) as answer:
            assert answer.status == 200 and "x-slipstream-ignored" not in answer.headers
        before = router.metrics.snapshot().get(COUNTER, 0)
        async with http.post(path, json={**BODIES[path], "surprise": 1, "other": 2}) as answer:
            assert answer.status == 200
            assert set(answer.headers["x-slipstream-ignored"].split(",")) == {"surprise", "other"}
    assert router.metrics.snapshot()[COUNTER] - before == 2


@pytest.mark.parametrize("query", ["", "?queueRequest=true"])
async def test_calls_of_several_runs_name_those_of_all_runs(
    cluster: FakeCluster, card: ModelCard, tmp_path: Path, query: str
) -> None:
    runs = [
        {"prompt": "a", "surprise": 1, "external_reference": "one"},
        {"messages": HI, "surprise": 1, "other": 2},
        {"messages": [{**HI[0], "mood": "good"}]},
    ]
    database = open_database(f"sqlite:{tmp_path}/router.db")
    async with (
        open_router(cluster, card, database=database) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        path = RUN_PATH.format(account="acc", model=card.name) + query
        async with http.post(path, json={"requests": runs}) as answer:
            assert answer.status == 200
            named = answer.headers["x-slipstream-ignored"]
        assert named == "requests[].surprise,requests[].other,requests[].messages[].mood"
        await eventually(lambda: router.metrics.snapshot().get(COUNTER) == 4)
    await database.close()
