"""Moves batches on: from their file to jobs, and from the answers of these to files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from libs.common import batch_bounds
from services.router.admission.fair_threads import RunPiece
from services.router.api.batches.batch_store import LEASE_S, BatchStore, HeldBatch
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.lines import BatchLine, DefectCode, LineDefect, LineReader, SeenIds
from services.router.api.batches.records import RequestBatch
from services.router.api.batches.result_files import ResultFile, ResultFiles
from services.router.api.batches.results import result_lines, unsubmitted_lines
from services.router.api.batches.states import BatchState, LineCounts, end_of, has_ended
from services.router.jobs.store import JobStore
from services.router.jobs.types import JobRequest
from slipstream import errors

log = logging.getLogger(__name__)

# Lines of 16 KiB are parsed within a few milliseconds, whatever they hold.
_PIECE_BYTES = 16 << 10
_SUBMITTED_TOGETHER, _SUBMITTED_BYTES = 500, 8 << 20
_RESULTS_TOGETHER = 20
# Looks at a batch whose jobs run, and at one whose tenant has too many jobs: it reads the file again.
_LOOK_S, _FULL_S = 1.0, 15.0
_IDLE_S = 1.0
_SWEEP_S = 60.0
_LEAST_EXPIRY_S = 60.0
_TENANTS_AT_ONCE = 4


class BatchRunner:
    """Works on the batches of a few tenants side by side, one of each: a long step delays no other tenant."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        jobs: JobStore,
        *,
        run_piece: RunPiece,
        clock: Callable[[], float],
    ) -> None:
        self._batches = batches
        self._files = files
        self._jobs = jobs
        self._run_piece = run_piece
        self._clock = clock
        self._wake = asyncio.Event()
        self._holding = asyncio.Lock()
        self._sweep_s = 0.0
        self._kept_s: dict[str, float] = {}  # by tenant: when the lease began or was prolonged

    def wake(self) -> None:
        """Look for work at once, and for files that were deleted."""
        self._sweep_s = 0.0
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled. An unavailable database is tried again."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_TENANTS_AT_ONCE):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                has_worked = await self.step()
                if not await self._sweep() and not has_worked:
                    await self._pause()
            except errors.SlipstreamError as error:
                log.warning("batches wait: %s", error.message)
                await self._pause()
            except Exception:
                log.exception("a batch waits until its lease ends")
                await self._pause()

    async def step(self) -> bool:
        """Work on one batch; whether there was one."""
        async with self._holding:  # `_kept_s` then has the tenants of all other workers
            held = await self._batches.hold(but=self._kept_s)
            if held is None:
                return False
            self._kept_s[held.batch.tenant] = self._clock()
        try:
            await self._advance(held)
        except errors.FailedPrecondition:
            pass  # cancelled meanwhile, or held by another router: it is looked at again
        except errors.NotFound:
            defect = LineDefect(DefectCode.INVALID_FILE, "the input file does not exist any more")
            await self._fail(held, [defect])
        finally:
            del self._kept_s[held.batch.tenant]
        return True

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _sweep(self) -> bool:
        """Remove a piece of what is deleted; whether there may be more."""
        if self._clock() < self._sweep_s:
            return False
        self._sweep_s = self._clock() + _SWEEP_S
        if await self._files.sweep():
            self._sweep_s = 0.0
            return True
        await self._batches.sweep()
        return False

    async def _advance(self, held: HeldBatch) -> None:
        if held.batch.state is BatchState.VALIDATING:
            held = await self._validate(held)
        if held.batch.state is BatchState.IN_PROGRESS and not self._is_late(held.batch):
            held, is_full = await self._submit(held)
            if is_full:
                await self._batches.save(held, rest_s=_FULL_S)
                return
        if held.batch.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING):
            held = await self._count(held)
        if held.batch.state is BatchState.FINALIZING or (
            held.batch.state is BatchState.CANCELLING and not held.batch.ended_unix_s
        ):
            await self._finish(held)
        elif held.batch.state is BatchState.IN_PROGRESS:
            await self._batches.save(held, rest_s=_LOOK_S)

    async def _keep(self, held: HeldBatch) -> None:
        """Prolong the lease, now and then. Raises FailedPrecondition where it was lost."""
        if self._clock() - self._kept_s[held.batch.tenant] > LEASE_S / 4:
            await self._batches.save(held)
            self._kept_s[held.batch.tenant] = self._clock()

    def _is_late(self, batch: RequestBatch) -> bool:
        return self._batches.wall_clock_s() >= batch.expires_unix_s

    # ---- from the file to jobs

    async def _validate(self, held: HeldBatch) -> HeldBatch:
        seen, defects = SeenIds(), list[LineDefect]()
        async for found in self._read(held.batch):
            for line in found:
                defect = line if isinstance(line, LineDefect) else seen.defect(line)
                if defect is not None:
                    defects.append(defect)
            if len(defects) >= batch_bounds.MAX_BATCH_ERRORS:
                break
            await self._keep(held)
        if not seen and not defects:
            defects.append(LineDefect(DefectCode.EMPTY_FILE, "the input file has no request"))
        if defects:
            return await self._fail(held, defects[: batch_bounds.MAX_BATCH_ERRORS])
        held = _changed(
            held,
            state=BatchState.IN_PROGRESS,
            in_progress_unix_s=self._batches.wall_clock_s(),
            counts=LineCounts(total=len(seen)),
        )
        await self._batches.save(held)
        return held

    async def _fail(self, held: HeldBatch, defects: Sequence[LineDefect]) -> HeldBatch:
        now_s = self._batches.wall_clock_s()
        held = _changed(held, state=BatchState.FAILED, defects=defects, ended_unix_s=now_s)
        await self._batches.save(held, rest_s=0)
        return held

    async def _submit(self, held: HeldBatch) -> tuple[HeldBatch, bool]:
        """Make jobs of all lines; also whether the tenant has no room for further ones now."""
        batch = held.batch
        if batch.n_submitted >= batch.counts.total:
            return held, False
        group = _LineGroup()
        async for found in self._read(batch, skipped=batch.n_submitted):
            for line in found:
                assert isinstance(line, BatchLine)  # the file does not change, and was validated
                if group.has_room(line):
                    group.add(line)
                    continue
                if (next_held := await self._submit_some(held, group.lines)) is None:
                    return held, True
                held, group = next_held, _LineGroup()
                group.add(line)
            await self._keep(held)  # the lines that are skipped may be a long file
        next_held = await self._submit_some(held, group.lines) if group.lines else held
        return next_held or held, next_held is None

    async def _submit_some(self, held: HeldBatch, lines: Sequence[BatchLine]) -> HeldBatch | None:
        batch = held.batch
        expires_s = max(_LEAST_EXPIRY_S, batch.expires_unix_s - self._batches.wall_clock_s())
        requests = [
            JobRequest(
                batch.endpoint,
                line.body,
                reference=line.custom_id,
                group_id=batch.id,
                idempotency_key=f"{batch.id}/{line.number}",
                expires_ms=round(expires_s * 1e3),
            )
            for line in lines
        ]
        held = _changed(held, n_submitted=batch.n_submitted + len(lines))
        # In one transaction: else a cancel between the two would give these lines two results.
        saving, key_sha256 = self._batches.saving(held), bytes.fromhex(batch.key_sha256)
        try:
            await self._jobs.submit(batch.tenant, requests, key_sha256=key_sha256, beside=saving)
        except errors.Overloaded:
            return None
        return held

    async def _read(
        self, batch: RequestBatch, *, skipped: int = 0
    ) -> AsyncIterator[Sequence[BatchLine | LineDefect]]:
        """The requests of the input file, piece by piece."""
        file = await self._files.get(batch.tenant, batch.input_file, even_expired=True)
        reader = LineReader(batch.endpoint, skipped=skipped)
        async for chunk in self._files.chunks(file):
            for begin in range(0, len(chunk), _PIECE_BYTES):
                piece = chunk[begin : begin + _PIECE_BYTES]
                yield await self._run_piece(batch.tenant, partial(reader.feed, piece))
        yield await self._run_piece(batch.tenant, reader.finish)

    # ---- from the answers to files

    async def _count(self, held: HeldBatch) -> HeldBatch:
        """Take over how many jobs have ended, and go on where all have or the batch must end."""
        batch = held.batch
        jobs = await self._jobs.counts(batch.tenant, batch.id)
        failed = jobs.failed + jobs.cancelled + jobs.expired
        held = _changed(held, counts=LineCounts(batch.counts.total, jobs.succeeded, failed))
        is_late = self._is_late(batch)
        if has_ended(batch.state, held.batch.counts, is_late=is_late):
            await self._jobs.cancel_group(batch.tenant, batch.id)
            if batch.state is BatchState.IN_PROGRESS:
                now_s = self._batches.wall_clock_s()
                held = _changed(held, state=BatchState.FINALIZING, finalizing_unix_s=now_s)
            await self._batches.save(held)
        return held

    async def _finish(self, held: HeldBatch) -> None:
        batch = held.batch
        code = "batch_expired" if self._is_late(batch) else "request_cancelled"
        if batch.state is BatchState.CANCELLING:
            code = "batch_cancelled"
        files = ResultFiles(self._files, batch)
        after = ""
        while jobs := await self._jobs.results(batch.tenant, batch.id, after=after, limit=_RESULTS_TOGETHER):
            await files.append(await self._run_piece(batch.tenant, partial(result_lines, jobs, code=code)))
            after = jobs[-1][0].id
            await self._keep(held)
        if files.n_jobs < batch.counts.total:
            await self._append_unsubmitted(held, files.errors, code)
        total = batch.counts.total
        n_unfinished = files.n_unfinished + total - files.n_jobs
        held = _changed(
            held,
            state=end_of(batch.state, is_late=self._is_late(batch), n_unfinished=n_unfinished),
            counts=LineCounts(total, files.n_completed, total - files.n_completed),
            tokens=files.tokens,
            model=files.model or None,
            output_file=await files.output.finish(),
            error_file=await files.errors.finish(),
            ended_unix_s=self._batches.wall_clock_s(),
        )
        await self._batches.save(held, rest_s=0)

    async def _append_unsubmitted(self, held: HeldBatch, failed: ResultFile, code: str) -> None:
        async for found in self._read(held.batch, skipped=held.batch.n_submitted):
            lines = [line for line in found if isinstance(line, BatchLine)]
            await failed.append(unsubmitted_lines(lines, code=code))
            await self._keep(held)


class _LineGroup:
    """Lines that become jobs together."""

    def __init__(self) -> None:
        self.lines: list[BatchLine] = []
        self._n_bytes = 0

    def has_room(self, line: BatchLine) -> bool:
        is_small = self._n_bytes + len(line.body) <= _SUBMITTED_BYTES
        return not self.lines or (is_small and len(self.lines) < _SUBMITTED_TOGETHER)

    def add(self, line: BatchLine) -> None:
        self.lines.append(line)
        self._n_bytes += len(line.body)


def _changed(held: HeldBatch, **changes: Any) -> HeldBatch:
    return HeldBatch(msgspec.structs.replace(held.batch, **changes), held.lease)
