"""Carries out the faults of a schedule on a running cluster, and keeps when each process was down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.chaos.schedule import Action, Fault
from bench.faults.faulty_disk import FaultyDisk
from slipstream.errors import SlipstreamError
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.commands.drain import restart_all

# After a router is ready again, connections that its end broke may still be noticed for so long.
_NOTICED_S = 3.0
_READY_S = 120.0
_FLIPPED_BYTES = 64


class FaultInjector:
    """One cluster's faults. A process that is down or stopped already is left alone."""

    def __init__(self, cluster: ClusterSupervisor, disk: FaultyDisk, rng: random.Random) -> None:
        """`disk`: the one under the directories of all stores, which have the names of the stores."""
        self.done: dict[str, int] = {}
        self.down_s: dict[str, list[tuple[float, float]]] = {}  # of each process
        self._cluster, self._disk, self._rng = cluster, disk, rng
        self._stopped: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, actions: Sequence[Action]) -> None:
        """Carry out the actions at their times; returns when the last one's effect has ended."""
        began_s = time.monotonic()
        for action in actions:
            await asyncio.sleep(max(0.0, began_s + action.at_s - time.monotonic()))
            task = asyncio.create_task(self._act(action))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._tasks:
            await asyncio.gather(*self._tasks)

    async def until_ready(self) -> None:
        """Wait until every process is ready. Raises TimeoutError."""
        async with asyncio.timeout(_READY_S):
            while any(process.state != "ready" for process in self._cluster.record().processes):
                await asyncio.sleep(0.1)

    async def restart_all(self) -> float:
        """Restart every process in rolling waves; returns the seconds that it took."""
        record, began_s = self._cluster.record(), time.monotonic()
        routers = [process.instance for process in record.processes if _is_router(process.instance)]
        watched = [asyncio.create_task(self._watch(name)) for name in routers]
        run_dir = Path(record.run_dir)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the report
            dial = operator_dial(run_dir)
            await asyncio.to_thread(restart_all, run_dir, timeout_s=_READY_S, dial=dial)
        took_s = time.monotonic() - began_s
        await asyncio.gather(*watched)
        return took_s

    async def _act(self, action: Action) -> None:
        fault, targets = action.fault, action.targets
        with contextlib.suppress(ProcessLookupError, SlipstreamError):
            if fault in (Fault.KILL, Fault.KILL_PAIR, Fault.KILL_ETCD, Fault.KILL_ALL):
                await self._kill(targets)
            elif fault in (Fault.STOP, Fault.STOP_ETCD):
                await self._stop(targets[0], action.lasts_s)
            elif fault is Fault.LOSE_ETCD:
                await self._lose_etcd()
            elif fault is Fault.FILL_DISK:
                await self._fill(action.lasts_s)
            else:
                await asyncio.to_thread(self._damage, fault, self._disk.directory / targets[0])
        self.done[fault] = self.done.get(fault, 0) + 1

    async def _kill(self, targets: Sequence[str]) -> None:
        # A router is never killed while the only other one is unavailable: the SDK would have none to
        # continue at.
        chosen = [name for name in targets if len(targets) > 2 or self._may_end(name)]
        since_s = time.monotonic()
        watched = [asyncio.create_task(self._watch(name)) for name in chosen]
        await asyncio.sleep(0)  # each has noted the process that is to end
        for name in chosen:
            with contextlib.suppress(SlipstreamError):
                self._cluster.kill(name)
        await asyncio.gather(*watched)
        for name in filter(_is_router, chosen):
            # With everything killed, a router that is back has no workers yet.
            self.down_s[name].append((since_s, time.monotonic()))

    def _may_end(self, name: str) -> bool:
        states = {process.instance: process.state for process in self._cluster.record().processes}
        if name in self._stopped or states.get(name) != "ready":
            return False
        others = [other for other in states if _is_router(other) and other != name]
        return not _is_router(name) or any(
            states[other] == "ready" and other not in self._stopped for other in others
        )

    async def _watch(self, name: str) -> None:
        """Note how long the process is down; returns when its successor is ready."""
        since_s = time.monotonic()
        pid = self._cluster.record().find(name).pid
        async with asyncio.timeout(_READY_S):
            while (now := self._cluster.record().find(name)).pid == pid or now.state != "ready":
                await asyncio.sleep(0.05)
        self.down_s.setdefault(name, []).append((since_s, time.monotonic() + _NOTICED_S))

    async def _stop(self, name: str, lasts_s: float) -> None:
        pid = self._cluster.record().find(name).pid
        if pid is None or not self._may_end(name):
            return
        self._stopped.add(name)
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
        finally:
            self._stopped.discard(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _lose_etcd(self) -> None:
        if not self._may_end("etcd"):
            return
        await self._cluster.hold("etcd")
        try:
            await asyncio.to_thread(shutil.rmtree, Path(self._cluster.record().run_dir) / "etcd")
        finally:
            await self._cluster.release("etcd")

    async def _fill(self, lasts_s: float) -> None:
        self._disk.fail(errno.ENOSPC, "write")
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._disk.heal()

    def _damage(self, fault: Fault, directory: Path) -> None:
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        for path in self._rng.sample(files, min(2, len(files))):
            with contextlib.suppress(OSError):
                if fault is Fault.DELETE_SEGMENTS:
                    path.unlink()
                else:
                    self._flip(path)

    def _flip(self, path: Path) -> None:
        n_bytes = path.stat().st_size
        with path.open("r+b") as file:
            for _ in range(_FLIPPED_BYTES if n_bytes else 0):
                place = self._rng.randrange(n_bytes)
                file.seek(place)
                found = file.read(1)
                if found:
                    file.seek(place)
                    file.write(bytes([found[0] ^ (1 << self._rng.randrange(8))]))


def _is_router(name: str) -> bool:
    return name.startswith("router-")
