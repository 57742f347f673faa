"""python -m services.kvstore: one node of the block store."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from pathlib import Path

from libs.common.discovery import LEASE_TTL_S
from libs.common.errors import SlipstreamError
from libs.common.telemetry import configure_logging
from libs.common.tls import tls_files
from libs.common.tracing import configure_tracing
from libs.common.transport.open import TRANSPORT_HELP, TransportChoice, transport_text
from libs.common.worker_record import Role
from services.kvstore.app import Options, serve
from services.kvstore.pool.config import DEFAULT_SEGMENT_BYTES, POOLS, PoolOptions, pool_master

DISK_THREADS = "kv-"
LAST_THREADS_S = 1.0


def main() -> int:
    """Parse the command line and serve; 2 when the configuration cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m services.kvstore", description="Keeps KV blocks in memory, on disk, in a pool."
    )
    parser.add_argument("--instance", required=True, help="name of this process, unique in its role")
    parser.add_argument("--region", default="", help="where it stands: KV moves within a region only")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address of the gRPC server")
    parser.add_argument("--etcd", default="", help="HOST:PORT[,HOST:PORT..]; empty = no discovery")
    parser.add_argument(
        "--etcd-lease-s", type=int, default=LEASE_TTL_S, help="how long a silent node keeps its place"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), help="directory for files of this run")
    parser.add_argument("--data-dir", type=Path, help="directory of the disk tier; default RUN_DIR/INSTANCE")
    parser.add_argument(
        "--disk", type=Path, action="append", help="directory on a disk of its own; repeat for several disks"
    )
    parser.add_argument("--dram-bytes", type=int, default=256 << 20, help="memory for blocks")
    parser.add_argument("--disk-bytes", type=int, default=1 << 30, help="of each disk; 0 = no disk tier")
    parser.add_argument(
        "--scrub-bytes-per-s",
        type=int,
        default=8 << 20,
        help="rate of verifying blocks on disk; 0 = never",
    )
    parser.add_argument(
        "--disk-write-bytes-per-day", type=int, default=0, help="endurance of all disks; 0 = no limit"
    )
    parser.add_argument(
        "--tenant-share", type=float, default=1.0, help="part of the memory that one tenant may fill"
    )
    parser.add_argument("--pool", choices=POOLS, help="share memory with the other nodes through this")
    parser.add_argument(
        "--pool-master", default="", help="HOST:PORT or etcd://HOST:PORT[;..]; default: elected in --etcd"
    )
    parser.add_argument(
        "--pool-admin",
        default="",
        help="HOST:PORT[,..] of the masters' HTTP faces: routers are told what others put, and what went",
    )
    parser.add_argument(
        "--pool-bytes", type=int, default=DEFAULT_SEGMENT_BYTES, help="memory this node adds to the pool"
    )
    parser.add_argument("--pool-replicas", type=int, default=1, help="copies of each block in the pool")
    parser.add_argument("--transport", type=transport_text, default="auto", help=TRANSPORT_HELP)
    parser.add_argument("--tls-ca", type=Path, help="PEM; with the two below: mTLS on gRPC")
    parser.add_argument("--tls-certificate", type=Path, help="PEM")
    parser.add_argument("--tls-key", type=Path, help="PEM")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    parser.add_argument("--drain-s", type=float, default=5.0, help="how long SIGTERM waits for what runs")
    # Every worker of a cluster may be started with the same line; the store serves any model.
    parser.add_argument("--model", type=Path, help="not used")
    parser.add_argument("--draft-model", type=Path, help="not used")
    parsed = parser.parse_args()
    configure_logging(parsed.instance, parsed.log_level)
    configure_tracing(Role.KVSTORE, parsed.instance)
    code = 0
    try:
        asyncio.run(serve(_options(parsed)))
    except SlipstreamError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        code = 2
    _leave_what_hangs(code)
    return code


def _leave_what_hangs(code: int) -> None:
    """End the process now when a disk's calls do not return: the interpreter would wait for their threads."""
    give_up_at = time.monotonic() + LAST_THREADS_S
    while left := [thread for thread in threading.enumerate() if thread.name.startswith(DISK_THREADS)]:
        if time.monotonic() > give_up_at:
            print(f"kvstore: {len(left)} threads of a disk do not end", file=sys.stderr)
            sys.stderr.flush()
            os._exit(code)
        time.sleep(0.01)


def _options(parsed: argparse.Namespace) -> Options:
    """Raises InvalidArgument."""
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


if __name__ == "__main__":
    sys.exit(main())
