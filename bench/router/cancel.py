"""How long a cancelled request is still held by anybody: one stream at a time, ledgers asked repeatedly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from bench.router.load import begins_with_delta
from libs.common.cluster.worker_service import held
from slipstream.rpc.dial import dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc

_LIMIT_S = 30.0


async def cancel_one(call: Any, endpoints: Mapping[str, str], *, deltas: int) -> float:
    """Milliseconds from the cancel to the first answers of all processes that say they hold nothing.

    `deltas`: how many to read before it; 0 = cancel as soon as a worker holds the request.
    """
    channels = [dial(endpoint) for endpoint in endpoints.values()]
    stubs: list[worker_pb2_grpc.WorkerServiceAsyncStub] = [
        worker_pb2_grpc.WorkerServiceStub(channel) for channel in channels
    ]

    async def anything_held() -> bool:
        request = worker_pb2.GetStatusRequest()
        answers = await asyncio.gather(*(stub.GetStatus(request, timeout=_LIMIT_S) for stub in stubs))
        return any(held(answer.ledger) for answer in answers)

    try:
        async with asyncio.timeout(2 * _LIMIT_S):
            while deltas:
                deltas -= begins_with_delta(await call.read())
            while not await anything_held():
                await asyncio.sleep(0.001)
            began_s = time.monotonic()
            call.cancel()
            while await anything_held():
                pass
            return (time.monotonic() - began_s) * 1e3
    finally:
        call.cancel()
        for channel in channels:
            await channel.close()
