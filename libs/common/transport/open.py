"""Choose the transport of this process."""

from __future__ import annotations

import logging

from libs.common.transport.base import KvTransport
from libs.common.transport.mooncake import MooncakeTransport
from libs.common.transport.socket import SocketTransport

log = logging.getLogger(__name__)

KINDS = ("auto", "mooncake", "socket")


def open_transport(
    kind: str = "auto", host: str = "127.0.0.1", *, protocol: str = "tcp", devices: str = ""
) -> KvTransport:
    """Open the one transport of this process, after any fork. All workers of a cluster must agree.

    auto is mooncake where its libraries load, else socket; one log line says which. `protocol` (tcp or
    rdma) and `devices` (RDMA device names, comma-separated) are Mooncake's.
    Raises ValueError for an unknown kind; ImportError when mooncake was asked for and does not load.
    """
    if kind not in KINDS:
        raise ValueError(f"transport must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind != "socket":
        try:
            transport = MooncakeTransport(host, protocol=protocol, devices=devices)
            log.info("KV transport: mooncake, protocol %s", protocol)
            return transport
        except ImportError as error:
            if kind == "mooncake":
                raise
            log.warning("KV transport: socket, because Mooncake does not load here (%s)", error)
            return SocketTransport(host)
    log.info("KV transport: socket")
    return SocketTransport(host)
