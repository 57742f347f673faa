"""What keeps requests going over the deaths and drains of workers, shared by all requests of this router."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from libs.common.block_hash import TokenArray
from libs.common.cluster.exit_reports import ExitReports, NoExitReports
from services.router.execution.policies.drain_limiter import DrainLimiter
from services.router.execution.policies.hedge_policy import HedgePolicy
from services.router.execution.policies.quarantine import Quarantine, Suspect
from slipstream.v1 import common_pb2


class FailoverState:
    """The policies that remember something from one request to the next."""

    def __init__(self, *, clock: Callable[[], float], exit_reports: ExitReports | None = None) -> None:
        self.exit_reports = exit_reports or NoExitReports()
        self.quarantine = Quarantine(clock)
        self.drain_limiter = DrainLimiter()
        self.hedge_policy = HedgePolicy()

    def lifeline(self, content: Callable[[], bytes]) -> RequestFailover:
        """For a request that runs `content`, a name that is made where it is needed. Raises Quarantined
        when workers died of it before."""
        if self.quarantine.knows_any:
            self.quarantine.refuse_known(content())
        return RequestFailover(self, content)


class RequestFailover:
    """One request's failures, suspicion and moves, over all its attempts."""

    def __init__(self, continuity: FailoverState, content: Callable[[], bytes]) -> None:
        self._shared = continuity
        self._content = content
        self._suspect = Suspect()
        self._endurance = RetryPolicy()
        self._moving_from = ""  # holds one of the moves away from there

    @property
    def avoid(self) -> set[str]:
        """Keys of workers that the next attempt should not use."""
        return self._endurance.avoid

    @property
    def error(self) -> SlipstreamError | None:
        """Of the last attempt; None before there was one."""
        return self._endurance.error

    def may_begin(self, place: WorkerPair) -> bool:
        """Whether an attempt may begin there now; under suspicion requests wait for each other."""
        if not self._suspect.strikes:
            return True
        return self._shared.quarantine.may_begin(self._suspect, _keys(place))

    def attempt(self, place: WorkerPair) -> _Trial:
        """Around an attempt at `place`. Raises Quarantined for one too many deaths."""
        return _Trial(self, place)

    def begin(self, place: WorkerPair) -> None:
        """From `attempt`: it begins."""
        self._shared.quarantine.begin(self._suspect, _keys(place))

    def end(self) -> None:
        """From `attempt`: it is over, and no death ended it."""
        self._shared.quarantine.leave(self._suspect)

    async def end_by_death(self, worker: str) -> None:
        """From `attempt`: the death of this worker ended it."""
        quarantine, suspect = self._shared.quarantine, self._suspect
        died: str | None = worker
        try:
            suspect.content = self._content()
            quarantine.saw_death(worker)
            if quarantine.would_convict(suspect, worker):
                await self._hear_evidence(worker)
        except asyncio.CancelledError:
            died = None  # the request ends anyway: no verdict before the evidence was heard
            raise
        finally:
            quarantine.leave(suspect, died=died)

    async def _hear_evidence(self, died: str) -> None:
        """How the workers ended that this request is blamed for: all are asked at once."""
        workers = (*self._suspect.struck_by, died)
        heard = await asyncio.gather(*(self._shared.deaths.has_crashed(worker) for worker in workers))
        for worker, broke in zip(workers, heard, strict=True):
            if broke is False:
                self._shared.quarantine.was_killed(worker)

    def hedged(self, place: WorkerPair) -> None:
        """The attempt runs at a second place as well."""
        self._shared.quarantine.join(self._suspect, _keys(place))

    def lost(self, place: WorkerPair, *, but: WorkerPair, failure: WorkerFailed | None) -> None:
        """Of the two places this one is given up; `failure`: why, if it was not merely slower."""
        died = failure.worker if failure is not None and failure.died else None
        gone = set(_keys(place)) - set(_keys(but))
        self._shared.quarantine.lost(self._suspect, gone, died=died)

    def took(self, batch: TokenBatch, place: WorkerPair) -> None:
        """The attempt brought a batch."""
        if not batch.tokens:
            return
        workers = (*suspect.struck_by, died)
        answers = await asyncio.gather(*(self.exit_reports.broke(worker) for worker in workers))
        for worker, broke in zip(workers, answers, strict=True):
            if broke is False:
                self.quarantine.was_killed(worker)


def content_digest(
    prompt: TokenArray,
    sampling: common_pb2.SamplingParams,
    *,
    tenant: str,
    hashes: Sequence[bytes] = (),
    block_tokens: int = 0,
) -> bytes:
    """Names what a request runs, the same when a client sends it again; the seed is left out.

    `hashes`: of the prompt's full blocks. The last one names all tokens up to there, so that a long prompt
    is not hashed again.
    """
    unseeded = common_pb2.SamplingParams()
    unseeded.CopyFrom(sampling)
    unseeded.seed = 0
    digest = hashlib.blake2b(b"".join(hashes[-1:]), digest_size=16, person=b"slip-quarantine")
    digest.update(prompt[len(hashes) * block_tokens :].tobytes())
    digest.update(unseeded.SerializeToString(deterministic=True))
    digest.update(tenant.encode())
    return digest.digest()
