"""Checks the API key of a gRPC call before its message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.router.api.api_keys import ApiKeys


class TenantInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of a service that carry no tenant's key. The host makes a status of what it raises."""

    def __init__(self, tenants: ApiKeys, service_name: str) -> None:
        self._tenants = tenants
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(self._prefix):
            metadata: Any = handler_call_details.invocation_metadata or ()
            self._tenants.tenant_of({name: value for name, value in metadata if isinstance(value, str)})
        return await continuation(handler_call_details)
