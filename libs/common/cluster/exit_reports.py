"""Reports of how worker processes ended, in etcd: evidence for the router's quarantine of requests.

    await report_exit(client, run, crashed=crashed)         # the supervisor, at once
    await EtcdExitReports(client).exit_of(run)              # a router, before it quarantines a request

Routers share a worker, and each one sees its own requests alone. So each one reports how many of them ran on
a worker that crashed. It asks for those of the others before it calls a request the cause.

`is_crash` (runtime/exit_codes.py) judges an exit. Reports are on a lease, so they expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from enum import Enum
from typing import NamedTuple, Protocol
from uuid import uuid4

from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import ABSENT, Swap
from libs.common.service_bounds import ATTEMPTS_REPORT_WAIT_S, DEATH_REPORT_WAIT_S, EXIT_REPORT_WRITE_S
from slipstream.errors import SlipstreamError
from slipstream.rpc.backoff import Backoff

log = logging.getLogger(__name__)

EXITS_PREFIX = "/slipstream/v1/exits/"
ATTEMPTS_PREFIX = "/slipstream/v1/crashed-attempts/"
# The roles whose exits routers ask for.
REPORTED_ROLES = (Role.PREFILL, Role.DECODE)
REPORT_TTL_S = 60
_POLL_S = 0.05
_LONGEST_WRITE_PAUSE_S = 0.5
# After an outage of etcd a report may come so late: the supervisor reconnects, and writes it then.
_LATE_S = 10.0
# An etcd that is well answers in less.
_ANSWER_S = 0.5
# What the value of another writer into etcd may raise.
_MALFORMED = (ValueError, LookupError, TypeError, OverflowError, RecursionError)


class WorkerExit(Enum):
    """How a worker's process ended, as far as its reports say."""

    CRASHED = "crashed"
    KILLED = "killed"  # from outside
    UNREPORTED = "unreported"  # etcd has no report
    UNKNOWN = "unknown"  # etcd cannot be asked, or could not a moment ago


class CrashedAttempts(NamedTuple):
    """Attempts that had not proven themselves on a worker when it crashed."""

    attempts: int = 0
    struck: int = 0  # of requests that had strikes before

    def beside(self, others: CrashedAttempts) -> CrashedAttempts:
        """The sum of both counts."""
        return CrashedAttempts(self.attempts + others.attempts, self.struck + others.struck)


NO_ATTEMPTS = CrashedAttempts()


class ExitReports(Protocol):
    """Reports of exits. A worker's key is `role/instance/incarnation`."""

    async def exit_of(self, worker_key: str) -> WorkerExit:
        """How the process ended. Never raises."""
        ...

    async def report_attempts(self, worker_key: str, ran: CrashedAttempts) -> None:
        """Report to the other routers what ran here on a worker that has crashed. Never raises."""
        ...

    async def attempts_elsewhere(self, worker_key: str) -> CrashedAttempts:
        """What the other routers report of a worker that has just crashed; waits for their reports."""
        ...


class NoExitReports:
    """Exit reports where none are made."""

    async def exit_of(self, worker_key: str) -> WorkerExit:
        return WorkerExit.UNREPORTED

    async def report_attempts(self, worker_key: str, ran: CrashedAttempts) -> None:
        return

    async def attempts_elsewhere(self, worker_key: str) -> CrashedAttempts:
        return NO_ATTEMPTS


class EtcdExitReports:
    """Reads reports from etcd; waits up to `wait_s` for one to arrive. One object is one router's."""

    def __init__(self, client: EtcdClient, *, wait_s: float = DEATH_REPORT_WAIT_S) -> None:
        self._client = client
        self._wait_s = wait_s
        self._own = uuid4().hex

    async def exit_of(self, worker_key: str) -> WorkerExit:
        clock, answered_s = asyncio.get_running_loop().time, float("-inf")
        try:
            async with asyncio.timeout(self._wait_s):
                while (found := await self._client.get(EXITS_PREFIX + worker_key)) is None:
                    answered_s = clock()
                    await asyncio.sleep(_POLL_S)
            return WorkerExit.CRASHED if json.loads(found.value)["crashed"] else WorkerExit.KILLED
        except _MALFORMED:
            return WorkerExit.UNREPORTED
        except (TimeoutError, SlipstreamError):
            is_answering = clock() - answered_s < _ANSWER_S and clock() - self._client.failed_s > _LATE_S
            return WorkerExit.UNREPORTED if is_answering else WorkerExit.UNKNOWN

    async def report_attempts(self, worker_key: str, ran: CrashedAttempts) -> None:
        key = f"{ATTEMPTS_PREFIX}{worker_key}/{self._own}"
        with contextlib.suppress(TimeoutError, SlipstreamError):
            async with asyncio.timeout(self._wait_s):
                lease = await self._client.grant_lease(REPORT_TTL_S)
                await self._client.put(key, json.dumps(ran).encode(), lease_id=lease.lease_id)

    async def attempts_elsewhere(self, worker_key: str) -> CrashedAttempts:
        prefix = f"{ATTEMPTS_PREFIX}{worker_key}/"
        await asyncio.sleep(ATTEMPTS_REPORT_WAIT_S)
        try:
            async with asyncio.timeout(self._wait_s):
                found = (await self._client.get_prefix(prefix)).entries
            others = [json.loads(entry.value) for key, entry in found.items() if key != prefix + self._own]
            return CrashedAttempts(*(sum(int(counts[index]) for counts in others) for index in range(2)))
        except (TimeoutError, SlipstreamError, *_MALFORMED):
            return NO_ATTEMPTS


async def report_exit(client: EtcdClient, run: str, *, crashed: bool) -> None:
    """Report that a run of a worker (see `run_name`) has ended.

    A run has one report, the first, so writing it again after an etcd failure is safe. It is written up to
    EXIT_REPORT_WRITE_S later, when etcd is back, or takes changes again: a full etcd still answers reads.
    """
    value = json.dumps({"crashed": crashed}).encode()
    until_s = time.monotonic() + EXIT_REPORT_WRITE_S
    backoff = Backoff(first_s=_POLL_S, longest_s=_LONGEST_WRITE_PAUSE_S)
    while True:
        try:
            lease = await client.grant_lease(REPORT_TTL_S)
            await client.swap([Swap(EXITS_PREFIX + run, value, ABSENT, lease.lease_id)])
            return
        except SlipstreamError as error:
            if time.monotonic() >= until_s:
                log.warning("the exit report of %s was not written: %s", run, error)
                return
        await asyncio.sleep(backoff.pause_s())


def run_name(role: Role, instance: str, incarnation: str) -> str:
    """The name of one run of one worker."""
    return f"{role}/{instance}/{incarnation}"
