"""ResponseService over gRPC: messages to and from `ResponseOperations`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc

from libs.common import api_bounds
from services.router.admission.fair_threads import RunPiece
from services.router.api.json_body import Json
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.rpc.messages import encoded_response, items_page
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.server import GrpcServer
from slipstream.v1 import responses_pb2

RESPONSE_SERVICE_NAME = "slipstream.v1.ResponseService"


class ResponseService:
    """The methods. Long answers are made off the event loop."""

    def __init__(self, operations: ResponseOperations, callers: Callers, *, run_piece: RunPiece) -> None:
        self._operations = operations
        self._callers = callers
        self._run_piece = run_piece

    async def get_response(self, request: responses_pb2.GetResponseRequest, context: Context) -> bytes:
        """GetResponse."""
        tenant = self._callers.tenant(context)
        return await self._shown(tenant, await self._operations.find(tenant, request.response_id))

    async def list_input_items(self, request: responses_pb2.ListInputItemsRequest, context: Context) -> bytes:
        """ListInputItems."""
        tenant = self._callers.tenant(context)
        if request.limit:
            api_bounds.PAGE_LIMIT.check(request.limit)
        items = await self._operations.input_items(tenant, request.response_id)
        return await self._run_piece(tenant, partial(items_page, items, request))

    async def cancel_response(self, request: responses_pb2.CancelResponseRequest, context: Context) -> bytes:
        """CancelResponse."""
        tenant = self._callers.tenant(context)
        return await self._shown(tenant, await self._operations.cancel(tenant, request.response_id))

    async def delete_response(
        self, request: responses_pb2.DeleteResponseRequest, context: Context
    ) -> responses_pb2.DeleteResponseResponse:
        """DeleteResponse."""
        await self._operations.delete(self._callers.tenant(context), request.response_id)
        return responses_pb2.DeleteResponseResponse()

    async def _shown(self, tenant: str, found: Json | bytes) -> bytes:
        return await self._run_piece(tenant, partial(encoded_response, found))


def response_handlers(
    service: ResponseService, api: GrpcServer
) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods, each with its line in the access log."""
    methods: dict[str, tuple[Any, Any]] = {
        "GetResponse": (service.get_response, responses_pb2.GetResponseRequest),
        "ListInputItems": (service.list_input_items, responses_pb2.ListInputItemsRequest),
        "CancelResponse": (service.cancel_response, responses_pb2.CancelResponseRequest),
        "DeleteResponse": (service.delete_response, responses_pb2.DeleteResponseRequest),
    }
    return api.unary_methods(methods)
