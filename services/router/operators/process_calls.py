"""Calls of operators to processes of the fleet, made by a router with an operator's token.

A worker's log names the operator, because the token has the operator's name. Without a cluster secret the
router calls as itself, a peer: workers then answer reads only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from libs.common.cluster.load_report import keep_plausible
from libs.common.cluster.worker_record import Role, Worker
from slipstream.bound import shown
from slipstream.enum_names import ROLES
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.rpc_errors import from_rpc_error, received
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
# It changes nothing, and its answer names the process.
_OF_ANY_PROCESS = "/slipstream.v1.WorkerService/GetStatus"
_STATUS_S = 0.5
_IDENTIFY_S = 5.0
# Processes that are asked for their load at once.
_AT_ONCE = 16
# Router processes that share a port are reached by chance.
_TRIES = 16


class ProcessCalls:
    """Dials for each call: operators call seldom."""

    def __init__(self, dial: Dial, secret: ClusterSecret | None) -> None:
        """`dial`: the router's own, with its certificate and token."""
        self._dial = dial
        self._secret = secret
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def report(self, worker: Worker) -> worker_pb2.LoadReport | None:
        """The load report of the process; None without a quick answer."""
        async with self._room, self._dial(worker.admin or worker.endpoint) as channel:
            try:
                status = await _status(channel)
            except (grpc.aio.AioRpcError, Unavailable):
                return None
        return keep_plausible(status.load) if status.incarnation == worker.incarnation else None

    async def call(
        self, worker: Worker, method: str, message: bytes, *, operator: str, timeout_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """The responses of the method, each as it came. Raises what the process answers."""
        if method not in OPERATOR_METHODS:
            raise InvalidArgument("method", f"must be one of {', '.join(OPERATOR_METHODS)}")
        is_checked = method != _OF_ANY_PROCESS or worker.role is Role.ROUTER
        clock = asyncio.get_running_loop().time
        until_s = None if timeout_s is None else clock() + timeout_s
        identify_s = min(_IDENTIFY_S, timeout_s or _IDENTIFY_S) if is_checked else None
        # The channel passes bytes on, and parses none.
        channel: Any = await self._open(worker, self._as_operator(operator), identify_s=identify_s)
        async with channel:
            # The process answers before the caller's deadline, which does not move.
            left_s = None if until_s is None else max(until_s - clock(), 0.0)
            try:
                if not OPERATOR_METHODS[method]:
                    yield await channel.unary_unary(method)(message, timeout=left_s)
                    return
                async for response in channel.unary_stream(method)(message, timeout=left_s):
                    yield response
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

    def _as_operator(self, name: str) -> Dial:
        if self._secret is None:
            return self._dial
        instance = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64] or "operator"
        return Dial(self._dial.tls, TokenMinter(self._secret, instance, CallerClass.OPERATOR))

    async def _open(self, worker: Worker, dial: Dial, *, identify_s: float | None) -> grpc.aio.Channel:
        """A channel to the process itself, which says who it is within `identify_s`; None: it is not asked.

        Raises Unavailable where another process answers at its endpoint. Routers may share a port. The
        address of a worker that has ended may be another one's by now, and a false record names any. No drain
        must reach that process.
        """
        endpoint = worker.admin or worker.endpoint
        if identify_s is None:
            return dial(endpoint)
        named, found = (ROLES.value(worker.role), worker.instance), ""
        for _ in range(_TRIES if worker.role is Role.ROUTER else 1):
            channel, is_named = dial(endpoint), False
            try:
                status = await _status(channel, timeout_s=identify_s)
                if is_named := (status.role, status.instance) == named:
                    return channel
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            finally:
                if not is_named:
                    await channel.close()
            found = shown(f"{ROLES.name(status.role)}/{status.instance}")
        raise Unavailable(f"{worker.role}/{worker.instance} was not reached: {found} answers at {endpoint}")


async def _status(channel: grpc.aio.Channel, *, timeout_s: float = _STATUS_S) -> worker_pb2.GetStatusResponse:
    stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
    answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout_s)
    return received(answer, sender="the process")
