"""Cancelling Drain or WatchLoad ends the call, even when the load changes at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import worker_pb2
from tests.support.stubs.idle_process import IdleProcess

WAIT_S = 100.0


class Call:
    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "nobody"


def busy_worker() -> WorkerService:
    process = IdleProcess(held=worker_pb2.Ledger(pins=1))
    return WorkerService(WorkerIdentity("kvstore", "kv-0"), process)


async def run_ready_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def ends_cancelled(task: asyncio.Task[Any]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=WAIT_S)
    if not done:  # the cancel was lost
        task.cancel()
        await asyncio.wait({task}, timeout=WAIT_S)
    return bool(done) and task.cancelled()


async def test_a_drain_call_is_cancelled_even_if_the_load_changes_at_the_same_time() -> None:
    worker, context = busy_worker(), Call()
    draining = asyncio.create_task(worker.Drain(worker_pb2.DrainRequest(), context))  # type: ignore[arg-type]
    await run_ready_tasks()
    worker.load_changed()
    draining.cancel()
    assert await ends_cancelled(draining)


async def test_a_load_watch_is_cancelled_even_if_the_load_changes_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("libs.common.cluster.worker_service.MAX_SILENCE_S", 60.0)
    worker, seen = busy_worker(), 0

    async def watch() -> None:
        nonlocal seen
        context: Any = Call()
        async for _ in worker.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_ms=1), context):
            seen += 1

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(WAIT_S):
        while seen < 2:  # the watch is past its pause and waits for a change
            worker.load_changed()
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    worker.load_changed()
    watching.cancel()
    assert await ends_cancelled(watching)


async def test_a_drain_polls_for_work_that_ends_without_a_notification(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafter streams and expired leases send no notification; the drain does not wait for a heartbeat."""
    monkeypatch.setattr("libs.common.cluster.worker_service.MAX_SILENCE_S", 3600.0)
    ledger = worker_pb2.Ledger(streams=1)
    worker = WorkerService(WorkerIdentity("drafter", "drafter-0"), IdleProcess(held=ledger))
    waiting = asyncio.create_task(worker.wait_idle(timeout_s=3600.0))
    await run_ready_tasks()
    assert not waiting.done()
    ledger.streams = 0
    async with asyncio.timeout(WAIT_S):
        await waiting
    assert not caplog.records
    ledger.streams = 1
    await worker.wait_idle(timeout_s=0.0)
    assert "stopping with work in progress: streams: 1" in caplog.text
