"""WorkerService, which every service has: identity, load, ledger, drain.

    worker = WorkerService(identity, process)    # `process` is a WorkerProcess
    add_WorkerServiceServicer_to_server(worker, host.server)
    worker.load_changed()        # after anything that changes load or ledger; cheap, never blocks

Drain and Undrain are for operators (libs/common/rpc/access_table.py): AccessInterceptor, which each host
has, refuses all other callers before these methods run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from libs.common.rpc.access import current_caller
from libs.common.service_bounds import LOAD_WATCHERS
from slipstream.enum_names import ROLES, TRANSPORTS
from slipstream.errors import Draining, FailedPrecondition, Overloaded
from slipstream.v1 import common_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

DEFAULT_MIN_INTERVAL_MS = 50
MIN_INTERVAL_S = 0.01
# The load stream is the worker's heartbeat: routers fail a worker that was silent for several times this.
MAX_SILENCE_S = 0.25
# How often a drain polls the ledger for ends without a notification, such as an expired lease.
_POLL_S = 0.05
# How long before a caller's deadline Drain responds with the ledger as it is.
DRAIN_ANSWER_MARGIN_S = 0.2


# A supervisor that reports exits sets the incarnation, so that a report names exactly one run.
INCARNATION_VARIABLE = "SLIPSTREAM_INCARNATION"


def new_incarnation() -> str:
    """A name for one run of a process. Its time is for people only, because wall clocks may jump."""
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def given_incarnation() -> str:
    """The incarnation from the environment, or a new one."""
    return os.environ.get(INCARNATION_VARIABLE) or new_incarnation()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity of this process. `transport` is mooncake, socket or none."""

    role: str
    instance: str
    incarnation: str = field(default_factory=given_incarnation)
    fingerprint: common_pb2.Fingerprint | None = None
    transport: str = "none"


def held(ledger: worker_pb2.Ledger) -> int:
    """The sum of the ledger: 0 exactly if the worker holds nothing."""
    return sum(value for _, value in ledger.ListFields())


class WorkerProcess(ABC):
    """What a process reports and does. The methods run on the event loop and do not block. Only
    `exit` raises.

    Without an override a process reports no counters and no policies, a drain changes nothing in it, and no
    call can end it.
    """

    @abstractmethod
    def load(self) -> worker_pb2.LoadReport:
        """The load now, without `sequence`."""

    @abstractmethod
    def ledger(self) -> worker_pb2.Ledger:
        """What the process holds for requests."""

    def status_counters(self) -> Mapping[str, float]:
        """The counters of its status, by metric name."""
        return {}

    def evictions(self) -> Sequence[worker_pb2.TierEviction]:
        """See `GetStatusResponse.evictions`."""
        return ()

    async def drain(self) -> None:
        """Stop being found for new work. Runs once until `undrain`."""
        return

    async def undrain(self) -> None:
        """Reverse `drain`."""
        return

    def exit(self) -> None:
        """Begin the orderly end of the process, as SIGTERM does. May raise FailedPrecondition."""
        raise FailedPrecondition("this process cannot end itself")


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The servicer. It sets the `sequence` of the reports of its process."""

    def __init__(self, identity: WorkerIdentity, process: WorkerProcess) -> None:
        self._identity = identity
        self._process = process
        self._drain_task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._changing = asyncio.Lock()  # held while the process drains or undrains
        self._sequence = 0
        self._watchers: set[asyncio.Event] = set()
        self._load_streams = 0
        self._started_at = time.monotonic()

    @property
    def draining(self) -> bool:
        """Whether Drain was called, and no Undrain. New work is refused: see `refuse_when_draining`."""
        return self._drain_task is not None

    def refuse_when_draining(self) -> None:
        """Raise Draining once Drain was called. For the start of every call that accepts work."""
        if self.draining:
            raise Draining(f"{self._identity.instance} is draining")

    def load_changed(self) -> None:
        """Wake the watchers of the load. From the event loop only."""
        for changed in self._watchers:
            changed.set()

    async def drain(self, *, is_final: bool = False) -> None:
        """Refuse new work and drain the process once; returns when it has drained.

        `is_final`: the process ends after it, so that no Undrain is possible any more.
        """
        self._is_ending = self._is_ending or is_final
        if self._drain_task is None:
            self._drain_task = asyncio.create_task(self._drain_process())
            self.load_changed()
        await asyncio.shield(self._drain_task)

    async def undrain(self) -> None:
        """Accept new work again; returns when the process does. Raises FailedPrecondition at the end of a
        process."""
        if self._is_ending:
            raise FailedPrecondition(f"{self._identity.instance} is about to end")
        if self._drain_task is None:
            return
        await asyncio.shield(self._drain_task)
        async with self._changing:
            if self._drain_task is None or self._is_ending:  # another call was quicker
                return
            self._drain_task = None
            await self._process.undrain()
        self.load_changed()

    async def wait_idle(self, *, timeout_s: float) -> None:
        """Return when the ledger is empty, or at the timeout, which logs the ledger."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_idle()
        except TimeoutError:
            log.warning("stopping with work in progress: %s", str(self._process.ledger()).replace("\n", " "))

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse(
            role=ROLES.value(self._identity.role),
            instance=self._identity.instance,
            incarnation=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            transport=TRANSPORTS.value(self._identity.transport),
            load=self._report(),
            ledger=self._process.ledger(),
            uptime_ms=int((time.monotonic() - self._started_at) * 1000),
            rss_bytes=resident_bytes(),
            draining=self.draining,
            counters=self._process.status_counters(),
            evictions=self._process.evictions(),
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        if self._load_streams >= LOAD_WATCHERS:
            raise Overloaded(f"{LOAD_WATCHERS} streams of load reports are open already")
        min_interval_s = max((request.min_interval_ms or DEFAULT_MIN_INTERVAL_MS) / 1000, MIN_INTERVAL_S)
        changed = asyncio.Event()
        self._watchers.add(changed)
        self._load_streams += 1
        try:
            while True:
                changed.clear()
                yield worker_pb2.WatchLoadResponse(load=self._report())
                await asyncio.sleep(min(min_interval_s, MAX_SILENCE_S))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, MAX_SILENCE_S - min_interval_s)):
                        await changed.wait()
        finally:
            self._load_streams -= 1
            self._watchers.discard(changed)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        # Read at once, as gRPC derives it from the wall clock, which may jump later.
        left_s = context.time_remaining()
        loop = asyncio.get_running_loop()
        until_s = None if left_s is None else loop.time() + max(0.0, left_s - DRAIN_ANSWER_MARGIN_S)
        log.warning("%s is drained by %s at %s", self._identity.instance, current_caller(), context.peer())
        if request.exit:
            self._process.exit()
            return worker_pb2.DrainResponse(ledger=self._process.ledger())
        await self.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._until_idle()
        return worker_pb2.DrainResponse(ledger=self._process.ledger())

    async def Undrain(
        self, request: worker_pb2.UndrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.UndrainResponse:
        log.warning("%s is undrained by %s at %s", self._identity.instance, current_caller(), context.peer())
        await self.undrain()
        return worker_pb2.UndrainResponse()

    async def _until_idle(self) -> None:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while held(self._process.ledger()):
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await changed.wait()
        finally:
            self._watchers.discard(changed)

    async def _drain_process(self) -> None:
        async with self._changing:
            await self._process.drain()

    def _report(self) -> worker_pb2.LoadReport:
        report = self._process.load()
        report.draining = self.draining
        self._sequence += 1
        report.sequence = self._sequence
        return report


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
