"""How a worker's process came to its end, as whoever started it saw it: evidence for the router's quarantine.

    await report_death(client, run, broke=broke)   # the supervisor, at once; it named the run itself
    await EtcdExitReports(client).broke(run)            # a router, when a request is about to be found guilty

A process that breaks ends itself: by an exit code, or by a signal for what it did (SIGSEGV, SIGABRT, ..). One
that somebody kills gets SIGKILL, SIGTERM, SIGINT or SIGHUP, and was as well as ever; so was one that ended in
order, with exit code 0, for whatever reason. The kernel's SIGKILL for want of memory is the process's own
doing. Reports are on a lease: nothing of them stays.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Protocol

from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import ABSENT, EtcdUnavailable, Swap
from libs.common.service_bounds import DEATH_REPORT_WAIT_S
from slipstream.errors import SlipstreamError

DEATHS_PREFIX = "/slipstream/v1/deaths/"
# Whose ends routers ask for.
TOLD_OF = (Role.PREFILL, Role.DECODE)
REPORT_TTL_S = 60
_LOOK_S = 0.05
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Of all processes of this container or host: cgroup v2, then the kernel as a whole.
_OOM_COUNTS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


class ExitReports(Protocol):
    """What is known of ends of processes."""

    async def broke(self, worker_key: str) -> bool | None:
        """Whether the worker `role/instance/incarnation` broke by itself; None when nobody says."""
        ...


class NoExitReports:
    """Nobody reports any."""

    async def broke(self, worker_key: str) -> bool | None:
        return None


class EtcdExitReports:
    """Reads reports; waits a moment for one that is on its way."""

    def __init__(self, client: EtcdClient, *, wait_s: float = DEATH_REPORT_WAIT_S) -> None:
        self._client = client
        self._wait_s = wait_s

    async def broke(self, worker_key: str) -> bool | None:
        try:
            async with asyncio.timeout(self._wait_s):
                while (found := await self._client.get(DEATHS_PREFIX + worker_key)) is None:
                    await asyncio.sleep(_LOOK_S)
            return bool(json.loads(found.value)["broke"])
        except (TimeoutError, SlipstreamError, ValueError, KeyError, TypeError):
            return None


async def report_death(client: EtcdClient, run: str, *, broke: bool) -> None:
    """This run of a worker (`run_name`) has ended. Without etcd nobody is told. A run ends once: what was
    said of it first stands, so it may be said again when a member of etcd leaves amid it; but not for longer
    than routers wait."""
    value = json.dumps({"broke": broke}).encode()
    until_s = time.monotonic() + DEATH_REPORT_WAIT_S
    while True:
        try:
            lease = await client.grant_lease(REPORT_TTL_S)
            await client.swap([Swap(DEATHS_PREFIX + run, value, ABSENT, lease.lease_id)])
            return
        except EtcdUnavailable:
            if time.monotonic() >= until_s:
                return
        except SlipstreamError:
            return
        await asyncio.sleep(_LOOK_S)


def run_name(role: Role, instance: str, incarnation: str) -> str:
    """One run of one worker, as routers name it."""
    return f"{role}/{instance}/{incarnation}"


def broke_by_itself(code: int, *, oom_kills: int) -> bool:
    """What an exit code (negative: the signal) says; `oom_kills`: processes that the kernel ended for want of
    memory while it ran. Pure."""
    return (
        code > 0 or (code < 0 and -code not in _FROM_OUTSIDE) or (-code == signal.SIGKILL and oom_kills > 0)
    )


def count_oom_kills() -> int:
    """So far, of the container or the host; 0 where nobody counts."""
    for path, name in _OOM_COUNTS:
        try:
            rows = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if name in rows:
            return int(rows[name])
    return 0
