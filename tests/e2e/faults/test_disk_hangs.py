"""A disk that hangs, fails, is full or read-only under a real kvstore, and a stopped kvstore, under load.

No request fails, every answer is right, the disk is used again after the fault, and nothing is held or
leaked. A library in the kvstore's process (disk_shim.c) injects the faults."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.faults.fault_load import (
    Answer,
    FaultRequest,
    FaultRun,
    answer_of,
    mixed_requests,
    run_streams,
    wrong,
)
from bench.faults.faulty_disk import FaultyDisk
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from tests.support.clusters.disturbance import undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.process_checks import is_stopped

STORE = "kvstore-0"
PREFILLERS = ("prefill-0", "prefill-1")
# Prompts that fill the store's memory of 256 blocks twice, and a prefill worker's pages four times.
LOAD = mixed_requests(12, tokens=8, words=500)
N_FRESH = 2
# Concurrent requests whose blocks a worker can keep until the store has taken them.
PART = 2
PAGE_BYTES = 64 * 64
ENGINE = ["--engine", "fake", "--fake-pace-s", "0.00003", "--kv-memory-bytes", str(160 * PAGE_BYTES)]
WAITING = "slipstream_kvstore_writes_waiting"
UNAVAILABLE, READ_ONLY = "slipstream_kvstore_disk_unavailable", "slipstream_kvstore_disk_read_only"
FROM_DISK = "slipstream_kvstore_hits_nvme_total"
WAITS = "slipstream_kvstore_disk_waits_total"
GIVEN_UP, SKIPPED = "slipstream_kv_restores_given_up_total", "slipstream_kv_restores_skipped_total"
# Pools of threads and connections grow on demand up to a bound; a leak grows without one.
POOLS_MAY_GROW = 8


def _renamed(request: FaultRequest, number: int) -> FaultRequest:
    text = f"Round {number}. {request.messages[0]['content']}"
    arguments = {**request.arguments, "request_id": f"{request.arguments['request_id']}-{number}"}
    arguments["session"] = arguments["request_id"]
    return FaultRequest([{"role": "user", "content": text}], arguments)


def _at(request: FaultRequest, worker: str) -> FaultRequest:
    headers = {"x-slipstream-prefill": worker}
    return FaultRequest(request.messages, {**request.arguments, "headers": headers})


@dataclass
class Site:
    cluster: LocalCluster
    disk: FaultyDisk
    expected: list[Answer]
    fresh: list[tuple[FaultRequest, Answer]] = field(default_factory=list)  # requests made during a fault
    rounds: int = 0
    turns: int = 0
    used_at_first: tuple[int, int] | None = None  # descriptors and threads

    def figure(self, name: str, *instances: str) -> int:
        return int(sum(self.cluster.status(instance).counters[name] for instance in instances or (STORE,)))

    def answers(self, load: Sequence[FaultRequest]) -> list[FaultRun]:
        """The load with other prefill workers than the last time, so that no worker has a whole prompt."""
        self.turns += 1
        requested = [_at(request, PREFILLERS[(n + self.turns) % 2]) for n, request in enumerate(load)]

        async def run() -> list[FaultRun]:
            async with AsyncClient(self.cluster.routers, resume_within_s=PATIENCE_S) as client:
                return await run_streams(client, requested, stagger_s=0.01, timeout_s=2 * PATIENCE_S)

        runs: list[FaultRun] = self.cluster.call(run(), timeout_s=3 * PATIENCE_S)
        return runs

    def run(self) -> None:
        """Run the load once, with new requests added: no request fails, every answer is right."""
        self.rounds += 1
        fresh = [_renamed(request, self.rounds) for request in LOAD[:N_FRESH]]
        runs = self.answers([*LOAD, *fresh])
        problems = wrong(runs[: len(LOAD)], self.expected)
        problems += [run.error for run in runs[len(LOAD) :] if run.error]
        assert not problems, "\n".join(problems)
        self.fresh += zip(fresh, map(answer_of, runs[len(LOAD) :]), strict=True)

    def check_fresh(self) -> None:
        """Check that the new requests give the same answers again."""
        seen, self.fresh = self.fresh[-2 * N_FRESH :], []
        runs = self.answers([request for request, _ in seen])
        assert not wrong(runs, [answer for _, answer in seen])

    def run_until(self, holds: Callable[[], object], what: str) -> None:
        """Run the load repeatedly until the condition holds."""

        def ran() -> bool:
            self.run()
            return bool(holds())

        until(ran, what=what)

    def descriptors(self) -> tuple[int, list[str]]:
        """The store's descriptors: the number outside of its disk, and the paths on its disk."""
        folder = Path(f"/proc/{self.cluster.pid(STORE)}/fd")
        found = []
        for entry in folder.iterdir():
            try:
                found.append(os.readlink(entry))
            except OSError:
                continue  # closed since the listing
        mine = [path for path in found if path.startswith(str(self.disk.directory))]
        return len(found) - len(mine), mine

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.cluster.pid(STORE)}/task").iterdir()))

    def well(self) -> bool:
        return not self.figure(UNAVAILABLE) and not self.figure(READ_ONLY)

    def use_the_disk(self) -> None:
        """Run the load until blocks have come from the disk again."""
        before = self.figure(FROM_DISK)

        def used() -> bool:
            for start in range(0, len(LOAD), PART):
                part = slice(start, start + PART)
                assert not wrong(self.answers(LOAD[part]), self.expected[part])
                self.cluster.assert_idle()  # the workers have stored what they computed
                until(lambda: not self.figure(WAITING), what="all blocks are on the disk")
            return self.figure(FROM_DISK) > before

        until(used, what="blocks read from the disk")


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with (
        lasting_dir(request, "disks") as run_dir,
        lasting_dir(request, "shim") as shim,
        FaultyDisk(shim, run_dir / "data" / STORE) as disk,
    ):
        config = fake_engine_config(
            run_dir,
            decode=1,
            drafters=0,
            extra_arguments={
                Role.PREFILL: [*ENGINE, "--restore-floor-ms", "1000"],
                Role.KVSTORE: ["--dram-bytes", str(1 << 20), "--disk-bytes", str(16 << 20)],
            },
            extra_environment={Role.KVSTORE: disk.environment},
        )
        with LocalCluster(config) as cluster:
            site = Site(cluster, disk, undisturbed(cluster, LOAD))
            site.use_the_disk()
            cluster.assert_idle()
            yield site


def hang(disk: FaultyDisk) -> None:
    disk.hang()


def fail(code: int, *kinds: str) -> Callable[[FaultyDisk], None]:
    return lambda disk: disk.fail(code, *kinds)


# Each fault of the disk, and the state that the store reports: unavailable, read-only, or unchanged.
FAULTS: dict[str, tuple[Callable[[FaultyDisk], None], str | None]] = {
    "hang": (hang, UNAVAILABLE),
    "read-only": (fail(errno.EROFS, "open", "write", "sync"), READ_ONLY),
    "eio": (fail(errno.EIO, "read", "write", "sync"), UNAVAILABLE),
    "eio-reads": (fail(errno.EIO, "read"), UNAVAILABLE),
    "sync": (fail(errno.EIO, "sync"), READ_ONLY),
    "full": (fail(errno.ENOSPC, "write"), READ_ONLY),
    "no-descriptors": (fail(errno.EMFILE, "open"), READ_ONLY),
    "slow": (lambda disk: disk.slow(0.05), None),
}
QUICK = ("hang", "read-only")
# Only opening a file fails. A store with all its segments opens none: then several runs of the load must
# succeed as without a fault.
OPENS = "no-descriptors"
RUNS_WITHOUT_EFFECT = 4


def faults() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in FAULTS]


@pytest.mark.parametrize("name", faults())
def test_a_disk_with_a_fault_fails_no_request_and_is_used_again(site: Site, name: str) -> None:
    suffer(site, name)


def suffer(site: Site, name: str, *, has_grown: bool = False) -> None:
    """Inject one fault, and wait until the disk is used again. `has_grown`: all files may exist already."""
    strike, becomes = FAULTS[name]
    elsewhere, _ = site.descriptors()
    threads, before, first = site.threads(), site.disk.bitten(), site.rounds

    def struck() -> bool:
        if becomes is None or site.figure(becomes):
            return True
        unaffected = site.disk.bitten() == before and site.rounds - first >= RUNS_WITHOUT_EFFECT
        return has_grown and name == OPENS and unaffected

    strike(site.disk)
    try:
        site.run_until(struck, f"{name}: {becomes}")
        assert becomes is None or not site.figure(becomes) or site.disk.bitten() > before
    finally:
        site.disk.heal()
    until(site.well, what="the disk is well again")
    site.use_the_disk()
    site.check_fresh()
    site.cluster.assert_idle()

    def nothing_leaked() -> bool:
        now, mine = site.descriptors()
        assert len(mine) == len(set(mine)) or "probe" in "".join(mine), mine
        return now <= elsewhere + POOLS_MAY_GROW and site.threads() <= threads + POOLS_MAY_GROW

    until(nothing_leaked, what=lambda: f"{site.descriptors()}, {site.threads()} of {elsewhere}, {threads}")


def test_no_request_waits_for_a_disk_that_is_unavailable(site: Site) -> None:
    site.disk.hang("read", "write", "sync")
    try:
        site.run_until(lambda: site.figure(UNAVAILABLE), "a disk that is unavailable")
        waits = site.figure(WAITS)

        def restores_all() -> bool:
            given_up = site.figure(GIVEN_UP, *PREFILLERS)
            for _ in range(2):
                site.run()
            return site.figure(GIVEN_UP, *PREFILLERS) == given_up

        # On busy cores a restore from memory may be slower than computing, and is given up for that.
        until(restores_all, what="two loads of which no restore is given up")
        assert site.figure(WAITS) == waits
        assert site.figure(UNAVAILABLE) == 1
    finally:
        site.disk.heal()
    until(site.well, what="the disk is well again")
    site.cluster.assert_idle()


def test_a_stopped_store_delays_only_requests_in_flight(site: Site) -> None:
    pid = site.cluster.pid(STORE)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: is_stopped(pid), what="a stopped process")
        skipped = {name: site.figure(SKIPPED, name) for name in PREFILLERS}
        site.run_until(
            lambda: all(site.figure(SKIPPED, name) > skipped[name] for name in PREFILLERS),
            "both workers do without the store",
        )
        given_up = site.figure(GIVEN_UP, *PREFILLERS)
        for _ in range(2):
            site.run()
        assert site.figure(GIVEN_UP, *PREFILLERS) == given_up
    finally:
        os.kill(pid, signal.SIGCONT)
    site.use_the_disk()
    site.cluster.assert_idle()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(10))
def test_rounds_of_all_faults_leak_nothing(site: Site, number: int) -> None:
    for name in FAULTS:
        suffer(site, name, has_grown=True)
    used = site.descriptors()[0], site.threads()
    site.used_at_first = site.used_at_first or used  # after the first round of this process
    assert used[0] <= site.used_at_first[0] + POOLS_MAY_GROW
    assert used[1] <= site.used_at_first[1] + POOLS_MAY_GROW
