"""Finds the request that crashes its workers, and refuses it for a while. Pure.

A worker that dies takes many requests with it, and at most one of them is the reason. Since a resumed
request repeats exactly what it did, the guilty one kills again almost at once, while the innocent go
on. So:

    a strike      for every request whose attempt had made less than PROOF_TOKENS on the worker that died
    a trial       a request with strikes begins on a worker only when no other one there is still
                  without its first token (if either has two strikes: without its PROOF_TOKENS), so that those
                  under suspicion come one by one
    a verdict     guilty with its second strike, if nothing else without its PROOF_TOKENS ran there and it
                  got no further than REPEAT_TOKENS beyond its last death: it died of the same thing; or with
                  its third, if nothing else with a strike ran there. It fails, and is refused for a while
                  when it comes again
    an acquittal  after PROOF_TOKENS in one attempt all strikes are forgotten; and a strike is taken back when
                  the worker's supervisor reports that it was killed from outside (cluster/exit_reports.py)

A request that kills while nothing else begins is found out by its second kill; one hidden in a crowd that
begins or resumes beside it by its third or fourth. The crowd never fails for it. Without
exit reports a worker that was killed from outside looks like one that died of a request. A request that
loses two workers in this way has most often got further in between than one that kills: the third strike is
for one that has not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from libs.common.service_bounds import MAX_QUARANTINED, QUARANTINE_S
from slipstream.errors import Quarantined

# Tokens of a dying worker's last steps may be lost on the way, so a repetition dies a few tokens later.
PROOF_TOKENS = 16
# Such a repetition adds no more than what was lost.
REPEAT_TOKENS = 8
STRIKES = 2


@dataclass(slots=True, eq=False)
class Suspect:
    """One request. `content` names what it runs, so that it is known again under another id; to be there when
    a death is judged."""

    content: bytes = b""
    strikes: int = 0
    struck_by: tuple[str, ...] = ()  # the workers of its latest strikes
    workers: tuple[str, ...] = ()  # that the attempt under way could kill
    tokens: int = 0  # of the attempt under way


@dataclass(slots=True)
class _Bench:
    """Attempts on one worker that have not proved harmless yet; their numbers when it died."""

    attempts: set[Suspect] = field(default_factory=set)
    all_at_death: int | None = None
    struck_at_death: int = 0

    @property
    def struck(self) -> int:
        return sum(suspect.strikes > 0 for suspect in self.attempts)


class Quarantine:
    """The court of one router. Time is given by `clock`, monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._benches: dict[str, _Bench] = {}
        self._guilty: OrderedDict[bytes, float] = OrderedDict()
        self._killed: OrderedDict[str, None] = OrderedDict()  # workers that did not break by themselves

    @property
    def unproven(self) -> int:
        """Attempts that have not proved harmless, by worker they run on; 0 when idle."""
        return sum(len(bench.attempts) for bench in self._benches.values())

    @property
    def knows_any(self) -> bool:
        """Whether anything is refused."""
        return bool(self._guilty)

    def refuse_known(self, content: bytes) -> None:
        """Raises Quarantined for what killed workers before."""
        until_s = self._guilty.get(content)
        if until_s is not None and self._clock() < until_s:
            raise Quarantined("workers died of this request: it is not run again")

    def may_begin(self, suspect: Suspect, workers: Iterable[str]) -> bool:
        """Whether an attempt may begin on these workers now. Those without strikes always may."""
        if not suspect.strikes:
            return True
        benches = [bench for worker in workers if (bench := self._benches.get(worker)) is not None]
        others = {other for bench in benches for other in bench.attempts if other is not suspect}
        return all(
            other.tokens >= (1 if max(suspect.strikes, other.strikes) < STRIKES else PROOF_TOKENS)
            for other in others
            if other.strikes
        )

    def begin(self, suspect: Suspect, workers: Iterable[str]) -> None:
        """The attempt begins. `leave` must follow, however it ends."""
        suspect.workers, suspect.tokens = tuple(workers), 0
        self._seat(suspect, suspect.workers)

    def observe(self, suspect: Suspect, tokens: int) -> None:
        """The attempt brought tokens."""
        suspect.tokens += tokens
        if suspect.workers and suspect.tokens >= PROOF_TOKENS:
            self._withdraw(suspect, suspect.workers)
            suspect.strikes, suspect.struck_by = 0, ()

    def join(self, suspect: Suspect, workers: Iterable[str]) -> None:
        """The attempt runs on these workers as well."""
        fresh = tuple(worker for worker in workers if worker not in suspect.workers)
        suspect.workers += fresh
        self._seat(suspect, fresh)

    def lost(self, suspect: Suspect, workers: Iterable[str], *, died: str | None = None) -> None:
        """The attempt goes on without these workers; `died`: what ended its part there. The strike counts for
        later."""
        if died is not None and self._blames(suspect, died):
            self.saw_death(died)
            suspect.strikes += 1
            suspect.struck_by += (died,)
        self._withdraw(suspect, tuple(workers))

    def saw_death(self, died: str) -> None:
        """Who was there is counted now: until the verdicts some may leave for reasons of their own."""
        bench = self._benches.get(died)
        if bench is not None and bench.all_at_death is None:
            bench.all_at_death, bench.struck_at_death = len(bench.attempts), bench.struck

    def would_convict(self, suspect: Suspect, died: str) -> bool:
        """Whether this death is more than a first strike: evidence is worth waiting for."""
        return suspect.strikes > 0 and self._blames(suspect, died)

    def was_killed(self, worker: str) -> None:
        """The worker was killed from outside: no request is to blame."""
        self._killed[worker] = None
        while len(self._killed) > MAX_QUARANTINED:
            self._killed.popitem(last=False)

    def done_with(self, suspect: Suspect, worker: str) -> None:
        """The attempt runs on, but not on this worker any more."""
        if worker in suspect.workers:
            self._withdraw(suspect, (worker,))

    def leave(self, suspect: Suspect, *, died: str | None = None) -> None:
        """The attempt is over; `died`: the worker whose death ended it. Raises Quarantined when guilty."""
        if suspect.struck_by:
            suspect.strikes -= sum(worker in self._killed for worker in suspect.struck_by)
            suspect.struck_by = tuple(worker for worker in suspect.struck_by if worker not in self._killed)
        if died is None or not self._blames(suspect, died):
            if suspect.workers:
                self._withdraw(suspect, suspect.workers)
            return
        self.saw_death(died)
        bench = self._benches[died]
        alone = bench.all_at_death == 1
        alone_with_strikes = bench.struck_at_death <= (suspect.strikes > 0)
        self._withdraw(suspect, suspect.workers)
        suspect.strikes += 1
        suspect.struck_by += (died,)
        needed = STRIKES if alone and suspect.tokens <= REPEAT_TOKENS else STRIKES + 1
        if suspect.strikes >= needed and (alone or alone_with_strikes):
            self._remember(suspect.content)
            raise Quarantined(f"{suspect.strikes} workers died of this request: it is not run again")

    def _blames(self, suspect: Suspect, died: str) -> bool:
        """Whether this death is a strike. One run of a worker dies once, also where two attempts saw it."""
        return died in suspect.workers and died not in suspect.struck_by and died not in self._killed

    def _seat(self, suspect: Suspect, workers: Iterable[str]) -> None:
        for worker in workers:
            bench = self._benches.get(worker)
            if bench is None:
                bench = self._benches[worker] = _Bench()
            bench.attempts.add(suspect)

    def _withdraw(self, suspect: Suspect, workers: Iterable[str]) -> None:
        for worker in workers:
            bench = self._benches.get(worker)
            if bench is not None:
                bench.attempts.discard(suspect)
                if not bench.attempts:
                    del self._benches[worker]
        suspect.workers = tuple([worker for worker in suspect.workers if worker not in workers])

    def _remember(self, content: bytes) -> None:
        self._guilty[content] = self._clock() + QUARANTINE_S
        self._guilty.move_to_end(content)
        while len(self._guilty) > MAX_QUARANTINED:
            self._guilty.popitem(last=False)
