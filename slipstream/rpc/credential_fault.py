"""Failed calls whose cause is a credential: the secret, a certificate, or TLS at one end only. Pure."""

from __future__ import annotations

import re

import grpc

# gRPC's words for a handshake that fails here, with BoringSSL's reason.
_HANDSHAKE = re.compile(r"handshake failed.*?OPENSSL_internal:(?P<reason>\w+)", re.IGNORECASE | re.DOTALL)
_CAUSES = {
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate has expired, has another name, or is not signed by an authority in --tls-ca here"
    ),
    "WRONG_VERSION_NUMBER": "it serves without TLS, and --tls-certificate is set here",
}
# gRPC's words for a valid certificate of another host.
_OTHER_NAME = "Hostname Verification Check failed"
_NAME_HINT = "its certificate has another name: --tls-server-name, or server_name of TlsFiles, states it"
_CLOSED_HINT = (
    "the port may speak TLS: give --tls-ca, --tls-certificate and --tls-key, or TlsFiles in the SDK; or it "
    "refuses the certificate that is given: with --tls-client-ca a router takes certificates of one CA at "
    "its port for clients (--endpoint), and of another at its admin port (--router)"
)
# gRPC's words for a port that answers by HTTP/1, and for one whose TLS agrees on no HTTP/2.
_HTTP_PORT = ("Trying to connect an http1.x server", "missing selected ALPN property")
_HTTP_PORT_HINT = (
    "this is a port for HTTP, and gRPC has others: of a router, --listen is for clients (--endpoint, the "
    "SDK), --admin for operators (--router)"
)
_NO_TLS = "WRONG_VERSION_NUMBER"
_NO_TLS_HINT = (
    "the port is without TLS: leave --tls-ca, --tls-certificate and --tls-key, or tls= in the SDK, out; or "
    "it is another port than the one that is meant"
)
# How a connection ends whose handshake fails at the other end.
_CLOSED = ("Socket closed", "Connection reset by peer")


def credential_fault(error: grpc.aio.AioRpcError) -> str | None:
    """Which credential the peer or this process does not accept; None where the cause is another one."""
    details = error.details() or ""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return f"it refuses this process: {details}"
    if error.code() is grpc.StatusCode.UNAVAILABLE and _OTHER_NAME in details:
        return f"the TLS handshake fails: {_NAME_HINT}"
    match = _HANDSHAKE.search(details) if error.code() is grpc.StatusCode.UNAVAILABLE else None
    if match is None:
        return None
    return f"the TLS handshake fails ({match['reason']}): {_CAUSES.get(match['reason'], 'see its log')}"


def lasting_fault(error: grpc.aio.AioRpcError) -> str:
    """Why a peer that is announced does not answer for long: a hint where the cause may be TLS."""
    return with_tls_hint(error.details() or error.code().name)


def is_http_port(details: str) -> bool:
    """Whether gRPC's text about a failed connection says that an HTTP server listens there."""
    return any(words in details for words in _HTTP_PORT)


def with_tls_hint(details: str) -> str:
    """The text of gRPC about a failed connection, with a hint at TLS or at a port for HTTP."""
    if _OTHER_NAME in details:
        return f"{details}: {_NAME_HINT}"
    if is_http_port(details):
        return f"{_HTTP_PORT_HINT} ({details})"
    if _NO_TLS in details:
        return f"{_NO_TLS_HINT} ({details})"
    if any(words in details for words in _CLOSED):
        return f"{details}: {_CLOSED_HINT}"
    return details
