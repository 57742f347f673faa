"""Callers and their rights: the rule of one port, and the interceptor that enforces it on every call.

    access = AccessControl(secret=secret, has_peer_certificates=tls is not None)
    ServiceHost(listen, access=access)

The rule reads metadata only: a refused call costs its headers, because no message of it is read.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from libs.common.rpc.access_table import METHOD_CLASSES
from libs.common.rpc.single_request import refusing_handler
from libs.common.runtime.process_settings import ServiceSettings
from libs.common.telemetry.paced_warnings import PacedWarnings
from slipstream import errors
from slipstream.rpc.audience import server_audiences
from slipstream.rpc.caller_class import ANONYMOUS, CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.hosts import host_of, is_loopback
from slipstream.rpc.peer_token import TOKEN_HEADER, TokenVerifier, claimed_caller
from slipstream.rpc.rpc_errors import to_status

log = logging.getLogger(__name__)

# The common name of an operator's certificate; all others of the peers' CA are peers.
OPERATOR_NAME = "slipstream-operator"
_FLAGS = "--cluster-secret-file, or --tls-ca, --tls-certificate and --tls-key"

# Gets the metadata, the method and the error of each refused call. Returns the answer's trailing metadata.
Metadata = tuple[tuple[str, str | bytes], ...]
OnRefused = Callable[[Iterable[tuple[str, Any]], str, errors.SlipstreamError], Metadata]

_caller: contextvars.ContextVar[CallerIdentity] = contextvars.ContextVar("caller", default=ANONYMOUS)


class KeyClasses(Protocol):
    """Knows API keys. The router has one; the other services have no keys."""

    @property
    def open(self) -> bool:
        """Whether no keys are configured: then every caller is a tenant."""

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers carry a key, right or wrong."""

    def caller_of(self, headers: Mapping[str, str], *, over_http: bool = False) -> CallerIdentity:
        """The class, name and tenant of the key in headers with lower-case names. Raises Unauthenticated.

        Where no keys are configured, it is the default tenant. `over_http`: the error says how HTTP sends it.
        """


class AccessControl:
    """The rule of one port. Without a secret, certificates and keys it admits every caller."""

    def __init__(
        self,
        *,
        secret: ClusterSecret | None = None,
        has_peer_certificates: bool = False,
        keys: KeyClasses | None = None,
        public_methods: Collection[str] = (),
        needs_key: bool = False,
    ) -> None:
        """`has_peer_certificates`: each connection of the port presents a certificate of the peers' CA.
        `public_methods`: full names of methods that need no credential at this port, whatever their class.
        `needs_key`: where keys are configured, a caller without any other credential needs one."""
        self._verifier = TokenVerifier(secret) if secret is not None else None
        self.has_peer_certificates = has_peer_certificates
        self._keys = keys
        self._needs_key = needs_key
        self.public_methods = frozenset(public_methods)
        self._audiences: frozenset[str] = frozenset()
        self._warnings = PacedWarnings(log)

    def answer_to(self, bound: str, names: Iterable[str] = ()) -> None:
        """Accept tokens for the bound endpoint of the port, and for the further ones by which others dial it.

        Before this call no token is accepted.
        """
        self._audiences = server_audiences(bound, names)

    @property
    def is_open(self) -> bool:
        """Whether calls of peers and operators need no credential."""
        return self._verifier is None and not self.has_peer_certificates

    def class_of(self, method: str) -> CallerClass:
        """The class of callers that may call the method at this port."""
        if method in self.public_methods:
            return CallerClass.PUBLIC
        return METHOD_CLASSES.get(method, CallerClass.OPERATOR)

    def admit(
        self, needed: CallerClass, metadata: Iterable[tuple[str, Any]], *, over_http: bool = False
    ) -> CallerIdentity:
        """The caller. Raises Unauthenticated without a credential, PermissionDenied for the wrong class.

        A certificate counts as a peer's here; the interceptor then looks whether it is an operator's.
        """
        if needed is CallerClass.PUBLIC:
            return ANONYMOUS
        caller = self._caller_of(needed, metadata, over_http=over_http)
        if not needed.admits(caller.kind) and not self._may_be_certificate(needed, caller):
            raise errors.PermissionDenied(
                f"this call is for class {needed}, and the caller's is {caller.kind}"
            )
        return caller

    def _caller_of(
        self, needed: CallerClass, metadata: Iterable[tuple[str, Any]], *, over_http: bool
    ) -> CallerIdentity:
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        token = headers.get(TOKEN_HEADER)
        if token is not None and self._verifier is not None:
            return self._caller_by_token(needed, token, self._verifier)
        keys = self._keys
        if keys is not None and (needed is CallerClass.TENANT or (not keys.open and keys.has_key(headers))):
            return keys.caller_of(headers, over_http=over_http)
        if self.has_peer_certificates:
            return CallerIdentity(CallerClass.PEER)
        if self.is_open and (keys is None or keys.open or not self._needs_key):
            return CallerIdentity(needed)
        if needed is CallerClass.PEER:
            self._warnings.warn("", "refuses callers without a token: they lack --cluster-secret-file")
        hint = ": send an API key as `Authorization: Bearer KEY`" if over_http and keys is not None else ""
        raise errors.Unauthenticated(f"a credential of class {needed} is needed{hint}")

    def _caller_by_token(self, needed: CallerClass, token: str, verifier: TokenVerifier) -> CallerIdentity:
        try:
            verified = verifier.verify(token)
            if verified.audience in self._audiences:
                return verified.caller
            if self.has_peer_certificates and needed is CallerClass.PEER:
                return CallerIdentity(CallerClass.PEER)  # the certificate says so, whatever the name
            raise errors.Unauthenticated(
                f"the token is for {verified.audience or 'no server'}, and this one answers to "
                f"{', '.join(sorted(self._audiences)) or 'none'} (--listen, --advertise, --server-names)"
            )
        except errors.Unauthenticated as error:
            claimed = claimed_caller(token)
            self._warnings.warn(claimed, f"refuses {claimed} (as it names itself): {error.message}")
            raise

    def _may_be_certificate(self, needed: CallerClass, caller: CallerIdentity) -> bool:
        return (
            self.has_peer_certificates
            and needed is CallerClass.OPERATOR
            and caller == CallerIdentity(CallerClass.PEER)
        )


def access_of(settings: ServiceSettings) -> AccessControl:
    """The rule for callers of a service behind the router. Raises InvalidArgument."""
    return AccessControl(secret=settings.cluster_secret(), has_peer_certificates=settings.tls() is not None)


def check_address(listen: str, *, is_open: bool, flag: str = "--listen", needed: str = _FLAGS) -> None:
    """Warn of an open port on a loopback address. Raises InvalidArgument for one elsewhere."""
    if not is_open:
        return
    if not is_loopback(host_of(listen)):
        raise errors.InvalidArgument(
            flag, f"{listen} is not a loopback address, and anyone could call: it needs {needed}"
        )
    _warn_open()


@functools.cache
def _warn_open() -> None:
    """Once in a process."""
    log.warning("every process of this machine may call, peer or not; this process lacks %s", _FLAGS)


def ignore_refusal(
    metadata: Iterable[tuple[str, Any]], method: str, error: errors.SlipstreamError
) -> Metadata:
    """Note nothing."""
    return ()


def current_caller() -> CallerIdentity:
    """The caller of the call that this task handles."""
    return _caller.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls by the table before anything of them is read."""

    def __init__(
        self,
        access: AccessControl,
        on_refused: OnRefused = ignore_refusal,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._access = access
        self._on_refused = on_refused
        self._on_call = on_call
        self._guarded: dict[str, tuple[Any, Any]] = {}  # by method: its handler, and that guarded

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata or ()
        self._on_call()
        try:
            needed = self._access.class_of(method)
            caller = self._access.admit(needed, metadata)
        except errors.SlipstreamError as error:
            if await continuation(handler_call_details) is None:
                return self._note_unknown(metadata, method)  # whatever the credential
            return refusing_handler(error, self._on_refused(metadata, method, error))
        if caller is not ANONYMOUS:
            _caller.set(caller)
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._note_unknown(metadata, method)
        if needed.admits(caller.kind):
            return handler
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = (handler, _with_operator_certificate(handler))
        return known[1]

    def _note_unknown(self, metadata: Iterable[tuple[str, Any]], method: str) -> None:
        self._on_refused(metadata, method, UnknownMethod("the method does not exist"))


class UnknownMethod(errors.SlipstreamError):
    """The port has no such method. gRPC answers so by itself."""

    code = "UNIMPLEMENTED"


def _with_operator_certificate(handler: Any) -> Any:
    """The handler, for connections with an operator's certificate only."""
    shape = next(
        name
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        if getattr(handler, name) is not None
    )
    inner = getattr(handler, shape)

    async def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
        names = (context.auth_context() or {}).get("x509_common_name", ())
        if OPERATOR_NAME.encode() not in names:
            error = errors.PermissionDenied(f"this call needs a certificate with the name {OPERATOR_NAME}")
            await context.abort_with_status(to_status(error))
        _caller.set(CallerIdentity(CallerClass.OPERATOR, "certificate"))

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await check(context)
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                yield response

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await check(context)
        return await inner(request, context)

    make = getattr(grpc, f"{shape}_rpc_method_handler")
    wrapped = stream if inspect.isasyncgenfunction(inner) else call
    return make(wrapped, handler.request_deserializer, handler.response_serializer)
