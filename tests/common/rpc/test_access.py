"""Who is admitted to a port, and what a refusal costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.rpc import access as access_module
from libs.common.rpc.access import AccessControl, current_caller
from libs.common.rpc.serve import ServiceHost
from slipstream.errors import InvalidArgument, PermissionDenied, Unauthenticated
from slipstream.rpc.caller_class import CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial, dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2

SECRET = ClusterSecret(b"the secret of this cluster")
OTHER = ClusterSecret(b"the secret of another one")
DRAIN = "/slipstream.v1.WorkerService/Drain"
STATUS = "/slipstream.v1.WorkerService/GetStatus"
PEER, OPERATOR, TENANT = CallerClass.PEER, CallerClass.OPERATOR, CallerClass.TENANT


class Keys:
    """One key of a tenant, and one of an operator."""

    open = False
    _callers: Mapping[str, CallerIdentity] = {
        "Bearer good": CallerIdentity(TENANT, "anna"),
        "Bearer root": CallerIdentity(OPERATOR, "ops"),
    }

    def has_key(self, headers: Mapping[str, str]) -> bool:
        return "authorization" in headers

    def caller_of(self, headers: Mapping[str, str]) -> CallerIdentity:
        caller = self._callers.get(headers.get("authorization", ""))
        if caller is None:
            raise Unauthenticated("an API key is needed")
        return caller


def token(kind: CallerClass = PEER, secret: ClusterSecret = SECRET) -> tuple[tuple[str, str], ...]:
    return TokenMinter(secret, "decode-0", kind).metadata()


def admitted(access: AccessControl, needed: CallerClass, *metadata: tuple[str, str]) -> str:
    """The caller, or the name of the refusal."""
    try:
        return str(access.admit(needed, metadata))
    except (Unauthenticated, PermissionDenied) as refusal:
        return type(refusal).__name__


def test_a_secret_asks_for_tokens() -> None:
    access = AccessControl(secret=SECRET, keys=Keys())
    good = ("authorization", "Bearer good")
    assert admitted(access, PEER, *token()) == "peer decode-0"
    assert admitted(access, PEER, *token(OPERATOR)) == "operator decode-0"
    assert admitted(access, OPERATOR, *token()) == "PermissionDenied"
    assert admitted(access, TENANT, *token()) == "PermissionDenied"
    assert admitted(access, PEER, *token(secret=OTHER)) == "Unauthenticated"
    assert admitted(access, PEER) == admitted(access, TENANT) == "Unauthenticated"
    assert admitted(access, PEER, good) == "PermissionDenied"
    assert admitted(access, TENANT, good) == "tenant anna"
    root = ("authorization", "Bearer root")
    assert admitted(access, OPERATOR, root) == admitted(access, TENANT, root) == "operator ops"
    assert admitted(access, CallerClass.PUBLIC) == "public"


def test_without_a_secret_only_keys_are_asked_for() -> None:
    assert AccessControl().is_open
    assert admitted(AccessControl(), OPERATOR) == "operator"
    assert admitted(AccessControl(keys=Keys()), TENANT) == "Unauthenticated"
    assert admitted(AccessControl(keys=Keys()), OPERATOR) == "operator"


def test_a_certificate_is_a_peers() -> None:
    access = AccessControl(has_peer_certificates=True)
    assert not access.is_open
    assert admitted(access, PEER) == "peer"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:9000", "node-7:9000", ":9000"])
async def test_an_open_port_is_on_loopback(listen: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--admin: .*--cluster-secret-file, or --tls-ca"):
        ServiceHost(listen, flag="--admin")


async def test_an_open_process_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    access_module._warn_open.cache_clear()
    for _ in range(3):
        await ServiceHost("127.0.0.1:0").stop(grace_s=0)
    await ServiceHost("127.0.0.1:0", access=AccessControl(secret=SECRET)).stop(grace_s=0)
    assert [record.levelname for record in caplog.records if "may call" in record.message] == ["WARNING"]


class CountingRequests:
    """A servicer whose deserialiser counts what is read of calls."""

    def __init__(self) -> None:
        self.read: list[bytes] = []
        self.callers: list[str] = []

    def _take(self, data: bytes) -> bytes:
        self.read.append(data)
        return data

    async def _answer(self, request: bytes, context: Any) -> bytes:
        self.callers.append(str(current_caller()))
        return worker_pb2.DrainResponse().SerializeToString()

    def add_to(self, server: grpc.aio.Server) -> None:
        method: Any = grpc.unary_unary_rpc_method_handler(self._answer, request_deserializer=self._take)
        handlers = {"Drain": method, "GetStatus": method, "Unclassified": method}
        generic = grpc.method_handlers_generic_handler("slipstream.v1.WorkerService", handlers)
        server.add_generic_rpc_handlers((generic,))


@asynccontextmanager
async def serving(access: AccessControl) -> AsyncIterator[tuple[CountingRequests, ServiceHost]]:
    servicer, host = CountingRequests(), ServiceHost("127.0.0.1:0", access=access)
    servicer.add_to(host.server)
    await host.start(["slipstream.v1.WorkerService"])
    try:
        yield servicer, host
    finally:
        await host.stop(grace_s=0)


async def code_of(host: ServiceHost, method: str, dial: Dial = dial, data: bytes = b"") -> grpc.StatusCode:
    async with dial(host.endpoint) as channel:
        begin: Any = channel.unary_unary(method)
        call = begin(data, timeout=60)
        try:
            await call
        except grpc.aio.AioRpcError:
            pass
        code: grpc.StatusCode = await call.code()
        return code


def with_token(kind: CallerClass) -> Dial:
    minter = TokenMinter(SECRET, "router-0", kind)
    return lambda endpoint: dial(endpoint, tokens=minter)


async def test_calls_carry_the_token_and_handlers_know_the_caller() -> None:
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        assert await code_of(host, STATUS, with_token(PEER)) is grpc.StatusCode.OK
        assert await code_of(host, DRAIN, with_token(OPERATOR)) is grpc.StatusCode.OK
        assert await code_of(host, DRAIN, with_token(PEER)) is grpc.StatusCode.PERMISSION_DENIED
        assert servicer.callers == ["peer router-0", "operator router-0"]


async def test_a_refused_call_is_not_read() -> None:
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        large = bytes(4 << 20)
        assert await code_of(host, STATUS, data=large) is grpc.StatusCode.UNAUTHENTICATED
        assert not servicer.read
        assert await code_of(host, STATUS, with_token(PEER), large) is grpc.StatusCode.OK
        assert servicer.read == [large]


async def test_a_method_without_a_class_is_for_operators() -> None:
    unknown = "/slipstream.v1.WorkerService/Unclassified"
    async with serving(AccessControl(secret=SECRET)) as (_, host):
        assert await code_of(host, unknown, with_token(PEER)) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(host, unknown, with_token(OPERATOR)) is grpc.StatusCode.OK
