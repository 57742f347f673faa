"""The ledgers of a cluster's workers, and a wait until all of them are empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from slipstream.rpc.dial import Dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc


async def statuses(endpoints: Mapping[str, str], dial: Dial) -> dict[str, worker_pb2.GetStatusResponse]:
    """GetStatus of every worker, by instance."""

    async def ask(endpoint: str) -> worker_pb2.GetStatusResponse:
        async with dial(endpoint) as channel:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)

    answers = await asyncio.gather(*(ask(endpoint) for endpoint in endpoints.values()))
    return dict(zip(endpoints, answers, strict=True))


def held(status: worker_pb2.GetStatusResponse) -> dict[str, int]:
    """The entries of a worker's ledger that are not zero; empty when the worker is idle."""
    return {field.name: value for field, value in status.ledger.ListFields()}


async def wait_until_idle(
    endpoints: Mapping[str, str], problems: list[str], dial: Dial, *, timeout_s: float = 15.0
) -> int:
    """Wait until every ledger is empty; entries left at the deadline are added to `problems`.

    Returns the number of leaked blocks.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answers = await statuses(endpoints, dial)
        busy = {instance: what for instance, status in answers.items() if (what := held(status))}
        if not busy or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    problems += [f"{instance} still holds {what}" for instance, what in busy.items()]
    return sum(status.ledger.blocks_leaked for status in answers.values())


async def block_counts(endpoints: Mapping[str, str], dial: Dial) -> dict[str, int]:
    """Blocks of all kvstores by tier."""
    totals = {"dram": 0, "nvme": 0}
    for status in (await statuses(endpoints, dial)).values():
        for tier in totals:
            totals[tier] += int(status.counters.get(f"slipstream_kvstore_blocks_{tier}", 0))
    return totals
