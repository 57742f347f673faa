"""The health of one process, as gRPC's health protocol asks for it. It needs no key.

grpcio's own servicer forgets all watchers of a name when one of them ends: the others never hear of a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

from slipstream.errors import NotFound

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """One status for each name. Call it from one event loop."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._is_final = False
        self._changed = asyncio.Event()  # a new one after each change

    def set_serving(self, name: str, serving: bool) -> None:
        """Change a status; all watchers of the name hear of it."""
        if not self._is_final:
            self._serving[name] = serving
            self._wake()

    def end(self) -> None:
        """Report NOT_SERVING for all names, and ignore later changes."""
        self._is_final = True
        self._serving = dict.fromkeys(self._serving, False)
        self._wake()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        """The status of a name. Raises NotFound for one that was never set."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            raise NotFound("no service has this name")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of a name now and after each change."""
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status == sent:
                await changed.wait()
                continue
            sent = status
            yield health_pb2.HealthCheckResponse(status=status)

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        serving = self._serving.get(name)
        if serving is None:
            return _UNKNOWN
        return _SERVING if serving else _NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
