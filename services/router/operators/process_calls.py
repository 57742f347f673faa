"""Calls of operators to processes of the fleet, made by a router with an operator's token.

A worker's log names the operator, because the token has the operator's name. Without a cluster secret the
router calls as itself, a peer: workers then answer reads only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from libs.common.cluster.worker_record import Role, Worker
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import worker_pb2, worker_pb2_grpc

# What operators call, and whether the method streams its responses.
OPERATOR_METHODS = {
    "/slipstream.v1.WorkerService/GetStatus": False,
    "/slipstream.v1.WorkerService/Drain": False,
    "/slipstream.v1.WorkerService/Undrain": False,
    "/slipstream.v1.KvEventService/WatchBlocks": True,
    "/slipstream.v1.KvstoreService/VerifyBlocks": True,
    "/slipstream.v1.KvstoreService/DropBlocks": False,
}
_STATUS_S = 0.5
# Router processes that share a port are reached by chance.
_TRIES = 16


class ProcessCalls:
    """Dials for each call: operators call seldom."""

    def __init__(self, dial: Dial, secret: ClusterSecret | None) -> None:
        """`dial`: the router's own, with its certificate and token."""
        self._dial = dial
        self._secret = secret

    async def report(self, worker: Worker) -> worker_pb2.LoadReport | None:
        """The load report of the process; None without a quick answer."""
        async with self._dial(worker.admin or worker.endpoint) as channel:
            try:
                status = await _status(channel)
            except grpc.aio.AioRpcError:
                return None
        return status.load if status.incarnation == worker.incarnation else None

    async def call(
        self, worker: Worker, method: str, message: bytes, *, operator: str, timeout_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """The responses of the method, each as it came. Raises what the process answers."""
        if method not in OPERATOR_METHODS:
            raise InvalidArgument("method", f"must be one of {', '.join(OPERATOR_METHODS)}")
        channel: Any = await self._open(worker, self._as_operator(operator))  # of bytes: nothing is parsed
        async with channel:
            try:
                if not OPERATOR_METHODS[method]:
                    yield await channel.unary_unary(method)(message, timeout=timeout_s)
                    return
                async for response in channel.unary_stream(method)(message, timeout=timeout_s):
                    yield response
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

    def _as_operator(self, name: str) -> Dial:
        if self._secret is None:
            return self._dial
        instance = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64] or "operator"
        return Dial(self._dial.tls, TokenMinter(self._secret, instance, CallerClass.OPERATOR))

    async def _open(self, worker: Worker, dial: Dial) -> grpc.aio.Channel:
        """A channel to the process itself: another router process may have the same port."""
        endpoint = worker.admin or worker.endpoint
        if worker.role is not Role.ROUTER:
            return dial(endpoint)
        for _ in range(_TRIES):
            channel = dial(endpoint)
            try:
                if (await _status(channel)).instance == worker.instance:
                    return channel
            except grpc.aio.AioRpcError as error:
                await channel.close()
                raise from_rpc_error(error) from None
            await channel.close()
        raise Unavailable(f"{worker.instance} at {endpoint} was not reached: others share its port")


async def _status(channel: grpc.aio.Channel) -> worker_pb2.GetStatusResponse:
    stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_STATUS_S)
