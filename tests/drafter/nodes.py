"""A drafter in this process over real gRPC, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from libs.common.rpc.serve import ServiceHost
from libs.engine.step.draft_head import DraftHead
from services.drafter.batcher import Batcher
from services.drafter.service import DrafterService
from slipstream.rpc.dial import dial
from slipstream.v1 import drafter_pb2_grpc


@dataclass
class DrafterNode:
    host: ServiceHost
    batcher: Batcher
    service: DrafterService
    channel: grpc.aio.Channel


@contextlib.asynccontextmanager
async def running_drafter(head: DraftHead, *, listen: str = "127.0.0.1:0") -> AsyncIterator[DrafterNode]:
    batcher = Batcher(lambda: head)
    await batcher.start()
    service = DrafterService(batcher, feature_width=head.feature_width)
    host = ServiceHost(listen)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, host.server)
    await host.start([])
    channel = dial(host.endpoint)
    try:
        yield DrafterNode(host, batcher, service, channel)
    finally:
        await channel.close()
        await host.stop(grace_s=0)
        await batcher.stop()
