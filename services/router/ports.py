"""The four ports of a router: gRPC and HTTP of clients, gRPC and HTTP of operators. Opened together.

The public gRPC port has methods of the classes public and tenant only, and no reflection.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libs.common.rpc.access import AccessControl, OnRefused, check_address, is_loopback
from libs.common.rpc.endpoints import endpoint_beside
from libs.common.rpc.serve import ServiceHost
from libs.common.rpc.single_request import ReadRequest
from libs.common.service_bounds import GRPC_IDLE_CONNECTION_S, GRPC_REQUEST_BYTES
from services.router.api.grpc_server import SERVICE_NAME
from services.router.autoscale.scaler import METHODS as SCALER_METHODS
from slipstream.errors import Unavailable

if TYPE_CHECKING:
    from services.router.server import RouterOptions

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """The bound ports. `admin_http_access`: the rule of the HTTP admin port; None where it is loopback."""

    public: ServiceHost
    http: socket.socket
    admin: ServiceHost
    admin_http: socket.socket
    admin_http_access: AccessControl | None


def open_ports(options: RouterOptions, *, read: ReadRequest, on_refused: OnRefused) -> RouterPorts:
    """`read` and `on_refused` are ServiceHost's, of the public gRPC port.

    Raises Unavailable for an address in use, InvalidArgument for one that anyone could call.
    """
    keys = options.tenants
    admin_http_access = None
    if not is_loopback(options.admin_http.rpartition(":")[0].strip("[]")):
        admin_http_access = AccessControl(secret=options.secret, keys=keys)
        check_address(
            options.admin_http, is_open=admin_http_access.is_open and keys.open, flag="--admin-http"
        )
    shared = [("grpc.so_reuseport", int(options.share_ports))]
    public = ServiceHost(
        options.listen,
        advertise=options.advertise,
        tls=options.client_tls or options.tls,
        access=AccessControl(secret=options.secret, keys=keys),
        names=options.server_names,
        has_reflection=False,
        options=[
            *shared,
            ("grpc.max_receive_message_length", GRPC_REQUEST_BYTES),
            # A client whose calls were refused keeps nothing here for longer.
            ("grpc.max_connection_idle_ms", int(GRPC_IDLE_CONNECTION_S * 1000)),
        ],
        read=read,
        on_refused=on_refused,
        front_doors=[f"/{SERVICE_NAME}/Generate"],
    )
    admin_access = AccessControl(
        secret=options.secret,
        has_peer_certificates=options.tls is not None,
        keys=keys,
        public_methods=SCALER_METHODS if options.scaler_is_public else (),
    )
    admin = ServiceHost(options.admin, tls=options.tls, access=admin_access, options=shared, flag="--admin")
    _answer_to(admin_access, admin.endpoint, public.endpoint, options)
    http = listen_tcp(options.http, share_port=options.share_ports)
    admin_http = listen_tcp(options.admin_http, share_port=options.share_ports)
    if admin_http_access is not None:
        _answer_to(admin_http_access, endpoint_of(admin_http), public.endpoint, options)
    return RouterPorts(public, http, admin, admin_http, admin_http_access)


def _answer_to(access: AccessControl, bound: str, advertised: str, options: RouterOptions) -> None:
    """Admit tokens for the port as it is bound, as it is announced, and by the server's further names."""
    access.answer_to(bound, (endpoint_beside(bound, advertised), *options.server_names))


def endpoint_of(listening: socket.socket) -> str:
    """host:port of a socket, with the port that was bound."""
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def listen_tcp(endpoint: str, *, share_port: bool = False, accept: bool = True) -> socket.socket:
    """A listening socket. `share_port`: other processes may listen there too; without `accept` it only
    keeps the port for them. Raises Unavailable."""
    host, _, port = endpoint.rpartition(":")
    # asyncio sets TCP_NODELAY only on sockets with the protocol TCP; those of create_server have none.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, int(port)))
        if accept:
            listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {endpoint}: {error}") from error
    return listening
