"""The four ports of a router: gRPC and HTTP of clients, gRPC and HTTP of operators. Opened together.

The public gRPC port has methods of the classes public and tenant only, and no reflection.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from libs.common.http.admin_port import AdminPort, open_admin_port
from libs.common.http.listening import listen_tcp
from libs.common.rpc.access import AccessControl, OnRefused, check_address
from libs.common.rpc.endpoints import endpoint_beside
from libs.common.rpc.serve import ServiceHost
from libs.common.rpc.single_request import ReadRequest
from libs.common.service_bounds import GRPC_IDLE_CONNECTION_S, GRPC_REQUEST_BYTES
from services.router.api.rpc.server import SERVICE_NAME
from services.router.autoscale.scaler import METHODS as SCALER_METHODS
from services.router.options import RouterOptions
from slipstream.rpc.hosts import host_of, is_loopback

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """The bound ports."""

    public: ServiceHost
    http: socket.socket
    admin: ServiceHost
    admin_http: AdminPort


def open_ports(options: RouterOptions, *, read: ReadRequest, on_refused: OnRefused) -> RouterPorts:
    """`read` and `on_refused` are ServiceHost's, of the public gRPC port.

    Raises Unavailable for an address in use, InvalidArgument for one that anyone could call.
    """
    check_clients_addresses(options)
    _warn_of_shared_trust(options)
    keys = options.keys
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
    admin = ServiceHost(
        options.admin,
        advertise=endpoint_beside(options.admin, public.endpoint, options.admin_advertise),
        tls=options.tls,
        access=admin_access,
        names=options.server_names,
        options=shared,
        flag="--admin",
    )
    admin_http = open_admin_port(
        options.admin_http,
        secret=options.secret,
        keys=keys,
        share_port=options.share_ports,
        advertised=public.endpoint,
        advertise=options.admin_http_advertise,
        names=options.server_names,
    )
    return RouterPorts(public, listen_tcp(options.http, share_port=options.share_ports), admin, admin_http)


def check_clients_addresses(options: RouterOptions) -> None:
    """Raise InvalidArgument for a port of clients that every other machine may use without a key."""
    needs_certificate = (options.client_tls or options.tls) is not None
    is_http_plain = options.tls is None or not options.http_tls
    ports = (
        ("--listen", options.listen, needs_certificate, "--api-keys, or --tls-ca and its certificates"),
        ("--http", options.http, False, "--api-keys"),
    )
    for flag, address, is_closed, needed in ports:
        if options.keys.open and not is_closed and not is_loopback(host_of(address)):
            check_address(address, is_open=True, flag=flag, needed=needed)
    if is_http_plain and not is_loopback(host_of(options.http)):
        log.warning(
            "--http %s is plain HTTP: API keys and texts pass in clear unless a proxy ends TLS", options.http
        )


def _warn_of_shared_trust(options: RouterOptions) -> None:
    """Once for each process: every certificate that opens the public port opens the workers, too."""
    clients = options.client_tls or options.tls
    if options.tls is not None and clients is not None and clients.ca == options.tls.ca:
        log.warning(
            "clients and peers share the CA of --tls-ca: each client's certificate opens the workers, too; "
            "--tls-client-ca names another CA for clients"
        )
