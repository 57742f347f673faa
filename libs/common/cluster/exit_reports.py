"""Reports of how worker processes ended, in etcd: evidence for the router's quarantine of requests.

    await report_exit(client, run, crashed=crashed)         # the supervisor, at once
    await EtcdExitReports(client).has_crashed(run)          # a router, before it quarantines a request

A crash is a non-zero exit code or a signal such as SIGSEGV or SIGABRT. Exit code 0 is an orderly end.
SIGKILL, SIGTERM, SIGINT and SIGHUP are sent from outside; of these only the kernel's SIGKILL for lack of
memory is a crash. Reports are on a lease, so they expire.
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

# The exit code of a process that cannot use its model: another start would fail in the same way.
MODEL_UNUSABLE = 78
EXITS_PREFIX = "/slipstream/v1/exits/"
# The roles whose exits routers ask for.
REPORTED_ROLES = (Role.PREFILL, Role.DECODE)
REPORT_TTL_S = 60
_POLL_S = 0.05
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Files with the counts of this container (cgroup v2), or else of the whole kernel.
_OOM_COUNTS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


class ExitReports(Protocol):
    """Reports of exits."""

    async def has_crashed(self, worker_key: str) -> bool | None:
        """Whether the process `role/instance/incarnation` crashed; None without a report."""
        ...


class NoExitReports:
    """Exit reports where none are made."""

    async def has_crashed(self, worker_key: str) -> bool | None:
        return None


class EtcdExitReports:
    """Reads reports from etcd; waits up to `wait_s` for one to arrive."""

    def __init__(self, client: EtcdClient, *, wait_s: float = DEATH_REPORT_WAIT_S) -> None:
        self._client = client
        self._wait_s = wait_s

    async def has_crashed(self, worker_key: str) -> bool | None:
        try:
            async with asyncio.timeout(self._wait_s):
                while (found := await self._client.get(EXITS_PREFIX + worker_key)) is None:
                    await asyncio.sleep(_POLL_S)
            return bool(json.loads(found.value)["crashed"])
        except (TimeoutError, SlipstreamError, ValueError, KeyError, TypeError):
            return None


async def report_exit(client: EtcdClient, run: str, *, crashed: bool) -> None:
    """Report that a run of a worker (see `run_name`) has ended.

    A run has one report, the first, so writing it again after an etcd failure is safe. Retries last as long
    as routers wait; without etcd there is no report.
    """
    value = json.dumps({"crashed": crashed}).encode()
    until_s = time.monotonic() + DEATH_REPORT_WAIT_S
    while True:
        try:
            lease = await client.grant_lease(REPORT_TTL_S)
            await client.swap([Swap(EXITS_PREFIX + run, value, ABSENT, lease.lease_id)])
            return
        except EtcdUnavailable:
            if time.monotonic() >= until_s:
                return
        except SlipstreamError:
            return
        await asyncio.sleep(_POLL_S)


def run_name(role: Role, instance: str, incarnation: str) -> str:
    """The name of one run of one worker."""
    return f"{role}/{instance}/{incarnation}"


def is_crash(code: int, *, oom_kills: int) -> bool:
    """Whether an exit code (negative: a signal) means a crash. Pure.

    `oom_kills`: how many processes the kernel killed for lack of memory while this one ran.
    """
    return (
        code > 0
        or (code < 0 and -code not in _EXTERNAL_SIGNALS)
        or (-code == signal.SIGKILL and oom_kills > 0)
    )


def count_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory so far; 0 where it does not count them."""
    for path, name in _OOM_COUNTS:
        try:
            rows = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if name in rows:
            return int(rows[name])
    return 0
