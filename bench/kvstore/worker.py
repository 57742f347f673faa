"""A worker's side of the KV store without an engine: its pages, its puts, its restores."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from libs.common.checksum import KvChecksum
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.runtime.process_settings import SECRET_VARIABLE
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.engine.step.types import FullBlock
from libs.worker.engine.page_exporter import PageExporter
from libs.worker.engine.page_memory import PageMemory
from libs.worker.offload.block_writer import commit_request
from libs.worker.pins.peers import Peers
from libs.worker.restore.block_fetcher import BlockFetcher, FetchStats
from libs.worker.restore.prefix_restore import PrefixRestorer
from slipstream.block_hashes import pack_hashes, unpack_hashes
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

FINGERPRINT = Fingerprint("bench", "bench", "bench", "float32", 64)
_START_S = 60.0
_SECRET_TEXT = "of the benchmark's cluster"
_SECRET = ClusterSecret(_SECRET_TEXT.encode())


@dataclass(frozen=True, slots=True)
class Store:
    """A running kvstore process."""

    endpoint: str
    pid: int


@contextmanager
def open_store(directory: Path, *, transport: str, dram_bytes: int, disk_bytes: int = 0) -> Iterator[Store]:
    """`python -m services.kvstore` with its files in `directory`, ended on leaving."""
    log = directory / "kvstore.log"
    command = [sys.executable, "-m", "services.kvstore", "--instance", "kvstore-0"]
    command += ["--run-dir", str(directory), "--transport", transport]
    command += ["--dram-bytes", str(dram_bytes), "--disk-bytes", str(disk_bytes)]
    with log.open("wb") as output:
        environment = {**os.environ, SECRET_VARIABLE: _SECRET_TEXT}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        give_up_at = time.monotonic() + _START_S
        while " is ready at " not in (said := log.read_text()):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"the kvstore did not start:\n{said}")
            time.sleep(0.02)
        yield Store(said.partition(" is ready at ")[2].split()[0], process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


class BenchWorker:
    """Pages of `page_bytes` that blocks are put from and restored into."""

    def __init__(self, transport: KvTransport, *, page_bytes: int, n_pages: int) -> None:
        self._pages = PageAlignedMemory(page_bytes * n_pages)
        engine: Any = SimpleNamespace(
            info=SimpleNamespace(page_bytes=page_bytes, n_pages=n_pages),
            memory=self._pages.view(0, self._pages.n_bytes),
            memory_address=self._pages.address,
            page_parts=None,
        )
        self._transport = transport
        self._memory = PageMemory(engine, KvChecksum.of_cluster(_SECRET))
        self._exporter = PageExporter(self._memory, transport, staging_bytes=page_bytes * n_pages * 2)
        self._peers = Peers(dial=Dial(tokens=TokenMinter(_SECRET, "bench")))
        unused: Any = None  # the engine's thread: only failed reads need it
        self._fetcher = BlockFetcher(transport, self._memory, unused, Counters())
        self._restorer = PrefixRestorer(
            self._fetcher,
            self._peers,
            transport_kind=transport.kind,
            instance="bench",
            fingerprint=FINGERPRINT,
        )
        self._chains: list[list[bytes]] = []
        self._stats = FetchStats()
        self._restores = 0
        self._restore_ms = 0.0

    @classmethod
    @asynccontextmanager
    async def opened(cls, transport: str, *, page_bytes: int, n_pages: int) -> AsyncIterator[BenchWorker]:
        """A worker with a separate transport, which closes when the block ends."""
        opened = open_transport(transport)
        worker = cls(opened, page_bytes=page_bytes, n_pages=n_pages)
        try:
            yield worker
        finally:
            await worker.released()
            await worker._peers.close()
            await opened.close()

    async def fill(self, endpoint: str, *, chains: int, blocks: int, durable: bool = False) -> None:
        """Put `chains` chains of `blocks` random blocks; `durable`: each is on disk before the next."""
        size = self._memory.page_bytes
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        for _ in range(chains):
            chain = [os.urandom(16) for _ in range(blocks)]
            self._chains.append(chain)
            for page in range(blocks):
                self._pages.view(page * size, size)[:] = os.urandom(size)
            reserved = await stub.Reserve(
                kvstore_pb2.ReserveRequest(
                    fingerprint=FINGERPRINT.to_proto(),
                    block_hashes=pack_hashes(chain),
                    block_bytes=size,
                    owner="bench",
                )
            )
            full = [FullBlock(block_hash, page) for page, block_hash in enumerate(chain)]
            exported = await self._exporter.export(range(blocks), is_read=True)
            request = commit_request(
                reserved.reservation_id,
                full,
                exported,
                page_bytes=size,
                transport=self._transport,
            )
            request.wait_durable = durable
            answer = await stub.Commit(request)
            self._exporter.release(exported)
            assert unpack_hashes(answer.committed) == chain
            assert unpack_hashes(answer.durable) == chain or not durable

    async def restore(self, endpoint: str, number: int) -> tuple[int, int]:
        """Restore chain `number` into the first pages, as a worker does before it computes.

        Returns how many blocks, and how many of them came from disk.
        """
        chain = self._chains[number]
        started = time.perf_counter()
        found = await self._restorer.restore(
            endpoint, chain, range(len(chain)), first_block=0, stats=self._stats
        )
        tiers = found.tiers
        assert len(tiers) == len(chain), "a miss"
        self._restore_ms += (time.perf_counter() - started) * 1e3
        self._restores += 1
        return len(tiers), tiers.count(common_pb2.CACHE_TIER_NVME)

    async def released(self) -> None:
        """Return when the pins of all restores have ended."""
        while self._restorer.pins:
            await asyncio.sleep(0.001)

    def phases_ms(self) -> dict[str, float]:
        """Mean milliseconds of a restore: in all, and of its reads, verification included."""
        count = max(1, self._restores)
        return {"restore": self._restore_ms / count, "read": self._stats.elapsed_ms / count}
