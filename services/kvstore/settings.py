"""Settings of a node, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libs.common.checksum import UNKEYED, KvChecksum
from libs.common.cluster.discovery import LEASE_TTL_S
from libs.common.etcd.access import EtcdAccess
from libs.common.rpc.access import AccessControl, access_of
from libs.common.runtime.process_settings import TierSettings
from libs.common.runtime.settings import check_peers, parse_endpoints, setting
from libs.common.transport.open import TransportChoice
from services.kvstore.pool.config import DEFAULT_SEGMENT_BYTES, POOLS, PoolOptions, check_master, pool_master
from slipstream.errors import InvalidArgument
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.hosts import host_of
from slipstream.rpc.tls import TlsFiles

MIN_DRAM_BYTES = 1 << 20
MIN_DISK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of a node. `disk_bytes` is of each disk; 0 means no disk tier."""

    instance: str
    listen: str
    etcd: EtcdAccess
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
    access: AccessControl | None = None  # None: everyone may call
    server_names: Sequence[str] = ()
    secret: ClusterSecret | None = None
    admin_http: str = "127.0.0.1:0"
    admin_http_advertise: str = ""  # what others dial for `admin_http`; "" = the host of `advertise`
    admin_http_tls: TlsFiles | None = None  # None: plain HTTP
    region: str = ""
    advertise: str = ""  # what others dial; "" = what `listen` came to
    kv_bind: str = ""  # HOST:PORT of the KV transport; "" = any free port of the address that others dial
    kv_advertise: str = ""  # HOST:PORT of the KV transport that peers dial; "" = the host of `advertise`
    pool: PoolOptions | None = None
    checksum: KvChecksum = UNKEYED

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


@dataclass(frozen=True)
class NodeSettings(TierSettings):
    """The settings of a node; `options_of` makes NodeOptions of it."""

    etcd_lease_s: int = setting("lifetime of a silent node's fleet membership", default=LEASE_TTL_S, least=1)
    dram_bytes: int = setting("memory for blocks, in bytes", default=256 << 20)
    tenant_share: float = setting("part of the memory that one tenant may fill", default=1.0)
    data_dir: Path | None = setting(
        "directory of the disk tier", default=None, default_text="RUN_DIR/INSTANCE"
    )
    disk: tuple[Path, ...] = setting(
        "directory on a separate disk; repeat for several", default=(), default_text="DATA_DIR"
    )
    disk_bytes: int = setting("bytes on each disk; 0 = no disk tier", default=1 << 30)
    scrub_bytes_per_s: int = setting("bytes verified on each disk per second; 0 = no scrub", default=8 << 20)
    disk_write_bytes_per_day: int = setting("write limit of all disks together; 0 = no limit", default=0)
    pool: str | None = setting("pool through which nodes share memory", default=None, choices=POOLS)
    pool_master: str = setting(
        "HOST:PORT or etcd://HOST:PORT[;..]",
        default="",
        default_text="elected in --etcd",
        check=check_master,
    )
    pool_admin: str = setting(
        "HOST:PORT[,..] of the masters' HTTP servers",
        default="",
        check=check_peers,
    )
    pool_bytes: int = setting(
        "bytes of memory that this node adds to the pool", default=DEFAULT_SEGMENT_BYTES
    )
    pool_replicas: int = setting("copies of each block in the pool", default=1, least=1)


def options_of(parsed: NodeSettings) -> NodeOptions:
    """The options that the settings of a node come to. Raises InvalidArgument."""
    return NodeOptions(
        instance=parsed.instance,
        region=parsed.region,
        listen=parsed.listen,
        advertise=parsed.advertise,
        kv_bind=parsed.kv_bind(),
        kv_advertise=parsed.kv_advertise,
        etcd=EtcdAccess.of(parsed),
        etcd_lease_s=parsed.etcd_lease_s,
        disks=parsed.disk or (parsed.data_dir or parsed.run_dir / parsed.instance,),
        scrub_bytes_per_s=parsed.scrub_bytes_per_s,
        tenant_share=parsed.tenant_share,
        disk_write_bytes_per_day=parsed.disk_write_bytes_per_day,
        dram_bytes=parsed.dram_bytes,
        disk_bytes=parsed.disk_bytes,
        transport=parsed.transport,
        drain_s=parsed.drain_s,
        pool=_pool(parsed),
        tls=parsed.tls(),
        checksum=KvChecksum.of_cluster(parsed.cluster_secret()),
        access=access_of(parsed),
        server_names=parse_endpoints(parsed.server_names),
        secret=parsed.cluster_secret(),
        admin_http=parsed.admin_http,
        admin_http_advertise=parsed.admin_http_advertise,
        admin_http_tls=parsed.tls_of_http(),
    )


def _pool(parsed: NodeSettings) -> PoolOptions | None:
    if parsed.pool is None:
        return None
    choice = TransportChoice.parse(parsed.transport)
    return PoolOptions(
        pool_master(parsed.pool_master, EtcdAccess.of(parsed)),
        segment_bytes=parsed.pool_bytes,
        replicas=parsed.pool_replicas,
        host=host_of(parsed.kv_advertise or parsed.advertise or parsed.listen),
        protocol="rdma" if choice.kind == "rdma" else "tcp",
        devices=choice.devices,
        admin=tuple(parsed.pool_admin.split(",")) if parsed.pool_admin else (),
        instance=parsed.instance,
        log_format=parsed.log_format,
    )
