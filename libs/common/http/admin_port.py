"""The admin HTTP port of a process: its socket, and who may read there.

On a loopback address every process of the machine may read. Elsewhere reading the metrics takes an operator,
or the scrape token; the health pages are public. A change takes the class of its route everywhere, unless the
process has neither a secret nor keys.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.common.http.guard import HttpGuard
from libs.common.http.listening import endpoint_of, listen_tcp
from libs.common.rpc.access import AccessControl, KeyClasses, check_address
from libs.common.rpc.access_table import HTTP_ADMIN_CLASSES, SCRAPE_ROUTE, is_console_route
from libs.common.rpc.endpoints import endpoint_beside
from slipstream.rpc.caller_class import ANONYMOUS, CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.console_key import console_key
from slipstream.rpc.hosts import host_of, is_loopback
from slipstream.rpc.scrape_token import scrape_token


@dataclass(frozen=True, slots=True)
class AdminPort:
    """A bound port. `access` judges reading; None: on a loopback address. `token` opens the metrics and
    nothing else. `changes` judges what is no GET; None: as `access`. `console_key` makes its bearer an
    operator of the console. `advertised` is the host:port that others dial; empty: the bound one."""

    listening: socket.socket
    access: AccessControl | None
    token: str
    changes: AccessControl | None = None
    console_key: str = ""
    advertised: str = ""

    @property
    def endpoint(self) -> str:
        """host:port, with the port that was bound."""
        return endpoint_of(self.listening)

    def guard(self, *, allowed_hosts: tuple[str, ...] = (), has_pages: bool = False) -> HttpGuard:
        """The rules for Host and Origin. A loopback port behind a proxy has the advertised name too."""
        if self.advertised and is_loopback(host_of(self.endpoint)):
            allowed_hosts = (*allowed_hosts, host_of(self.advertised))
        return HttpGuard.of(self.endpoint, allowed_hosts=allowed_hosts, cors_origins=(), has_pages=has_pages)

    def admit(self, route: str, headers: Mapping[str, str]) -> CallerIdentity:
        """The caller, by the table. Raises Unauthenticated, PermissionDenied; KeyError without class."""
        needed = HTTP_ADMIN_CLASSES[route]
        if is_console_route(route) and _is_bearer(headers, self.console_key):
            return CallerIdentity(CallerClass.OPERATOR, "console key")
        access = self.access
        if not route.startswith("GET "):
            access = self.changes or access
        if access is None or (route == SCRAPE_ROUTE and _is_bearer(headers, self.token)):
            return ANONYMOUS
        metadata = ((name.lower(), value) for name, value in headers.items())
        return access.admit(needed, metadata, over_http=True)


def _is_bearer(headers: Mapping[str, str], token: str) -> bool:
    """Whether the headers carry this token. An empty one is no token."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    return (
        bool(token)
        and kind.lower() == "bearer"
        and hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    )


def open_admin_port(
    endpoint: str,
    *,
    secret: ClusterSecret | None,
    keys: KeyClasses | None = None,
    share_port: bool = False,
    advertised: str = "",
    advertise: str = "",
    names: Iterable[str] = (),
) -> AdminPort:
    """Bind --admin-http.

    `advertise` is --admin-http-advertise, `advertised` the gRPC address that stands in for it
    (`endpoint_beside`). Callers' tokens name the port as it is bound, as it is advertised, or one of `names`.

    Raises Unavailable for an address in use, InvalidArgument for one that anyone could read.
    """
    access, changes = None, AccessControl(secret=secret, keys=keys, needs_key=True)
    if not is_loopback(host_of(endpoint)):
        access = changes
        is_open = access.is_open and (keys is None or keys.open)
        needed = "--cluster-secret-file" if keys is None else "--cluster-secret-file or --api-keys"
        check_address(endpoint, is_open=is_open, flag="--admin-http", needed=needed)
    token = scrape_token(secret) if secret is not None else ""
    key = console_key(secret) if secret is not None and keys is not None else ""
    listening = listen_tcp(endpoint, share_port=share_port)
    bound = endpoint_of(listening)
    dialled = endpoint_beside(bound, advertised or bound, advertise)
    changes.answer_to(bound, (dialled, *names))
    return AdminPort(listening, access, token, changes, key, dialled)
