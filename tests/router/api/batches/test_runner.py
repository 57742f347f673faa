"""Batches from their file to their results, through crashes, cancels and the end of their time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from libs.common import batch_bounds
from services.router.api.batches import runner
from services.router.api.batches.batch_store import LEASE_S, decode_batch
from services.router.api.batches.records import NewBatch, RequestBatch, batch_object
from services.router.api.batches.runner import BatchRunner
from services.router.api.batches.states import BatchState
from services.router.jobs.store import JobLimits, JobStore
from slipstream import errors
from tests.router.api.batches.conftest import CHAT, TENANT, BatchTables, line
from tests.router.jobs.stores import JobTables


async def run_jobs(tables: BatchTables, count: int) -> None:
    for _ in range(count):
        await tables.end_job()


async def test_a_batch_runs_to_its_files(tables: BatchTables) -> None:
    batch = await tables.create(line("a") + line("b") + line("c"))
    assert batch.state is BatchState.VALIDATING
    assert await tables.step()
    batch = await tables.get(batch)
    assert (batch.state, batch.counts.total, batch.n_submitted) == (BatchState.IN_PROGRESS, 3, 3)
    await tables.end_job()
    await tables.end_job(status=400, body={"error": {"message": "bad"}})
    await tables.step()
    batch = await tables.get(batch)
    assert (batch.counts.completed, batch.counts.failed, batch.counts.left) == (1, 1, 1)
    await tables.end_job()
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.COMPLETED
    assert not await tables.step()
    output, failed = await tables.read(batch.output_file), await tables.read(batch.error_file)
    assert {item["custom_id"] for item in output + failed} == {"a", "b", "c"}
    assert len(output) == 2
    assert output[0]["response"]["status_code"] == 200 and output[0]["error"] is None
    assert output[0]["response"]["body"]["object"] == "chat.completion"
    assert output[0]["response"]["request_id"] == output[0]["response"]["body"]["id"]
    assert failed[0]["response"] == {**failed[0]["response"], "status_code": 400}
    said = batch_object(batch)
    assert said["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert said["usage"]["input_tokens"] == 20 and said["usage"]["output_tokens"] == 6
    assert said["usage"]["input_tokens_details"] == {"cached_tokens": 8}
    assert (said["model"], said["status"]) == ("kimi", "completed")
    assert said["completed_at"] >= said["finalizing_at"] >= said["in_progress_at"] >= said["created_at"]
    assert said["failed_at"] is said["cancelled_at"] is said["expired_at"] is None


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"\n \n", ["empty_file"]),
        (line("a") + line("a"), ["duplicate_custom_id"]),
        (line("a") + b"{\n" + line("b", method="GET"), ["invalid_json_line", "invalid_method"]),
        (b"{\n" * 1000, ["invalid_json_line"] * batch_bounds.MAX_BATCH_ERRORS),
    ],
)
async def test_a_batch_with_a_defect_fails_and_runs_nothing(
    tables: BatchTables, content: bytes, codes: list[str]
) -> None:
    batch = await tables.create(content)
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.FAILED
    assert [defect.code for defect in batch.defects] == codes
    assert (await tables.jobs.store.counts(TENANT)).total == 0
    said = batch_object(batch)
    assert [item["code"] for item in said["errors"]["data"]] == codes
    assert said["failed_at"] is not None


async def test_a_batch_stays_held_while_its_file_is_read(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "x" * runner._PIECE_BYTES}]}
    batch = await tables.create(b"".join(line(f"n{index}", body=body) for index in range(8)))

    async def slow_piece(tenant: str, piece: Callable[[], Any]) -> Any:
        tables.jobs.now_s += LEASE_S / 3
        assert await tables.batches.hold() is None
        return piece()

    monkeypatch.setattr(tables, "_run_piece", slow_piece)
    assert await tables.make_runner().step()
    assert (await tables.get(batch)).n_submitted == 8


async def test_a_router_that_dies_amid_submission_doubles_no_job(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SUBMITTED_TOGETHER", 2)
    batch = await tables.create(b"".join(line(f"n{index}") for index in range(7)))
    submit, n_calls = JobStore.submit, 0

    async def dying_submit(self: JobStore, *given: Any, **options: Any) -> Any:
        nonlocal n_calls
        jobs = await submit(self, *given, **options)
        n_calls += 1
        if n_calls == 2:
            raise RuntimeError("the process dies after the commit")
        return jobs

    monkeypatch.setattr(JobStore, "submit", dying_submit)
    with pytest.raises(RuntimeError):
        await tables.step()
    assert (await tables.get(batch)).n_submitted == 4
    assert not await tables.make_runner().step()  # the dead router holds the batch
    tables.jobs.now_s += 120
    assert await tables.make_runner().step()
    assert (await tables.jobs.store.counts(TENANT, batch.id)).total == 7
    assert (await tables.get(batch)).n_submitted == 7


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_cancel_amid_submission_gives_each_request_one_result(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    monkeypatch.setattr(runner, "_SUBMITTED_TOGETHER", 2)
    batch = await tables.create(b"".join(line(f"n{index}") for index in range(7)))
    submit, n_calls = JobStore.submit, 0

    async def submit_and_cancel(self: JobStore, *given: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2 and is_before:
            await tables.batches.cancel(TENANT, batch.id)
        jobs = await submit(self, *given, **options)
        if n_calls == 2 and not is_before:
            await tables.batches.cancel(TENANT, batch.id)
        return jobs

    monkeypatch.setattr(JobStore, "submit", submit_and_cancel)
    await tables.step()
    assert (await tables.jobs.store.counts(TENANT, batch.id)).total == (2 if is_before else 4)
    while (await tables.get(batch)).state is not BatchState.CANCELLED:
        assert await tables.step()
    ended = await tables.get(batch)
    failed = await tables.read(ended.error_file)
    assert sorted(item["custom_id"] for item in failed) == [f"n{index}" for index in range(7)]
    assert (await tables.jobs.store.counts(TENANT, batch.id)).live == 0


async def test_a_tenant_without_room_for_jobs_waits_and_goes_on(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SUBMITTED_TOGETHER", 2)
    small = JobTables(tables.jobs.database, JobLimits(max_live=3))
    tables.jobs.store = JobStore(
        small.database, wall_clock_s=lambda: tables.jobs.now_s, limits=JobLimits(max_live=3)
    )
    tables.runner = tables.make_runner()
    batch = await tables.create(b"".join(line(f"n{index}") for index in range(5)))
    await tables.step()
    assert (await tables.get(batch)).n_submitted == 2
    await run_jobs(tables, 2)
    await tables.step()
    await run_jobs(tables, 2)
    await tables.step()
    await run_jobs(tables, 1)
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.COMPLETED and batch.counts.completed == 5
    assert [item["custom_id"] for item in await tables.read(batch.output_file)] == [
        f"n{index}" for index in range(5)
    ]


async def test_a_cancelled_batch_keeps_what_is_done(tables: BatchTables) -> None:
    batch = await tables.create(line("a") + line("b"))
    await tables.step()
    await tables.end_job()
    cancelled = await tables.batches.cancel(TENANT, batch.id)
    assert cancelled.state is BatchState.CANCELLING
    assert (await tables.batches.cancel(TENANT, batch.id)).state is BatchState.CANCELLING
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.CANCELLED
    (done,), (undone,) = await tables.read(batch.output_file), await tables.read(batch.error_file)
    assert (done["custom_id"], undone["custom_id"]) == ("a", "b")
    assert (undone["response"], undone["error"]["code"]) == (None, "batch_cancelled")
    with pytest.raises(errors.FailedPrecondition):
        await tables.batches.cancel(TENANT, batch.id)
    assert (await tables.jobs.store.counts(TENANT, batch.id)).live == 0


async def test_a_cancel_amid_work_is_not_overwritten(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await tables.create(line("a"))
    submit = JobStore.submit

    async def submit_and_cancel(self: JobStore, *given: Any, **options: Any) -> Any:
        await tables.batches.cancel(TENANT, batch.id)
        return await submit(self, *given, **options)

    monkeypatch.setattr(JobStore, "submit", submit_and_cancel)
    await tables.step()
    assert (await tables.get(batch)).state is BatchState.CANCELLING
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.CANCELLED
    assert (await tables.jobs.store.counts(TENANT, batch.id)).live == 0


async def test_a_late_batch_expires_with_what_is_done(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SUBMITTED_TOGETHER", 2)
    tables.jobs.store = JobStore(
        tables.jobs.database, wall_clock_s=lambda: tables.jobs.now_s, limits=JobLimits(max_live=2)
    )
    tables.runner = tables.make_runner()
    batch = await tables.create(b"".join(line(f"n{index}") for index in range(5)))
    await tables.step()
    await tables.end_job()
    tables.jobs.now_s += batch_bounds.BATCH_WINDOW_S
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.EXPIRED
    assert [item["custom_id"] for item in await tables.read(batch.output_file)] == ["n0"]
    late = await tables.read(batch.error_file)
    assert [item["custom_id"] for item in late] == ["n1", "n2", "n3", "n4"]
    assert {item["error"]["code"] for item in late} == {"batch_expired"}
    assert batch_object(batch)["expired_at"] is not None


async def test_files_written_twice_have_each_line_once(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await tables.create(line("a") + line("b"))
    await tables.step()
    await run_jobs(tables, 2)
    save, is_dead = tables.batches.save, False

    async def dying_save(held: Any, **given: Any) -> None:
        if held.batch.ended_unix_s is not None and not is_dead:
            raise RuntimeError("the process dies before the last write")
        await save(held, **given)

    monkeypatch.setattr(tables.batches, "save", dying_save)
    with pytest.raises(RuntimeError):
        await tables.step()
    is_dead = True
    tables.jobs.now_s += 120
    await tables.step()
    batch = await tables.get(batch)
    assert batch.state is BatchState.COMPLETED
    assert len(await tables.read(batch.output_file)) == 2
    page = await tables.files.page(TENANT, purpose="batch_output", after="", limit=9, is_ascending=True)
    assert [file.id for file in page] == [batch.output_file]


async def test_an_input_that_is_gone_fails_the_batch(tables: BatchTables) -> None:
    batch = await tables.create(line("a"))
    await tables.jobs.database.run(lambda tx: tx.execute("DELETE FROM files"))
    await tables.step()
    batch = await tables.get(batch)
    assert (batch.state, batch.defects[0].code) == (BatchState.FAILED, "invalid_file")


async def test_an_input_stays_while_its_batch_runs(tables: BatchTables) -> None:
    batch: RequestBatch = await tables.create(line("a"))
    with pytest.raises(errors.FailedPrecondition):
        await tables.files.delete(TENANT, batch.input_file)
    tables.jobs.now_s += 2 * 86_400  # the file has expired, the batch is late
    assert not await tables.files.sweep()
    await tables.step()
    assert (await tables.get(batch)).state is BatchState.EXPIRED
    assert await tables.files.sweep()


async def test_work_on_a_file_is_the_tenants(tables: BatchTables) -> None:
    await tables.create(line("a"), tenant="bob")
    await tables.step()
    assert set(tables.pieces) == {"bob"}
    assert json.loads(
        await tables.jobs.store.request("bob", (await tables.jobs.store.list_jobs("bob"))[0].id)
    )
    assert (await tables.jobs.store.list_jobs("bob"))[0].path == CHAT


async def test_a_batch_needs_room_for_the_files_that_end_it(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await tables.create(line("a"))
    await tables.step()
    monkeypatch.setattr(batch_bounds, "MAX_TENANT_FILE_BYTES", 10)
    with pytest.raises(errors.Overloaded, match="bytes already"):
        await tables.batches.create(TENANT, NewBatch(CHAT, batch.input_file, {}, 86_400))


async def test_the_oldest_batches_that_are_over_are_forgotten(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_bounds, "MAX_TENANT_STORED_BATCHES", 3)
    running = await tables.create(line("a"))
    await tables.step()
    over = []
    for _ in range(4):
        tables.jobs.now_s += 1
        over.append(await tables.create(b"no line of a batch"))
        while (await tables.get(over[-1])).state is not BatchState.FAILED:
            await tables.step()
    stored = await tables.batches.page(TENANT, after="", limit=10)
    assert [decode_batch(record).id for record in stored] == [over[3].id, over[2].id, over[1].id, running.id]


async def test_a_long_step_of_one_tenant_delays_no_other_one(tables: BatchTables) -> None:
    """Four tenants' batches are worked on side by side, and one batch of a tenant at a time."""
    gate = asyncio.Event()
    held: list[str] = []

    async def run_piece(tenant: str, piece: Callable[[], Any]) -> Any:
        if tenant == "large":
            held.append(tenant)
            await gate.wait()
        return piece()

    runner = BatchRunner(
        tables.batches,
        tables.files,
        tables.jobs.store,
        run_piece=run_piece,
        clock=lambda: tables.jobs.now_s,
    )
    for _ in range(3):
        await tables.create(line("a"), tenant="large")
    small = await tables.create(line("a"), tenant="small")
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(30):
        while not (await tables.jobs.store.counts("small")).queued:
            await asyncio.sleep(0.01)
    assert held == ["large"] and not gate.is_set()
    assert (await tables.batches.get("small", small.id)).state is BatchState.IN_PROGRESS
    gate.set()
    async with asyncio.timeout(30):
        while (await tables.jobs.store.counts("large")).queued < 3:
            tables.jobs.now_s += 20
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
