"""`client.responses` against a whole router before fake workers."""

from __future__ import annotations

import aiohttp
import pytest

from services.router.server import RouterServer
from slipstream.errors import InvalidArgument, NotFound
from slipstream.replies import ToolCall
from slipstream.responses.messages import saved_response
from slipstream.v1 import responses_pb2, router_pb2
from tests.router.conftest import HELLO
from tests.router.support.fake_cluster import FakeCluster
from tests.sdk.calls.either_client import EitherClient

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    *HELLO,
    {"role": "assistant", "content": "Hm."},
    {"role": "user", "content": "Go on."},
]


async def test_a_stored_answer_is_found_and_deleted(client: EitherClient) -> None:
    reply = await client("chat", MESSAGES, store=True, max_tokens=6, metadata={"for": "a test"})
    found = await client("responses.get", reply.response_id)
    assert (found.id, found.model, found.text) == (reply.response_id, reply.model, reply.text)
    assert (found.status, found.ended, found.metadata) == ("incomplete", True, {"for": "a test"})
    assert (found.usage.completion_tokens, found.usage.cost) == (6, None)
    assert found.usage.prompt_tokens == reply.usage.prompt_tokens
    assert [item.role for item in found.output] == ["assistant"]
    with pytest.raises(InvalidArgument) as refused:  # it is not in the background
        await client("responses.cancel", reply.response_id)
    assert refused.value.field == "response_id"
    await client("responses.delete", reply.response_id)
    for method in ("get", "delete", "input_items"):
        with pytest.raises(NotFound):
            await client(f"responses.{method}", reply.response_id)


async def test_input_items_lead_from_page_to_page(
    client: EitherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.responses.calls._PAGE", 3)
    reply = await client("chat", MESSAGES, store=True, max_tokens=2)
    items = await client("responses.input_items", reply.response_id, oldest_first=True)
    assert [(item.role, item.text) for item in items] == [(m["role"], m["content"]) for m in MESSAGES]
    assert await client("responses.input_items", reply.response_id) == items[::-1]


async def test_a_response_in_the_background_is_cancelled(
    client: EitherClient, router: RouterServer, cluster: FakeCluster
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()  # nothing ends
    body = {"input": "Where?", "background": True}
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
        http.post("/v1/responses", json=body) as answer,
    ):
        begun = await answer.json()
    running = await client("responses.get", begun["id"])
    assert running.status in ("queued", "in_progress") and not running.ended and running.usage is None
    cancelled = await client("responses.cancel", begun["id"])
    assert (cancelled.status, cancelled.ended) == ("cancelled", True)
    for decode in cluster.decodes:
        decode.gate.set()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (responses_pb2.RESPONSE_ERROR_CODE_UNSPECIFIED, ""),
        (responses_pb2.RESPONSE_ERROR_CODE_RATE_LIMIT_EXCEEDED, "rate_limit_exceeded"),
        (99, "unknown"),  # of a later contract
    ],
)
def test_the_error_code_of_a_response_is_shown_by_its_name(code: int, shown: str) -> None:
    sent = responses_pb2.Response(error_code=code).SerializeToString()  # type: ignore[arg-type]
    assert saved_response(responses_pb2.Response.FromString(sent)).error_code == shown


def test_each_kind_of_an_item_is_shown() -> None:
    item = responses_pb2.ResponseItem
    said = router_pb2.Message(role=router_pb2.MESSAGE_ROLE_ASSISTANT)
    said.content.add(text="a")
    said.content.add(text="b")
    response = responses_pb2.Response(
        status=responses_pb2.RESPONSE_STATUS_COMPLETED,
        output=[
            item(id="1", reasoning="Hm."),
            item(id="2", message=said),
            item(id="3", tool_call=router_pb2.ToolCall(id="c", name="find", arguments="{}")),
            item(id="4", tool_result=responses_pb2.ToolResult(tool_call_id="c", output="x")),
        ],
        usage=router_pb2.Usage(completion_tokens=9, reasoning_tokens=7),
    )
    found = saved_response(response)
    assert (found.text, found.reasoning, found.tool_calls) == ("ab", "Hm.", [ToolCall("c", "find", "{}")])
    assert [each.kind for each in found.output] == ["reasoning", "message", "tool_call", "tool_result"]
    assert (found.output[3].tool_call_id, found.output[3].text) == ("c", "x")
    assert found.usage is not None and found.usage.reasoning_tokens == 7
