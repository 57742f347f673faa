"""gRPC's wake-ups that come together are one turn of the loop, and none is lost."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from libs.common.runtime import grpc_loop
from libs.common.runtime.grpc_loop import GrpcLoop


class PollerCompletionQueue:
    """As much of gRPC's as the loop sees: it reads one byte a turn and takes all events. `then`: what comes
    when they were taken and the turn is not over."""

    def __init__(self, then: Sequence[int] = ()) -> None:
        self.then = then
        self.wakes, self.writes = socket.socketpair()
        self.wakes.setblocking(False)
        self.events: list[int] = []
        self.taken: list[int] = []
        self.turns = 0

    def push(self, event: int) -> None:
        """From its thread."""
        self.events.append(event)
        self.writes.send(b"1")

    def handle(self, loop: asyncio.AbstractEventLoop) -> None:
        """From the loop."""
        assert self.wakes.recv(1) == b"1"
        self.turns += 1
        events, self.events = self.events, []
        self.taken += events
        for event in self.then:
            self.push(event)
        self.then = ()


@asynccontextmanager
async def watched(queue: PollerCompletionQueue) -> AsyncIterator[PollerCompletionQueue]:
    """The running loop handles it as gRPC has loops do."""
    loop = asyncio.get_running_loop()
    loop.add_reader(queue.wakes, functools.partial(queue.handle, loop))
    try:
        yield queue
    finally:
        loop.remove_reader(queue.wakes)
        queue.wakes.close()
        queue.writes.close()


def test_wake_ups_that_come_together_are_one_turn() -> None:
    async def run() -> None:
        async with watched(PollerCompletionQueue()) as queue, asyncio.timeout(60):
            for event in range(100):
                queue.push(event)
            while len(queue.taken) < 100:
                await asyncio.sleep(0)
            assert queue.turns == 1
            queue.push(100)
            while len(queue.taken) < 101:
                await asyncio.sleep(0)
        assert queue.turns == 2
        assert queue.taken == list(range(101))

    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(run())


def test_an_event_that_comes_when_the_others_were_taken_has_a_turn() -> None:
    async def run() -> None:
        async with watched(PollerCompletionQueue(then=[2, 3])) as queue, asyncio.timeout(60):
            for event in range(2):
                queue.push(event)
            while len(queue.taken) < 4:
                await asyncio.sleep(0)
        assert queue.taken == [0, 1, 2, 3] and queue.turns == 2

    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(run())


def test_grpcs_own_reader_is_known_and_calls_are_served() -> None:
    """Whoever changes the name that the loop goes by in gRPC is found out here."""
    seen: list[bool] = []

    class Watched(GrpcLoop):
        def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
            seen.append(grpc_loop._belongs_to_grpc(callback))
            super().add_reader(fd, callback, *args)

    async def run() -> None:
        async def echo(request: bytes, context: object) -> bytes:
            return request

        server = grpc.aio.server()
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Echo": grpc.unary_unary_rpc_method_handler(echo)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/t.T/Echo")
            texts = [str(number).encode() for number in range(100)]
            async with asyncio.timeout(60):
                assert await asyncio.gather(*(call(text) for text in texts)) == texts
        await server.stop(None)

    with asyncio.Runner(loop_factory=Watched) as runner:
        runner.run(run())
    assert any(seen)
