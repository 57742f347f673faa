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
from slipstream.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from slipstream.rpc.caller_class import CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2

SECRET = ClusterSecret(b"the secret of this cluster")
OTHER = ClusterSecret(b"the secret of another one")
DRAIN = "/slipstream.v1.WorkerService/Drain"
STATUS = "/slipstream.v1.WorkerService/GetStatus"
ENDPOINT = "127.0.0.1:7000"
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

    def caller_of(self, headers: Mapping[str, str], *, over_http: bool = False) -> CallerIdentity:
        caller = self._callers.get(headers.get("authorization", ""))
        if caller is None:
            raise Unauthenticated("an API key is needed")
        return caller


def token(
    kind: CallerClass = PEER, secret: ClusterSecret = SECRET, endpoint: str = ENDPOINT
) -> tuple[tuple[str, str], ...]:
    return TokenMinter(secret, "decode-0", kind).tokens_for(endpoint).metadata()


def admitted(access: AccessControl, needed: CallerClass, *metadata: tuple[str, str]) -> str:
    """The caller, or the name of the refusal."""
    try:
        return str(access.admit(needed, metadata))
    except (Unauthenticated, PermissionDenied) as refusal:
        return type(refusal).__name__


def test_a_secret_asks_for_tokens() -> None:
    access = AccessControl(secret=SECRET, keys=Keys())
    access.answer_to(ENDPOINT)
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


async def code_of(
    host: ServiceHost, method: str, dial: Dial = PLAIN_DIAL, data: bytes = b""
) -> grpc.StatusCode:
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
    return Dial(tokens=TokenMinter(SECRET, "router-0", kind))


async def test_calls_carry_the_token_and_handlers_know_the_caller() -> None:
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        assert await code_of(host, STATUS, with_token(PEER)) is grpc.StatusCode.OK
        assert await code_of(host, DRAIN, with_token(OPERATOR)) is grpc.StatusCode.OK
        assert await code_of(host, DRAIN, with_token(PEER)) is grpc.StatusCode.PERMISSION_DENIED
        assert servicer.callers == ["peer router-0", "operator router-0"]


async def test_a_refused_call_is_not_read() -> None:
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        large = bytes(60 << 10)  # the bound of this method is 64 KiB
        assert await code_of(host, STATUS, data=large) is grpc.StatusCode.UNAUTHENTICATED
        assert not servicer.read
        assert await code_of(host, STATUS, with_token(PEER), large) is grpc.StatusCode.OK
        assert servicer.read == [large]


async def test_a_method_without_a_class_is_for_operators() -> None:
    unknown = "/slipstream.v1.WorkerService/Unclassified"
    async with serving(AccessControl(secret=SECRET)) as (_, host):
        assert await code_of(host, unknown, with_token(PEER)) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(host, unknown, with_token(OPERATOR)) is grpc.StatusCode.OK


NAME = "10.0.0.5:7000"


def test_a_token_counts_at_its_audience_only() -> None:
    one, other = AccessControl(secret=SECRET), AccessControl(secret=SECRET)
    assert admitted(one, PEER, *token()) == "Unauthenticated"  # a port without an endpoint
    one.answer_to(ENDPOINT)
    other.answer_to("127.0.0.1:7001")
    for kind in (PEER, OPERATOR):
        given = token(kind)
        assert admitted(one, PEER, *given) == f"{kind} decode-0"
        assert admitted(other, PEER, *given) == "Unauthenticated"
        assert admitted(one, PEER, *given) == f"{kind} decode-0"  # from the memory of verified tokens
        assert admitted(other, PEER, *given) == "Unauthenticated"
    with pytest.raises(Unauthenticated, match=r"for 127.0.0.1:7000, and this one answers to 127.0.0.1:7001"):
        other.admit(PEER, token())
    assert admitted(one, PEER, *token(endpoint="dns:///elsewhere:1")) == "Unauthenticated"


def test_a_change_of_names_counts_for_verified_tokens_too() -> None:
    access = AccessControl(secret=SECRET)
    access.answer_to("0.0.0.0:7000", [NAME])
    given = token(endpoint=NAME)
    assert admitted(access, PEER, *given) == "peer decode-0"
    assert admitted(access, PEER, *token()) == "Unauthenticated"  # a loopback address of another machine
    access.answer_to("0.0.0.0:7000", ["router-0.svc:7000"])
    assert admitted(access, PEER, *given) == "Unauthenticated"


def test_a_certificate_needs_no_name() -> None:
    access = AccessControl(secret=SECRET, has_peer_certificates=True)
    access.answer_to(ENDPOINT)
    assert admitted(access, PEER, *token(endpoint=NAME)) == "peer"
    assert admitted(access, OPERATOR, *token(OPERATOR, endpoint=NAME)) == "Unauthenticated"
    assert admitted(access, PEER, *token(secret=OTHER)) == "Unauthenticated"


def test_a_refused_process_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    access = AccessControl(secret=SECRET)
    access.answer_to(ENDPOINT)
    texts = []
    for _ in range(20):
        for refused in (token(secret=OTHER), token(endpoint=NAME), ()):
            assert admitted(access, PEER, *refused) == "Unauthenticated"
            texts += [value for _, value in refused]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "refuses peer decode-0" in caplog.text and "--cluster-secret-file differs" in caplog.text
    assert "without a token" in caplog.text
    assert not any(text in caplog.text or text.rpartition(":")[2] in caplog.text for text in texts)


async def test_a_host_answers_to_its_port_and_its_names() -> None:
    access = AccessControl(secret=SECRET)
    host = ServiceHost("0.0.0.0:0", access=access, names=[NAME])
    try:
        assert admitted(access, PEER, *token(endpoint=NAME)) == "peer decode-0"
        assert admitted(access, PEER, *token(endpoint=f"127.0.0.1:{host.port}")) == "Unauthenticated"
    finally:
        await host.stop(grace_s=0)


async def test_a_server_refuses_what_another_one_received() -> None:
    """The fake server announces its own address, and replays what it is given."""
    received: list[tuple[tuple[str, Any], ...]] = []

    class Fake(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            received.append(tuple(details.invocation_metadata))
            return await continuation(details)

    fake = ServiceHost("127.0.0.1:0", interceptors=[Fake()])
    await fake.start(["x"])
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        try:
            await code_of(fake, STATUS, with_token(PEER))
            ((name, stolen),) = [pair for pair in received[0] if pair[0] == "x-slipstream-token"]
            async with PLAIN_DIAL(host.endpoint) as channel:
                begin: Any = channel.unary_unary(STATUS)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await begin(b"", timeout=60, metadata=((name, stolen),))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not servicer.read
            assert await code_of(host, STATUS, with_token(PEER)) is grpc.StatusCode.OK
        finally:
            await fake.stop(grace_s=0)


async def test_localhost_leads_to_no_other_process_of_the_port() -> None:
    """A resolver names ::1 first, where another user may listen at the port of a server on 127.0.0.1."""
    async with serving(AccessControl(secret=SECRET)) as (servicer, host):
        try:
            squatter = ServiceHost(f"[::1]:{host.port}")
        except Unavailable:
            pytest.skip("this machine has no ::1")
        await squatter.start(["x"])
        try:
            async with with_token(PEER)(f"localhost:{host.port}") as channel:
                begin: Any = channel.unary_unary(STATUS)
                await begin(b"", timeout=60)
            assert servicer.callers == ["peer router-0"]
        finally:
            await squatter.stop(grace_s=0)
