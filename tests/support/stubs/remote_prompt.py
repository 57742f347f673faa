"""One prompt on a separate Prefill stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc


class RemotePrompt:
    """An iterator of the prompt's events. Raises its SlipstreamError, or AioRpcError when the call breaks."""

    def __init__(
        self, channel: grpc.aio.Channel, start: prefill_pb2.StartPrefill, *, timeout_s: float = 100
    ) -> None:
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_pb2.PrefillRequest(starts=[start])
        self.call: Any = stub.Prefill(iter([request]), timeout=timeout_s)
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        return self._events

    async def _read(self) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async for response in self.call:
            for event in response.events:
                if event.HasField("failure"):
                    raise from_failure(event.failure)
                yield event
