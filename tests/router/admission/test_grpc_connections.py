"""A tenant has its share of a router's gRPC connections; gRPC closes those beyond it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.router import ports
from services.router.admission import accepted_sockets, grpc_connections
from services.router.admission.accepted_sockets import AcceptedSockets
from services.router.admission.grpc_connections import GrpcConnections
from services.router.request.model_card import ModelCard
from slipstream.errors import Overloaded
from slipstream.rpc.hosts import host_of
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

_ESTABLISHED = "01"


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_connection_counts_until_grpc_has_closed_it() -> None:
    clock = _Clock()
    connections = GrpcConnections(clock=clock, most_tenant=1, closed_after_s=9)
    connections.begin_call("first", "a")
    connections.begin_call("first", "a")
    connections.end_call("first")
    clock.now_s = 100
    with pytest.raises(Overloaded, match="this tenant has 1 connections"):
        connections.begin_call("second", "a")
    connections.begin_call("third", "b")
    connections.end_call("first")
    clock.now_s = 108
    with pytest.raises(Overloaded):
        connections.begin_call("second", "a")
    clock.now_s = 109
    connections.begin_call("second", "a")


def test_a_call_on_an_idle_connection_keeps_it_counted() -> None:
    clock = _Clock()
    connections = GrpcConnections(clock=clock, most_tenant=2, closed_after_s=9)
    for peer in ("first", "second"):
        connections.begin_call(peer, "a")
        connections.end_call(peer)
        clock.now_s += 5
    connections.begin_call("first", "a")  # 10 s after its last call; it was forgotten, and gets a new place
    with pytest.raises(Overloaded):
        connections.begin_call("third", "a")
    clock.now_s = 14
    connections.begin_call("third", "a")


def test_nothing_is_kept_of_refused_calls_and_closed_connections() -> None:
    clock = _Clock()
    connections = GrpcConnections(clock=clock, most_tenant=2, closed_after_s=9)
    for index in range(50):
        with contextlib.suppress(Overloaded):
            connections.begin_call(f"peer-{index}", "a")
            connections.end_call(f"peer-{index}")
    assert connections.shares.tenants["a"] == len(connections._connections) == 2
    clock.now_s = 9
    connections.begin_call("other", "b")
    assert dict(connections.shares.tenants) == {"b": 1}


def test_an_address_has_its_share_of_connections_without_a_key_and_keeps_the_oldest() -> None:
    connections = GrpcConnections(clock=_Clock(), most_address=2)
    first, second, third = (("10.0.0.7", port) for port in (1, 2, 3))
    other, mine = ("10.0.0.8", 1), ("127.0.0.1", 1)
    assert not connections.keyless_excess([second, first, other, mine])
    assert connections.keyless_excess([third, first, second, other]) == {third}
    connections.begin_call("ipv4:10.0.0.7:2", "a")
    assert not connections.keyless_excess([third, first, second])
    assert connections.keyless_excess([first, ("10.0.0.7", 4), third]) == {("10.0.0.7", 4)}


def test_a_loopback_address_has_no_bound_of_connections_without_a_key() -> None:
    connections = GrpcConnections(clock=_Clock(), most_address=1)
    assert not connections.keyless_excess([(host, port) for host in ("127.0.0.1", "::1") for port in (1, 2)])


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50000", ("10.0.0.7", 50000)),
        ("ipv6:%5B::1%5D:50000", ("::1", 50000)),
        ("ipv6:[2001:db8::1]:50000", ("2001:db8::1", 50000)),
        ("ipv6:%5B::ffff:10.0.0.7%5D:50000", ("10.0.0.7", 50000)),
        ("ipv6:%5Bfe80::1%252%5D:50000", ("fe80::1", 50000)),
        ("unix:/tmp/x", ("", 0)),
    ],
)
def test_the_address_of_a_peer_is_that_of_its_socket(peer: str, address: tuple[str, int]) -> None:
    assert accepted_sockets.address_of(peer) == address


def test_connections_are_seen_and_ended_while_no_file_can_be_opened() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with (
            socket.create_connection(address, timeout=60) as client,
            server.accept()[0] as accepted,
            contextlib.closing(AcceptedSockets(f"127.0.0.1:{address[1]}")) as sockets,
        ):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, accepted.fileno() + 1), limits[1]))
                with contextlib.suppress(OSError):
                    while True:
                        held.append(os.dup(client.fileno()))
                assert accepted_sockets.n_files() >= 256
                assert sockets.clients() == [client.getsockname()]
                sockets.shut_down([client.getsockname()])
                assert not client.recv(1)
            finally:
                for descriptor in held:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class _Listeners:
    """Two listeners with one port at two addresses, and a client of each."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        grpc_listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = grpc_listener.getsockname()[1]
        http_listener = stack.enter_context(socket.create_server(("127.0.0.2", self.port)))
        self.clients, self.accepted = [], []
        for listener in (grpc_listener, http_listener):
            client = socket.create_connection(listener.getsockname(), timeout=60)
            self.clients.append(stack.enter_context(client))
            self.accepted.append(stack.enter_context(listener.accept()[0]))
        self.names = [client.getsockname() for client in self.clients]

    def has_ended(self, index: int) -> bool:
        """Whether the client reads the end of its connection; else it reads what it is sent."""
        with contextlib.suppress(OSError):
            self.accepted[index].send(b"x")
        return not self.clients[index].recv(1)


def test_connections_to_another_address_with_the_same_port_are_left_alone() -> None:
    with contextlib.ExitStack() as stack:
        both = _Listeners(stack)
        mine = stack.enter_context(contextlib.closing(AcceptedSockets(f"127.0.0.1:{both.port}")))
        every = stack.enter_context(contextlib.closing(AcceptedSockets(f"0.0.0.0:{both.port}")))
        assert mine.clients() == both.names[:1]
        assert set(every.clients()) == set(both.names)
        mine.shut_down(both.names)
        assert [both.has_ended(0), both.has_ended(1)] == [True, False]


def test_a_v4_address_is_known_on_a_socket_for_both_protocols() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        )
        port = listener.getsockname()[1]
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        accepted = stack.enter_context(listener.accept()[0])
        assert accepted.getsockname()[0] == "::ffff:127.0.0.1"
        for host, found in (
            ("127.0.0.1", [client.getsockname()]),
            ("[::]", [client.getsockname()]),
            ("[::1]", []),
        ):
            with contextlib.closing(AcceptedSockets(f"{host}:{port}")) as sockets:
                assert sockets.clients() == found


def test_a_call_that_outlives_the_close_touches_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that stops cancels the wait for the thread, and not the thread."""
    with contextlib.ExitStack() as stack:
        both = _Listeners(stack)
        sockets = AcceptedSockets(f"0.0.0.0:{both.port}")
        client_of, others = AcceptedSockets._client_of, list[int]()

        def close_after(mine: AcceptedSockets, number: int) -> tuple[str, int] | None:
            found = client_of(mine, number)
            if found is not None and not others:
                sockets.close()
                for index in range(2):  # others open files, which take the numbers
                    others.append(os.memfd_create(f"other-{index}"))
                    stack.callback(os.close, others[-1])
            return found

        monkeypatch.setattr(AcceptedSockets, "_client_of", close_after)
        sockets.shut_down(both.names)
        names = [os.readlink(f"/proc/self/fd/{number}").split()[0] for number in others]
        assert names == ["/memfd:other-0", "/memfd:other-1"]
        assert not both.has_ended(0)


@pytest.mark.parametrize("is_before", [True, False], ids=["before the copy", "after the copy"])
def test_a_connection_that_takes_the_number_of_another_one_goes_on(
    is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC closes a connection amid its end, and the kernel gives its number to the next one."""
    copy_file = os.dup2
    with contextlib.ExitStack() as stack:
        both = _Listeners(stack)
        other = os.dup(both.accepted[1].fileno())
        stack.callback(os.close, other)
        sockets = stack.enter_context(contextlib.closing(AcceptedSockets(f"0.0.0.0:{both.port}")))
        number = both.accepted[0].fileno()

        def take_number(source: int, target: int, inheritable: bool = True) -> int:
            if source == number and is_before:
                copy_file(other, number)
            copied = copy_file(source, target, inheritable)
            if source == number and not is_before:
                copy_file(other, number)
            return copied

        monkeypatch.setattr(os, "dup2", take_number)
        sockets.shut_down(both.names[:1])
        monkeypatch.undo()
        assert sockets.clients().count(both.names[1]) == 3  # the number, its copy and the socket
        assert not both.has_ended(1)
        assert both.clients[0].recv(1) == b""


def established(port: int) -> int:
    """The open connections of a local port. gRPC's sockets for IPv4 are among those of IPv6."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return sum(int(row[1].rpartition(":")[2], 16) == port and row[3] == _ESTABLISHED for row in rows)


async def test_calls_on_connections_beyond_the_share_are_refused_and_these_are_closed(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for open_s in (3.0, 12.0, 48.0):  # until a slow machine makes the calls while all connections are open
        monkeypatch.setattr(ports, "GRPC_IDLE_CONNECTION_S", open_s)
        if await are_refused_and_closed(cluster, card, open_s):
            return
    raise AssertionError("each time a connection was idle for too long before the last call")


async def are_refused_and_closed(cluster: FakeCluster, card: ModelCard, open_s: float) -> bool:
    """False where the machine was too slow for the premise: a connection may have been closed as idle."""
    clock = asyncio.get_running_loop().time
    keys = tenant_keys({"key-a": "a", "key-b": "b"})
    async with open_router(cluster, card, keys=keys) as router, contextlib.AsyncExitStack() as stack:
        connections = router._connections
        connections.shares.most_tenant, connections.closed_after_s = 2, open_s

        async def connect(index: int) -> Any:
            channel = grpc.aio.insecure_channel(router.host.endpoint, options=[("n", index)])
            return router_pb2_grpc.RouterServiceStub(await stack.enter_async_context(channel))

        async def code(stub: Any, key: str) -> str:
            try:
                await stub.ListModels(router_pb2.ListModelsRequest(), metadata=(("x-api-key", key),))
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

        stubs, began_s = [await connect(index) for index in range(5)], clock()
        refused = "RESOURCE_EXHAUSTED: this tenant has 2 connections, and may have no more"
        codes = [await code(stub, "key-a") for stub in stubs[:4]] + [await code(stubs[4], "key-b")]
        n_open = established(router.host.port)
        if clock() - began_s >= open_s:
            return False
        assert codes == ["OK", "OK", refused, refused, "OK"]
        assert n_open >= 5  # another test's client may still look for an older server
        async with asyncio.timeout(
            60 + 2 * open_s
        ):  # each reading costs as much as all connections of the machine
            while established(router.host.port):
                await asyncio.sleep(0.2)
        async with asyncio.timeout(60):  # the share comes back with the closed connections
            while await code(stubs[3], "key-a") == refused:
                await asyncio.sleep(0.05)
    return True


async def test_connections_of_an_address_beyond_its_share_end_unless_they_have_shown_a_key(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another machine: of a loopback address there may be any number."""
    monkeypatch.setattr(grpc_connections, "is_loopback", lambda host: False)
    monkeypatch.setattr(ports, "GRPC_IDLE_CONNECTION_S", 600)
    keys = tenant_keys({"key-a": "a"})
    async with open_router(cluster, card, keys=keys) as router, contextlib.AsyncExitStack() as stack:
        router._connections.most_address = 2
        host, port = host_of(router.host.endpoint), router.host.port
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(router.host.endpoint, options=[("n", index)])
            )
            for index in range(3)
        ]
        for channel in channels:  # three with a key
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            await stub.ListModels(router_pb2.ListModelsRequest(), metadata=(("x-api-key", "key-a"),))
        keyless = [await asyncio.open_connection(host, port) for _ in range(5)]
        refused = "slipstream_grpc_connections_refused_total"
        await eventually(lambda: router.counters.snapshot().get(refused, 0) == 3)
        await eventually(lambda: established(port) == 5)
        for channel in channels:
            assert channel.get_state() == grpc.ChannelConnectivity.READY
        for _, writer in keyless:
            writer.close()


async def test_without_keys_there_is_no_share(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router, contextlib.AsyncExitStack() as stack:
        router._connections.shares.most_tenant = 1
        for index in range(3):
            channel = grpc.aio.insecure_channel(router.host.endpoint, options=[("n", index)])
            stub: Any = router_pb2_grpc.RouterServiceStub(await stack.enter_async_context(channel))
            await stub.ListModels(router_pb2.ListModelsRequest())
