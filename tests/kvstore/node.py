"""A kvstore process, and a client that makes a worker's calls over real gRPC and a real transport."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.checksum import checksum, checksum_at, memory_at
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.transport.base import KvTransport, ReadOp
from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.block_hashes import pack_hashes, unpack_hashes
from slipstream.enum_names import TRANSPORTS
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.processes.launching import ServiceProcess
from tests.support.stubs.pin_stub import PinStub

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 327_680  # 64 tokens of 8 layers of 160 float32 values
FINGERPRINT = Fingerprint("m", "t", "c", "float32", 64).to_proto()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int, n_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(n_bytes)


@dataclass
class KvstoreProcess:
    """`python -m services.kvstore` on a free port, with its data in `directory`."""

    directory: Path
    transport: str
    dram_bytes: int = 64 << 20
    disk_bytes: int = 128 << 20
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    process: ServiceProcess = field(init=False)
    endpoint: str = field(init=False)

    def start(self) -> None:
        log = self.directory / "kvstore.log"
        offset = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", "services.kvstore", "--instance", "kv-0"]
        command += ["--run-dir", str(self.directory), "--data-dir", str(self.directory / "data")]
        command += ["--dram-bytes", str(self.dram_bytes), "--disk-bytes", str(self.disk_bytes)]
        command += ["--transport", self.transport, *self.arguments]
        with log.open("ab") as output:
            self.process = ServiceProcess(command, output, self.environment)
        deadline = time.monotonic() + 200
        while True:
            printed = log.read_bytes()[offset:].decode()
            if " is ready at " in printed:
                self.endpoint = printed.partition(" is ready at ")[2].split()[0]
                return
            assert self.process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.02)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)


class Client:
    """A worker's calls to a kvstore."""

    def __init__(
        self,
        endpoint: str,
        transport: KvTransport,
        memory: PageAlignedMemory,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        self.transport = transport
        self.memory = memory  # registered by the caller; reads use the upper half
        self.landing = memory.address + memory.n_bytes // 2
        self.channel = dial(endpoint, tls=tls)
        self.kvstore = kvstore_pb2_grpc.KvstoreServiceStub(self.channel)
        self.pins = PinStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    def source(self, index: int, number: int) -> kvstore_pb2.SourceBlock:
        address = self.memory.address + index * BLOCK_BYTES
        memory_at(address, BLOCK_BYTES)[:] = payload(number)
        return kvstore_pb2.SourceBlock(
            block_hash=key(number), address=address, n_bytes=BLOCK_BYTES, checksum=checksum(payload(number))
        )

    async def reserve(self, numbers: Sequence[int]) -> kvstore_pb2.ReserveResponse:
        return await self.kvstore.Reserve(
            kvstore_pb2.ReserveRequest(
                fingerprint=FINGERPRINT,
                block_hashes=pack_hashes([key(n) for n in numbers]),
                block_bytes=BLOCK_BYTES,
                owner="w",
            ),
            timeout=60,
        )

    async def commit(
        self, reservation_id: str, blocks: Sequence[kvstore_pb2.SourceBlock], **changes: Any
    ) -> kvstore_pb2.CommitResponse:
        request = kvstore_pb2.CommitRequest(
            reservation_id=reservation_id,
            transport=TRANSPORTS.value(self.transport.kind),
            transport_session=self.transport.session_id,
            blocks=blocks,
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return await self.kvstore.Commit(request, timeout=60)

    async def put(self, numbers: Sequence[int]) -> int:
        """Reserve and commit; return the number of committed blocks."""
        reserved = await self.reserve(numbers)
        if not reserved.reservation_id:
            return 0
        wanted = set(unpack_hashes(reserved.wanted))
        blocks = [self.source(i, n) for i, n in enumerate(numbers) if key(n) in wanted]
        answer = await self.commit(reserved.reservation_id, blocks)
        return len(unpack_hashes(answer.committed))

    async def lookup(self, numbers: Sequence[int]) -> list[int]:
        request = kvstore_pb2.LookupRequest(
            fingerprint=FINGERPRINT, block_hashes=pack_hashes([key(n) for n in numbers])
        )
        answer = await self.kvstore.Lookup(request, timeout=60)
        assert answer.held_blocks == len(answer.tiers)
        return list(answer.tiers)

    async def pin(
        self, numbers: Sequence[int], *, first_block: int = 0, max_blocks: int = 0, lease_ms: int = 60_000
    ) -> kvstore_pb2.PinResponse:
        return await self.pins.pin(
            kvstore_pb2.PinRequest(
                fingerprint=FINGERPRINT,
                block_hashes=pack_hashes([key(n) for n in numbers]),
                first_block=first_block,
                max_blocks=max_blocks,
                lease_ms=lease_ms,
                owner="r",
            ),
            timeout=60,
        )

    async def read(
        self, pinned: kvstore_pb2.PinResponse, numbers: Sequence[int], *, timeout_s: float = 60
    ) -> None:
        """Read the pinned blocks and check all their bytes."""
        reads = [
            ReadOp(self.landing + i * BLOCK_BYTES, block.address, block.n_bytes)
            for i, block in enumerate(pinned.blocks)
        ]
        for op in reads:
            memory_at(op.local_address, op.n_bytes)[:] = bytes(op.n_bytes)
        await self.transport.read(pinned.transport_session, reads, timeout_s=timeout_s)
        for op, block, number in zip(reads, pinned.blocks, numbers, strict=True):
            assert checksum_at(op.local_address, op.n_bytes) == block.checksum
            assert bytes(memory_at(op.local_address, op.n_bytes)) == payload(number)

    async def release(self, lease_id: str) -> None:
        await self.pins.release(lease_id)

    async def fetch(self, numbers: Sequence[int]) -> list[common_pb2.CacheTier.ValueType]:
        """Pin, read, verify and release; return the tiers."""
        pinned = await self.pin(numbers)
        if not pinned.lease_id:
            return []
        await self.read(pinned, numbers[: len(pinned.blocks)])
        await self.release(pinned.lease_id)
        return [block.tier for block in pinned.blocks]

    async def status(self) -> worker_pb2.GetStatusResponse:
        return await self.worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)

    async def wait_status(self, condition: object, *, timeout_s: float = 100) -> worker_pb2.GetStatusResponse:
        """Wait for a status with `condition(status)` and return it."""
        assert callable(condition)
        async with asyncio.timeout(timeout_s):
            while not condition(status := await self.status()):
                await asyncio.sleep(0.03)
        return status

    async def readiness(self) -> int:
        request = health_pb2.HealthCheckRequest(service="readiness")
        try:
            return int((await self.health.Check(request, timeout=60)).status)
        except grpc.aio.AioRpcError:
            return int(health_pb2.HealthCheckResponse.UNKNOWN)
