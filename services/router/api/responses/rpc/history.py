"""Calls of Generate and Tokenize that go on with a stored response, and answers that are stored."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from services.router.api.answers.field_paths import FieldPaths, MessageSources
from services.router.api.json_body import Json
from services.router.api.responses.items import add_items
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.request import EarlierItems, ResponseDraft, echo_of
from services.router.api.responses.rpc.call_items import items_of
from services.router.api.responses.stored.items import items_to_store
from services.router.api.responses.stored.store import ResponseStore, StoredResponse
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from services.router.execution.request_manager import RequestManager
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, ChatInput, GenerationRequest
from slipstream.v1 import router_pb2


class AnswerKeeper:
    """Makes the response of one call while its events pass, and stores it at their end."""

    def __init__(
        self,
        store: ResponseStore,
        tenant: str,
        shape: ResponsesShape,
        items: Sequence[Json],
        earlier: EarlierItems,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._shape = shape
        self._items = items
        self._earlier = earlier
        self._writer: ResponsesWriter | None = None

    @property
    def response_id(self) -> str:
        """The id by which the client finds the response again."""
        return self._shape.response_id

    def add(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        """Take the next events of the answer. Raises InvalidArgument for too many log probabilities."""
        for event in events:
            if event.HasField("started"):
                self._writer = ResponsesWriter(event.started, self._shape)
                continue
            assert self._writer is not None
            if event.HasField("delta"):
                self._writer.add(event.delta)
            else:
                self._writer.body(event.finished)

    async def store(self) -> None:
        """Store the response, once it is whole. Raises InvalidArgument for a long one, Overloaded."""
        if self._writer is not None and self._writer.response is not None:
            stored = StoredResponse(self._writer.response, self._items, self._earlier.items)
            await self._store.save(self._tenant, stored)


class Continuation(msgspec.Struct, frozen=True):
    """A call's requests with the conversation before them. `keeper` None: the answer is not stored."""

    requests: Sequence[GenerationRequest]
    n_further_bytes: int
    keeper: AnswerKeeper | None


async def continue_call(
    manager: RequestManager,
    operations: ResponseOperations,
    requests: Sequence[GenerationRequest],
    draft: ResponseDraft,
    caller: Caller,
    *,
    n_bytes: int,
) -> Continuation:
    """Look up what the call goes on with. `n_bytes`: of its message.

    Raises NotFound for an unknown id, InvalidArgument naming the field, and Overloaded.
    """
    earlier = await operations.earlier_items(caller.tenant, draft)
    n_further_bytes, own = earlier.n_bytes, requests[0].input
    assert isinstance(own, ChatInput)
    extend = partial(_extended, requests, earlier, manager.context.card)
    extended = await manager.read(caller, extend, n_bytes=n_bytes + n_further_bytes)
    keeper = None
    if draft.wants_store:
        shape = ResponsesShape(secrets.token_hex(16), echo_of(draft, is_stored=True))
        items = items_to_store(items_of(own.messages), shape.key)
        keeper = AnswerKeeper(operations.opened, caller.tenant, shape, items, earlier)
    return Continuation(extended, n_further_bytes, keeper)


def _extended(
    requests: Sequence[GenerationRequest], earlier: EarlierItems, card: ModelCard
) -> Sequence[GenerationRequest]:
    """The requests with the earlier items before their messages. Raises InvalidArgument.

    All answers share one input: it is how choices of a prompt are known.
    """
    own, sources = requests[0].input, MessageSources()
    assert isinstance(own, ChatInput)
    add_items(sources, [("previous_response_id", item) for item in earlier.items], lambda _: None)
    for index, message in enumerate(own.messages):
        sources.add(dict(message), f"messages[{index}]")
    whole = msgspec.structs.replace(own, messages=sources.messages)
    extended = [msgspec.structs.replace(request, input=whole) for request in requests]
    FieldPaths(sources.paths, {}).check(extended[0], card)
    return extended
