"""Both clients' types, tools, choices and retries against a real gRPC server in place of a router."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest

import slipstream
from slipstream import (
    AnswerMismatch,
    AsyncClient,
    Client,
    Event,
    InvalidArgument,
    Overloaded,
    Reply,
    ToolError,
)
from slipstream.rpc.rpc_errors import to_status
from slipstream.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.stubs.blocking_router import serving
from tests.support.stubs.partial_servicer import partial_servicer

STOP, CALLS, LENGTH = (
    common_pb2.FINISH_REASON_STOP,
    common_pb2.FINISH_REASON_TOOL_CALLS,
    common_pb2.FINISH_REASON_LENGTH,
)
HELLO = [{"role": "user", "content": "hello"}]


@dataclasses.dataclass
class Ticket:
    subject: str
    days: int


class Model(pydantic.BaseModel):
    subject: str
    days: int


class DeskRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers by the last message: the ticket, a cut ticket, calls of `look`, or what a tool said."""

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.refusals = 0

    def Generate(self, request: Any, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.refusals:
            self.refusals -= 1
            context.abort_with_status(to_status(Overloaded("full", retry_after_ms=20)))
        last = request.chat.messages[-1]
        said = last.content[0].text if last.content else ""
        calls, finish = [], STOP
        texts = ["Said ", said]
        if request.output.json_schema:
            texts, finish = (['{"subject": '], LENGTH) if said == "cut" else ([TICKET_TEXT], STOP)
        elif said.startswith("call") and request.chat.tool_choice.mode != router_pb2.TOOL_CHOICE_MODE_NONE:
            texts, finish = [], CALLS
            for index, text in enumerate(said.split()[1:]):
                arguments = json.dumps({"order_id": text}) if text != "wrong" else "{}"
                name = "absent" if text == "absent" else "look"
                calls.append(
                    router_pb2.ToolCallDelta(index=index, id=f"c{index}", name=name, arguments=arguments)
                )
        for index in range(request.n or 1):
            yield _response(started=router_pb2.Started(request_id="r", model="m", index=index))
        for index in range(request.n or 1):
            for text in texts:
                yield _response(delta=router_pb2.Delta(text=text, index=index))
            if calls:
                yield _response(delta=router_pb2.Delta(tool_calls=calls, index=index))
            yield _response(finished=router_pb2.Finished(finish_reason=finish, index=index))


TICKET_TEXT = '{"subject": "x", "days": 3}'


def _response(**event: Any) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(events=[router_pb2.GenerateEvent(**event)])


class Caller:
    """A client whose calls block, whichever it is."""

    def __init__(self, client: Client | AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if isinstance(self._client, Client):
                return getattr(self._client, name)(*arguments, **options)
            return self._loop.run_until_complete(awaited(*arguments, **options))

        async def awaited(*arguments: Any, **options: Any) -> Any:
            """Make the call in the loop, where grpc.aio needs it."""
            made = getattr(self._client, name)(*arguments, **options)
            return await made if asyncio.iscoroutine(made) else made

        return call

    def events(self, stream: Any) -> list[Event]:
        """All events of a stream."""

        async def collected() -> list[Event]:
            return [event async for event in stream]

        if isinstance(stream, slipstream.Stream):
            return list(stream)
        return self._loop.run_until_complete(collected())


@pytest.fixture
def router() -> Iterator[tuple[DeskRouter, str]]:
    servicer = partial_servicer(DeskRouter)
    with serving(servicer) as endpoint:
        yield servicer, endpoint


@pytest.fixture(params=["blocking", "asyncio"])
def caller(request: pytest.FixtureRequest, router: tuple[DeskRouter, str]) -> Iterator[Caller]:
    loop = asyncio.new_event_loop()
    if request.param == "blocking":
        client: Client | AsyncClient = Client(router[1])
    else:

        async def made() -> AsyncClient:
            return AsyncClient(router[1])

        client = loop.run_until_complete(made())
    made_caller = Caller(client, loop)
    yield made_caller
    made_caller.close()
    loop.close()


@pytest.mark.parametrize("kind", [Ticket, Model])
def test_an_answer_is_an_instance_of_the_type(
    caller: Caller, router: tuple[DeskRouter, str], kind: type[Any]
) -> None:
    assert caller.chat(HELLO, response_format=kind) == kind(subject="x", days=3)
    schema = json.loads(router[0].requests[0].output.json_schema)
    assert schema["properties"].keys() == {"subject", "days"}
    assert schema["additionalProperties"] is False
    stream = caller.stream_chat(HELLO, response_format=kind)
    assert "".join(event.text for event in caller.events(stream)) == TICKET_TEXT
    assert stream.reply.parse(kind) == kind(subject="x", days=3)


def test_an_answer_that_was_cut_is_a_mismatch(caller: Caller) -> None:
    with pytest.raises(AnswerMismatch, match="finish_reason length"):
        caller.chat([{"role": "user", "content": "cut"}], response_format=Ticket)


def test_one_form_and_one_choice_are_taken(caller: Caller) -> None:
    with pytest.raises(InvalidArgument, match="output: must be left out"):
        caller.chat(HELLO, response_format=Ticket, output={"json_object": True})
    with pytest.raises(InvalidArgument, match="n: must be 1"):
        caller.chat(HELLO, response_format=Ticket, n=2)


def test_choices_are_separate_replies(caller: Caller, router: tuple[DeskRouter, str]) -> None:
    reply = caller.chat(HELLO, n=3)
    assert isinstance(reply, Reply)
    assert [choice.text for choice in reply.choices] == ["Said hello"] * 3
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 3
    events = caller.events(caller.stream_chat(HELLO, n=2))
    assert [event.index for event in events] == [0, 0, 1, 1]
    assert router[0].requests[0].n == 3


def look(order_id: str) -> str:
    """Look up an order."""
    if order_id == "7":
        raise ToolError("no such order")
    if order_id == "8":
        raise OSError("the shop is closed")
    return f"order {order_id}"


async def look_later(order_id: str) -> str:
    """Look up an order."""
    await asyncio.sleep(0)
    return look(order_id)


look_later.__name__ = "look"


def _ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_tools_run_until_the_model_answers(caller: Caller, router: tuple[DeskRouter, str]) -> None:
    run = caller.run_tools(_ask("call 1 7 wrong absent"), [look], tool_choice="required", session="s")
    results = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert results[:2] == ["order 1", '{"error": "no such order"}']
    assert "missing: ['order_id']" in results[2]
    assert "no function absent" in results[3]
    assert run.reply.finish_reason == "stop"
    assert run.messages[-1] == run.reply.as_message()
    first, second = router[0].requests
    assert first.chat.tools[0].strict
    assert first.chat.tool_choice.mode == router_pb2.TOOL_CHOICE_MODE_REQUIRED
    assert second.chat.tool_choice.mode == router_pb2.TOOL_CHOICE_MODE_AUTO


def test_the_last_round_has_to_answer(caller: Caller, router: tuple[DeskRouter, str]) -> None:
    def again(order_id: str) -> str:
        """Make the model call again."""
        return "call 1"

    again.__name__ = "look"
    run = caller.run_tools(_ask("call 1"), [again], max_rounds=3)
    assert run.reply.text == "Said call 1"
    assert len(router[0].requests) == 4
    assert router[0].requests[-1].chat.tool_choice.mode == router_pb2.TOOL_CHOICE_MODE_NONE


def test_an_exception_of_a_function_ends_the_loop(caller: Caller) -> None:
    with pytest.raises(OSError, match="closed"):
        caller.run_tools(_ask("call 8"), [look])


def test_coroutine_functions_need_the_asynchronous_client(router: tuple[DeskRouter, str]) -> None:
    async def run() -> Any:
        async with AsyncClient(router[1]) as client:
            return await client.run_tools(_ask("call 1 2"), [look_later])

    messages = asyncio.run(run()).messages
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["order 1", "order 2"]
    with Client(router[1]) as client, pytest.raises(InvalidArgument, match="use AsyncClient"):
        client.run_tools(_ask("call 1"), [look_later])


@pytest.mark.parametrize("options", [{"tools": []}, {"n": 2}, {"max_rounds": 0}])
def test_arguments_that_the_loop_sets_are_refused(caller: Caller, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        caller.run_tools(HELLO, [look], **options)


def test_a_refused_request_is_sent_again(caller: Caller, router: tuple[DeskRouter, str]) -> None:
    router[0].refusals = 2
    assert caller.chat(HELLO).text == "Said hello"
    assert len(router[0].requests) == 3
    router[0].refusals = 1
    with pytest.raises(Overloaded):
        caller.chat(HELLO, reject_if_busy=True)


def test_every_exported_name_loads() -> None:
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError):
        _ = slipstream.absent
