"""Sends fuzzed inputs to every method of a service, and collects what must not be answered."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from libs.common.cluster.worker_service import resident_bytes
from slipstream.enum_names import FAILURE_CODES
from slipstream.v1 import common_pb2
from tests.support.fuzz.message_fuzzer import MessageFuzzer, metadata

# Bad input never has these statuses: they are a defect of the service.
DEFECTS = {"UNKNOWN", "INTERNAL"}
_CALL_S = 20.0
# The words of grpc.aio's client, in place of the status, when a call ends while it writes.
_WRITE_FAILED = "Internal error from Core"
_NEXT_ANSWER_S = 0.05
# Of a test that is not soak.
_INPUTS_PER_METHOD, _MOST_INPUTS = 250, 2000


@dataclass
class RpcFuzzer:
    """One service behind a channel. `leave_out` names methods that end the service."""

    channel: grpc.aio.Channel
    service: ServiceDescriptor
    rng: random.Random
    seeds: Sequence[Message] = ()
    leave_out: frozenset[str] = frozenset()
    headers: Mapping[str, Sequence[str | bytes]] = field(default_factory=dict)
    side_by_side: int = 16
    statuses: Counter[str] = field(default_factory=Counter)  # by "Method CODE"
    defects: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fuzzer = MessageFuzzer(self.rng, self.seeds)
        self._methods = [method for method in self.service.methods if method.name not in self.leave_out]

    @property
    def short_inputs(self) -> int:
        """The inputs of a short test: a method of a small service gets as many as one of a large service."""
        return min(_INPUTS_PER_METHOD * len(self._methods), _MOST_INPUTS)

    async def run(self, inputs: int) -> None:
        """Send so many inputs, each to one method."""
        await self._send_each(self._send, inputs)

    async def use(self, inputs: int) -> None:
        """Send so many valid messages: the seeds as they are, and empty ones to methods without any."""
        await self._send_each(self._send_valid, inputs)

    async def _send_each(self, send_one: Callable[[], Awaitable[None]], inputs: int) -> None:
        left = iter(range(inputs))

        async def send() -> None:
            for _ in left:
                await send_one()

        async with asyncio.TaskGroup() as senders:
            for _ in range(self.side_by_side):
                senders.create_task(send())

    def check(self) -> None:
        """Assert that no input was answered as a defect, and that each method was reached and refused."""
        assert not self.defects, f"{len(self.defects)} defects:\n" + "\n".join(self.defects[:20])
        reached = {key.split()[0] for key in self.statuses}
        assert reached == {method.name for method in self._methods}
        for method in self._methods:
            assert self.statuses[f"{method.name} INVALID_ARGUMENT"], (method.name, self.statuses)

    async def _send(self) -> None:
        method = self.rng.choice(self._methods)
        most = 3 if method.client_streaming else 1
        # A call without its message, and one with two, are wrong in another way.
        count = self.rng.choice((0, 2)) if self.rng.random() < 0.03 else self.rng.randint(1, most)
        await self._send_to(method, [self._fuzzer.data(method.input_type) for _ in range(count)])

    async def _send_valid(self) -> None:
        method = self.rng.choice(self._methods)
        fitting = [seed for seed in self.seeds if seed.DESCRIPTOR is method.input_type]
        await self._send_to(method, [self.rng.choice(fitting).SerializeToString() if fitting else b""])

    async def _send_to(self, method: MethodDescriptor, sent: Sequence[bytes]) -> None:
        code, details = await self._call(method, sent)
        if details == _WRITE_FAILED:
            code = "CUT"
        self.statuses[f"{method.name} {code}"] += 1
        if code in DEFECTS:
            self.defects.append(f"{method.name} {code} {details}: {[data[:100] for data in sent]}")

    async def _call(self, method: MethodDescriptor, sent: Sequence[bytes]) -> tuple[str, str]:
        """The status of the call, or that of a command on it, and its words."""
        call: Any = self.channel.stream_stream(
            f"/{self.service.full_name}/{method.name}",
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )(timeout=_CALL_S, metadata=metadata(self.rng, self.headers))
        try:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
                for data in sent:
                    await call.write(data)
                await call.done_writing()
            async with asyncio.timeout(None) as patience:
                while (answer := await call.read()) is not grpc.aio.EOF:
                    if (failure := _failure_in(answer)) is not None:
                        return FAILURE_CODES.name(failure.code), failure.message
                    patience.reschedule(asyncio.get_running_loop().time() + _NEXT_ANSWER_S)
            return (await call.code()).name, await call.details()
        except TimeoutError:  # an endless stream, or a long answer
            return "CUT", ""
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        finally:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call.code()


def _failure_in(message: Message) -> common_pb2.Failure | None:
    """The first Failure in the message, at any depth."""
    if isinstance(message, common_pb2.Failure):
        return message
    for of_field, value in message.ListFields():
        if of_field.message_type is None or of_field.message_type.GetOptions().map_entry:
            continue
        for part in value if of_field.is_repeated else (value,):
            if (found := _failure_in(part)) is not None:
                return found
    return None


async def fuzz(
    fuzzer: RpcFuzzer,
    inputs: int | None = None,
    *,
    most_growth_bytes: int = 20 << 20,
    settle: Callable[[], Any] | None = None,
) -> None:
    """Send so many inputs, or those of a short test. Check the answers, and this process's memory from the
    first tenth on."""
    inputs = inputs or fuzzer.short_inputs
    first = inputs // 10
    await fuzzer.run(first)
    if settle is not None:
        await settle()
    before = resident_bytes()
    await fuzzer.run(inputs - first)
    if settle is not None:
        await settle()
    fuzzer.check()
    assert resident_bytes() - before < most_growth_bytes
