"""The admin HTTP port of a process: its socket, and who may read there.

On a loopback address every process of the machine may read, because the port only reports. Elsewhere reading
the metrics takes an operator, or the scrape token; the health pages are public.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.common.http.guard import HttpGuard
from libs.common.http.listening import endpoint_of, listen_tcp
from libs.common.rpc.access import AccessControl, KeyClasses, check_address
from libs.common.rpc.access_table import HTTP_ADMIN_CLASSES, SCRAPE_ROUTE
from libs.common.rpc.endpoints import endpoint_beside
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.hosts import host_of, is_loopback
from slipstream.rpc.scrape_token import scrape_token


@dataclass(frozen=True, slots=True)
class AdminPort:
    """A bound port. `access` None: on a loopback address. `token` opens the metrics and nothing else."""

    listening: socket.socket
    access: AccessControl | None
    token: str

    @property
    def endpoint(self) -> str:
        """host:port, with the port that was bound."""
        return endpoint_of(self.listening)

    def guard(self, *, allowed_hosts: tuple[str, ...] = ()) -> HttpGuard:
        """The rules for Host and Origin."""
        return HttpGuard.of(self.endpoint, allowed_hosts=allowed_hosts, cors_origins=())

    def admit(self, route: str, headers: Mapping[str, str]) -> None:
        """Refuse a caller by the table. Raises Unauthenticated, PermissionDenied; KeyError without class."""
        needed = HTTP_ADMIN_CLASSES[route]
        if self.access is None or (route == SCRAPE_ROUTE and self._has_token(headers)):
            return
        self.access.admit(needed, ((name.lower(), value) for name, value in headers.items()))

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        return (
            bool(self.token)
            and kind.lower() == "bearer"
            and hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self.token.encode())
        )


def open_admin_port(
    endpoint: str,
    *,
    secret: ClusterSecret | None,
    keys: KeyClasses | None = None,
    share_port: bool = False,
    advertised: str = "",
    names: Iterable[str] = (),
) -> AdminPort:
    """Bind --admin-http.

    Callers' tokens name the port as it is bound, the host of `advertised`, or one of `names`.

    Raises Unavailable for an address in use, InvalidArgument for one that anyone could read.
    """
    access = None
    if not is_loopback(host_of(endpoint)):
        access = AccessControl(secret=secret, keys=keys)
        is_open = access.is_open and (keys is None or keys.open)
        needed = "--cluster-secret-file" if keys is None else "--cluster-secret-file or --api-keys"
        check_address(endpoint, is_open=is_open, flag="--admin-http", needed=needed)
    token = scrape_token(secret) if secret is not None else ""
    port = AdminPort(listen_tcp(endpoint, share_port=share_port), access, token)
    if access is not None:
        access.answer_to(port.endpoint, (endpoint_beside(port.endpoint, advertised or port.endpoint), *names))
    return port
