"""A router's admin port that answers with losses of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from slipstream.enum_names import ROLES
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc


class LossPort(autoscale_pb2_grpc.AutoscaleServiceServicer):
    """The servicer. `costs` by (tier, instance); `refuses` is the status of every call where it is set."""

    def __init__(self, **costs: int) -> None:
        """`costs`: of decode workers."""
        self.costs = {("decode", name): cost for name, cost in costs.items()}
        self.refuses: grpc.StatusCode | None = None
        self.metadata: dict[str, Any] = {}

    async def GetRecommendations(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        if self.refuses is not None:
            await context.abort(self.refuses, "not you")
        losses = [
            autoscale_pb2.RemovalLoss(role=ROLES.value(tier), instance=name, deletion_cost=cost)
            for (tier, name), cost in self.costs.items()
        ]
        return autoscale_pb2.GetRecommendationsResponse(losses=losses)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block; gives host:port."""
        server = grpc.aio.server()
        autoscale_pb2_grpc.add_AutoscaleServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)
