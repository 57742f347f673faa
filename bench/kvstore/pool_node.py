"""A Mooncake Store to compare with: its master, and the process that owns the blocks.

    python -m bench.kvstore.pool_node MASTER BATCHES BATCH_BLOCKS BLOCK_BYTES [SSD_DIR [serve]]

Puts BATCHES batches and prints one JSON line with the checksum of every block. With SSD_DIR it first waits
until every block has a copy on disk; with `serve` it puts nothing and offers what the directory holds.
It closes its client when its standard input ends.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.checksum import checksum_at
from libs.common.transport.mooncake import engine_environment
from libs.common.transport.registered_memory import PageAlignedMemory
from supervisor.pool import master_binary, master_command
from supervisor.ports import free_ports

CLIENT_TTL_S = 3
LOCAL_BUFFER_BYTES = 32 << 20
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`batches` batches of `batch_blocks` blocks of `block_bytes`."""

    batches: int
    batch_blocks: int
    block_bytes: int

    @property
    def batch_bytes(self) -> int:
        return self.batch_blocks * self.block_bytes

    def names(self, batch: int) -> list[str]:
        """The keys of a batch."""
        return [f"block-{batch}-{index}" for index in range(self.batch_blocks)]


def pool_environment(shape: PoolShape) -> dict[str, str]:
    """As our transport sets the engine; a bucket on disk is a batch, and is written within a second."""
    return {
        **engine_environment("127.0.0.1"),
        "GLOG_minloglevel": "3",
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(4 * shape.batch_bytes),
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(shape.batch_blocks),
    }


@contextmanager
def open_master(directory: Path, *, offload: bool) -> Iterator[str]:
    """A master without etcd, killed on leaving; its address."""
    port, metrics_port = free_ports(2, rng=random.Random())
    command = master_command(
        master_binary(), port=port, metrics_port=metrics_port, etcd=None, client_ttl_s=CLIENT_TTL_S
    )
    log = directory / "pool-master.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--enable_offload=true"] if offload else command, stdout=output, stderr=output
        )
    try:
        give_up_at = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"the master did not start:\n{log.read_text()}") from None
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


@contextmanager
def open_node(
    master: str, shape: PoolShape, *, ssd: Path | None = None, serve: bool = False
) -> Iterator[Any]:
    """A process that owns the blocks; what it says of itself."""
    command = [sys.executable, "-m", "bench.kvstore.pool_node", master]
    command += [str(shape.batches), str(shape.batch_blocks), str(shape.block_bytes)]
    command += [str(ssd)] if ssd is not None else []
    command += ["serve"] if serve else []
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said:
            raise RuntimeError("the owner of the pool's blocks did not start")
        yield json.loads(said)
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        process.stdout.close()


def open_store(master: str, shape: PoolShape, *, segment_bytes: int = 0, **options: Any) -> Any:
    """A client of the store, in this process; without a segment it only reads."""
    os.environ.update(pool_environment(shape))
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master, **options
    )
    if code != 0:
        raise RuntimeError(f"Mooncake Store does not connect to its master: {code}")
    return store


def put_all(store: Any, shape: PoolShape) -> list[str]:
    """Put random blocks; the checksum of each."""
    memory = PageAlignedMemory(shape.batch_bytes)
    assert store.register_buffer(memory.address, memory.n_bytes) == 0
    size, checksums = shape.block_bytes, []
    addresses = [memory.address + index * size for index in range(shape.batch_blocks)]
    for batch in range(shape.batches):
        memory.view(0, memory.n_bytes)[:] = os.urandom(memory.n_bytes)
        codes = store.batch_put_from(shape.names(batch), addresses, [size] * len(addresses))
        assert not any(codes), codes
        checksums += [checksum_at(address, size).hex() for address in addresses]
    return checksums


def wait_for_disk(store: Any, shape: PoolShape) -> None:
    """Until every block has a copy on disk."""
    give_up_at = time.monotonic() + _START_S
    names = [name for batch in range(shape.batches) for name in shape.names(batch)]
    while True:
        found = store.batch_get_replica_desc(names)
        on_disk = sum(any(each.is_local_disk_replica() for each in found.get(name, ())) for name in names)
        if on_disk == len(names):
            return
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"only {on_disk} of {len(names)} blocks were written to disk")
        time.sleep(0.2)


def main(master: str, shape: PoolShape, *, ssd: str, serve: bool) -> None:
    """Own the blocks."""
    offload = {"enable_ssd_offload": True, "ssd_offload_path": ssd} if ssd else {}
    segment_bytes = max(64 << 20, 2 * shape.batches * shape.batch_bytes)
    store = open_store(master, shape, segment_bytes=segment_bytes, **offload)
    checksums = [] if serve else put_all(store, shape)
    if ssd and not serve:
        wait_for_disk(store, shape)
    print(json.dumps({"checksums": checksums}), flush=True)
    sys.stdin.read()
    store.close()
    os._exit(0)


if __name__ == "__main__":
    asked = PoolShape(*map(int, sys.argv[2:5]))
    main(sys.argv[1], asked, ssd=(sys.argv[5:6] or [""])[0], serve=sys.argv[6:] == ["serve"])
