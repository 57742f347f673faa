"""A drafter in this process over real gRPC, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from libs.common.cluster.address_book import LoopbackAddresses
from libs.common.rpc.serve import ServiceHost
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from libs.engine.step.draft_head import DraftHead
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from libs.worker.engine.feature_memory import FeatureMemory, FeatureReader
from libs.worker.requests.messages import FEATURE_BYTES
from services.drafter.batcher import Batcher
from services.drafter.service import DrafterService
from slipstream.rpc.dial import dial
from slipstream.v1 import drafter_pb2_grpc
from tests.worker.nodes import CHECKSUM


@dataclass
class DrafterNode:
    host: ServiceHost
    batcher: Batcher
    service: DrafterService
    channel: grpc.aio.Channel
    counters: Counters
    memory: FeatureMemory | None

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)


@contextlib.asynccontextmanager
async def running_drafter(
    head: DraftHead, *, listen: str = "127.0.0.1:0", transport: KvTransport | None = None
) -> AsyncIterator[DrafterNode]:
    """A drafter that reads exported rows by `transport`, which it closes; without one it reads none."""
    batcher, counters = Batcher(lambda: head), Counters()
    await batcher.start()
    memory = reader = None
    if transport is not None:
        slot_bytes = FEATURE_WINDOW_TOKENS * FEATURE_BYTES * head.feature_width
        memory = FeatureMemory(transport, slot_bytes=slot_bytes, checksum=CHECKSUM, exports=False)
        reader = FeatureReader(transport, memory, LoopbackAddresses(), counters)
    service = DrafterService(batcher, feature_width=head.feature_width, counters=counters, reader=reader)
    host = ServiceHost(listen)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, host.server)
    await host.start([])
    channel = dial(host.endpoint)
    try:
        yield DrafterNode(host, batcher, service, channel, counters, memory)
    finally:
        await channel.close()
        await host.stop(grace_s=0)
        await batcher.stop()
        if transport is not None:
            await transport.close()
