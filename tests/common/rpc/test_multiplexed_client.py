"""How a multiplexed stream ends: whatever ends it, all its receivers fail, and the peer learns of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.multiplexed_client import BATCH_BYTES, MultiplexedClient, PeerUnanswering, batches
from slipstream import errors
from slipstream.v1 import prefill_pb2
from tests.support.network.fault_proxy import FaultProxy

Receiver = Callable[[errors.SlipstreamError], None]


class Call:
    """One call, as grpc.aio's: its frames are what the test puts in; None is the cancel."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[int | None] = asyncio.Queue()
        self.written: list[Any] = []
        self.cancelled = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> int:
        frame = await self.frames.get()
        if frame is None:
            raise asyncio.CancelledError
        return frame

    async def write(self, message: Any) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self.cancelled = True
        self.frames.put_nowait(None)


class Client(MultiplexedClient[Receiver, Any]):
    """Writes each batch of commands as one message; its receivers are functions that take the failure."""

    def __init__(self) -> None:
        super().__init__("worker-0")
        self.calls: list[Call] = []
        self.n_broken = 0
        self.is_channel_closed = False

    def open_call(self) -> Call:
        if self.is_channel_closed:
            raise RuntimeError("Channel is closed.")
        self.calls.append(Call())
        return self.calls[-1]

    def pack(self, commands: Sequence[Any]) -> Iterable[Any]:
        return [list(commands)]

    def dispatch(self, frame: int) -> None:
        if frame < 0:
            raise ValueError("packed fields of different lengths")

    def fail(self, receiver: Receiver, error: errors.SlipstreamError) -> None:
        receiver(error)

    def on_broken(self) -> None:
        self.n_broken += 1

    def start(self, command: Any, receiver: Receiver) -> None:
        self.receivers[self.new_handle()] = receiver
        self.send(command)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_a_frame_that_cannot_be_read_ends_the_stream_on_both_sides() -> None:
    client, failures = Client(), list[errors.SlipstreamError]()
    calls = client.calls
    client.start("start", failures.append)
    await until(lambda: calls[0].written == [["start"]])
    calls[0].frames.put_nowait(1)
    calls[0].frames.put_nowait(-1)
    await until(lambda: bool(failures))
    assert isinstance(failures[0], errors.Unavailable)
    assert calls[0].cancelled
    assert not client.is_open
    client.start("again", failures.append)
    await until(lambda: len(calls) == 2 and calls[1].written == [["again"]])
    calls[1].frames.put_nowait(-1)
    await until(lambda: len(failures) == 2)


async def test_a_failure_of_the_peer_that_quotes_grpcs_words_is_no_silence() -> None:
    served = grpc.aio.server()

    async def fails(_: Any, __: Any) -> Any:
        yield b"1"
        raise RuntimeError("a request with the text 'ping timeout'")

    handlers: dict[str, Any] = {"Fail": grpc.stream_stream_rpc_method_handler(fails)}
    served.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", handlers),))
    port = served.add_insecure_port("127.0.0.1:0")
    await served.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(served.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        client, failures = Client(), list[errors.SlipstreamError]()
        client.open_call = channel.stream_stream("/test.Peer/Fail")  # type: ignore[assignment, method-assign]
        client.pack = lambda commands: [b"start"] * len(commands)  # type: ignore[method-assign]
        client.dispatch = lambda frame: None  # type: ignore[method-assign]
        client.start("start", failures.append)
        await until(lambda: bool(failures))
        assert "ping timeout" in failures[0].message
        assert not isinstance(failures[0], PeerUnanswering)
        await client.close()


async def test_a_command_that_cannot_be_written_ends_the_stream() -> None:
    class Fails(Client):
        def pack(self, commands: Sequence[int]) -> Iterable[int]:
            return [1 // command for command in commands]

    client, failures = Fails(), list[errors.SlipstreamError]()
    client.start(1, failures.append)
    client.start(0, failures.append)
    await until(lambda: len(failures) == 2)
    assert isinstance(failures[0], errors.Unavailable)
    assert client.calls[0].cancelled


async def test_commands_of_one_iteration_of_the_event_loop_are_one_message() -> None:
    client = Client()
    client.send("opens it")
    (call,) = client.calls
    await until(lambda: bool(call.written))
    client.send("alone")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.written[1:] == [["alone"]]
    client.send("two")
    client.send("together")
    await until(lambda: len(call.written) > 2)
    assert call.written[2:] == [["two", "together"]]

    async def broken(_: object) -> None:
        raise asyncio.InvalidStateError("the call is over")

    call.write = broken  # type: ignore[method-assign,assignment]
    client.send("lost")  # raises nothing: the stream's reader notices the end
    await asyncio.sleep(0)
    assert len(call.written) == 3
    await client.close()


@pytest.mark.parametrize("how", ["closed", "broken off", "cancelled by the peer"])
async def test_a_receiver_that_raises_strands_no_other(how: str) -> None:
    client, failures = Client(), list[errors.SlipstreamError]()

    def raises(error: errors.SlipstreamError) -> None:
        raise ZeroDivisionError

    for receiver in (failures.append, raises, failures.append, raises, failures.append):
        client.start("start", receiver)
    await until(lambda: bool(client.calls[0].written))
    if how == "closed":
        await client.close()
    elif how == "broken off":
        client.break_off(errors.Unavailable("silent"))
    else:
        client.calls[0].frames.put_nowait(None)
    await until(lambda: len(failures) == 3)
    assert client.n_broken == 1
    assert not client.receivers and not client.is_open and client.calls[0].cancelled
    client.start("again", failures.append)
    await until(lambda: len(client.calls) == 2 and client.calls[1].written == [["again"]])
    await client.close()
    assert len(failures) == 4


async def test_a_call_that_was_broken_off_fails_nothing_of_its_successor() -> None:
    client, failures = Client(), list[errors.SlipstreamError]()
    client.start("start", failures.append)
    await until(lambda: bool(client.calls[0].written))
    client.break_off(errors.Unavailable("silent"))
    client.start("again", failures.append)
    await until(lambda: client.calls[1].written == [["again"]])
    assert [error.message for error in failures] == ["silent"]
    assert len(client.receivers) == 1 and client.n_broken == 1
    await client.close()


async def test_a_command_is_withdrawn_until_it_is_written() -> None:
    client = Client()
    first, second, equal = ["a"], ["b"], ["b"]
    for command in (first, second):
        client.send(command)
    assert not client.withdraw(equal)
    assert client.withdraw(second) and not client.withdraw(second)
    assert client.waiting_commands == 1
    (call,) = client.calls
    await until(lambda: call.written == [[first]])
    assert not client.withdraw(first)
    client.send(first)
    assert client.withdraw(first)  # its writer is awake already, and finds nothing
    await asyncio.sleep(0)
    client.send(second)
    await until(lambda: call.written == [[first], [second]])
    await client.close()


async def test_handles_in_use_are_not_given_twice() -> None:
    client = Client()
    client._last_handle = 0xFFFF_FFFD
    for _ in range(2):
        client.receivers[client.new_handle()] = lambda error: None
    client.receivers[1] = lambda error: None
    assert set(client.receivers) == {0xFFFF_FFFE, 0xFFFF_FFFF, 1}
    assert client.new_handle() == 2


@given(st.lists(st.integers(0, BATCH_BYTES * 2) | st.none(), min_size=1, max_size=30))
def test_batches_keep_order_and_bound(sizes: list[int | None]) -> None:
    """None: a number, which counts as no bytes."""
    commands = [0 if n is None else prefill_pb2.StartPrefill(prompt=bytes(n)) for n in sizes]
    packed = list(batches(commands))
    assert [command for batch in packed for command in batch] == commands
    measured = [[0 if isinstance(c, int) else c.ByteSize() for c in batch] for batch in packed]
    assert all(
        batch and (sum(batch) <= BATCH_BYTES or len([n for n in batch if n]) == 1) for batch in measured
    )


async def test_receivers_fail_where_no_call_can_be_opened_and_the_next_command_tries_again() -> None:
    client = Client()
    client.is_channel_closed = True
    failed: list[errors.SlipstreamError] = []
    client.start("a", failed.append)
    assert not failed  # the receiver's owner has not got its handle yet
    assert not client.receivers and not client.is_open
    client.is_channel_closed = False
    client.start("b", failed.append)
    await until(lambda: bool(client.calls[0].written))
    (error,) = failed
    assert isinstance(error, errors.Unavailable) and "worker-0" in error.message
    assert client.calls[0].written == [["b"]] and len(client.receivers) == 1
    await client.close()


@pytest.mark.parametrize(("fault", "is_crash_like"), [("blackhole", False), ("reset", True)])
async def test_a_peer_that_answers_no_ping_differs_from_one_whose_connection_is_closed(
    fault: str, is_crash_like: bool
) -> None:
    """As a stopped process differs from one that was killed: its kernel closes nothing."""
    served = grpc.aio.server()

    async def stay_open(_: Any, context: Any) -> Any:
        yield b"1"
        await asyncio.sleep(60)

    handlers: dict[str, Any] = {"Stay": grpc.stream_stream_rpc_method_handler(stay_open)}
    served.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", handlers),))
    port = served.add_insecure_port("127.0.0.1:0")
    await served.start()
    # A stall of a slow machine is as long as a quick ping: only the fault that no ping outlives has those.
    ping_ms = 60_000 if is_crash_like else 200
    names = ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")
    options = [("grpc.http2.max_pings_without_data", 0), *((f"grpc.{name}", ping_ms) for name in names)]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(served.stop, None)
        proxy = await stack.enter_async_context(FaultProxy(f"127.0.0.1:{port}"))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(proxy.endpoint, options=options))
        client, failures, frames = Client(), list[errors.SlipstreamError](), list[bytes]()
        client.open_call = channel.stream_stream("/test.Peer/Stay")  # type: ignore[assignment, method-assign]
        client.pack = lambda commands: [b"start"] * len(commands)  # type: ignore[method-assign]
        client.dispatch = frames.append  # type: ignore[assignment, method-assign]
        client.start("start", failures.append)
        await until(lambda: bool(frames))
        getattr(proxy, fault)()
        await until(lambda: bool(failures))
        assert isinstance(failures[0], errors.Unavailable)
        assert isinstance(failures[0], PeerUnanswering) is not is_crash_like
        proxy.restore()
        await client.close()
