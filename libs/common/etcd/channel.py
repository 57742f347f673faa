"""The gRPC channel to an etcd cluster: its target, options and credentials."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.credentials.bounded_file import read_bounded
from slipstream.credentials.certificates import check_authority, check_pair
from slipstream.errors import InvalidArgument
from slipstream.rpc.dial import NO_RETRIES
from slipstream.rpc.hosts import host_of
from slipstream.rpc.tls import FilesVersion, files_version

# etcd ends a connection with GOAWAY too_many_pings if pings arrive more often than every 5 s. The health
# check of connection.py detects silence sooner.
_KEEPALIVE_MS = 6_000
CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 3_000),
    # gRPC uses this value for an unanswered ping (dial.py).
    ("grpc.http2.ping_timeout_ms", 3_000),
    # etcd counts a ping beside no call as too many. A connection in use has the calls of probes; one that was
    # replaced lingers without any, and etcd's refusal would halve the pings of its address.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the limit of one connection attempt: a stopped etcd accepts a connection and then sends nothing.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_500),
    # Channels must not share the back-off state of a dead member.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    # The name of a member that starts again elsewhere has another address soon.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    NO_RETRIES,
    ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
]


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """The CA of etcd's certificate, and our own certificate and key where etcd asks for them (PEM)."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def version(self) -> FilesVersion | None:
        """Changes when a file is replaced or written; None while one is missing."""
        return files_version(self.ca, self.certificate, self.key)

    def check(self) -> None:
        """Raises TlsFault for files that are not PEM, or a key of another certificate."""
        check_authority(self.ca)
        if self.certificate is not None and self.key is not None:
            check_pair(self.certificate, self.key)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials from the files as they are now. Raises InvalidArgument for one that cannot be read."""
        try:
            ca = read_bounded(self.ca)
            if self.certificate is None or self.key is None:
                return grpc.ssl_channel_credentials(ca)
            return grpc.ssl_channel_credentials(ca, read_bounded(self.key), read_bounded(self.certificate))
        except OSError as error:
            raise InvalidArgument("etcd", f"{error.filename} cannot be read: {error.strerror}") from None


def channel_target(endpoints: Sequence[str]) -> str:
    """gRPC's target for the endpoints: one "host:port", or several "address:port" tried in turn.

    One channel takes only one host name. A cluster has one DNS name for all its addresses.
    """
    hosts = [host_of(endpoint) for endpoint in endpoints]
    if not endpoints or not all(hosts):
        raise InvalidArgument("etcd", f"endpoints must be host:port, not {list(endpoints)}")
    try:
        versions = {ipaddress.ip_address(host).version for host in hosts}
    except ValueError:
        if len(endpoints) == 1:
            return f"dns:///{endpoints[0]}"
        raise InvalidArgument("etcd", "give one DNS name, or IP addresses only") from None
    if len(versions) > 1:
        raise InvalidArgument("etcd", "IPv4 and IPv6 endpoints cannot be mixed")
    return f"ipv{versions.pop()}:{','.join(endpoints)}"


def open_channel(target: str, tls: EtcdTls | None, *, host: str) -> grpc.aio.Channel:
    """Open a channel. `host` is the name in the certificate, because an ipv4: target has none."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, ("grpc.default_authority", host)]
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)
