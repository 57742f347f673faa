"""What keeps a request going over the deaths and drains of workers: one `RequestFailover` each.

lifeline = continuity.lifeline(content)              # raises Quarantined for a known killer
while not lifeline.may_begin(place): ...             # place again, a little later
async with lifeline.attempt(place):                  # raises Quarantined instead of WorkerFailed
    lifeline.took(batch)
lifeline.failed(failure, new_tokens=...)             # raises when there is no point in going on
lifeline.close()                                     # always, at the end
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from libs.common.block_hash import TokenArray
from libs.common.cluster.exit_reports import ExitReports, NoExitReports
from services.router.execution.attempt_types import TokenBatch, WorkerFailed, WorkerPair
from services.router.execution.drain_limiter import DrainLimiter
from services.router.execution.hedge_policy import HedgePolicy
from services.router.execution.quarantine import Quarantine, Suspect
from services.router.execution.retry_policy import RetryPolicy
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from slipstream.errors import SlipstreamError
from slipstream.v1 import common_pb2


class FailoverState:
    """The state that all requests of this router share."""

    def __init__(
        self, fleet: RouterFleet, *, clock: Callable[[], float], deaths: ExitReports | None = None
    ) -> None:
        self.fleet = fleet
        self.deaths = deaths or NoExitReports()
        self.quarantine = Quarantine(clock)
        self.moves = DrainLimiter()
        self.hedges = HedgePolicy()

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
        heard = await asyncio.gather(*(self._shared.deaths.broke(worker) for worker in workers))
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
        if self._moving_from:
            self._settled()
        if self._suspect.workers:
            quarantine = self._shared.quarantine
            if place.prefill is not None:
                quarantine.done_with(self._suspect, place.prefill.key)
            quarantine.took(self._suspect, len(batch.tokens))

    def hedge_after_s(self, place: WorkerPair, context_tokens: int) -> float | None:
        """How long to wait for the prefill of this attempt before a second worker is asked as well."""
        if place.prefill is None:
            return None
        uncached = place.uncached_tokens if place.uncached_tokens is not None else context_tokens
        wait_ms = self._shared.hedges.wait_ms(
            uncached_tokens=uncached,
            cached_tokens=context_tokens - uncached,
            other_workers=int(self._another(place.prefill)),
        )
        return None if wait_ms is None else wait_ms / 1e3

    def may_hedge(self) -> bool:
        """Whether a second attempt may run beside this one: the router's budget allows it, and no worker died
        of the request, which under suspicion is to put one place at risk and not two."""
        return self._shared.hedges.has_budget and not self._suspect.strikes

    def spend_hedge(self) -> None:
        """A second attempt is made."""
        self._shared.hedges.spend()

    def prefilled(self, place: WorkerPair, elapsed_s: float) -> None:
        """A first token came so long after it was asked for."""
        if place.uncached_tokens is not None:
            self._shared.hedges.observe(elapsed_s * 1e3, uncached_tokens=place.uncached_tokens)

    def leave(self, link: WorkerConnection) -> bool:
        """Whether a sequence should move away from this decode worker now: it drains, another one can
        take over, and not too many are moving already. Takes the move."""
        if not link.draining or not self._another(link) or not self._shared.moves.take(link.key):
            return False
        self._settled()
        self._moving_from = link.key
        return True

    def failed(self, failure: WorkerFailed, *, new_tokens: int) -> None:
        """The attempt failed. Raises what the client is told when there is no point in another."""
        self._endurance.failed(failure.error, failure.worker, failure.other, new_tokens=new_tokens)

    def close(self) -> None:
        """The request is over."""
        self._settled()

    def _settled(self) -> None:
        if self._moving_from:
            self._shared.moves.give_back(self._moving_from)
            self._moving_from = ""

    def _another(self, link: WorkerConnection) -> bool:
        """Whether there is another worker that can do what this one does."""
        for other in self._shared.fleet.links_of(link.worker.role):
            # The fingerprint last: to compare two takes longer than all the rest.
            if other.ready and other is not link and other.fingerprint == link.fingerprint:
                return True
        return False


class _Trial:
    """See `RequestFailover.attempt`."""

    def __init__(self, lifeline: RequestFailover, place: WorkerPair) -> None:
        self._lifeline = lifeline
        self._place = place

    async def __aenter__(self) -> None:
        self._lifeline.begin(self._place)

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, WorkerFailed) and error.died:
            await self._lifeline.end_by_death(error.worker)
        else:
            self._lifeline.end()


def content_of(
    prompt: TokenArray,
    sampling: common_pb2.SamplingParams,
    *,
    tenant: str,
    hashes: Sequence[bytes] = (),
    block_tokens: int = 0,
) -> bytes:
    """A name for what a request runs, the same when a client sends it again; the seed is left out.

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


def _keys(place: WorkerPair) -> list[str]:
    return [link.key for link in (place.prefill, place.decode) if link is not None]
