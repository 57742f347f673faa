"""Many jobs through kills of routers, workers and the database: none lost, none with two results.

Real processes serve the shipped model. Each body is submitted twice, with a seed, so that the answers of a
pair must be equal to the byte. A watcher reads the tables meanwhile: the first result that it sees of a job
has to be the last one, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from bench.progress import say
from bench.serve.workloads import WORDS
from libs.common.cluster.worker_record import Role
from libs.database.database import Database, open_database
from slipstream.async_client import AsyncClient
from slipstream.errors import SlipstreamError
from slipstream.jobs.messages import JobOptions
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import DATABASE_NAME, ClusterConfig
from tests.support.processes.postgres import PostgresServer

_SUBMITTED_AT_ONCE = 250
_PAGE = 1000
_WATCH_S = 1.0
_READY_S = 120.0
_DATABASE = "postgresql"


async def measure_kills(options: argparse.Namespace) -> dict[str, object]:
    """The run on the database of `options.database`."""
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if options.database == _DATABASE:
            server = await asyncio.to_thread(_start_postgres, Path(folder))
        try:
            return await _measure(Path(folder) / "run", server, options)
        finally:
            if server is not None:
                server.stop()


def _start_postgres(folder: Path) -> PostgresServer:
    (folder / "pg").mkdir()
    folder.chmod(0o755)  # it runs as another user
    server = PostgresServer(folder / "pg")
    server.start()
    return server


async def _measure(
    run_dir: Path, server: PostgresServer | None, options: argparse.Namespace
) -> dict[str, object]:
    url = server.url if server is not None else f"sqlite:{run_dir / DATABASE_NAME}"
    config = ClusterConfig(
        run_dir=run_dir,
        routers=2,
        draft_model=None,
        drafters=0,
        extra_arguments={Role.ROUTER: ("--database", url)} if server is not None else {},
    )
    began_s = time.monotonic()
    async with ClusterSupervisor(config, say=say) as cluster:
        routers = [p.endpoint for p in cluster.record().processes if p.role == Role.ROUTER]
        killer = Killer(cluster, server, random.Random(options.seed), every_s=options.kill_every_s)
        database = open_database(url)
        watcher = ResultWatcher(database)
        async with AsyncClient(routers) as client:
            tasks = [asyncio.create_task(killer.run()), asyncio.create_task(watcher.run())]
            ids = await _submit(client, options.jobs, options.seed)
            submitted_s = time.monotonic() - began_s
            deadline_s = began_s + options.minutes * 60
            while not await watcher.all_ended(ids) and time.monotonic() < deadline_s:
                await asyncio.sleep(_WATCH_S)
        took_s = time.monotonic() - began_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await watcher.look_at_all()
        await database.close()
    report = judge(ids, watcher)
    if server is None:
        report["integrity_check"] = _integrity(run_dir / DATABASE_NAME)
    return {
        "database": options.database,
        "seconds": round(took_s),
        "submit_seconds": round(submitted_s),
        "jobs_per_s": round(len(ids) / took_s, 1),
        "kills": dict(sorted(killer.done.items())),
        **report,
    }


async def _submit(client: AsyncClient, n_jobs: int, seed: int) -> list[str]:
    """Pairs of equal bodies, one after the other; a lost router costs a repeated call and no job."""
    ids: list[str] = []
    for begin in range(0, n_jobs, _SUBMITTED_AT_ONCE):
        bodies = [
            _body(number // 2, seed) for number in range(begin, min(n_jobs, begin + _SUBMITTED_AT_ONCE))
        ]
        options = JobOptions(group_id="kills", idempotency_key=f"kills-{begin}")
        while True:
            try:
                ids += [job.id for job in await client.jobs.submit(bodies, options=options)]
                break
            except SlipstreamError as error:
                say(f"submits again: {error}")
                await asyncio.sleep(1.0)
    return ids


def _body(number: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed * 1_000_003 + number)
    text = " ".join(rng.choices(WORDS, k=8))
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        "temperature": 2.0,
        "seed": number,
        "ignore_eos": True,
    }


class Killer:
    """Kills a process or the database every so many seconds. A process that is not ready is left alone."""

    def __init__(
        self, cluster: ClusterSupervisor, server: PostgresServer | None, rng: random.Random, *, every_s: float
    ) -> None:
        self.done: Counter[str] = Counter()
        self._cluster, self._server, self._rng = cluster, server, rng
        self._every_s = every_s

    async def run(self) -> None:
        """Kill until cancelled."""
        kinds: list[str] = [Role.ROUTER, Role.DECODE, Role.PREFILL]
        kinds += [_DATABASE] if self._server is not None else [Role.ROUTER]  # SQLite is in the routers
        while True:
            await asyncio.sleep(self._every_s * self._rng.uniform(0.5, 1.5))
            kind = self._rng.choice(kinds)
            if kind == _DATABASE:
                await self._restart_database()
            elif self._kill(kind):
                self.done[kind] += 1

    def _kill(self, role: str) -> bool:
        """SIGKILL one process of the role, where another one is ready."""
        ready = [p for p in self._cluster.record().processes if p.role == role and p.state == "ready"]
        if len(ready) < 2:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._cluster.kill(self._rng.choice(ready).instance)
        return True

    async def _restart_database(self) -> None:
        """End the server as a crash does, or cutting connections, and start it again."""
        assert self._server is not None
        number = self._rng.choice([signal.SIGQUIT, signal.SIGINT])
        await asyncio.shield(asyncio.to_thread(self._restart, number))
        self.done[f"{_DATABASE} {number.name}"] += 1

    def _restart(self, number: signal.Signals) -> None:
        assert self._server is not None
        self._server.stop(number)
        self._server.start()


class ResultWatcher:
    """Reads results as they appear. `changed` has the jobs whose result was seen to change or to go."""

    def __init__(self, database: Database) -> None:
        self.states: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.answers: dict[str, bytes] = {}  # the digests of choices
        self.changed: set[str] = set()
        self.n_results = 0
        self._database = database
        self._whole: dict[str, bytes] = {}  # the digests of whole results, as first seen
        self._since_unix_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            with contextlib.suppress(SlipstreamError):
                await self._look()
            await asyncio.sleep(_WATCH_S)

    async def all_ended(self, ids: list[str]) -> bool:
        """Whether each job has ended."""
        return all(job_id in self.states for job_id in ids)

    async def look_at_all(self) -> None:
        """Read every result once more."""
        self._since_unix_s = 0.0
        before = set(self._whole)
        found = await self._look()
        self.changed |= before - found
        sql = "SELECT COUNT(*) FROM job_results"
        [(self.n_results,)] = await self._database.read(lambda tx: tx.execute(sql))

    async def _look(self) -> set[str]:
        """Take over the results since the last look; their ids."""
        found: set[str] = set()
        async for job_id, state, attempt, ended_s, body in self._rows():
            digest = hashlib.blake2b(body or b"").digest()
            if self._whole.setdefault(job_id, digest) != digest or self.states.get(job_id, state) != state:
                self.changed.add(job_id)
            self.states[job_id], self.attempts[job_id] = state, attempt
            if body is not None:
                self.answers[job_id] = _choices(bytes(body))
            found.add(job_id)
            self._since_unix_s = max(self._since_unix_s, ended_s - 10.0)  # commits come in another order
        return found

    async def _rows(self) -> AsyncIterator[tuple[Any, ...]]:
        since_s, after = self._since_unix_s, ""
        sql = (
            "SELECT id, state, attempt, ended_unix_s, body FROM jobs LEFT JOIN job_results USING (id)"
            " WHERE ended_unix_s > ? AND id > ? ORDER BY id LIMIT ?"
        )
        while True:
            values = (since_s, after, _PAGE)
            rows = await self._database.read(lambda tx, values=values: tx.execute(sql, values))  # type: ignore[misc]
            for row in rows:
                yield row
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]


def judge(ids: list[str], watcher: ResultWatcher) -> dict[str, object]:
    """The verdict on the jobs."""
    states = Counter(watcher.states.get(job_id, "lost") for job_id in ids)
    pairs = [(ids[i], ids[i + 1]) for i in range(0, len(ids) - 1, 2)]
    unequal = [pair for pair in pairs if watcher.answers.get(pair[0]) != watcher.answers.get(pair[1])]
    repeated = sum(watcher.attempts.get(job_id, 0) > 1 for job_id in ids)
    return {
        "submitted": len(ids),
        "distinct_ids": len(set(ids)),
        "succeeded": states["succeeded"],
        "lost": states["lost"],
        "failed": states["failed"] + states["expired"] + states["cancelled"],
        "with_two_results": len(watcher.changed) + max(0, watcher.n_results - len(set(ids))),
        "run_more_than_once": repeated,
        "pairs": len(pairs),
        "unequal_pairs": len(unequal),
        "distinct_answers": len(set(watcher.answers.values())),
    }


def _choices(body: bytes) -> bytes:
    """The digest of the part of an answer that every attempt must repeat."""
    answer = msgspec.json.decode(body)
    usage = answer.get("usage") or {}
    same = [answer.get("choices"), usage.get("prompt_tokens"), usage.get("completion_tokens")]
    return hashlib.blake2b(msgspec.json.encode(same, order="deterministic")).digest()


def _integrity(path: Path) -> str:
    with sqlite3.connect(path) as raw:
        return str(raw.execute("PRAGMA integrity_check").fetchone()[0])
