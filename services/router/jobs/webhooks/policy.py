"""Where webhooks may go: the hosts and ports that the operator allows, and their addresses. Pure."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from libs.common import job_bounds
from services.router.jobs.types import Webhook

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Target = tuple[str, int]  # a host and a port
_MAX_URL_CHARS = 2048
SCHEME_PORTS = {"https": 443, "http": 80}
# NAME or [IPv6], with a port. A bare IPv6 address has colons, too, and no port.
_WITH_PORT = re.compile(r"(\[[^][]+\]|[^:]+):([0-9]{1,5})")
_BRACKETS = re.compile(r"^\[(.*)\]$")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
# A local NAT64 (RFC 8215), mapped and compatible IPv4, 6to4, Teredo.
_TRANSLATED = tuple(
    map(ipaddress.IPv6Network, ("64:ff9b:1::/48", "::ffff:0:0/96", "::/96", "2002::/16", "2001::/32"))
)
_SECRET_BYTES = (24, 64)
_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True)
class WebhookHosts:
    """The targets of --webhook-hosts, each with the networks of its addresses; None = any public address."""

    networks: Mapping[Target, Sequence[Network | None]]

    def check(self, hook: Webhook, field: str) -> None:
        """Raises InvalidArgument for a URL or a secret that is not taken."""
        reason = self._reason(hook.url) or _secret_fault(hook.secret)
        if reason:
            raise job_bounds.WEBHOOK.refused(field, reason=reason)

    def allows(self, target: Target, address: str) -> bool:
        """Whether this address, which the target's name came to, may be dialled at its port."""
        found = ipaddress.ip_address(address)
        plain = getattr(found, "ipv4_mapped", None) or found
        networks = self.networks.get(target, ())
        return any(is_public(found) if each is None else plain in each for each in networks)

    def names(self, url: str) -> bool:
        """Whether the host and the port of this URL are allowed."""
        return not self._reason(url)

    def _reason(self, url: str) -> str:
        """Why the URL is refused; empty if it is not."""
        if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable():
            return f"url must have at most {_MAX_URL_CHARS} printable ASCII characters"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return "url must be a URL"
        if parts.scheme not in SCHEME_PORTS or not parts.hostname:
            return "url must begin with https:// or http:// and a host"
        if parts.username is not None or parts.password is not None or parts.fragment:
            return "url must have no user and no fragment"
        if not any(parts.hostname == host for host, _ in self.networks):
            return "url must name a host that the router's operator allows (--webhook-hosts)"
        port = SCHEME_PORTS[parts.scheme] if port is None else port
        if (parts.hostname, port) not in self.networks:
            return f"url must have a port that the router's operator allows: {port} is none (--webhook-hosts)"
        return ""


def is_public(address: Address) -> bool:
    """Whether packets to it leave for the Internet, through translators of addresses, too.

    A NAT64 sends to the IPv4 address that the last 32 bits are. Of mapped, 6to4 and Teredo addresses, none
    is dialled: they may reach any IPv4 address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        elif any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not address.is_multicast


def parse_webhook_hosts(text: str) -> WebhookHosts:
    """`NAME[:PORT][@NETWORK][,..]`; an address stands for itself. Raises ValueError with the reason.

    A name without a port has those of https and http. The entries of one target add up.
    """
    networks: dict[Target, tuple[Network | None, ...]] = {}
    for item in filter(None, text.split(",")):
        target, _, network = item.partition("@")
        name, ports = _name_and_ports(target.lower())
        if not name or not ports or any(c in "/@?#[]" or c.isspace() for c in name):
            raise ValueError(f"{item!r} is not NAME[:PORT] or NAME[:PORT]@NETWORK")
        found = ipaddress.ip_network(network) if network else _own_network(name)
        for port in ports:
            networks[name, port] = (*networks.get((name, port), ()), found)
    return WebhookHosts(networks)


def _name_and_ports(target: str) -> tuple[str, Sequence[int]]:
    """The name without brackets, and its ports; none for a number that is no port."""
    stated = _WITH_PORT.fullmatch(target)
    if stated is not None:
        port = int(stated[2])
        return _BRACKETS.sub(r"\1", stated[1]), (port,) if 0 < port < 1 << 16 else ()
    name = _BRACKETS.sub(r"\1", target)
    if ":" in name and _own_network(name) is None:
        return name, ()
    return name, tuple(SCHEME_PORTS.values())


def _own_network(name: str) -> Network | None:
    try:
        return ipaddress.ip_network(name)
    except ValueError:
        return None


def signing_key(secret: str) -> bytes:
    """The bytes of `whsec_...`. Raises ValueError."""
    if not secret.startswith(_SECRET_PREFIX):
        raise ValueError("no prefix")
    return base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)


def _secret_fault(secret: str) -> str:
    least, most = _SECRET_BYTES
    reason = f"secret must be {_SECRET_PREFIX} and base64 of {least} to {most} bytes"
    try:
        return "" if least <= len(signing_key(secret)) <= most else reason
    except (ValueError, binascii.Error):
        return reason


def first_allowed(hosts: WebhookHosts, target: Target, addresses: Sequence[str]) -> str:
    """The address to dial; empty if any of them is not allowed, as a name that is rebound has both."""
    return addresses[0] if addresses and all(hosts.allows(target, each) for each in addresses) else ""
