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

    async def hear_evidence(self, suspect: Suspect, died: str) -> None:
        """A worker died while it ran the suspect. Before a second strike, ask how this worker and those of
        earlier strikes ended: a worker that was killed from outside counts as no strike."""
        self.quarantine.saw_death(died)
        if not self.quarantine.would_convict(suspect, died):
            return
        workers = (*suspect.struck_by, died)
        answers = await asyncio.gather(*(self.exit_reports.has_crashed(worker) for worker in workers))
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
