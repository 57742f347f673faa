"""The one way to open a gRPC channel: keepalive, size limits, fast reconnect, mTLS or tokens when configured.

The server's side of the agreement is in `libs/common/rpc/serve.py`: it pings at a slower pace, and takes any
number of pings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from slipstream.rpc.audience import audience_of
from slipstream.rpc.backoff import CHANNEL_PAUSE_MS, PING_ANSWER_S, PING_S
from slipstream.rpc.names import is_name
from slipstream.rpc.tls import FilesVersion, TlsFiles
from slipstream.rpc.token_channel import CallMetadata, TokenChannel

# gRPC's transparent retries repeat a call that the peer did not process. On a connection whose first frame
# is GOAWAY, as of a worker that stops, they repeat it without a pause until the call's deadline, at 200 MB/s
# and more. Callers retry by their own policies.
NO_RETRIES = ("grpc.enable_retries", 0)
# Prompts travel as packed bytes: 256k tokens are 1 MiB. KV never travels in protobuf.
MAX_MESSAGE_BYTES = 32 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", int(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1000)),
    # The limit for an unanswered ping; without it a dead connection is closed after a minute.
    ("grpc.http2.ping_timeout_ms", int(PING_ANSWER_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", CHANNEL_PAUSE_MS[0]),
    # The time of one attempt to connect, handshakes included: a busy peer takes more than the first pause.
    ("grpc.min_reconnect_backoff_ms", CHANNEL_PAUSE_MS[1]),
    ("grpc.max_reconnect_backoff_ms", CHANNEL_PAUSE_MS[1]),
    # Back-off state of a dead peer must not leak into another channel of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # A name that moves to another address, as of a pod that starts again, is asked for after a failure.
    ("grpc.dns_min_time_between_resolutions_ms", CHANNEL_PAUSE_MS[1]),
    ("grpc.enable_http_proxy", 0),
    NO_RETRIES,
]


class Credentials(Protocol):
    """The credentials of a caller: tokens of a process (TokenMinter), or an API key."""

    def tokens_for(self, endpoint: str) -> CallMetadata:
        """The tokens of calls to the server at the endpoint."""
        ...


# Opens a channel to one process.
OpenChannel = Callable[[str], grpc.aio.Channel]


def dial(
    endpoint: str, *, tls: TlsFiles | None = None, tokens: Credentials | None = None
) -> grpc.aio.Channel:
    """A channel to `endpoint` ("host:port"). Lazy: connects at the first call. The caller closes it.

    `tokens`: the calls carry those for this endpoint, where certificates do not say who calls.
    """
    if tls is not None:
        target = _target_of(endpoint)
        channel = grpc.aio.secure_channel(target, tls.channel_credentials(), options=tls_options(tls))
    else:
        # Without a certificate the address alone says who answers: dial the one that the tokens name.
        named = endpoint if tokens is None else audience_of(endpoint) or endpoint
        channel = grpc.aio.insecure_channel(_target_of(named), options=CHANNEL_OPTIONS)
    return channel if tokens is None else TokenChannel(channel, tokens.tokens_for(endpoint))


def _target_of(endpoint: str) -> str:
    """The endpoint as gRPC's target: to gRPC "unix:7000" alone is a file, and "dns:7000" the host 7000."""
    return f"dns:///{endpoint}" if audience_of(endpoint) and is_name(endpoint) else endpoint


def tls_options(tls: TlsFiles) -> list[tuple[str, int | str]]:
    """CHANNEL_OPTIONS, with the name that the server's certificate must have."""
    # Certificates of pods cannot have their addresses, which are made later.
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return [*CHANNEL_OPTIONS, *named]


@dataclass(frozen=True, slots=True)
class Dial:
    """Opens channels with the credentials of this process, and knows when these change."""

    tls: TlsFiles | None = None
    tokens: Credentials | None = None

    def __call__(self, endpoint: str) -> grpc.aio.Channel:
        """A channel to "host:port" with the files as they are now."""
        return dial(endpoint, tls=self.tls, tokens=self.tokens)

    def files_version(self) -> FilesVersion | None:
        """Changes when a file of the certificate does; None without files, and while one is missing."""
        return self.tls.version() if self.tls is not None else None


# Of processes without credentials.
PLAIN_DIAL = Dial()
