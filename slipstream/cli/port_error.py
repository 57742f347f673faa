"""Why an operator's call to a port fails."""

from __future__ import annotations

import grpc

from slipstream.errors import SlipstreamError, Unauthenticated, Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.credential_fault import credential_fault, is_http_port, with_tls_hint
from slipstream.rpc.rpc_errors import from_rpc_error, status_of

# Of a process's words for a call without a credential that it takes. One with TLS never says so: a connection
# without a certificate fails.
_NO_CREDENTIAL = "a credential of class"
# What gives one, by the class of the call. Only routers know API keys, and they pass calls of operators on.
_PEERS_CREDENTIAL = "--cluster-secret-file; with an operator's API key, ask through --router"
OPERATORS_CREDENTIAL = "--cluster-secret-file, or --api-key of an operator"
CLIENTS_CREDENTIAL = "--api-key of an operator, or --endpoint of a router's port for clients"
_ASK_ADMIN = "of a router, ask the gRPC admin port (--admin; `admin` in cluster.json)"


def port_error(error: grpc.aio.AioRpcError, *, credential: str = OPERATORS_CREDENTIAL) -> SlipstreamError:
    """Why an operator's call failed: another kind of port, a credential, TLS, or what the process says.

    `credential`: the flags of the command that give one for calls of operators.
    """
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"a port without status: {_ASK_ADMIN}")
    if is_http_port(error.details() or ""):
        return Unavailable(f"a port for HTTP: {_ASK_ADMIN}")
    fault = credential_fault(error)
    if fault is not None:
        if _NO_CREDENTIAL in fault:
            is_of_peers = f"{_NO_CREDENTIAL} {CallerClass.PEER}" in fault
            fault = f"{fault} ({_PEERS_CREDENTIAL if is_of_peers else credential})"
        return Unauthenticated(fault)
    if error.code() is grpc.StatusCode.CANCELLED and status_of(error) is None:
        return Unavailable("the process ended the call: it stops")
    typed = from_rpc_error(error)
    return Unavailable(with_tls_hint(typed.message)) if isinstance(typed, Unavailable) else typed
