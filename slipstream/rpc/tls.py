"""Mutual TLS from three PEM files, for both ends of every internal connection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """CA that signs all peers, and this process's certificate and key (PEM)."""

    ca: Path
    certificate: Path
    key: Path

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that require and verify the client's certificate."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials that present our certificate and verify the server's."""
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )
