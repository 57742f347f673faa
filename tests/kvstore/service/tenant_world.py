"""A node with a pool over real gRPC and sockets, and a malicious worker for all tenants."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor

from libs.common.checksum import checksum, checksum_at, memory_at
from libs.common.kv_events.log import BlockEventLog
from libs.common.kv_events.server import KvEventServicer
from libs.common.rpc.serve import ServiceHost
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import ReadOp
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from services.kvstore.core.events import publish_changes
from services.kvstore.core.puts import Puts
from services.kvstore.core.store import BlockStore
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from services.kvstore.service import KvstoreServicer
from slipstream.block_hashes import pack_hashes
from slipstream.rpc.dial import dial
from slipstream.v1 import common_pb2, kv_events_pb2, kv_events_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from tests.kvstore.node import FINGERPRINT
from tests.kvstore.pool.memory_pool import MemoryPool
from tests.kvstore.service.surface import ask, methods
from tests.support.stubs.idle_process import idle_service

BLOCK_BYTES, MAX_BLOCKS = 4096, 6
MAX_SOURCES = 48  # blocks of one commit
SECRET_BYTES = 24
# The services of a node besides WorkerService, which handles no blocks.
SURFACE = (
    kvstore_pb2.DESCRIPTOR.services_by_name["KvstoreService"],
    kv_events_pb2.DESCRIPTOR.services_by_name["KvEventService"],
)
METHODS = {method.name: method for service in SURFACE for method in methods(service)}
ENDLESS = {"WatchBlocks"}  # streams without an end
IDS: list[str] = []  # the latest ids of leases and reservations
ResultT = TypeVar("ResultT")


def payload(block_hash: bytes) -> bytes:
    return random.Random(block_hash).randbytes(BLOCK_BYTES)


class World:
    """A node with little memory over real gRPC and sockets, and one worker for all tenants."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now_ms = 0.0
        self.called: set[str] = set()
        self.secrets: set[bytes] = set()  # the first bytes of each block's payload
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def _open(self) -> None:
        counters, dram = Counters(), DramTier(1 << 20)
        self.node_transport, self.transport = SocketTransport(), SocketTransport()
        self.node_transport.register(dram.memory.buffer)
        self.memory = PageAlignedMemory((MAX_SOURCES + 1) * BLOCK_BYTES)
        self.transport.register(self.memory.buffer)
        options = PoolOptions("127.0.0.1:1", staging_bytes=4 << 20)
        client: Any = MemoryPool(options)
        self.pool: MemoryPool = client
        pool = PoolTier(dram, options, client)
        self.store = BlockStore(dram, None, counters, now_ms=lambda: self.now_ms, pool=pool)
        self.puts = Puts(self.store, self.node_transport, counters, now_ms=lambda: self.now_ms)
        self.host = ServiceHost("127.0.0.1:0")
        servicer = KvstoreServicer(self.store, self.puts, self.node_transport, idle_service())
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(servicer, self.host.server)
        events = KvEventServicer(BlockEventLog("tenants"))
        publish_changes(self.store, events)
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(events, self.host.server)
        await self.host.start([service.full_name for service in SURFACE])
        self.channel = dial(self.host.endpoint)

    def ask(self, method: MethodDescriptor, requests: list[Any]) -> Any:
        """Return the answers or an error's status code, and check that none has bytes of a block."""

        async def answers() -> Any:
            most = 1 if method.name in ENDLESS else 10_000
            try:
                return await ask(self.channel, method, requests, answers=most)
            except grpc.aio.AioRpcError as error:
                return error.code()

        self.called.add(method.name)
        found = self.run(answers())
        if not isinstance(found, grpc.StatusCode):
            reported = b"".join(answer.SerializeToString() for answer in found)
            windows = {reported[at : at + SECRET_BYTES] for at in range(len(reported))}
            assert not windows & self.secrets
            IDS.extend(re.findall(r"[0-9a-f]{32}", repr(found)))
            del IDS[:-10]
        return found

    def call(self, name: str, request: Any) -> Any:
        """Return the last answer or the status code of an error."""
        found = self.ask(METHODS[name], [request])
        return found if isinstance(found, grpc.StatusCode) else found[-1]

    def command(self, **command: Any) -> kvstore_pb2.PinAnswer:
        """Return the answer to one command; a pin's lease outlives the stream."""
        request = kvstore_pb2.PinsRequest(commands=[kvstore_pb2.PinCommand(handle=1, **command)])
        frames = self.ask(METHODS["Pins"], [request])
        answer: kvstore_pb2.PinAnswer
        (answer,) = [answer for frame in frames for answer in frame.answers]
        return answer

    def close(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.host.stop(grace_s=0.2)
            await self.store.close(flush_timeout_s=1)
            await self.transport.close()
            await self.node_transport.close()

        self.run(end())
        self.loop.close()

    def end_leases(self) -> None:
        self.now_ms += 120_000
        self.store.expire()
        self.puts.expire()

    def reserve(self, hashes: list[bytes]) -> Any:
        return self.call(
            "Reserve",
            kvstore_pb2.ReserveRequest(
                fingerprint=FINGERPRINT,
                block_hashes=pack_hashes(hashes),
                block_bytes=BLOCK_BYTES,
                owner="w",
            ),
        )

    def commit(self, reservation_id: str, sources: list[kvstore_pb2.SourceBlock], session: str = "") -> Any:
        return self.call(
            "Commit",
            kvstore_pb2.CommitRequest(
                reservation_id=reservation_id,
                transport=common_pb2.TRANSPORT_SOCKET,
                transport_session=session or self.transport.session_id,
                blocks=sources,
            ),
        )

    def source(self, index: int, block_hash: bytes, content: bytes) -> kvstore_pb2.SourceBlock:
        address = self.memory.address + index * BLOCK_BYTES
        memory_at(address, BLOCK_BYTES)[:] = content
        self.secrets.add(content[:SECRET_BYTES])
        return kvstore_pb2.SourceBlock(
            block_hash=block_hash, address=address, n_bytes=BLOCK_BYTES, checksum=checksum(content)
        )

    def pin(self, hashes: list[bytes], first_block: int = 0) -> Any:
        return self.command(pin=self.pin_request(hashes, first_block)).pinned

    def pin_request(self, hashes: list[bytes], first_block: int) -> kvstore_pb2.PinRequest:
        return kvstore_pb2.PinRequest(
            fingerprint=FINGERPRINT,
            block_hashes=pack_hashes(hashes),
            first_block=first_block,
            lease_ms=10_000,
            owner="r",
        )

    def read(self, session: str, block: kvstore_pb2.PinnedBlock) -> bytes | None:
        """Return the bytes of a pinned block, or None if their checksum is wrong."""
        landing = self.memory.address + MAX_SOURCES * BLOCK_BYTES
        self.run(self.transport.read(session, [ReadOp(landing, block.address, BLOCK_BYTES)], timeout_s=20))
        right = checksum_at(landing, BLOCK_BYTES) == block.checksum
        return bytes(memory_at(landing, BLOCK_BYTES)) if right else None
