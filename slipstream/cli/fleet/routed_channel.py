"""Channels to the processes of a cluster that lead through the admin port of a router.

A command that has such a channel works like one that dials the process: the stubs are the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.enum_names import ROLES
from slipstream.errors import Unavailable
from slipstream.rpc.dial import OpenChannel
from slipstream.rpc.token_channel import WrappedChannel
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc

# Calls without a deadline would wait for a router that hangs.
_LONGEST_S = 3600.0


class RoutedDial:
    """Opens channels to "role/instance" through the router at `router`."""

    def __init__(self, router: str, dial: OpenChannel) -> None:
        self._router = router
        self._dial = dial

    def __call__(self, process: str) -> grpc.aio.Channel:
        """A channel to the process. Lazy, as every channel."""
        role, _, instance = process.partition("/")
        return _RoutedChannel(self._dial(self._router), role, instance)


class _RoutedChannel(WrappedChannel):
    """Sends calls to the process in calls of FleetService. Owns the channel to the router."""

    def __init__(self, channel: grpc.aio.Channel, role: str, instance: str) -> None:
        super().__init__(channel)
        self._role = ROLES.value(role)
        self._instance = instance
        self._stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)

    def unary_unary(self, method: str, *codecs: Any, **named: Any) -> Any:
        begin = self.unary_stream(method, *codecs, **named)

        async def first(request: Any, **options: Any) -> Any:
            async for response in begin(request, **options):
                return response
            raise Unavailable(f"{self._instance} ended the call without a response")

        return first

    def unary_stream(self, method: str, *codecs: Any, **named: Any) -> Any:
        serialize, parse = codecs or (named["request_serializer"], named["response_deserializer"])

        def call(request: Any, *, timeout: float | None = None) -> _RoutedStream:
            wrapped = fleet_pb2.CallProcessRequest(
                role=self._role, instance=self._instance, method=method, message=serialize(request)
            )
            started = self._stub.CallProcess(wrapped, timeout=_LONGEST_S if timeout is None else timeout)
            return _RoutedStream(started, parse, self._instance)

        return call

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return _refuse_streams

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return _refuse_streams


class _RoutedStream:
    """The responses of one call, with what of gRPC's interface callers use."""

    def __init__(self, call: Any, parse: Callable[[bytes], Any], instance: str) -> None:
        self._call = call
        self._parse = parse
        self._instance = instance

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Raises Unavailable for what is no message: the router passes on what the process sends."""
        async for response in self._call:
            try:
                message = self._parse(response.message)
            except DecodeError:
                self._call.cancel()
                raise Unavailable(f"{self._instance} sent what is no answer to this call") from None
            yield message

    def cancel(self) -> bool:
        """End the call."""
        return bool(self._call.cancel())


def _refuse_streams(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a router passes on calls with one request only")
