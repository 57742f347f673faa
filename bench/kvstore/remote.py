"""Remote reads of the KV store end to end, against the bare Mooncake engine and a raw socket.

    python -m bench.kvstore.remote                 # 1 MiB blocks in batches of 16
    python -m bench.kvstore.remote --json

Readers in this process, each with one other process that has the bytes, take turns:

    kvstore      the product's own path: a worker restores a prefix of 16 blocks (lookup and pin in one
                 call, transfer by Mooncake, every block verified, release)
    kvstore_socket  the same, where the transfer is by our own sockets
    mooncake     `batch_transfer_sync_read` of the same 16 blocks, nothing else; it spins on a core
    polled       the engine's async reads of the same 16 blocks, polled as our transport polls them; one
                 engine, where our transport has two
    socket       `recv_into` of the same bytes over one TCP connection, nothing else

Each turn reads `--batches` batches; a side's figure is the median of its turns, and the ratio is the
median of the ratios within a turn, for the machine may be shared.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.kvstore.peer import PeerMemory, spawn_peer
from bench.kvstore.worker import BenchWorker, open_store
from libs.common.transport.mooncake import engine_environment
from libs.common.transport.mooncake_read import LANES
from libs.common.transport.registered_memory import PageAlignedMemory

MIB = 1 << 20
_POLL_MIN_S, _POLL_MAX_S = 0.00015, 0.0004
CHAINS = 6  # different batches, read in turn


@dataclass(frozen=True, slots=True)
class ReadShape:
    """The blocks to read: `batch_blocks` blocks of `block_bytes` at a time, `batches` times a turn."""

    block_bytes: int = MIB
    batch_blocks: int = 16
    batches: int = 12
    turns: int = 9

    @property
    def batch_bytes(self) -> int:
        return self.block_bytes * self.batch_blocks

    @property
    def memory_bytes(self) -> int:
        return self.batch_bytes * CHAINS


Reader = Callable[[int], Coroutine[Any, Any, None]]  # reads batch number n


class MooncakeReader:
    """The engine itself."""

    def __init__(self, shape: ReadShape, peer: PeerMemory) -> None:
        os.environ.update(engine_environment("127.0.0.1"))
        os.environ["MC_TCP_LANES_PER_PEER"] = str(LANES)  # one engine has as many as both of ours together
        from mooncake.engine import TransferEngine

        self._shape, self._peer = shape, peer
        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self._memory = PageAlignedMemory(shape.batch_bytes)
        assert self._engine.register_memory(self._memory.address, self._memory.n_bytes) == 0

    async def read(self, number: int) -> None:
        size, first = self._shape.block_bytes, number % CHAINS * self._shape.batch_bytes
        offsets = [index * size for index in range(self._shape.batch_blocks)]
        failed = self._engine.batch_transfer_sync_read(
            self._peer.session,
            [self._memory.address + offset for offset in offsets],
            [self._peer.address + first + offset for offset in offsets],
            [size] * len(offsets),
        )
        assert failed == 0

    async def read_polled(self, number: int) -> None:
        size, first = self._shape.block_bytes, number % CHAINS * self._shape.batch_bytes
        self._wait_for(
            [
                self._engine.batch_transfer_async_read(
                    self._peer.session,
                    [self._memory.address + offset],
                    [self._peer.address + first + offset],
                    [size],
                )
                for offset in range(0, self._shape.batch_bytes, size)
            ]
        )

    def _wait_for(self, elements: list[int]) -> None:
        """In this thread: the event loop's own timers are no finer than a millisecond."""
        pause_s = _POLL_MIN_S
        while elements:
            left = [element for element in elements if self._engine.transfer_check_status(element) == 0]
            pause_s = _POLL_MIN_S if len(left) < len(elements) else min(2 * pause_s, _POLL_MAX_S)
            elements = left
            if elements:
                time.sleep(pause_s)


class SocketReader:
    """One connection; the peer sends a batch for each byte it gets."""

    def __init__(self, shape: ReadShape, peer: PeerMemory) -> None:
        self._shape = shape
        self._connection = socket.create_connection(("127.0.0.1", peer.port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = PageAlignedMemory(shape.batch_bytes)

    async def read(self, number: int) -> None:
        self._connection.sendall(bytes([number % CHAINS]))
        view = self._memory.view(0, self._shape.batch_bytes)
        while view:
            view = view[self._connection.recv_into(view) :]


async def timed(reader: Reader, shape: ReadShape) -> float:
    """GB/s of one turn."""
    started = time.perf_counter()
    for number in range(shape.batches):
        await reader(number)
    return shape.batches * shape.batch_bytes / (time.perf_counter() - started) / 1e9


@asynccontextmanager
async def restoring(transport: str, shape: ReadShape) -> AsyncIterator[tuple[BenchWorker, Reader]]:
    """A kvstore with the batches, a worker that restores them, and its reader."""
    with (
        tempfile.TemporaryDirectory() as directory,
        open_store(Path(directory), transport=transport, dram_bytes=shape.memory_bytes * 2) as store,
    ):
        async with BenchWorker.opened(
            transport, page_bytes=shape.block_bytes, n_pages=shape.batch_blocks
        ) as worker:
            await worker.fill(store.endpoint, chains=CHAINS, blocks=shape.batch_blocks)

            async def restore(number: int) -> None:
                await worker.restore(store.endpoint, number % CHAINS)

            yield worker, restore


async def measure(shape: ReadShape) -> dict[str, Any]:
    """All sides in turn; GB/s and ratios."""
    async with AsyncExitStack() as stack:
        peer = stack.enter_context(spawn_peer(shape.memory_bytes, shape.batch_bytes))
        worker, kvstore = await stack.enter_async_context(restoring("mooncake", shape))
        socket_worker, kvstore_socket = await stack.enter_async_context(restoring("socket", shape))
        bare = MooncakeReader(shape, peer)
        sides: dict[str, Reader] = {
            "kvstore": kvstore,
            "kvstore_socket": kvstore_socket,
            "mooncake": bare.read,
            "polled": bare.read_polled,
            "socket": SocketReader(shape, peer).read,
        }
        turns: dict[str, list[float]] = {name: [] for name in sides}
        for reader in sides.values():  # first contacts, page faults
            await timed(reader, ReadShape(shape.block_bytes, shape.batch_blocks, CHAINS, 1))
        for turn in range(shape.turns):
            names = list(sides)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                turns[name].append(await timed(sides[name], shape))
        phases = {"kvstore": worker.phases_ms(), "kvstore_socket": socket_worker.phases_ms()}
    return summary(shape, turns, phases)


def summary(
    shape: ReadShape, turns: dict[str, list[float]], phases: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """The figures of a run."""

    def ratio(ours: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(turns[ours], turns[other], strict=True)), 3)

    return {
        "block_bytes": shape.block_bytes,
        "batch_blocks": shape.batch_blocks,
        "gb_per_s": {name: round(statistics.median(values), 3) for name, values in turns.items()},
        "spread_gb_per_s": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in turns.items()
        },
        "ratio_to_mooncake": ratio("kvstore", "mooncake"),
        "ratio_to_polled": ratio("kvstore", "polled"),
        "ratio_to_socket": ratio("kvstore", "socket"),
        "kvstore_socket_ratio_to_mooncake": ratio("kvstore_socket", "mooncake"),
        "kvstore_socket_ratio_to_polled": ratio("kvstore_socket", "polled"),
        "kvstore_socket_ratio_to_socket": ratio("kvstore_socket", "socket"),
        "phase_ms_a_batch": {
            side: {name: round(value, 3) for name, value in each.items()} for side, each in phases.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore.remote", __doc__)
    parser.add_argument("--block-bytes", type=int, default=MIB)
    parser.add_argument("--batch-blocks", type=int, default=16)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    shape = ReadShape(asked.block_bytes, asked.batch_blocks, asked.batches, asked.turns)
    found = asyncio.run(measure(shape))
    if asked.json:
        print(json.dumps(found))
        return
    for name, speed in found["gb_per_s"].items():
        low, high = found["spread_gb_per_s"][name]
        print(f"{name:14} {speed:6.2f} GB/s   ({low:.2f} to {high:.2f})")
    for name, value in found.items():
        if "ratio" in name:
            print(f"{name}: {value:.2f}")
    for side, phases in found["phase_ms_a_batch"].items():
        print(f"{side}, ms a batch:", ", ".join(f"{name} {value:.2f}" for name, value in phases.items()))


if __name__ == "__main__":
    main()
