"""Holds jobs back while live requests run: a held job leaves its workers and keeps its tokens.

A live request holds jobs when admission takes it, before its prompt is encoded, so that the workers are free
when the prompt comes. A job goes on from its tokens, as after a failover, and so with the same text.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from services.router.request.types import Caller

# An answer with fewer tokens after the first says little about the time between tokens.
_LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class MetJobs:
    """The jobs that a live request met when it came: those that ran, and those of them that went on."""

    began_s: float = 0.0
    met: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True)
class LiveSample:
    """How fast one live request was, and what it met."""

    ttft_ms: float
    new_tokens: int  # of the prompt, without cached ones
    token_ms: float  # between two tokens; 0 for a short answer
    met: int
    beside: int


class LiveObserver(Protocol):
    """Learns from live requests."""

    def observe(self, sample: LiveSample) -> None:
        """A live request has ended well."""


class AnswerFigures(Protocol):
    """The figures of an answer."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class HeldRun(Protocol):
    """A request that runs, and can leave its workers."""

    hold: JobHold | None
    met_jobs: MetJobs

    @property
    def figures(self) -> AnswerFigures:
        """The figures of the answer until now."""

    def suspend(self) -> None:
        """Leave the workers. Idempotent."""


class JobHold:
    """Whether one job waits."""

    def __init__(self, run: HeldRun, caller: Caller) -> None:
        self.caller = caller
        self.was_held = False  # at any time until now
        self._run = run
        self._freed = asyncio.Event()
        self._freed.set()

    @property
    def is_held(self) -> bool:
        """Whether the job must not be on workers."""
        return not self._freed.is_set()

    def hold(self) -> None:
        """Leave the workers until `free`."""
        self.was_held = True
        self._freed.clear()
        self._run.suspend()

    def free(self) -> None:
        """Let the job go on."""
        self._freed.set()

    async def wait_freed(self) -> None:
        """Return when the job may go on."""
        await self._freed.wait()


class JobHolds:
    """The jobs among the requests of a router. Any number runs until a limit is set, then the oldest.

    The choices of one job are held together: they have one caller.
    """

    def __init__(self) -> None:
        self.n_held_total = 0
        self.beside = 0  # jobs that go on when a live request comes
        self.observer: LiveObserver | None = None
        self._jobs: dict[int, list[JobHold]] = {}  # by the identity of the caller
        self._limit: int | None = None

    @property
    def running(self) -> int:
        """Jobs that are not held."""
        return sum([not any(hold.is_held for hold in holds) for holds in self._jobs.values()])

    @property
    def held(self) -> int:
        """Jobs that wait for live requests."""
        return len(self._jobs) - self.running

    def live_arrived(self, caller: Caller) -> int:
        """Hold what must not run beside a live request; how many jobs it met. Nothing for a job."""
        if caller.is_job or not self._jobs:
            return 0
        met = self.running
        self.set_limit(self.beside if self._limit is None else min(self.beside, self._limit))
        return met

    def set_limit(self, limit: int | None) -> None:
        """Hold all but so many of the oldest jobs, and let these go on; None = hold none.

        Each choice counts, so that jobs with many leave the places of live requests free. The oldest job goes
        on with any number of them: it would wait for ever.
        """
        self._limit = limit
        n_choices = 0
        oldest_first = sorted(self._jobs.values(), key=lambda holds: holds[0].caller.submitted_unix_s)
        for holds in oldest_first:
            n_with = n_choices + len(holds)
            if limit is None or n_with <= limit or (limit and not n_choices):
                n_choices = n_with
                for hold in holds:
                    hold.free()
            else:
                self._hold(holds)

    def add(self, run: HeldRun, caller: Caller, met: int, *, began_s: float) -> None:
        """Take a request that begins. A job may be held at once; `met` is what a live request met."""
        if not caller.is_job:
            run.met_jobs = MetJobs(began_s, met, min(met, self.beside))
            return
        run.hold = JobHold(run, caller)
        holds = self._jobs.setdefault(id(caller), [])
        holds.append(run.hold)
        if holds[0].is_held or (len(holds) == 1 and self._is_over()):
            self._hold(holds)

    def remove(self, run: HeldRun, *, now_s: float, is_whole: bool) -> None:
        """Forget a request that has ended, and learn from a live one whose answer is whole."""
        if run.hold is not None:
            holds = self._jobs[id(run.hold.caller)]
            holds.remove(run.hold)
            if not holds:
                del self._jobs[id(run.hold.caller)]
        elif is_whole and self.observer is not None:
            self.observer.observe(_sample_of(run.met_jobs, run.figures, now_s))

    def _is_over(self) -> bool:
        """Whether the choices that run are more than the limit."""
        if self._limit is None:
            return False
        return sum([len(holds) for holds in self._jobs.values() if not holds[0].is_held]) > self._limit

    def _hold(self, holds: list[JobHold]) -> None:
        for hold in holds:
            if not hold.is_held:
                self.n_held_total += 1
                hold.hold()


def _sample_of(met: MetJobs, figures: AnswerFigures, now_s: float) -> LiveSample:
    n_more = figures.completion_tokens - 1
    decode_ms = (now_s - met.began_s) * 1e3 - figures.ttft_ms
    return LiveSample(
        ttft_ms=figures.ttft_ms,
        new_tokens=figures.prompt_tokens - figures.cached_tokens,
        token_ms=decode_ms / n_more if n_more >= _LEAST_TOKENS else 0.0,
        met=met.met,
        beside=met.beside,
    )
