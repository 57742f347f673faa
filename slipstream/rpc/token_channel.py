"""A channel whose calls carry the tokens of one server.

It adds the metadata when a call begins and returns gRPC's own call object. An interceptor would wrap every
call and every message of its streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import grpc


class CallMetadata(Protocol):
    """Says who calls, in the metadata of each call."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call made now."""
        ...


class WrappedChannel(grpc.aio.Channel):
    """Has the interface of `grpc.aio.Channel`, and owns the channel that it wraps. Subclasses make calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


class TokenChannel(WrappedChannel):
    """Adds the metadata of `tokens` to each call."""

    def __init__(self, channel: grpc.aio.Channel, tokens: CallMetadata) -> None:
        super().__init__(channel)
        self._tokens = tokens

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*arguments, **named), has_request=True)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*arguments, **named), has_request=True)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*arguments, **named), has_request=False)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*arguments, **named), has_request=False)

    def _with_token(self, begin: Callable[..., Any], *, has_request: bool) -> Callable[..., Any]:
        token = self._tokens.metadata
        if has_request:

            def unary(request: Any, *, metadata: Any = None, **options: Any) -> Any:
                return begin(request, metadata=(*(metadata or ()), *token()), **options)

            return unary

        def stream(requests: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            return begin(requests, metadata=(*(metadata or ()), *token()), **options)

        return stream
