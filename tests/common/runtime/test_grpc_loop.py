"""GrpcLoop handles simultaneous wake-ups of gRPC in one loop iteration and loses none."""

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
    """The part of gRPC's queue that the loop sees: each iteration reads one byte and takes all events.

    `then`: events that are pushed after the others were taken, in the same iteration.
    """

    def __init__(self, then: Sequence[int] = ()) -> None:
        self.then = then
        self.wakes, self.writes = socket.socketpair()
        self.wakes.setblocking(False)
        self.events: list[int] = []
        self.taken: list[int] = []
        self.iterations = 0

    def push(self, event: int) -> None:
        """Called from gRPC's thread."""
        self.events.append(event)
        self.writes.send(b"1")

    def handle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called from the event loop."""
        assert self.wakes.recv(1) == b"1"
        self.iterations += 1
        events, self.events = self.events, []
        self.taken += events
        for event in self.then:
            self.push(event)
        self.then = ()


@asynccontextmanager
async def handling_events(queue: PollerCompletionQueue) -> AsyncIterator[PollerCompletionQueue]:
    """Register `queue` with the running loop as gRPC does."""
    loop = asyncio.get_running_loop()
    loop.add_reader(queue.wakes, functools.partial(queue.handle, loop))
    try:
        yield queue
    finally:
        loop.remove_reader(queue.wakes)
        queue.wakes.close()
        queue.writes.close()


def test_simultaneous_wake_ups_are_handled_in_one_loop_iteration() -> None:
    async def run() -> None:
        async with handling_events(PollerCompletionQueue()) as queue, asyncio.timeout(60):
            for event in range(100):
                queue.push(event)
            while len(queue.taken) < 100:
                await asyncio.sleep(0)
            assert queue.iterations == 1
            queue.push(100)
            while len(queue.taken) < 101:
                await asyncio.sleep(0)
        assert queue.iterations == 2
        assert queue.taken == list(range(101))

    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(run())


def test_an_event_pushed_while_others_are_handled_gets_an_iteration() -> None:
    async def run() -> None:
        async with handling_events(PollerCompletionQueue(then=[2, 3])) as queue, asyncio.timeout(60):
            for event in range(2):
                queue.push(event)
            while len(queue.taken) < 4:
                await asyncio.sleep(0)
        assert queue.taken == [0, 1, 2, 3] and queue.iterations == 2

    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(run())


def test_the_loop_recognises_the_completion_queue_of_grpc() -> None:
    """GrpcLoop finds the queue by its class name: this test fails when gRPC renames the class."""
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
