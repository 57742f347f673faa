"""Growth of a local cluster's etcd under a load of sessions, and writes of one session.

    python -m bench.etcd --minutes 22 --json
    python -m bench.etcd --minutes 22 --session-ttl-s 300     # records end during the run

A real cluster with the fake engine gets `--rate` requests a second, each of a new session, and
`--busy-sessions` that ask again at once. Printed are the bytes of etcd's database, of its write-ahead log and
of its snapshots: at each minute, and their growth an hour in the part after the second compaction. Etcd keeps
the revisions of 5 to 10 minutes, so earlier parts show how its file fills. Compaction frees pages inside the
database, whose file never shrinks. A watch counts the writes of each session.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from bench.command_line import bench_parser, print_report
from bench.progress import say
from bench.router.http_client import HttpTarget
from libs.common.cluster.placement_record import SESSIONS_PREFIX
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import PrefixChanges
from libs.common.etcd.watch import watch_prefix
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

_SAMPLE_S = 5.0
# Etcd compacts every 5 minutes, from the sixth minute on, and then keeps the revisions of the last five.
_FULL_S = 630.0
_WORDS = 120  # more than one block of 64 tokens, so that the session is recorded
_METRICS = {
    "db_bytes": "etcd_mvcc_db_total_size_in_bytes",
    "db_in_use_bytes": "etcd_mvcc_db_total_size_in_use_in_bytes",
    "keys": "etcd_debugging_mvcc_keys_total",
}


@dataclass(frozen=True, slots=True)
class StorageSample:
    """What etcd stores at one moment. `disk_bytes` are allocated blocks of all its files."""

    at_s: float
    db_bytes: int
    db_in_use_bytes: int
    keys: int
    wal_bytes: int
    snapshot_bytes: int
    disk_bytes: int


@dataclass
class SessionWrites:
    """When a watch saw the writes of each session."""

    at_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def follow(self, endpoint: str) -> None:
        """Collect until cancelled."""
        client = EtcdClient([endpoint])
        try:
            async with aclosing(watch_prefix(client, SESSIONS_PREFIX)) as updates:
                async for update in updates:
                    if isinstance(update, PrefixChanges):
                        for key, entry in update.changes:
                            if entry is not None:
                                self.at_s[key].append(time.monotonic())
        finally:
            await client.close()

    def figures(self) -> dict[str, object]:
        """Totals, and the writes of the sessions that wrote more than once."""
        busy = [times for times in self.at_s.values() if len(times) > 1]
        return {
            "sessions": len(self.at_s),
            "writes": sum(map(len, self.at_s.values())),
            "busy_sessions": len(busy),
            "most_writes_per_s": round(max(map(writes_per_s, busy), default=0.0), 3),
            "most_writes_in_10_s": max(map(most_in_window, busy), default=0),
        }


def most_in_window(times: Sequence[float], *, window_s: float = 10.0) -> int:
    """The most of these ascending times that fall into one window; a watch may get writes late."""
    first, most = 0, 0
    for last, at_s in enumerate(times):
        while at_s - times[first] >= window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def writes_per_s(times: Sequence[float]) -> float:
    """The rate from the first to the last of at least two writes."""
    return (len(times) - 1) / (times[-1] - times[0])


def growth(samples: Sequence[StorageSample]) -> dict[str, float]:
    """The slope of each size in MB an hour, and of the keys."""
    if len(samples) < 2:
        return {}
    hours = [sample.at_s / 3600 for sample in samples]
    columns: Mapping[str, Sequence[float]] = {
        name: [getattr(sample, name) for sample in samples]
        for name in ("db_bytes", "db_in_use_bytes", "wal_bytes", "snapshot_bytes", "disk_bytes", "keys")
    }
    slopes = {name: statistics.linear_regression(hours, values).slope for name, values in columns.items()}
    return {
        name.replace("_bytes", "_mb"): round(slope / 1e6 if name.endswith("_bytes") else slope, 2)
        for name, slope in slopes.items()
    }


async def storage(endpoint: str, data_dir: Path, *, at_s: float) -> StorageSample:
    """Ask etcd's metrics and measure its files."""
    async with aiohttp.ClientSession() as client, client.get(f"http://{endpoint}/metrics") as answer:
        text = await answer.text()
    values = {}
    for what, name in _METRICS.items():
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        values[what] = int(float(found[1]))
    stats = await asyncio.to_thread(_stats, data_dir)
    return StorageSample(
        at_s=at_s,
        wal_bytes=sum(stat.st_size for path, stat in stats.items() if path.suffix == ".wal"),
        snapshot_bytes=sum(stat.st_size for path, stat in stats.items() if path.suffix == ".snap"),
        disk_bytes=sum(stat.st_blocks * 512 for stat in stats.values()),
        **values,
    )


def _stats(folder: Path) -> dict[Path, os.stat_result]:
    return {path: path.stat() for path in folder.rglob("*") if path.is_file()}


class SessionLoad:
    """Requests of new sessions at a rate, and of busy sessions in a loop."""

    def __init__(self, target: HttpTarget) -> None:
        self.n_done = 0
        self.errors: list[str] = []
        self._target = target

    async def run(self, *, rate_per_s: float, busy_sessions: int, until_s: float) -> None:
        """Returns at `until_s` of the monotonic clock, when all requests have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(busy_sessions):
                group.create_task(self._busy(f"busy-{number}", until_s))
            began_s = time.monotonic()
            for number in itertools.count():
                due_s = began_s + number / rate_per_s
                if due_s > until_s:
                    return
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(self._ask(f"session-{number}", 0))

    async def _busy(self, session: str, until_s: float) -> None:
        for turn in itertools.count():
            if time.monotonic() > until_s:
                return
            await self._ask(session, turn)
            await asyncio.sleep(0.1)

    async def _ask(self, session: str, turn: int) -> None:
        text = f"{session} turn {turn}: " + "word " * _WORDS
        try:
            log = await self._target.stream(
                [{"role": "user", "content": text}], max_tokens=2, session=session
            )
        except OSError as error:
            self.errors.append(str(error))
            return
        self.n_done += 1
        if log.error:
            self.errors.append(log.error)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The whole run."""
    engine = ["--engine", "fake"]
    config = ClusterConfig(
        run_dir=folder / "run",
        draft_model=None,
        prefill=1,
        decode=1,
        kvstores=0,
        drafters=0,
        log_level="warning",
        access_log="off",
        extra_arguments={
            Role.PREFILL: engine,
            Role.DECODE: engine,
            Role.ROUTER: ["--session-ttl-s", str(options.session_ttl_s)],
        },
    )
    samples: list[StorageSample] = []
    writes = SessionWrites()
    async with ClusterSupervisor(config, say=say) as cluster:
        record = cluster.record()
        endpoint = record.etcd.split(",")[0]
        load = SessionLoad(HttpTarget(f"http://{record.router_http}"))
        following = asyncio.create_task(writes.follow(endpoint))
        began_s = time.monotonic()
        sizes = {"rate_per_s": options.rate, "busy_sessions": options.busy_sessions}
        running = asyncio.create_task(load.run(**sizes, until_s=began_s + options.minutes * 60))
        while not running.done():
            samples.append(await storage(endpoint, folder / "run" / "etcd", at_s=time.monotonic() - began_s))
            await asyncio.wait({running}, timeout=_SAMPLE_S)
        await running
        following.cancel()
    full = [sample for sample in samples if sample.at_s >= _FULL_S]
    every = max(1, int(60 / _SAMPLE_S))
    return {
        "minutes": options.minutes,
        "rate_per_s": options.rate,
        "session_ttl_s": options.session_ttl_s,
        "requests": load.n_done,
        "requests_per_s": round(load.n_done / (options.minutes * 60), 1),
        "errors": sorted(set(load.errors)),
        "session_writes": writes.figures(),
        "growth_per_hour_after_second_compaction": growth(full),
        "growth_per_hour": growth(samples),
        "ended": asdict(samples[-1]),
        "minutes_sampled": [asdict(sample) for sample in samples[::every]],
    }


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("etcd", __doc__)
    parser.add_argument("--minutes", type=float, default=22.0)
    parser.add_argument("--rate", type=float, default=31.0, help="new sessions a second")
    parser.add_argument("--busy-sessions", type=int, default=2)
    parser.add_argument("--session-ttl-s", type=int, default=3600, help="of the router")
    return parser.parse_args(argv)


def main() -> int:
    """Measure and print."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="etcd-growth-") as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print_report(found, as_json=options.json)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
