"""The calls of ResponseService, blocking and awaited.

with Client("127.0.0.1:7000") as client:
    reply = client.chat([{"role": "user", "content": "Hello"}], store=True)
    print(client.responses.get(reply.response_id).text)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc

from slipstream.calls.callers import AsyncCaller, BlockingCaller, Metadata
from slipstream.endpoints import Endpoints
from slipstream.responses.messages import ConversationItem, SavedResponse, conversation_item, saved_response
from slipstream.v1 import responses_pb2, responses_pb2_grpc

_PAGE = 100


class BlockingResponses:
    """The stored responses of the caller's tenant; `Client.responses`."""

    def __init__(self, endpoints: Endpoints[grpc.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = BlockingCaller(
            responses_pb2_grpc.ResponseServiceStub, endpoints, metadata, max_retries
        )

    def get(self, response_id: str) -> SavedResponse:
        """One response. Raises NotFound."""
        request = responses_pb2.GetResponseRequest(response_id=response_id)
        return saved_response(self._caller.call("GetResponse", request).response)

    def input_items(self, response_id: str, *, oldest_first: bool = False) -> Iterator[ConversationItem]:
        """The conversation before the response, page by page, the last item first."""
        request = _list_request(response_id, oldest_first)
        for item in self._caller.items("ListInputItems", request, "items"):
            yield conversation_item(item)

    def cancel(self, response_id: str) -> SavedResponse:
        """End a response in the background, which stays as it is once it has ended.

        Raises InvalidArgument for another response.
        """
        request = responses_pb2.CancelResponseRequest(response_id=response_id)
        return saved_response(self._caller.call("CancelResponse", request).response)

    def delete(self, response_id: str) -> None:
        """Delete a response; those that continue it stay whole. Raises NotFound the second time."""
        request = responses_pb2.DeleteResponseRequest(response_id=response_id)
        self._caller.call("DeleteResponse", request, is_idempotent=False)


class AsyncResponses:
    """`BlockingResponses` for one event loop; `AsyncClient.responses`."""

    def __init__(self, endpoints: Endpoints[grpc.aio.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = AsyncCaller(responses_pb2_grpc.ResponseServiceStub, endpoints, metadata, max_retries)

    async def get(self, response_id: str) -> SavedResponse:
        """See `BlockingResponses.get`."""
        request = responses_pb2.GetResponseRequest(response_id=response_id)
        return saved_response((await self._caller.call("GetResponse", request)).response)

    async def input_items(
        self, response_id: str, *, oldest_first: bool = False
    ) -> AsyncIterator[ConversationItem]:
        """See `BlockingResponses.input_items`."""
        request = _list_request(response_id, oldest_first)
        async for item in self._caller.items("ListInputItems", request, "items"):
            yield conversation_item(item)

    async def cancel(self, response_id: str) -> SavedResponse:
        """See `BlockingResponses.cancel`."""
        request = responses_pb2.CancelResponseRequest(response_id=response_id)
        return saved_response((await self._caller.call("CancelResponse", request)).response)

    async def delete(self, response_id: str) -> None:
        """See `BlockingResponses.delete`."""
        request = responses_pb2.DeleteResponseRequest(response_id=response_id)
        await self._caller.call("DeleteResponse", request, is_idempotent=False)


def _list_request(response_id: str, oldest_first: bool) -> responses_pb2.ListInputItemsRequest:
    return responses_pb2.ListInputItemsRequest(
        response_id=response_id, limit=_PAGE, oldest_first=oldest_first
    )
