"""The socket transport with misbehaving peers, and its server with unauthenticated connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from libs.common.transport import socket_server
from libs.common.transport.base import PeerGone, ReadOp, TransferRefused, TransferTimeout
from libs.common.transport.incarnation_probe import IncarnationProbe, ProbeAddress, greet
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from libs.common.transport.socket_server import MAGIC, REPLY, REQUEST, SERVED, WELCOME
from slipstream.errors import TransferError
from tests.support.defaults import set_default
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.process_checks import eventually

Behave = Callable[[socket.socket], None]


WAIT_S = 60.0


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep slow peers from counting as silent."""
    set_default(monkeypatch, SocketTransport.__init__, "progress_timeout_s", WAIT_S)
    monkeypatch.setattr(socket_server, "HELLO_TIMEOUT_S", WAIT_S)


@pytest.fixture
async def transport() -> AsyncIterator[SocketTransport]:
    opened = SocketTransport()
    yield opened
    await opened.close()


@pytest.fixture
def memory(transport: SocketTransport) -> PageAlignedMemory:
    made = PageAlignedMemory(1 << 20)
    transport.register(made.buffer)
    return made


@contextlib.contextmanager
def misbehaving_peer(behave: Behave) -> Iterator[str]:
    """A server that accepts one reader and one request, and then runs `behave`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(len(MAGIC) + 16, socket.MSG_WAITALL)
                connection.sendall(WELCOME)
                connection.recv(REQUEST.size, socket.MSG_WAITALL)
                behave(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}/{os.urandom(16).hex()}"
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("claimed", [99, 101, 0, 2**64 - 1])
async def test_an_answer_of_another_length_fails_the_read(
    transport: SocketTransport, memory: PageAlignedMemory, claimed: int
) -> None:
    answer = REPLY.pack(SERVED, claimed) + bytes(200)
    with misbehaving_peer(lambda c: c.sendall(answer)) as session, pytest.raises(TransferRefused):
        await transport.read(session, [ReadOp(memory.address, 1, 100)], timeout_s=WAIT_S)
    assert transport.reads_in_flight == 0


async def test_an_answer_that_ends_early_raises_peer_gone(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    for sent in (b"", REPLY.pack(SERVED, 100)[:7], REPLY.pack(SERVED, 100) + bytes(99)):
        with misbehaving_peer(lambda c, sent=sent: c.sendall(sent)) as session, pytest.raises(PeerGone):  # type: ignore[misc]
            await transport.read(session, [ReadOp(memory.address, 1, 100)], timeout_s=WAIT_S)


async def test_a_trickling_peer_is_disconnected_and_nothing_lands_later(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    enough = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.sendall(REPLY.pack(SERVED, 1 << 20))
        while not enough.wait(0.02):
            connection.sendall(b"x")

    with misbehaving_peer(trickle) as session:
        with pytest.raises(TransferTimeout) as caught:
            await transport.read(session, [ReadOp(memory.address, 1, 1 << 20)], timeout_s=0.2)
        assert caught.value.quiet
        memory.view(0, 1 << 20)[:] = bytes(1 << 20)
        assert not transport.quarantined(memory.address, 1 << 20)
        enough.set()
    assert memory.view(0, 1 << 20) == bytes(1 << 20)


async def test_silent_peers_do_not_delay_reads_from_other_peers() -> None:
    """Silent peers accept connections and never send a byte, like stopped processes."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=512)
    alive = SocketTransport()
    source = PageAlignedMemory(4096)
    alive.register(source.buffer)
    source.view(0, 5)[:] = b"hello"
    for silence_s in (2.0, 8.0, 32.0):  # until it exceeds the time a working peer takes on a slow machine
        if await reads_past_silent_peers(silent, alive, source, silence_s):
            break
    else:
        raise AssertionError("the read from the working peer waited for the silent ones")
    await alive.close()
    silent.close()


async def reads_past_silent_peers(
    silent: socket.socket, alive: SocketTransport, source: PageAlignedMemory, silence_s: float
) -> bool:
    """Whether a read from `alive` ends before any of a hundred reads from silent peers, which all fail."""
    transport = SocketTransport(progress_timeout_s=silence_s)
    memory = PageAlignedMemory(2 * 4096)
    transport.register(memory.buffer)
    unserved = [
        asyncio.create_task(
            transport.read(
                f"127.0.0.1:{silent.getsockname()[1]}/{os.urandom(16).hex()}",
                [ReadOp(memory.address + 4096, 1, 10)],
                timeout_s=WAIT_S,
            )
        )
        for _ in range(100)
    ]
    await asyncio.sleep(0)
    assert transport.reads_in_flight == 100
    hello = [ReadOp(memory.address, source.address, 5)]
    try:
        await transport.read(alive.session_id, hello, timeout_s=WAIT_S)
        assert bytes(memory.view(0, 5)) == b"hello"
        waited_for_none = not any(task.done() for task in unserved)
    except TransferTimeout:
        waited_for_none = False
    for ended in await asyncio.gather(*unserved, return_exceptions=True):
        assert isinstance(ended, TransferTimeout)
    await transport.close()
    return waited_for_none


async def test_connections_without_a_valid_token_get_no_answer_and_disturb_no_reader(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    """Without a token, with a wrong one, half a greeting or noise, the server closes the connection."""
    host, port = transport.session_id.partition("/")[0].rsplit(":", 1)
    half_open = socket.create_connection((host, int(port)))  # and sends nothing
    for greeting in (os.urandom(24), MAGIC + bytes(16), b"GET / HTTP/1.1\r\n\r\n" + bytes(10)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(greeting)
        writer.write(REQUEST.pack(memory.address, 100))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    other = SocketTransport()
    landing = PageAlignedMemory(4096)
    other.register(landing.buffer)
    memory.view(0, 5)[:] = b"hello"
    await other.read(transport.session_id, [ReadOp(landing.address, memory.address, 5)], timeout_s=WAIT_S)
    assert bytes(landing.view(0, 5)) == b"hello"
    half_open.close()
    await other.close()


async def test_connections_without_the_token_keep_no_reader_out(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    memory.view(0, 4)[:] = b"abcd"
    host, _, port = transport.session_id.partition("/")[0].rpartition(":")
    n_silent = socket_server.MAX_CONNECTIONS + socket_server.MAX_UNKNOWN
    reader, into = SocketTransport(), PageAlignedMemory(1 << 12)
    reader.register(into.buffer)
    with contextlib.ExitStack() as silent:
        for _ in range(n_silent):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        op = ReadOp(into.address, memory.address, 4)
        await reader.read(transport.session_id, [op], timeout_s=WAIT_S)
        assert bytes(into.view(0, 4)) == b"abcd"
    await reader.close()


@contextlib.asynccontextmanager
async def waiting_without_descriptors(port: int, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Until then this process has no descriptor for a connection to the port.

    The kernel takes one before it waits for a connection, so that one may still be accepted.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # 0 to 2 are always in use
            client.connect(("127.0.0.1", port))
            await eventually(lambda: "accepts no connection now" in caplog.text, timeout_s=WAIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        yield


async def test_a_port_that_found_no_descriptor_accepts_again(
    transport: SocketTransport, memory: PageAlignedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    peer = SocketTransport()
    other = PageAlignedMemory(1 << 12)
    peer.register(other.buffer)
    port = int(peer.session_id.partition("/")[0].rpartition(":")[2])
    async with waiting_without_descriptors(port, caplog):
        await transport.read(peer.session_id, [ReadOp(memory.address, other.address, 64)], timeout_s=WAIT_S)
    await peer.close()


async def test_a_probe_that_found_no_descriptor_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    probe = IncarnationProbe("127.0.0.1:0", note=b"a note")
    async with waiting_without_descriptors(probe.port, caplog):
        address = ProbeAddress("127.0.0.1", probe.port, probe.nonce)
        assert await greet(address, timeout_s=WAIT_S) == b"a note"
    probe.close()


async def test_a_refusal_among_many_requests_leaves_no_answer_for_the_next_read(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    other = SocketTransport()
    landing = PageAlignedMemory(1 << 20)
    other.register(landing.buffer)
    memory.view(0, 4096)[:] = b"\x07" * 4096
    for _ in range(3):
        reads = [ReadOp(landing.address + i, memory.address + i, 1) for i in range(100)]
        reads[50] = ReadOp(landing.address, 4096, 1)
        with pytest.raises(TransferError):
            await other.read(transport.session_id, reads, timeout_s=WAIT_S)
        landing.view(0, 4096)[:] = bytes(4096)
        await other.read(
            transport.session_id, [ReadOp(landing.address, memory.address, 4096)], timeout_s=WAIT_S
        )
        assert bytes(landing.view(0, 4096)) == b"\x07" * 4096
    await other.close()


async def test_connections_that_were_reset_while_idle_are_not_reused(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    """A middlebox may reset all idle connections while the peer lives."""
    peer = SocketTransport()
    theirs = PageAlignedMemory(1 << 12)
    peer.register(theirs.buffer)
    address, _, token = peer.session_id.partition("/")
    read = [ReadOp(memory.address, theirs.address, theirs.n_bytes)]
    async with FaultProxy(address) as proxy:
        session = f"{proxy.endpoint}/{token}"
        await asyncio.gather(*(transport.read(session, read, timeout_s=WAIT_S) for _ in range(4)))
        proxy.reset()
        for number in range(1, 5):
            theirs.view(0, theirs.n_bytes)[:] = bytes([number]) * theirs.n_bytes
            await transport.read(session, read, timeout_s=WAIT_S)
            assert bytes(memory.view(0, theirs.n_bytes)) == bytes([number]) * theirs.n_bytes
    await peer.close()


@pytest.mark.parametrize("cut", [1, REQUEST.size - 1, 3 * REQUEST.size + 5])
async def test_requests_that_arrive_in_parts_are_answered_in_order(
    transport: SocketTransport, memory: PageAlignedMemory, cut: int
) -> None:
    memory.view(0, 1 << 20)[:] = bytes(i % 251 for i in range(1 << 20))
    (host, port), token = (
        transport.session_id.partition("/")[0].rsplit(":", 1),
        transport.session_id.partition("/")[2],
    )
    wanted = [(memory.address + i, 200_000 + i) for i in range(5)]
    requests = b"".join(REQUEST.pack(*each) for each in wanted)
    expected = b"".join(
        REPLY.pack(SERVED, n) + bytes(memory.view(address - memory.address, n)) for address, n in wanted
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(MAGIC + bytes.fromhex(token) + requests[:cut])
    assert await asyncio.wait_for(reader.readexactly(1), 60) == WELCOME
    writer.write(requests[cut:])
    assert await asyncio.wait_for(reader.readexactly(len(expected)), 60) == expected
    writer.close()


async def test_a_reader_that_receives_nothing_is_disconnected(
    transport: SocketTransport, memory: PageAlignedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "SEND_TIMEOUT_S", 0.2)
    host, port = transport.session_id.partition("/")[0].rsplit(":", 1)
    token = bytes.fromhex(transport.session_id.partition("/")[2])
    with socket.create_connection((host, int(port)), timeout=60) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(MAGIC + token)
        assert await asyncio.to_thread(lazy.recv, 1) == WELCOME
        lazy.sendall(REQUEST.pack(memory.address, 1 << 20) * 32)
        server = transport._server
        assert server is not None
        await eventually(lambda: not server._connections, timeout_s=60)


async def test_no_bytes_on_a_socket_change_registered_memory(
    transport: SocketTransport, memory: PageAlignedMemory
) -> None:
    """The protocol has reads only: requests of any content, also with the token, write nothing."""
    memory.view(0, memory.n_bytes)[:] = before = os.urandom(memory.n_bytes)
    host, port = transport.session_id.partition("/")[0].rsplit(":", 1)
    token = bytes.fromhex(transport.session_id.partition("/")[2])
    rng = random.Random(7)

    def attack() -> None:
        for number in range(60):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(MAGIC + token)
                assert connection.recv(1) == WELCOME
                n_bytes = rng.randrange(1, memory.n_bytes)
                wanted = REQUEST.pack(memory.address + rng.randrange(memory.n_bytes), n_bytes)
                connection.sendall(wanted if number % 2 else wanted + rng.randbytes(4096))

    await asyncio.to_thread(attack)
    assert bytes(memory.view(0, memory.n_bytes)) == before
