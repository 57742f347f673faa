"""The command-line options of a node."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from libs.common.cluster.discovery import LEASE_TTL_S
from libs.common.runtime.process_options import process_parser, tls_files
from libs.common.transport.open import TransportChoice
from services.kvstore.pool.config import DEFAULT_SEGMENT_BYTES, POOLS, PoolOptions, pool_master
from slipstream.errors import InvalidArgument
from slipstream.tls import TlsFiles

MIN_DRAM_BYTES = 1 << 20
MIN_DISK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed options. `disk_bytes` is for each disk; 0 means no disk tier."""

    instance: str
    listen: str
    etcd: str
    disks: tuple[Path, ...]
    dram_bytes: int
    disk_bytes: int
    transport: str
    drain_s: float
    scrub_bytes_per_s: int = 0
    tenant_share: float = 1.0
    disk_write_bytes_per_day: int = 0  # for all disks together; 0 = no limit
    etcd_lease_s: int = LEASE_TTL_S
    tls: TlsFiles | None = None
    region: str = ""
    pool: PoolOptions | None = None

    def check(self) -> None:
        """Raises InvalidArgument for values that cannot work."""
        if self.dram_bytes < MIN_DRAM_BYTES:
            raise InvalidArgument("--dram-bytes", f"must be at least {MIN_DRAM_BYTES}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise InvalidArgument("--tenant-share", "must be above 0 and at most 1")
        if self.disk_write_bytes_per_day < 0:
            raise InvalidArgument("--disk-write-bytes-per-day", "must not be negative")
        if self.disk_bytes and self.disk_bytes < MIN_DISK_BYTES:
            raise InvalidArgument("--disk-bytes", f"must be 0 or at least {MIN_DISK_BYTES}")
        if self.scrub_bytes_per_s < 0:
            raise InvalidArgument("--scrub-bytes-per-s", "must not be negative")
        if self.pool is not None:
            self.pool.check()


def node_parser() -> argparse.ArgumentParser:
    """The command-line parser; `options_of` converts its result."""
    parser = process_parser("kvstore", "Keeps KV blocks in memory, on disk, in a pool.")
    add = parser.add_argument
    add("--etcd-lease-s", type=int, default=LEASE_TTL_S, help="lifetime of a silent node's fleet membership")
    add("--dram-bytes", type=int, default=256 << 20, help="memory for blocks, in bytes")
    add("--tenant-share", type=float, default=1.0, help="part of the memory that one tenant may fill")
    _add_disk_options(parser)
    _add_pool_options(parser)
    return parser


def _add_disk_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data-dir", type=Path, help="directory of the disk tier; default RUN_DIR/INSTANCE")
    add("--disk", type=Path, action="append", help="directory on a separate disk; repeat for several disks")
    add("--disk-bytes", type=int, default=1 << 30, help="bytes on each disk; 0 = no disk tier")
    add(
        "--scrub-bytes-per-s",
        type=int,
        default=8 << 20,
        help="bytes verified on each disk per second; 0 = no scrub",
    )
    add(
        "--disk-write-bytes-per-day",
        type=int,
        default=0,
        help="write limit of all disks together; 0 = no limit",
    )


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pool", choices=POOLS, help="the pool through which nodes share memory")
    add("--pool-master", default="", help="HOST:PORT or etcd://HOST:PORT[;..]; default: elected in --etcd")
    add(
        "--pool-admin",
        default="",
        help="HOST:PORT[,..] of the masters' HTTP servers, which list the pool's blocks for routers",
    )
    add(
        "--pool-bytes",
        type=int,
        default=DEFAULT_SEGMENT_BYTES,
        help="memory that this node adds to the pool, in bytes",
    )
    add("--pool-replicas", type=int, default=1, help="copies of each block in the pool")


def options_of(parsed: argparse.Namespace) -> Options:
    """The options of a parsed command line. Raises InvalidArgument."""
    return Options(
        instance=parsed.instance,
        region=parsed.region,
        listen=parsed.listen,
        etcd=parsed.etcd,
        etcd_lease_s=parsed.etcd_lease_s,
        disks=tuple(parsed.disk or [parsed.data_dir or parsed.run_dir / parsed.instance]),
        scrub_bytes_per_s=parsed.scrub_bytes_per_s,
        tenant_share=parsed.tenant_share,
        disk_write_bytes_per_day=parsed.disk_write_bytes_per_day,
        dram_bytes=parsed.dram_bytes,
        disk_bytes=parsed.disk_bytes,
        transport=parsed.transport,
        drain_s=parsed.drain_s,
        pool=_pool(parsed),
        tls=tls_files(parsed),
    )


def _pool(parsed: argparse.Namespace) -> PoolOptions | None:
    if parsed.pool is None:
        return None
    choice = TransportChoice.parse(parsed.transport)
    return PoolOptions(
        pool_master(parsed.pool_master, parsed.etcd),
        segment_bytes=parsed.pool_bytes,
        replicas=parsed.pool_replicas,
        host=parsed.listen.rsplit(":", 1)[0],
        protocol="rdma" if choice.kind == "rdma" else "tcp",
        devices=choice.devices,
        admin=tuple(parsed.pool_admin.split(",")) if parsed.pool_admin else (),
    )
