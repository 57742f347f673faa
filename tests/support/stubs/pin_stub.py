"""A lender's pins by single calls, each on a separate Pins stream."""

from __future__ import annotations

import grpc

from slipstream.rpc.rpc_errors import from_failure, from_rpc_error
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc


class PinStub:
    """Pin calls that raise the lender's SlipstreamErrors. A pin outlives its stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub = kvstore_pb2_grpc.KvstoreServiceStub(channel)

    async def pin(self, request: kvstore_pb2.PinRequest, *, timeout: float = 60) -> kvstore_pb2.PinResponse:
        return (await self._ask(kvstore_pb2.PinCommand(pin=request), timeout)).pinned

    async def renew(self, lease_id: str, *, lease_ms: int = 0, timeout: float = 60) -> None:
        request = kvstore_pb2.RenewPinRequest(lease_id=lease_id, lease_ms=lease_ms)
        await self._ask(kvstore_pb2.PinCommand(renew=request), timeout)

    async def release(self, lease_id: str, *, timeout: float = 60) -> None:
        request = kvstore_pb2.ReleasePinRequest(lease_id=lease_id)
        await self._ask(kvstore_pb2.PinCommand(release=request), timeout)

    async def _ask(self, command: kvstore_pb2.PinCommand, timeout_s: float) -> kvstore_pb2.PinAnswer:
        command.handle, command.deadline_ms = 1, int(timeout_s * 1e3)
        call = self._stub.Pins(iter([kvstore_pb2.PinsRequest(commands=[command])]), timeout=timeout_s)
        try:
            answers = [answer async for frame in call for answer in frame.answers]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        if answers[0].HasField("failure"):
            raise from_failure(answers[0].failure)
        return answers[0]
