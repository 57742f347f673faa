"""A node's pool options, checked before anything starts. Pure."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from libs.common.etcd.access import EtcdAccess
from libs.common.runtime.settings import check_peers
from slipstream.errors import FailedPrecondition, InvalidArgument

POOLS = ("mooncake",)
DEFAULT_SEGMENT_BYTES = 256 << 20
MIN_SEGMENT_BYTES = 16 << 20
STAGING_BYTES = 64 << 20
MAX_REPLICAS = 8
_ETCD = "etcd://"


def check_master(text: str) -> None:
    """Raises ValueError for what names no master of a pool; nothing stands for the elected one."""
    addresses = text.removeprefix(_ETCD).split(";") if text else []
    try:
        if not all(addresses) or "," in text:
            raise ValueError
        check_peers(",".join(addresses))
    except ValueError:
        raise ValueError(f"must be HOST:PORT or etcd://HOST:PORT[;HOST:PORT..], not {text!r}") from None
    if ";" in text and not text.startswith(_ETCD):
        raise ValueError("several addresses only after etcd://")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool of a node.

    `master`: HOST:PORT of a mooncake_master, or etcd://HOST:PORT[;HOST:PORT..] where its leader is elected.
    `segment_bytes`: memory that this node contributes; 0 for a node that only uses the memory of others.
    """

    master: str
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    replicas: int = 1
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: tuple[str, ...] = ()
    staging_bytes: int = STAGING_BYTES
    admin: tuple[str, ...] = ()  # HOST:PORT of each master's HTTP server, which lists the pool's values
    instance: str = ""  # of the node, whose log has the agent's lines
    log_format: str = "text"

    @property
    def max_value_bytes(self) -> int:
        """The largest value that passes through the staging memory, which holds several at a time."""
        return self.staging_bytes // 8

    def check(self) -> None:
        """Raises InvalidArgument and FailedPrecondition for options that cannot work."""
        if not self.master:
            raise InvalidArgument("--pool-master", "must be given")
        for flag, check, text in (
            ("--pool-master", check_master, self.master),
            ("--pool-admin", check_peers, ",".join(self.admin)),
        ):
            try:
                check(text)
            except ValueError as error:
                raise InvalidArgument(flag, str(error)) from None
        if self.segment_bytes and self.segment_bytes < MIN_SEGMENT_BYTES:
            raise InvalidArgument("--pool-bytes", f"must be 0 or at least {MIN_SEGMENT_BYTES}")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InvalidArgument("--pool-replicas", f"must be 1 to {MAX_REPLICAS}")
        if importlib.util.find_spec("mooncake") is None:
            raise FailedPrecondition(
                "--pool mooncake needs mooncake-transfer-engine-non-cuda: install slipstream-server[kvstore]"
            )


def pool_master(asked: str, etcd: EtcdAccess) -> str:
    """The configured master, else the leader that the cluster's etcd knows.

    Raises InvalidArgument when neither is given, or Mooncake cannot reach this etcd.
    """
    if asked:
        return asked
    if not etcd.endpoints:
        raise InvalidArgument("--pool-master", "must be given where there is no --etcd")
    if not etcd.is_plain:
        raise InvalidArgument("--pool-master", "must be given: Mooncake reaches no etcd with TLS or a user")
    return _ETCD + etcd.endpoints.replace(",", ";")
