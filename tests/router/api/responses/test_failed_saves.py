"""A stream whose response cannot be stored: numbered without gaps, with all that its response has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.database.database import Database
from services.router.api.responses.stored.store import ResponseStore
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.errors import Unavailable
from slipstream.v1 import router_pb2
from tests.router.conftest import open_router, script, text_ids
from tests.router.support.answer_events import STARTED, answers, finished, sse_objects
from tests.router.support.fake_cluster import FakeCluster

TEXT = "Your order left the warehouse yesterday."


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card, database=database) as opened:
        yield opened


async def test_what_precedes_the_failure_is_sent_and_numbered(
    router: RouterServer, cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens come with the end, of which nothing but the failure can be sent."""

    async def refuse(*_: object) -> None:
        raise Unavailable("the database disk is full")

    monkeypatch.setattr(ResponseStore, "save", refuse)
    for worker in cluster.decodes:
        worker.gate.clear()
    script(cluster.model, text_ids(card, TEXT))
    body = {"input": "hi", "store": True, "stream": True, "temperature": 0}
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
        http.post("/v1/responses", json=body) as answer,
    ):
        data = await answer.content.readuntil(b"output_text.delta")  # the stream has begun
        for worker in cluster.decodes:
            worker.gate.set()
        data += await answer.content.read()
    events = sse_objects(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "the database disk is full"
    shown = "".join([event["delta"] for event in events if event["type"] == "response.output_text.delta"])
    assert shown == events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


@given(deltas=answers(), end=st.sampled_from(["STOP", "LENGTH"]), is_closing=st.booleans())
def test_the_failure_has_the_number_of_the_end_that_is_not_sent(
    deltas: list[router_pb2.Delta], end: str, is_closing: bool
) -> None:
    writer = ResponsesWriter(STARTED, ResponsesShape("k", {}))
    sent = [writer.opening(), *[writer.delta_event(delta) for delta in deltas]]
    if is_closing:
        sent += writer.before_closing(finished(end))
        writer.closing(finished(end))
    sent += writer.failure({"code": "server_error", "message": "no"})
    events = sse_objects(b"".join(sent))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    output = events[-1]["response"]["output"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    ended = {item["id"]: item for item in items}
    assert output == [ended.get(item["id"], item | {"status": "incomplete"}) for item in output]
    assert len(output) - len(ended) <= (not is_closing)
