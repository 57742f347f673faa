"""A router's connection to one worker: its identity, its load, and the channel to it.

The router's code calls a WorkerConnection a link. It is `ready` while the process that discovery named
answers: its status was read, its fingerprint is known, and its load stream is open. It reconnects by itself
until closed. Losing discovery does not close it; a worker that is only cut off from etcd goes on serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import grpc

from libs.common.cluster.exit_reports import run_name
from libs.common.cluster.load_report import keep_plausible
from libs.common.cluster.worker_record import Role, Worker
from libs.common.telemetry.paced_warnings import WARN_EVERY_S, PacedWarnings
from services.router.workers.prefill_client import PrefillClient
from slipstream.enum_names import ROLES, TRANSPORTS
from slipstream.errors import Unavailable
from slipstream.rpc.backoff import ANSWER_S, Backoff
from slipstream.rpc.credential_fault import credential_fault, lasting_fault
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.rpc.names import wait_resolved
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import common_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

STALE_AFTER_S = 3.0
# A worker whose load stream, which is its heartbeat (cluster/worker_service.py), was silent for this long is
# given up. With it goes all that it runs for this router.
SILENCE_S = 2.0
_STATUS_TIMEOUT_S = 5.0
_LOAD_INTERVAL_MS = 50
# Of reports that come faster, two are read in this time. A router that was late still catches up.
LEAST_GAP_S = 0.01
# What gRPC says of a peer whose kernel closed or refused the connection.
_ENDED = ("connection refused", "connection reset", "socket closed")

_Answer = TypeVar("_Answer")


class WorkerListener(Protocol):
    """Runs something on a worker, and is notified when the worker falls silent or drains."""

    def on_worker_silent(self, link: WorkerConnection) -> None:
        """The worker sent no heartbeat for too long."""

    def on_worker_draining(self, link: WorkerConnection) -> None:
        """The worker drains. Called again and again while it does."""


class ConnectionOwner(Protocol):
    """Owns connections; called on the event loop."""

    def fits(self, fingerprint: common_pb2.Fingerprint, /) -> bool:
        """Whether a worker of this fingerprint may be used. Another one never gets ready."""
        ...

    def readiness_changed(self) -> None:
        """A worker is ready, or no longer."""
        ...

    def reported(self, link: WorkerConnection, report: worker_pb2.LoadReport) -> None:
        """A worker sent a load report."""
        ...


class WorkerConnection:
    """Follows one incarnation of one worker."""

    def __init__(
        self,
        worker: Worker,
        owner: ConnectionOwner,
        *,
        dial: Dial = PLAIN_DIAL,
        clock: Callable[[], float],
        silence_s: float = SILENCE_S,
        warnings: PacedWarnings | None = None,
        news: PacedWarnings | None = None,
    ) -> None:
        """`warnings` and `news`: those of all connections. So a worker that comes and goes is named once, and
        many false workers do not fill the log."""
        self.worker = worker
        self.key = run_name(worker.role, worker.instance, worker.incarnation)
        self.files_version = dial.files_version()  # that its channel was made with
        self.channel = dial(worker.endpoint)
        self.fingerprint: common_pb2.Fingerprint | None = None
        self.digest = ""  # the fingerprint's, in hex
        self.transport = ""
        self.prefills = PrefillClient(self.channel, instance=worker.instance)
        self.ready = False
        self.draining = False  # it takes no new work, and its sequences should move away
        # Uncached prompt tokens (prefill) or context tokens (decode) this router has sent there.
        self.tokens_in_flight = 0
        self.requests_in_flight = 0
        self._counted: set[TokensInFlight] = set()
        self.listeners: set[WorkerListener] = set()
        # Calls under way that release what the worker holds of a request.
        self.releases_in_flight = 0
        self._when_settled: list[Callable[[str, bool], None]] = []
        self._stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self._report = worker_pb2.LoadReport()
        self._reported_s = 0.0
        self._following = False  # its load stream is open
        # The last report less this router's own counts at that time: the load of other routers.
        self._tokens_of_others = 0
        self._requests_of_others = 0
        self._clock = clock
        self._owner = owner
        self._silence_s = silence_s
        self._warnings = warnings or PacedWarnings(log)
        self._news = news or PacedWarnings(log, level=logging.INFO)
        self._task = asyncio.create_task(self._follow(), name=f"link-{worker.instance}")

    @property
    def reachable(self) -> bool:
        """Whether a load report came lately, also while the worker drains."""
        return self._following and self.report_age_s <= STALE_AFTER_S

    @property
    def report_age_s(self) -> float:
        """Seconds since the last load report."""
        return self._clock() - self._reported_s

    @property
    def has_reported(self) -> bool:
        """Whether a load report ever came."""
        return self._reported_s > 0

    @property
    def is_silent(self) -> bool:
        """Whether the worker missed its heartbeats for too long."""
        return self.report_age_s > self._silence_s

    @property
    def report(self) -> worker_pb2.LoadReport | None:
        """The last load report; None when it is stale, which means unknown and not full."""
        reported_s = self._reported_s
        return self._report if reported_s and self._clock() - reported_s <= STALE_AFTER_S else None

    def load(self) -> tuple[worker_pb2.LoadReport | None, int, int]:
        """(`report`, tokens, requests) there, of all routers as far as known. Tokens are prompt tokens to be
        computed on a prefill worker, and those of the context of what runs on others."""
        report, tokens, requests = self.report, self.tokens_in_flight, self.requests_in_flight
        if report is None:
            return None, tokens, requests
        return report, tokens + self._tokens_of_others, requests + self._requests_of_others

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """`tokens_in_flight`, request by request."""
        return tuple([count.tokens for count in self._counted])

    def count(self, count: TokensInFlight) -> None:
        """Count a request at the worker, until `discount`."""
        self._counted.add(count)
        self.requests_in_flight += 1

    def discount(self, count: TokensInFlight) -> None:
        """Take back the estimate of a request that ended."""
        self._counted.discard(count)
        self.requests_in_flight -= 1

    def check_heartbeat(self) -> bool:
        """Whether the worker fell silent while something runs there. All listeners are notified of silence,
        and of draining. A silent worker gets no requests until it reports again."""
        if not self.listeners:
            return False
        if self.is_silent:
            self._following = False
            self._set_ready(False)
            self._notify(lambda listener: listener.on_worker_silent(self))
            return True
        if self.draining:
            self._notify(lambda listener: listener.on_worker_draining(self))
        return False

    def when_settled(self, call: Callable[[str, bool], None]) -> None:
        """Call `call(key, has_ended)` once when the silent worker answers again, or its process has ended."""
        self._when_settled.append(call)

    def settle(self, *, has_ended: bool) -> None:
        """The worker answered, or its process has ended: see `when_settled`."""
        calls, self._when_settled = self._when_settled, []
        for call in calls:
            call(self.key, has_ended)

    def _notify(self, call: Callable[[WorkerListener], None]) -> None:
        """Call every listener; one that raises does not keep the others from being called."""
        for listener in list(self.listeners):
            try:
                call(listener)
            except Exception:
                log.exception("a listener of %s failed", self.worker.instance)

    async def close(self) -> None:
        """End the connection. Calls still open on the channel fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.ready = False
        await self.prefills.close()
        await self.channel.close()

    async def _follow(self) -> None:
        backoff = Backoff()
        await wait_resolved(self.worker.endpoint, what=self.worker.instance)
        answered_s = self._clock()
        while True:
            try:
                await self._identify()
                async for response in self._stub.WatchLoad(
                    worker_pb2.WatchLoadRequest(min_interval_ms=_LOAD_INTERVAL_MS)
                ):
                    report = received(response, sender=self.worker.instance).load
                    self._following = True
                    soon_s = answered_s + LEAST_GAP_S - self._clock()
                    self._apply(report)
                    backoff.succeeded()
                    answered_s = self._clock()
                    if soon_s > 0:  # what it sends meanwhile waits there, or is never made
                        await asyncio.sleep(soon_s)
            except (_WrongWorker, Unavailable) as error:
                answered_s = self._clock()
                self._news.warn(
                    f"{self.key} is wrong", f"{self.worker.instance} at {self.worker.endpoint}: {error}"
                )
            except grpc.aio.AioRpcError as error:
                if shows_end(error.code(), error.details() or ""):
                    self.settle(has_ended=True)
                self._log_failure(error, silent_s=self._clock() - answered_s)
            finally:
                self._following = False
                self._set_ready(False)
            await asyncio.sleep(backoff.pause_s())

    def _log_failure(self, error: grpc.aio.AioRpcError, *, silent_s: float) -> None:
        """A warning where credentials differ, or the worker does not answer for long."""
        name = f"{self.worker.role}/{self.worker.instance}"
        at = f"{self.worker.instance} at {self.worker.endpoint}"
        fault = credential_fault(error)
        if fault is not None:
            self._warnings.warn(name, f"{at} gets no requests: {fault}")
        elif silent_s >= WARN_EVERY_S:
            self._warnings.warn(name, f"{at} does not answer for {silent_s:.0f} s: {lasting_fault(error)}")
        else:
            self._news.warn(self.key, f"{at}: {error.details()}")

    async def _identify(self) -> None:
        status = received(await first_answer(self._ask_status), sender=self.worker.instance)
        named = (self.worker.role, self.worker.instance, self.worker.incarnation)
        role = ROLES.name(status.role)
        if (role, status.instance, status.incarnation) != named:
            if (role, status.instance) == named[:2]:  # a later run of the process
                self.settle(has_ended=True)
            raise _WrongWorker(f"is {role}/{status.instance} {status.incarnation}")
        if status.draining:
            raise _WrongWorker("is draining")
        if status.fingerprint.digest and not self._owner.fits(status.fingerprint):
            raise _WrongWorker("has another tokenizer or chat template than this router")
        self.fingerprint = status.fingerprint if status.fingerprint.digest else None
        self.digest = status.fingerprint.digest.hex()
        self.transport = TRANSPORTS.name(status.transport)

    async def _ask_status(self) -> worker_pb2.GetStatusResponse:
        return await self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)

    def _apply(self, report: worker_pb2.LoadReport) -> None:
        if self.ready and report.sequence <= self._report.sequence:
            return
        self._report = keep_plausible(report)
        self._reported_s = self._clock()
        self.draining = report.draining
        self.settle(has_ended=False)
        prefill = self.worker.role is Role.PREFILL
        tokens = report.prefill_tokens_in_flight if prefill else report.decode_tokens_in_flight
        requests = report.requests_running + report.requests_waiting
        self._tokens_of_others = max(tokens - self.tokens_in_flight, 0)
        self._requests_of_others = max(requests - self.requests_in_flight, 0)
        self._owner.reported(self, report)
        self._set_ready(not self.draining)

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._owner.readiness_changed()


def shows_end(code: grpc.StatusCode, details: str) -> bool:
    """Whether a call failed because no process has the peer's port any more. Pure.

    The kernel answers for a process that stands still, or that is written to a core file, as before.
    """
    return code is grpc.StatusCode.UNAVAILABLE and any(words in details.lower() for words in _ENDED)


async def first_answer(
    ask: Callable[[], Coroutine[Any, Any, _Answer]], *, every_s: float = ANSWER_S
) -> _Answer:
    """The first answer to a question that is repeated every `every_s`, without giving up the earlier ones. A
    lost question delays nothing, and the answer of a slow peer still counts. `ask` bounds the time of each;
    the first one that fails ends them all, and its error is raised."""
    asked: set[asyncio.Task[_Answer]] = set()
    try:
        while True:
            asked.add(asyncio.create_task(ask()))
            done, _ = await asyncio.wait(asked, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return min(done, key=lambda task: task.exception() is not None).result()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class _WrongWorker(Exception):
    """Another process answers there, or this one drains."""


class TokensInFlight:
    """One request at a worker and its tokens there, counted until released."""

    __slots__ = ("_link", "_released", "tokens")

    def __init__(self, link: WorkerConnection, tokens: int) -> None:
        self._link = link
        self.tokens = tokens
        self._released = False
        link.count(self)
        link.tokens_in_flight += tokens

    def add(self, tokens: int) -> None:
        """Count more tokens."""
        self.tokens += tokens
        self._link.tokens_in_flight += tokens

    def lower_to(self, tokens: int) -> None:
        """Lower the count to `tokens`, if it is higher."""
        self.add(min(tokens - self.tokens, 0))

    def release(self) -> None:
        """End the count of the request and its tokens. Idempotent."""
        if not self._released:
            self._released = True
            self._link.discount(self)
        if self.tokens:
            self.add(-self.tokens)
