"""A prompt on a prefill worker that does not offer the shared stream: a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_status import rpc_status

from libs.common.rpc.tracing import trace_metadata
from services.router.workers.idle_wait import IDLE_S
from slipstream import errors
from slipstream.rpc_errors import from_rpc_error
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc


class UnaryPrefill:
    """Implements `prefill_stream.PrefillCall`. `timeout_s`: the request's time left."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        request: prefill_pb2.PrefillRequest,
        *,
        instance: str,
        timeout_s: float | None,
    ) -> None:
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.broke = self.first_taken = False
        self.on_first: Callable[[prefill_pb2.FirstToken], bool] | None = None  # never asked
        self._instance = instance
        self._call = stub.Prefill(request, timeout=timeout_s, metadata=trace_metadata())
        self._reading: asyncio.Task[prefill_pb2.PrefillResponse | None] | None = None

    async def next_or_idle(self) -> prefill_pb2.PrefillResponse | None:
        """See `PrefillCall`."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        done, _ = await asyncio.wait({self._reading}, timeout=2 * IDLE_S)
        if not done:
            return None
        reading, self._reading = self._reading, None
        try:
            response = reading.result()
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from error
        if response is None:
            raise errors.Unavailable("prefill ended without a token")
        return response

    def close(self) -> None:
        """See `PrefillCall`."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> prefill_pb2.PrefillResponse | None:
        return await anext(aiter(self._call), None)

    def _typed(self, error: grpc.aio.AioRpcError) -> errors.SlipstreamError:
        typed = from_rpc_error(error)
        if isinstance(typed, errors.Aborted):  # not by us: it shuts down
            return errors.Unavailable(f"{self._instance} cancelled the call")
        self.broke = isinstance(typed, errors.Unavailable) and rpc_status.from_call(error) is None
        return typed
