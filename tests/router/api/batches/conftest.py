"""Batches on an SQLite database, and a hand that ends their jobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from libs.database.database import open_database
from services.router.api.batches.batch_store import BatchStore
from services.router.api.batches.file_store import FileStore, NewFile
from services.router.api.batches.records import NewBatch, RequestBatch
from services.router.api.batches.runner import BatchRunner
from services.router.jobs.types import JobOutcome, JobState
from tests.router.jobs.stores import JobTables

CHAT = "/v1/chat/completions"
TENANT = "alice"


class BatchTables:
    """The stores of one database under one clock, and a runner of two."""

    def __init__(self, jobs: JobTables) -> None:
        self.jobs = jobs
        self.files = FileStore(jobs.database, wall_clock_s=lambda: jobs.now_s)
        self.batches = BatchStore(jobs.database, wall_clock_s=lambda: jobs.now_s)
        self.pieces: list[str] = []
        self.runner = self.make_runner()

    def make_runner(self) -> BatchRunner:
        return BatchRunner(
            self.batches,
            self.files,
            self.jobs.store,
            run_piece=self._run_piece,
            clock=lambda: self.jobs.now_s,
        )

    async def _run_piece(self, tenant: str, piece: Callable[[], Any]) -> Any:
        self.pieces.append(tenant)
        return piece()

    async def upload(self, content: bytes, *, tenant: str = TENANT, ttl_s: float = 86_400) -> str:
        writer = await self.files.begin(NewFile(tenant, "input.jsonl", "batch"))
        await writer.append(content)
        return (await writer.finish(ttl_s=ttl_s)).id

    async def create(self, content: bytes, *, tenant: str = TENANT) -> RequestBatch:
        new = NewBatch(CHAT, await self.upload(content, tenant=tenant), {}, 86_400)
        return await self.batches.create(tenant, new)

    async def step(self) -> bool:
        """One step of the runner, after whatever pause it left."""
        self.jobs.now_s += 16
        return await self.runner.step()

    async def get(self, batch: RequestBatch) -> RequestBatch:
        return await self.batches.get(batch.tenant, batch.id)

    async def end_job(self, *, status: int = 200, body: Any = None) -> None:
        """Claim the next job, and end it."""
        job = await self.jobs.claim_one("router")
        outcome = JobOutcome(status, json.dumps(body or answer(job.id)).encode())
        state = JobState.SUCCEEDED if status == 200 else JobState.FAILED
        assert await self.jobs.leases.finish("router", job, outcome, state)

    async def read(self, file_id: str | None) -> list[Any]:
        """The lines of a file."""
        assert file_id is not None
        file = await self.files.get(TENANT, file_id)
        content = b"".join([chunk async for chunk in self.files.chunks(file)])
        assert len(content) == file.n_bytes
        return [json.loads(line) for line in content.splitlines()]


def answer(name: str) -> Any:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    return {"id": name, "object": "chat.completion", "model": "kimi", "choices": [], "usage": usage}


def line(custom_id: str, /, **changes: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": f"hi {custom_id}"}]}
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    return json.dumps({name: value for name, value in request.items() if value is not None}).encode() + b"\n"


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[BatchTables]:
    database = open_database(f"sqlite:{tmp_path}/batches.db")
    made = BatchTables(JobTables(database))
    await made.jobs.leases.register("router")
    yield made
    await database.close()
