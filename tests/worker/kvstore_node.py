"""A kvstore in this process with real gRPC and real sockets, without disks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from libs.common.cluster.worker_service import held
from libs.common.rpc.serve import ServiceHost
from libs.common.transport.socket import SocketTransport
from services.kvstore.core.node import Node
from services.kvstore.dram.tier import DramTier
from services.kvstore.service import KvstoreServicer
from slipstream.v1 import kvstore_pb2_grpc
from tests.support.stubs.idle_process import idle_service
from tests.worker.nodes import CHECKSUM, eventually


@dataclass
class KvstoreNode:
    host: ServiceHost
    node: Node

    @property
    def endpoint(self) -> str:
        return self.host.endpoint

    @property
    def blocks(self) -> int:
        return int(self.node.measure()["slipstream_kvstore_blocks_dram"])

    async def wait_idle(self) -> None:
        await eventually(lambda: held(self.node.ledger()) == 0, f"an empty ledger, {self.node.ledger()!r}")


@contextlib.asynccontextmanager
async def running_kvstore(
    *, dram_bytes: int = 4 << 20, tenant_share: float = 1.0
) -> AsyncIterator[KvstoreNode]:
    transport = SocketTransport()
    dram = DramTier(dram_bytes, tenant_share=tenant_share, checksum=CHECKSUM)
    transport.register(dram.memory.buffer)
    node = Node(dram, None, transport)
    worker = idle_service()
    servicer = KvstoreServicer(node.store, node.puts, transport, worker)
    host = ServiceHost("127.0.0.1:0")
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(servicer, host.server)
    await host.start([])
    node.start(worker)
    try:
        yield KvstoreNode(host, node)
    finally:
        await host.stop(grace_s=0)
        await node.close()
        await transport.close()
