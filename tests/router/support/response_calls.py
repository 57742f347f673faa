"""Calls of one tenant that store answers over gRPC, continue and show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.requests import chat_request
from slipstream.v1 import responses_pb2, router_pb2
from slipstream.v1.responses_pb2_grpc import ResponseServiceStub
from slipstream.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import HELLO, WAIT_S
from tests.router.support.two_faces import TwoFaces, key_of

GO_ON = [{"role": "user", "content": "Go on."}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


class Answer:
    """A whole answer over gRPC."""

    def __init__(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        [self.started] = [event.started for event in events if event.HasField("started")]
        [self.finished] = [event.finished for event in events if event.HasField("finished")]
        self.text = "".join([event.delta.text for event in events if event.HasField("delta")])
        self.id = self.started.response_id


class Responses:
    """The calls of one tenant."""

    def __init__(self, faces: TwoFaces, tenant: str = "alice") -> None:
        self._responses: Any = ResponseServiceStub(faces.channel)
        self._router: Any = RouterServiceStub(faces.channel)
        self._options: Any = {"metadata": key_of(tenant), "timeout": WAIT_S}

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(responses_pb2, f"{method}Request")(**fields)
        return getattr(self._responses, method)(request, **self._options)

    async def get(self, response_id: str) -> responses_pb2.Response:
        found: responses_pb2.Response = (await self.call("GetResponse", response_id=response_id)).response
        return found

    def begin(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Any:
        return self._router.Generate(request_of(messages, **fields), **self._options)

    async def answer(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Answer:
        return Answer([event async for part in self.begin(messages, **fields) for event in part.events])

    async def tokens(self, messages: Sequence[Any], **fields: Any) -> Sequence[int]:
        request = router_pb2.TokenizeRequest(request=request_of(messages, **fields))
        found: Sequence[int] = (await self._router.Tokenize(request, **self._options)).token_ids
        return found


def request_of(
    messages: Sequence[Any], *, store: bool = False, previous_response_id: str = "", **arguments: Any
) -> router_pb2.GenerateRequest:
    request = chat_request(messages, {"max_tokens": 6, **arguments})  # type: ignore[typeddict-item]
    request.store, request.previous_response_id = store, previous_response_id
    return request


def text_of(item: responses_pb2.ResponseItem) -> str:
    return "".join([part.text for part in item.message.content])
