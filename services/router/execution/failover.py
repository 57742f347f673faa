"""The failover policies that all requests of a router share: quarantine, drain limiter, hedge policy."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence

from libs.common.block_hash import TokenArray
from libs.common.cluster.exit_reports import CrashedAttempts, ExitReports, NoExitReports
from libs.common.service_bounds import MAX_QUARANTINED
from services.router.execution.policies.drain_limiter import DrainLimiter
from services.router.execution.policies.hedge_policy import HedgePolicy
from services.router.execution.policies.quarantine import Quarantine, Suspect
from services.router.workers.connection import WorkerConnection
from slipstream.v1 import common_pb2


class FailoverState:
    """The policies with state that outlives a request, and the source of exit reports."""

    def __init__(self, *, clock: Callable[[], float], exit_reports: ExitReports | None = None) -> None:
        self.exit_reports = exit_reports or NoExitReports()
        self.quarantine = Quarantine(clock)
        self.drain_limiter = DrainLimiter()
        self.hedge_policy = HedgePolicy()
        self._tasks: set[asyncio.Task[None]] = set()  # that read reports on silent workers, or write one
        self._reported: OrderedDict[str, None] = OrderedDict()  # crashed workers, for other routers

    def watch_silent(self, suspect: Suspect, link: WorkerConnection) -> None:
        """Record that a worker fell silent under the suspect, and what comes of the worker."""
        if self.quarantine.fell_silent(suspect, link.key):
            self._report(link.key, self.quarantine.silence_of(link.key))
            link.when_settled(self._settled)

    def _settled(self, worker: str, has_ended: bool) -> None:
        if not has_ended:
            self.quarantine.silence_ended(worker, crashed=False)
            return
        self._spawn(self._check_ended(worker), name="ended-worker")

    def _spawn(self, work: Coroutine[None, None, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_ended(self, worker: str) -> None:
        ended, elsewhere = await asyncio.gather(
            self.exit_reports.exit_of(worker), self.exit_reports.attempts_elsewhere(worker)
        )
        self.quarantine.record_exit(worker, ended)
        self.quarantine.silence_ended(worker, crashed=True, elsewhere=elsewhere)

    def close(self) -> None:
        """Wait for no more reports: no request runs any more."""
        for task in self._tasks:
            task.cancel()

    async def check_exit_reports(self, suspect: Suspect, crashed: str) -> None:
        """Read how `crashed`, which ran the suspect, and the workers of its earlier strikes ended.

        Only a second or later strike waits for the reports. Other routers get and give the number of their
        requests on the crashed one.
        """
        self.report_crash(crashed)
        if not self.quarantine.is_repeated_strike(suspect, crashed):
            return
        workers = (*suspect.struck_by, crashed)
        reports = asyncio.gather(*(self.exit_reports.exit_of(worker) for worker in workers))
        answers, elsewhere = await asyncio.gather(reports, self.exit_reports.attempts_elsewhere(crashed))
        self.quarantine.record_elsewhere(crashed, elsewhere)
        for worker, ended in zip(workers, answers, strict=True):
            self.quarantine.record_exit(worker, ended)

    def report_crash(self, crashed: str) -> None:
        """Report to the other routers, once, what ran here on a crashed worker."""
        self._report(crashed, self.quarantine.record_crash(crashed))

    def _report(self, worker: str, ran: CrashedAttempts) -> None:
        if not ran.attempts or worker in self._reported:
            return
        self._reported[worker] = None
        if len(self._reported) > MAX_QUARANTINED:
            self._reported.popitem(last=False)
        self._spawn(self.exit_reports.report_attempts(worker, ran), name="crashed-attempts")


def content_digest(
    prompt: TokenArray,
    sampling: common_pb2.SamplingParams,
    *,
    tenant: str,
    hashes: Sequence[bytes] = (),
    block_tokens: int = 0,
    is_open: bool = False,
) -> bytes:
    """Hash a request's tenant, prompt and sampling without the seed: a repeated request has the same digest.

    With `is_open` the fleet of the moment gave `max_tokens`, which then does not count.

    `hashes` are those of the prompt's full blocks. The last one stands for all their tokens, so the digest
    of a long prompt is cheap.
    """
    unseeded = common_pb2.SamplingParams()
    unseeded.CopyFrom(sampling)
    unseeded.seed = 0
    if is_open:
        unseeded.max_tokens = 0
    unseeded.ClearField("prompt_logprobs")  # a later attempt does not ask for them again
    digest = hashlib.blake2b(b"".join(hashes[-1:]), digest_size=16, person=b"slip-quarantine")
    digest.update(prompt[len(hashes) * block_tokens :].tobytes())
    digest.update(unseeded.SerializeToString(deterministic=True))
    digest.update(tenant.encode())
    return digest.digest()
