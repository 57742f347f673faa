"""Decides which HTTP requests reach a handler, by Host, Origin and content type. Pure.

A web page must not use a router that its visitor can reach:

* Host: a page whose own name resolves to the router's address (DNS rebinding) sends its own name. Addresses
  and `localhost` are no such names and always pass; other names pass where the list has them.
* Origin: browsers add it to what a page sends to another origin. A request with an origin passes only if the
  list of origins has it. Clients that are no browsers send none.
* Content type: a page may send `text/plain`, or no type at all, without a preflight request. A POST must be
  JSON.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.common.http.failure import HttpRefusal

ANY = "*"
# Encodings of a request body that are decoded.
_ENCODINGS = ("gzip", "deflate", "identity")
_LIMITS = ", ".join(
    f"x-ratelimit-{part}-{kind}, anthropic-ratelimit-{kind}-{part}"
    for kind in ("requests", "tokens")
    for part in ("limit", "remaining", "reset")
)
_OWN = "x-slipstream-placement, x-slipstream-ignored"
_EXPOSED = f"x-request-id, request-id, retry-after, retry-after-ms, {_OWN}, {_LIMITS}"
_ASKED_HEADERS = re.compile(r"[A-Za-z0-9_, -]{0,1024}")
_PREFLIGHT_S = 600


@dataclass(frozen=True, slots=True)
class HttpGuard:
    """The rules of one listener. `hosts` None lets any Host pass; ANY in `origins` lets any page call.

    `has_pages`: the listener serves pages, whose requests have its own address as their origin.
    """

    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    has_pages: bool = False

    @classmethod
    def of(
        cls,
        endpoint: str,
        *,
        allowed_hosts: Iterable[str],
        cors_origins: Iterable[str],
        has_pages: bool = False,
    ) -> HttpGuard:
        """The rules for a listener at `endpoint` (host:port).

        Without a list of hosts a loopback listener takes addresses and localhost only, and any other listener
        takes every name. Its operator's DNS and proxies decide what leads there.
        """
        listed = frozenset(name.lower() for name in allowed_hosts)
        host = endpoint.rpartition(":")[0]
        takes_any = ANY in listed or (not listed and not _is_loopback(host))
        origins = frozenset(origin.lower() for origin in cors_origins)
        return cls(None if takes_any else listed, origins, has_pages)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise HttpRefusal for a request that may not reach any handler."""
        host = _host_name(headers.get("Host", ""))
        if self.hosts is not None and not (_is_safe_name(host) or host in self.hosts):
            raise HttpRefusal(
                403,
                "the Host header names a host that is not served here: set the router's --allowed-hosts to "
                "the name that clients dial, as where its certificate has that name; addresses always pass",
                code="host_not_allowed",
            )
        origin = headers.get("Origin")
        if origin is not None and not (self.allows_origin(origin) or self._is_own(origin, headers)):
            raise HttpRefusal(
                403,
                "pages of this origin may not call; a router's --cors-origins lists those that may",
                code="origin_not_allowed",
            )

    def _is_own(self, origin: str, headers: Mapping[str, str]) -> bool:
        """Whether the page came from this listener: its origin is the Host, which was judged before."""
        scheme, separator, host = origin.lower().partition("://")
        own = headers.get("Host", "").strip().lower()
        return self.has_pages and bool(separator and own) and scheme in ("http", "https") and host == own

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of this origin may call."""
        return ANY in self.origins or origin.lower() in self.origins

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether a browser asks what a page may send."""
        return method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that answer a preflight request of an allowed origin, beside `cors_headers`."""
        asked = headers.get("Access-Control-Request-Headers", "")
        return {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": asked if _ASKED_HEADERS.fullmatch(asked) else "",
            "Access-Control-Max-Age": str(_PREFLIGHT_S),
        }

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of any answer that let an allowed page read it."""
        if not self.origins:
            return {}
        varies = {"Vary": "Origin"}
        origin = headers.get("Origin")
        if origin is None or not self.allows_origin(origin):
            return varies
        return {**varies, "Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}


def check_body(headers: Mapping[str, str], *, content_type: str) -> None:
    """Raise HttpRefusal for a POST whose body is not JSON in a known encoding.

    `content_type` is the parsed type without parameters.
    """
    if "Content-Type" not in headers or content_type != "application/json":
        raise HttpRefusal(
            415,
            "the body must be JSON: send it with `Content-Type: application/json`",
            code="unsupported_content_type",
            headers={"Accept": "application/json"},
        )
    if headers.get("Content-Encoding", "identity").strip().lower() not in _ENCODINGS:
        raise HttpRefusal(
            415,
            f"the Content-Encoding must be one of {', '.join(_ENCODINGS)}",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": ", ".join(_ENCODINGS)},
        )


def check_form(headers: Mapping[str, str], *, content_type: str) -> None:
    """Raise HttpRefusal for a POST whose body is not a form, uncompressed."""
    if content_type != "multipart/form-data" or "Content-Encoding" in headers:
        raise HttpRefusal(
            415,
            "the body must be a form: send it with `Content-Type: multipart/form-data`, without an encoding",
            code="unsupported_content_type",
            headers={"Accept": "multipart/form-data"},
        )


def _host_name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        address, _, port = host[1:].partition("]")
        return address if not port or port.startswith(":") else host
    return host.partition(":")[0].rstrip(".")


@functools.lru_cache(maxsize=256)
def _is_safe_name(host: str) -> bool:
    """Whether no DNS server decides where the name leads. A request without Host is from no browser."""
    if not host or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
