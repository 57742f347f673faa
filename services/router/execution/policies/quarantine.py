"""Finds the request that crashes its workers, and refuses it for a while. Pure.

A worker that crashes ends many requests, and at most one of them is the cause. A continued request repeats
exactly the same work, so the one that crashes workers does so again almost at once, and others continue. So:

    strike        each request whose attempt has fewer than PROOF_TOKENS on a crashed worker gets one
    serial start  a request with strikes begins on a worker only when every other one with strikes there has
                  its first token. If either has two strikes, the other one needs its PROOF_TOKENS.
    quarantine    follows the second strike, if no other unproven attempt ran on the worker and this one made
                  at most REPEAT_TOKENS: it crashed at the same place. It follows the third strike, if no
                  other request with strikes ran there. The request fails, and is refused for QUARANTINE_S.
    clearing      an attempt with PROOF_TOKENS clears all strikes. A strike is also withdrawn when the
                  supervisor reports that the worker was killed from outside (cluster/exit_reports.py).
    silence       of a worker is no strike: it may stand still. It becomes one when the process turns out to
                  have ended, for example after a long core dump, unless the request has proven itself since.
    no etcd       of a worker that ended while etcd could not be asked it is unknown who ended it. Its strike
                  decides nothing before ALONE_STRIKES. What a report said before counts on.
    other routers share the worker: what they report of a crash counts as run there too, up to the strike
                  before ALONE_STRIKES. From then on the request is judged by this router's requests alone, so
                  that poison at several routers does not hide behind itself.
    leaving       clears nothing. A request that is cancelled on a worker counts there until the worker has
                  released it, and the worker's end then is a strike. Strikes stay with the content of a
                  request for QUARANTINE_S, so its repetition begins with them.

A request that crashes its workers alone is found by its second crash. Among others that begin on the same
worker it is found by its third or fourth; the others never fail for it. Without exit reports the quarantine
cannot distinguish a killed worker from a crashed one. A harmless request that loses two workers so has most
often made more than REPEAT_TOKENS in between. The third strike is for one that has not.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from libs.common.cluster.exit_reports import NO_ATTEMPTS, CrashedAttempts, WorkerExit
from libs.common.service_bounds import MAX_QUARANTINED, QUARANTINE_S
from slipstream.errors import Quarantined

# Tokens of a worker's last steps may be lost, so a repetition may emit a few tokens before it crashes.
PROOF_TOKENS = 16
# A repetition emits at most the tokens that were lost.
REPEAT_TOKENS = 8
STRIKES = 2
# With so many strikes what other routers ran is no excuse any more. Without progress it is no chance.
ALONE_STRIKES = 5
_CRASHED = "this request crashed {} workers: it is not run again"
_REPORTED = (WorkerExit.CRASHED, WorkerExit.KILLED)


@dataclass(slots=True, eq=False)
class Suspect:
    """One request and its strikes. `content` is its digest without the id, needed by `end` after a crash."""

    content: bytes = b""
    struck_by: tuple[str, ...] = ()  # the workers of its strikes
    workers: tuple[str, ...] = ()  # the workers on which the running attempt is unproven
    tokens: int = 0  # of the running attempt
    silent_workers: tuple[str, ...] = ()  # workers that fell silent under it, and may have crashed
    is_quarantined: bool = False  # the ends of silent workers have decided it

    @property
    def strikes(self) -> int:
        """The number of its strikes."""
        return len(self.struck_by)


@dataclass(slots=True)
class _UnprovenAttempts:
    """The attempts on one worker with fewer than PROOF_TOKENS, and their numbers when it crashed."""

    attempts: set[Suspect] = field(default_factory=set)
    at_crash: CrashedAttempts | None = None
    elsewhere: CrashedAttempts = NO_ATTEMPTS  # of other routers

    def now(self) -> CrashedAttempts:
        """The attempts that run on the worker now."""
        return CrashedAttempts(len(self.attempts), sum(suspect.strikes > 0 for suspect in self.attempts))

    def has_crashed(self) -> CrashedAttempts:
        """The attempts that ran on the worker when it crashed; the first call counts them."""
        if self.at_crash is None:
            self.at_crash = self.now()
        return self.at_crash


@dataclass(slots=True)
class _Silence:
    """The unproven attempts on a worker as it fell silent, and the tokens that each had made."""

    ran: CrashedAttempts
    tokens: dict[Suspect, int] = field(default_factory=dict)


class Quarantine:
    """The strikes and refusals of one router. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unproven: dict[str, _UnprovenAttempts] = {}  # by worker
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()  # by content
        # By content: the workers of strikes that no attempt has cleared, and until when they count.
        self._struck: OrderedDict[bytes, tuple[tuple[str, ...], float]] = OrderedDict()
        self._exits: OrderedDict[str, WorkerExit] = OrderedDict()  # what is known of workers' ends
        self._silent: OrderedDict[str, _Silence] = OrderedDict()  # by worker

    @property
    def unproven(self) -> int:
        """The number of unproven attempts, summed over the workers; 0 when idle."""
        return sum(len(worker.attempts) for worker in self._unproven.values())

    @property
    def has_suspects(self) -> bool:
        """Whether `check` may refuse a request, or `restore_strikes` give it strikes: else none is hashed."""
        now_s = self._clock()
        while self._refused_until_s and next(iter(self._refused_until_s.values())) <= now_s:  # oldest first
            self._refused_until_s.popitem(last=False)
        while self._struck and next(iter(self._struck.values()))[1] <= now_s:
            self._struck.popitem(last=False)
        return bool(self._refused_until_s or self._struck)

    def check(self, content: bytes) -> None:
        """Raises Quarantined for a request that crashed workers before."""
        until_s = self._refused_until_s.get(content)
        if until_s is not None and self._clock() < until_s:
            raise Quarantined("this request crashed workers: it is not run again")

    def may_begin(self, suspect: Suspect, workers: Iterable[str]) -> bool:
        """Whether an attempt may begin on these workers now. A request without strikes always may."""
        if not suspect.strikes:
            return True
        unproven = [self._unproven[worker].attempts for worker in workers if worker in self._unproven]
        others = set[Suspect]().union(*unproven) - {suspect}
        return all(
            other.tokens >= (1 if max(suspect.strikes, other.strikes) < STRIKES else PROOF_TOKENS)
            for other in others
            if other.strikes
        )

    def begin(self, suspect: Suspect, workers: Iterable[str]) -> None:
        """Register an attempt before it begins. The caller always calls `end` after it.

        Raises Quarantined, without an `end`, for a request that silent workers have decided about.
        """
        if suspect.is_quarantined:
            raise Quarantined(_CRASHED.format(suspect.strikes))
        suspect.workers, suspect.tokens = (), 0
        self.add_workers(suspect, workers)

    def observe(self, suspect: Suspect, tokens: int) -> None:
        """Count tokens that the attempt made. PROOF_TOKENS of them clear the request."""
        suspect.tokens += tokens
        if suspect.workers and suspect.tokens >= PROOF_TOKENS:
            self._remove(suspect, suspect.workers)
            self.clear_strikes(suspect)

    def add_workers(self, suspect: Suspect, workers: Iterable[str]) -> None:
        """Record that the attempt, or its hedge, runs on these workers as well."""
        added = tuple(worker for worker in workers if worker not in suspect.workers)
        suspect.workers += added
        for worker in added:
            self._unproven.setdefault(worker, _UnprovenAttempts()).attempts.add(suspect)

    def leave_workers(
        self, suspect: Suspect, workers: Collection[str], *, crashed: str | None = None
    ) -> None:
        """Record that the attempt continues without these workers, of which `crashed` crashed.

        A strike for the crash has no effect before the attempt's end.
        """
        if crashed is not None and self._is_strike(suspect, crashed):
            self.record_crash(crashed)
            suspect.struck_by += (crashed,)
        self._remove(suspect, workers)

    def record_crash(self, worker: str) -> CrashedAttempts:
        """Count the attempts on a crashed worker now, before some of them end for other reasons."""
        unproven = self._unproven.get(worker)
        return unproven.has_crashed() if unproven is not None else NO_ATTEMPTS

    def record_elsewhere(self, worker: str, ran: CrashedAttempts) -> None:
        """Record what other routers had on a crashed worker, before the `end` of what ran here."""
        if worker in self._unproven:
            known = self._unproven[worker].elsewhere  # a read that failed found nothing
            self._unproven[worker].elsewhere = CrashedAttempts(*map(max, known, ran))

    def is_repeated_strike(self, suspect: Suspect, crashed: str) -> bool:
        """Whether the crash is a strike after an earlier one, for which exit reports are worth a wait."""
        return suspect.strikes > 0 and self._is_strike(suspect, crashed)

    def record_exit(self, worker: str, ended: WorkerExit) -> None:
        """Record what reports say of a worker's end. One that was killed from outside causes no strikes."""
        known = self._exits.get(worker)
        if known in _REPORTED or (known is not None and ended is WorkerExit.UNKNOWN):
            return  # reports expire, and etcd may be unavailable by now
        self._exits[worker] = ended
        while len(self._exits) > MAX_QUARANTINED:
            self._exits.popitem(last=False)

    # ---- workers that fall silent

    def fell_silent(self, suspect: Suspect, worker: str) -> bool:
        """Record that the running attempt ends with the silence of its worker, before `end`.

        Whether the silence is a new one, whose outcome is to be reported.
        """
        if not self._is_strike(suspect, worker):
            return False
        if is_new := worker not in self._silent:
            self._silent[worker] = _Silence(self._unproven[worker].now())
            if len(self._silent) > MAX_QUARANTINED:
                self._silent.popitem(last=False)
        self._silent[worker].tokens[suspect] = suspect.tokens
        suspect.silent_workers += (worker,)
        return is_new

    def clear_strikes(self, suspect: Suspect) -> None:
        """Clear strikes and silent workers of a request that ran to its end, or has proven itself."""
        suspect.struck_by = ()
        self._struck.pop(suspect.content, None)
        for worker in suspect.silent_workers:
            if worker in self._silent:
                self._silent[worker].tokens.pop(suspect, None)
        suspect.silent_workers = ()
        if suspect.is_quarantined:
            suspect.is_quarantined = False
            self._refused_until_s.pop(suspect.content, None)

    def silence_of(self, worker: str) -> CrashedAttempts:
        """What ran on a silent worker as it fell silent."""
        return self._silent[worker].ran if worker in self._silent else NO_ATTEMPTS

    def silence_ended(self, worker: str, *, crashed: bool, elsewhere: CrashedAttempts = NO_ATTEMPTS) -> None:
        """A silent worker answers again, or its process has ended: a strike for each request of the silence.

        `elsewhere`: what other routers ran there.
        """
        silence = self._silent.pop(worker, None)
        if silence is None:
            return
        for suspect, tokens in silence.tokens.items():
            suspect.silent_workers = tuple(name for name in suspect.silent_workers if name != worker)
            if not crashed or worker in suspect.struck_by or self._was_killed(worker):
                continue
            self.restore_strikes(suspect)
            if worker in suspect.struck_by:  # by an equal request
                continue
            if self._strike(suspect, worker, silence.ran, elsewhere, tokens=tokens):
                suspect.is_quarantined = True

    def end(self, suspect: Suspect, *, crashed: str | None = None) -> None:
        """Record the attempt's end. Raises Quarantined when a crash of the worker `crashed` decides it."""
        if suspect.struck_by:
            suspect.struck_by = tuple(itertools.filterfalse(self._was_killed, suspect.struck_by))
        if crashed is None or not self._is_strike(suspect, crashed):
            if suspect.workers:
                self._remove(suspect, suspect.workers)
            self._keep(suspect)
            return
        ran, elsewhere = self._unproven[crashed].has_crashed(), self._unproven[crashed].elsewhere
        self._remove(suspect, suspect.workers)
        if self._strike(suspect, crashed, ran, elsewhere, tokens=suspect.tokens):
            raise Quarantined(_CRASHED.format(suspect.strikes))

    def _strike(
        self, suspect: Suspect, worker: str, ran: CrashedAttempts, elsewhere: CrashedAttempts, *, tokens: int
    ) -> bool:
        """Count a crash after so many tokens. Whether it decides: the content is refused from now on."""
        if suspect.strikes + 1 < ALONE_STRIKES:
            ran = ran.beside(elsewhere)
        was_alone_with_strikes = ran.struck <= (suspect.strikes > 0)
        suspect.struck_by += (worker,)
        is_shown = self._has_strikes(suspect, _needed(ran, tokens))
        if is_shown and (ran.attempts == 1 or was_alone_with_strikes):
            self._refuse(suspect.content)
            return True
        self._keep(suspect)
        return False

    def _is_strike(self, suspect: Suspect, crashed: str) -> bool:
        """Whether the crash is a strike. An attempt and its hedge get one strike for one crash."""
        is_new = crashed in suspect.workers and crashed not in suspect.struck_by
        return is_new and not self._was_killed(crashed)

    def _was_killed(self, worker: str) -> bool:
        return self._exits.get(worker) is WorkerExit.KILLED

    def _has_strikes(self, suspect: Suspect, needed: int) -> bool:
        """Whether so many strikes are by workers whose ends are known, or ALONE_STRIKES by any."""
        n_unknown = sum(self._exits.get(worker) is WorkerExit.UNKNOWN for worker in suspect.struck_by)
        return suspect.strikes - n_unknown >= needed or suspect.strikes >= ALONE_STRIKES

    def _remove(self, suspect: Suspect, workers: Collection[str]) -> None:
        for worker in workers:
            unproven = self._unproven.get(worker)
            if unproven is not None:
                unproven.attempts.discard(suspect)
                if not unproven.attempts:
                    del self._unproven[worker]
        suspect.workers = tuple([worker for worker in suspect.workers if worker not in workers])

    def _keep(self, suspect: Suspect) -> None:
        """Keep the strikes for a repetition of the request."""
        if suspect.struck_by and suspect.content:
            self._struck[suspect.content] = (suspect.struck_by, self._clock() + QUARANTINE_S)
            self._struck.move_to_end(suspect.content)
            while len(self._struck) > MAX_QUARANTINED:
                self._struck.popitem(last=False)

    def restore_strikes(self, suspect: Suspect) -> None:
        """Add the strikes that equal requests left, but for workers that were killed from outside."""
        workers, until_s = self._struck.get(suspect.content, ((), 0.0))
        if self._clock() >= until_s:
            self._struck.pop(suspect.content, None)
            return
        known = dict.fromkeys((*workers, *suspect.struck_by))
        suspect.struck_by = tuple(itertools.filterfalse(self._was_killed, known))

    def _refuse(self, content: bytes) -> None:
        self._struck.pop(content, None)
        self._refused_until_s[content] = self._clock() + QUARANTINE_S
        self._refused_until_s.move_to_end(content)
        while len(self._refused_until_s) > MAX_QUARANTINED:
            self._refused_until_s.popitem(last=False)


def _needed(ran: CrashedAttempts, tokens: int) -> int:
    """The strikes that decide about a request that had made so many tokens, by what ran on the worker."""
    return STRIKES if ran.attempts == 1 and tokens <= REPEAT_TOKENS else STRIKES + 1
