"""Chooses and opens the transport of this process."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from libs.common.transport.base import KvTransport
from libs.common.transport.mooncake import MooncakeTransport
from libs.common.transport.socket import SocketTransport
from slipstream.errors import FailedPrecondition
from slipstream.rpc.hosts import address_of, is_loopback

log = logging.getLogger(__name__)

TRANSPORT_HELP = (
    "how KV blocks move: auto, mooncake, socket, rdma or rdma:DEVICE[,DEVICE..]; auto is socket on a "
    "loopback address, else Mooncake where it loads"
)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The value of `--transport`. `kind` is auto, mooncake, socket or rdma.

    `devices` are names of RDMA devices; empty means all of them.
    """

    kind: str
    devices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TransportChoice:
        """Parse a value in the form of `TRANSPORT_HELP`. Raises ValueError for any other."""
        kind, colon, listed = text.partition(":")
        devices = tuple(listed.split(",")) if colon else ()
        if kind not in ("auto", "mooncake", "socket", "rdma") or (devices and kind != "rdma"):
            raise ValueError(
                f"transport must be auto, mooncake, socket, rdma or rdma:DEVICE[,DEVICE..], not {text!r}"
            )
        if not all(devices):
            raise ValueError(f"a device name is empty in {text!r}")
        return cls(kind, devices)


def open_transport(
    text: str = "auto",
    host: str = "127.0.0.1",
    *,
    bind: str = "",
    advertise: str = "",
    serves: bool = True,
) -> KvTransport:
    """Open the one transport of this process, after any fork. All workers of a cluster must agree.

    `host` is where peers reach this process, and may be a name. `bind` is the HOST:PORT that the socket
    transport or Mooncake's probe listens on, by default any free port of `host`. `advertise` is the HOST:PORT
    that peers dial instead of `host` and the bound port, which port 0 keeps. The ports of Mooncake's engines
    stay those that they chose. auto is socket where peers dial a loopback address, as Mooncake's ports are
    open on all interfaces. Elsewhere it is Mooncake over TCP if its libraries load, else socket. One log line
    names the choice. `serves`: else this process only reads, and the socket transport opens no port. Raises
    ValueError for an unknown choice, FailedPrecondition when a requested Mooncake does not load or an RDMA
    device is missing or unusable, TransferRefused when the engine does not start or the port is taken.
    """
    choice = TransportChoice.parse(text)
    bind = bind or f"{host}:0"
    host, port = address_of(advertise) if advertise else (host, 0)
    if choice.kind == "auto" and is_loopback(host):
        log.info("KV transport: socket, because peers reach this process at %s", host)
        return SocketTransport(host, bind=bind, port=port, serves=serves)
    if choice.kind != "socket":
        protocol = "rdma" if choice.kind == "rdma" else "tcp"
        try:
            transport = MooncakeTransport(
                host, bind=bind, port=port, protocol=protocol, devices=choice.devices
            )
            log.info("KV transport: %s, devices %s", transport.kind, ",".join(transport.devices) or "any")
            return transport
        except ImportError as error:
            if choice.kind != "auto":
                raise FailedPrecondition(
                    f"--transport {text}: Mooncake does not load ({error}): it needs libibverbs1, libnuma1 "
                    "and libcurl4, and a build with CUDA its runtime; --transport socket needs none of them"
                ) from error
            log.warning("KV transport: socket, because Mooncake does not load (%s)", error)
            return SocketTransport(host, bind=bind, port=port, serves=serves)
    log.info("KV transport: socket")
    return SocketTransport(host, bind=bind, port=port, serves=serves)
