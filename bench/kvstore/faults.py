"""Time to first token while the kvstore's disk is broken, against no kvstore at all; both in one run.

    python -m bench.kvstore.faults --rounds 2 --json  # under four minutes on two idle cores
    python -m bench.kvstore.faults --only hangs,EIO   # more of some of them

Two local clusters of the shipped model, one with a kvstore and one without any, get prompts of the same
length in turn. Those of the first have their KV on the kvstore's disk and nowhere else, so every one of them
would be read from there; those of the second are new to it. Then the disk hangs for five seconds, fails
reads and writes, is full, read-only, or without descriptors, or the kvstore is stopped. Printed is how long
first tokens take with each fault against those without a kvstore, asked in between: the aim is 1.2.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.faults.faulty_disk import FaultyDisk
from bench.ledgers import held, statuses
from bench.progress import say
from bench.request_log import percentiles
from bench.serve.workloads import WORDS
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

STORE, WORKER = "kvstore-0", "prefill-0"
HANG_S = 5.0
AIM = 1.2
_UNAVAILABLE = ("slipstream_kvstore_disk_unavailable", "slipstream_kvstore_disk_read_only")
_ON_DISK, _IN_MEMORY = "slipstream_kvstore_blocks_nvme", "slipstream_kvstore_blocks_dram"
_WAIT_S = 120.0
# So little that a prompt's blocks are gone from memory and from the worker when its turn comes.
_KEEPS_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class FaultWorkload:
    """The requests: so many prompts of so many tokens for each fault."""

    prompt_tokens: int
    rounds: int
    only: tuple[str, ...] = ()  # faults; none for all
    seed: int = 0


class FaultedCluster:
    """One of the two clusters."""

    def __init__(self, cluster: ClusterSupervisor, client: AsyncClient) -> None:
        self.cluster, self.client = cluster, client

    async def ttft(self, text: str) -> tuple[float, float]:
        """(milliseconds to the first token, part of the prompt that was cached)."""
        started, first_ms = time.perf_counter(), 0.0
        messages = [{"role": "user", "content": text}]
        stream = self.client.stream_chat(
            messages,
            temperature=0.0,
            max_tokens=4,
            ignore_eos=True,
            headers={"x-slipstream-prefill": WORKER},  # not on the decode worker, which may have it
        )
        async for event in stream:
            if not first_ms and event.completion_tokens:
                first_ms = (time.perf_counter() - started) * 1e3
        usage = stream.reply.usage
        assert usage is not None, "a request failed"
        first_ms = first_ms or (time.perf_counter() - started) * 1e3  # nothing of it was text
        return first_ms, sum(usage.cached_by_tier.values()) / usage.prompt_tokens

    async def quiet(self) -> dict[str, Any]:
        """Until nothing is held; what all workers say then."""
        record = self.cluster.record()
        endpoints, dial = record.service_endpoints(), operator_dial(Path(record.run_dir))
        async with asyncio.timeout(_WAIT_S):
            while True:
                seen = await statuses(endpoints, dial)
                if not any(held(status) for status in seen.values()):
                    return seen
                await asyncio.sleep(0.02)


class FaultBench:
    """Both clusters and the disk under one of them."""

    def __init__(
        self, stored: FaultedCluster, bare: FaultedCluster, disk: FaultyDisk, shape: FaultWorkload
    ) -> None:
        self._stored, self._bare, self._disk, self._shape = stored, bare, disk, shape
        self._random = random.Random(shape.seed)
        self._words = round(0.7 * shape.prompt_tokens)

    async def run(self) -> list[dict[str, Any]]:
        """One row for each fault, the first without any."""
        for side in (self._stored, self._bare):
            await side.ttft(self._text())
        rows = []
        for name, (strike, heal) in self._faults().items():
            if self._shape.only and name not in self._shape.only:
                continue
            texts = [self._text() for _ in range(self._shape.rounds)]
            await self._store(texts)
            rows.append(await self._fault(name, texts, strike, heal))
            say(str(rows[-1]))
        return rows

    def _faults(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        disk, stop = self._disk, self._signal
        return {
            "none": (lambda: None, disk.heal),
            "hangs for 5 s": (self._hang_for_a_while, disk.heal),
            "hangs": (disk.hang, disk.heal),
            "EIO": (lambda: disk.fail(errno.EIO, "read", "write", "sync"), disk.heal),
            "full": (lambda: disk.fail(errno.ENOSPC, "write"), disk.heal),
            "read-only": (lambda: disk.fail(errno.EROFS, "open", "write", "sync"), disk.heal),
            "no descriptors": (lambda: disk.fail(errno.EMFILE, "open"), disk.heal),
            "slow": (lambda: disk.slow(0.02), disk.heal),
            "kvstore stopped": (lambda: stop(signal.SIGSTOP), lambda: stop(signal.SIGCONT)),
        }

    def _hang_for_a_while(self) -> None:
        self._disk.hang()
        asyncio.get_running_loop().call_later(HANG_S, self._disk.heal)

    def _signal(self, number: int) -> None:
        pid = self._stored.cluster.record().find(STORE).pid
        assert pid is not None
        os.kill(pid, number)

    async def _fault(
        self, name: str, texts: list[str], strike: Callable[[], object], heal: Callable[[], object]
    ) -> dict[str, Any]:
        """Strike, ask both sides in turn, heal, and wait until the disk is used again."""
        stored: list[tuple[float, float]] = []
        bare: list[float] = []
        strike()
        try:
            for number, text in enumerate(texts):
                sides: list[Callable[[], Awaitable[None]]] = [
                    lambda text=text: _put(stored, self._stored.ttft(text)),  # type: ignore[misc]
                    lambda: _put(bare, self._bare.ttft(self._text()), only_time=True),
                ]
                for ask in sides if number % 2 else reversed(sides):
                    await ask()
        finally:
            heal()
        await self._well()
        return _row(name, stored, bare)

    async def _store(self, texts: list[str]) -> None:
        """Have the prompts on the disk, and out of everybody's memory."""
        for text in [*texts, *(self._text() for _ in range(_KEEPS_PROMPTS + 1))]:
            await self._stored.ttft(text)
        async with asyncio.timeout(_WAIT_S):
            while True:
                counters = (await self._stored.quiet())[STORE].counters
                if counters[_ON_DISK] >= counters[_IN_MEMORY]:
                    return
                await asyncio.sleep(0.05)

    async def _well(self) -> None:
        async with asyncio.timeout(_WAIT_S):
            while True:
                counters = (await self._stored.quiet())[STORE].counters
                if not any(counters[name] for name in _UNAVAILABLE):
                    return
                await asyncio.sleep(0.05)

    def _text(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._words))


async def _put(into: list[Any], asked: Awaitable[tuple[float, float]], *, only_time: bool = False) -> None:
    ttft_ms, cached = await asked
    into.append(ttft_ms if only_time else (ttft_ms, cached))


def _row(name: str, stored: list[tuple[float, float]], bare: list[float]) -> dict[str, Any]:
    with_ms = [ttft_ms for ttft_ms, _ in stored]
    mine, theirs = percentiles(with_ms), percentiles(bare)
    return {
        "fault": name,
        "requests": len(with_ms),
        "cached_share": round(statistics.mean(cached for _, cached in stored), 3),
        "ttft_ms": mine,
        "no_kvstore_ttft_ms": theirs,
        "ratio": {
            "p50": round(mine["p50"] / theirs["p50"], 3),
            "p99": round(mine["p99"] / theirs["p99"], 3),
            "median_of_pairs": round(statistics.median(a / b for a, b in zip(with_ms, bare, strict=True)), 3),
        },
        "aim": AIM,
    }


def _config(run_dir: Path, shape: FaultWorkload, environment: dict[str, str] | None) -> ClusterConfig:
    """A prefill worker that keeps little; `environment`: of its kvstore, None for none."""
    block_bytes = 64 * 5 * (96 + 16) * 4  # of the shipped model, for sizes of memory only
    prompt_bytes = -(-shape.prompt_tokens // 64) * block_bytes * 5 // 4
    keeps = str(_KEEPS_PROMPTS * prompt_bytes)
    return ClusterConfig(
        run_dir=run_dir,
        draft_model=None,
        prefill=1,
        decode=1,
        drafters=0,
        kvstores=int(environment is not None),
        ready_timeout_s=400,
        allow_requested_prefill=True,
        extra_arguments={
            Role.PREFILL: ["--kv-memory-bytes", keeps],
            Role.KVSTORE: ["--dram-bytes", keeps, "--disk-bytes", str(1 << 30)],
        },
        extra_environment={Role.KVSTORE: environment or {}},
    )


async def measure(shape: FaultWorkload) -> list[dict[str, Any]]:
    """Start both clusters, measure, stop them."""
    with tempfile.TemporaryDirectory() as directory:
        stored_dir, bare_dir, shim = (Path(directory) / name for name in ("stored", "bare", "shim"))
        for path in (stored_dir, bare_dir, shim):
            path.mkdir()
        async with AsyncExitStack() as stack:
            disk = stack.enter_context(FaultyDisk(shim, stored_dir / "data" / STORE))
            sides: list[FaultedCluster] = []
            for run_dir, environment in ((stored_dir, disk.environment), (bare_dir, None)):
                config = _config(run_dir, shape, environment)
                cluster = await stack.enter_async_context(ClusterSupervisor(config, say=lambda line: None))
                client = AsyncClient(cluster.record().router_grpc, timeout_s=300)
                sides.append(FaultedCluster(cluster, await stack.enter_async_context(client)))
            return await FaultBench(sides[0], sides[1], disk, shape).run()


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore.faults", __doc__)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=12, help="requests to each side, a fault")
    parser.add_argument(
        "--only", default="", help="faults by their names, with commas between; all by default"
    )
    asked = parser.parse_args()
    only = tuple(asked.only.split(",")) if asked.only else ()
    rows = asyncio.run(measure(FaultWorkload(asked.prompt_tokens, asked.rounds, only)))
    if asked.json:
        print(json.dumps(rows))
        return
    print("fault             cached   TTFT p50 / p99 ms   without kvstore     ratio p50 / p99 / of pairs")
    for row in rows:
        mine, bare, ratio = row["ttft_ms"], row["no_kvstore_ttft_ms"], row["ratio"]
        print(
            f"{row['fault']:16} {row['cached_share']:7.0%}  {mine['p50']:8.1f} / {mine['p99']:7.1f}  "
            f"{bare['p50']:8.1f} / {bare['p99']:7.1f}   {ratio['p50']:.2f} / {ratio['p99']:.2f} / "
            f"{ratio['median_of_pairs']:.2f}"
        )


if __name__ == "__main__":
    main()
