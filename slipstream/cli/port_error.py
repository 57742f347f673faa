"""Why an operator's call to a port fails."""

from __future__ import annotations

import grpc
from grpc_status import rpc_status

from slipstream.errors import SlipstreamError, Unauthenticated, Unavailable
from slipstream.rpc.credential_fault import credential_fault, is_http_port, with_tls_hint
from slipstream.rpc.rpc_errors import from_rpc_error

# Of a process's words for a call without any credential, and the flags that give one.
_NO_CREDENTIAL = "a credential of class"
_CREDENTIALS = "--cluster-secret-file, --api-key, or --tls-ca, --tls-certificate and --tls-key"
_ASK_ADMIN = "of a router, ask the gRPC admin port (--admin; `admin` in cluster.json)"


def port_error(error: grpc.aio.AioRpcError) -> SlipstreamError:
    """Why an operator's call failed: another kind of port, a credential, TLS, or what the process says."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"a port without status: {_ASK_ADMIN}")
    if is_http_port(error.details() or ""):
        return Unavailable(f"a port for HTTP: {_ASK_ADMIN}")
    fault = credential_fault(error)
    if fault is not None:
        return Unauthenticated(f"{fault} ({_CREDENTIALS})" if _NO_CREDENTIAL in fault else fault)
    if error.code() is grpc.StatusCode.CANCELLED and rpc_status.from_call(error) is None:
        return Unavailable("the process ended the call: it stops")
    typed = from_rpc_error(error)
    return Unavailable(with_tls_hint(typed.message)) if isinstance(typed, Unavailable) else typed
