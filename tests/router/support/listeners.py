"""Listeners of worker streams that queue their calls, for a test to read one by one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slipstream import errors
from slipstream.v1 import decode_pb2, prefill_pb2


@dataclass
class TokenArrival:
    """Tokens of one frame, and the rest of their delta."""

    tokens: list[int]
    rest: decode_pb2.SequenceDelta | None

    @property
    def ended(self) -> bool:
        """Whether this is the last delta."""
        return self.rest is not None and bool(self.rest.finish_reason)


class SequenceReader:
    """A `SequenceListener` that queues arrivals."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[TokenArrival | Exception] = asyncio.Queue()
        self.prompt_start: decode_pb2.PromptStart | None = None

    def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
        self.arrivals.put_nowait(TokenArrival(tokens, rest))

    def on_prompt_started(self, start: decode_pb2.PromptStart) -> None:
        self.prompt_start = start

    def on_sequence_failed(self, error: errors.SlipstreamError) -> None:
        self.arrivals.put_nowait(error)

    def on_listener_error(self, error: Exception) -> None:
        self.arrivals.put_nowait(error)

    async def next(self) -> TokenArrival:
        """Return the next arrival, or raise the error of the sequence."""
        arrival = await asyncio.wait_for(self.arrivals.get(), 60)
        if isinstance(arrival, Exception):
            raise arrival
        return arrival


class PrefillReader:
    """A `PrefillListener` that queues events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[prefill_pb2.PrefillEvent | Exception] = asyncio.Queue()
        self.is_connection_lost = False

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        self.events.put_nowait(event)

    def on_prefill_failed(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        self.is_connection_lost = is_connection_lost
        self.events.put_nowait(error)

    def on_listener_error(self, error: Exception) -> None:
        self.events.put_nowait(error)

    async def next(self) -> prefill_pb2.PrefillEvent:
        """Return the next event, or raise the error of the prompt."""
        event = await asyncio.wait_for(self.events.get(), 60)
        if isinstance(event, Exception):
            raise event
        return event

    async def first_token(self) -> int:
        """Skip all other events and return the first token."""
        while not (event := await self.next()).HasField("first_token"):
            pass
        return event.first_token.token_id
