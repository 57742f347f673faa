"""Jobs through kills of routers and of the database: none is lost, none has two results."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from libs.database.database import open_database
from services.router.jobs.store import JobStore
from tests.database.conftest import postgres  # noqa: F401 - fixture
from tests.router.jobs.conftest import empty
from tests.router.jobs.puller_process import answer_of
from tests.router.jobs.stores import make_request
from tests.support.processes.launching import ServiceProcess
from tests.support.processes.postgres import PostgresServer

_PULLERS = 3
_SUBMITTED_AT_ONCE = 250


class KilledPullers:
    """Processes that run jobs. `kill_one` ends one as a crash does, and starts another in its place."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._output = (folder / "output").open("wb")
        self._started = 0
        self._processes = [self._start() for _ in range(_PULLERS)]

    def _start(self) -> ServiceProcess:
        name = f"r{self._started}"
        self._started += 1
        module = "tests.router.jobs.puller_process"
        command = [sys.executable, "-m", module, self._url, name, str(self._folder / f"{name}.log")]
        return ServiceProcess(command, self._output)

    def kill_one(self, index: int) -> None:
        self._processes[index].send_signal(signal.SIGKILL)
        self._processes[index] = self._start()

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        self._output.close()

    def accepted(self) -> Counter[str]:
        """How often each job's result was accepted, as the processes wrote it down."""
        return Counter(line for log in self._folder.glob("r*.log") for line in log.read_text().splitlines())


async def _run(
    url: str, folder: Path, *, jobs: int, kills: int, server: PostgresServer | None = None
) -> None:
    database = open_database(url)
    store = JobStore(database, wall_clock_s=time.time)
    await store.list_jobs("alice")
    await empty(database)
    prompts = [f"prompt {i}" for i in range(jobs)]
    ids: list[str] = []
    for begin in range(0, jobs, _SUBMITTED_AT_ONCE):
        some = [make_request(prompt) for prompt in prompts[begin : begin + _SUBMITTED_AT_ONCE]]
        ids += [job.id for job in await store.submit("alice", some)]
    pullers = await asyncio.to_thread(KilledPullers, url, folder)
    rng = random.Random(jobs)
    try:
        async with asyncio.timeout(240 + jobs / 10):
            for kill in range(kills):
                done = jobs * kill // (kills + 1)  # each kill comes while jobs run
                while (await store.counts("alice")).succeeded < done:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(pullers.kill_one, rng.randrange(_PULLERS))
                if server is not None and kill % 4 == 1:
                    await asyncio.to_thread(server.stop, rng.choice([signal.SIGQUIT, signal.SIGINT]))
                    await asyncio.to_thread(server.start)
            while (await store.counts("alice")).live:
                await asyncio.sleep(0.1)
    finally:
        pullers.close()
    accepted = pullers.accepted()
    assert set(accepted) <= set(ids) and max(accepted.values()) == 1, "a job has two results"
    await _check_results(store, ids, prompts)
    owners = await database.read(lambda tx: tx.execute("SELECT SUM(live) FROM job_tenants"))
    assert owners == [(0,)]
    await database.close()


async def _check_results(store: JobStore, ids: list[str], prompts: list[str]) -> None:
    """Each job has ended well, with the answer that any attempt gives."""
    found: dict[str, bytes] = {}
    after = ""
    while page := await store.results("alice", "", after=after, limit=1000):
        after = page[-1][0].id
        found |= {job.id: result.body for job, result in page if result is not None}
    assert found == {
        job_id: answer_of(make_request(prompt).body) for job_id, prompt in zip(ids, prompts, strict=True)
    }


async def test_sqlite_jobs_survive_kills_amid_commits(tmp_path: Path) -> None:
    await _run(f"sqlite:{tmp_path}/jobs.db", tmp_path, jobs=300, kills=6)
    with sqlite3.connect(tmp_path / "jobs.db") as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_postgresql_jobs_survive_restarts(postgres: PostgresServer, tmp_path: Path) -> None:  # noqa: F811
    await _run(postgres.url, tmp_path, jobs=200, kills=2, server=postgres)


@pytest.mark.soak
@pytest.mark.timeout(4000)
async def test_20000_sqlite_jobs_survive_kills_amid_commits(tmp_path: Path) -> None:
    await _run(f"sqlite:{tmp_path}/jobs.db", tmp_path, jobs=20_000, kills=150)
    with sqlite3.connect(tmp_path / "jobs.db") as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.soak
@pytest.mark.timeout(4000)
async def test_20000_postgresql_jobs_survive_restarts(
    postgres: PostgresServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    await _run(postgres.url, tmp_path, jobs=20_000, kills=60, server=postgres)
