"""Admits, queues or rejects requests: one controller for live and queued work. Pure.

    controller = Admission(AdmissionLimits())
    decision = controller.offer(ask, capacity, now_ms)     # ADMITTED, QUEUED or REJECTED, at once
    controller.first_token(key, now_ms)                    # from here on it cannot be preempted
    controller.end(key, now_ms, output_tokens=...)         # ended, in whatever way and state
    changes = controller.poll(capacity, now_ms)            # after any of these, and periodically while
                                                           # requests wait: which ones left the queue

Order: classes are strict, but work of a lower class that has waited `promote_ms` goes before every second
request of a higher one. In a class tenants share by tokens (fair_queue.py). A request runs when it fits: a
place is free, its prefill begins in time and decode will have room when its prefill is done (forecast.py).
A request that would run alone always fits. A full queue pushes out the newest request of the tenant with the
most. A higher class may preempt requests of lower classes that have no token yet. Work that is not urgent is
of class BULK; with `may_wait` False it runs now or is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from services.router.admission.fair_queue import FairQueue
from services.router.admission.forecast import Capacity, Forecast, Load, Outlook
from services.router.admission.types import (
    AdmissionDecision,
    AdmissionLimits,
    AdmissionRequest,
    Changes,
    Priority,
    Verdict,
)

# A request enters the queue if its expected wait is at most this share of the time to its latest begin.
_WAIT_SHARE = 0.5
# Sequences of one batch end together, so the mean covers many ends.
_END_DECAY = 0.97
_ADMITTED = AdmissionDecision(Verdict.ADMITTED)


@dataclass(slots=True)
class _Running(Load):
    ask: AdmissionRequest = field(kw_only=True)
    preemptions: int = field(kw_only=True)


@dataclass(slots=True)
class _Waiting:
    ask: AdmissionRequest
    since_ms: float
    until_ms: float
    preemptions: int = 0


@dataclass(slots=True)
class _Class:
    queue: FairQueue
    waiting: dict[str, _Waiting] = field(default_factory=dict)  # by arrival


class Admission:
    """See the module's text. Not thread-safe; keys are unique among what runs and waits."""

    def __init__(self, limits: AdmissionLimits, *, naive_forecast: bool = False) -> None:
        self._limits = limits
        self._forecast = Forecast(naive=naive_forecast)
        self._running: dict[str, _Running] = {}
        # The same requests by phase. Few are in prefill; of the others the forecast needs only the number.
        self._prefilling: dict[str, _Running] = {}
        self._decoding: dict[str, _Running] = {}
        self._classes = {priority: _Class(FairQueue(limits.tenant_weights)) for priority in Priority}
        self._where: dict[str, Priority] = {}  # of waiting requests
        self._last_end_ms: float | None = None
        # The sum of the times between ends and their number, with decaying weights.
        self._between_ends_ms, self._ends = 0.0, 0.0
        self._served_promoted = False
        self.live_ended_ms = -math.inf  # when the last request ended that was no job

    @property
    def running(self) -> int:
        """Requests admitted and not ended."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._where)

    @property
    def waiting_tokens(self) -> int:
        """The tokens to compute of the requests in the queue."""
        return sum(
            waiting.ask.prefill_tokens
            for of_class in self._classes.values()
            for waiting in of_class.waiting.values()
        )

    def above(self, priority: Priority) -> tuple[int, int]:
        """How many requests of higher classes run, and how many wait."""
        running = sum([each.ask.priority < priority for each in self._running.values()])
        return running, sum([len(c.waiting) for p, c in self._classes.items() if p < priority])

    @property
    def prefilling(self) -> int:
        """Running requests without a first token."""
        return len(self._prefilling)

    @property
    def crowded(self) -> bool:
        """Whether requests wait or all places are taken."""
        return bool(self._where) or len(self._running) >= self._limits.max_running

    # ---- events

    def offer(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> AdmissionDecision:
        """Admit, queue or reject a new request."""
        outlook = self._outlook(ask, capacity, now_ms)
        late, behind = _is_late(ask, now_ms, outlook), self._queued_before(ask.priority)
        if not late and not behind and self._fits(ask, capacity, outlook):
            self._admit(ask, now_ms, outlook, preemptions=0)
            return _ADMITTED
        refusal = self._refusal(ask, capacity, now_ms, outlook)
        if refusal is not None:
            return refusal
        if not behind:
            victims = self._victims(ask, capacity, now_ms)
            if victims:
                put_back = tuple(self._put_back(key, now_ms) for key in victims)
                self._admit(ask, now_ms, self._outlook(ask, capacity, now_ms), preemptions=0)
                return AdmissionDecision(Verdict.ADMITTED, preempted=put_back)
        pushed_out = self._make_room(ask) if self._is_full(ask.priority) else ""
        self._enqueue(_Waiting(ask, now_ms, self._until_ms(ask, now_ms)))
        retry_after_ms = self._retry_after_ms(ask.priority, now_ms)
        return AdmissionDecision(Verdict.QUEUED, pushed_out=pushed_out, retry_after_ms=retry_after_ms)

    def refuses(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> AdmissionDecision | None:
        """The refusal that `offer` would return, if it would. Changes nothing."""
        return self._refusal(ask, capacity, now_ms, self._outlook(ask, capacity, now_ms))

    def waits(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> bool:
        """Whether `offer` would queue the request. Changes nothing."""
        outlook = self._outlook(ask, capacity, now_ms)
        if self._refusal(ask, capacity, now_ms, outlook) is not None:
            return False
        return self._queued_before(ask.priority) or not self._may_run(ask, capacity, now_ms, outlook)

    def _refusal(
        self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, outlook: Outlook
    ) -> AdmissionDecision | None:
        reason = ""
        if _is_late(ask, now_ms, outlook):
            reason = "cannot begin in time"
        elif not self._queued_before(ask.priority) and self._may_run(ask, capacity, now_ms, outlook):
            return None
        elif not ask.may_wait:
            reason = "busy"
        elif self._expected_wait_ms(ask.priority, now_ms) >= self._most_wait_ms(ask, now_ms):
            reason = "cannot begin in time"
        elif self._is_full(ask.priority) and self._newest_of_longest(ask) is None:
            reason = "queue full"
        if not reason:
            return None
        return AdmissionDecision(Verdict.REJECTED, reason, self._retry_after_ms(ask.priority, now_ms))

    def first_token(self, key: str, now_ms: float) -> None:
        """Move a request from prefill to decode. Unknown keys are ignored."""
        running = self._prefilling.pop(key, None)
        if running is not None:
            self._decoding[key] = running
            running.prefilled_ms = now_ms
            self._forecast.observe_first_token(now_ms - running.admitted_ms)

    def end(self, key: str, now_ms: float, *, output_tokens: int = 0) -> None:
        """Remove a request that ended, or whose caller left the queue. Unknown keys are ignored."""
        running = self._running.pop(key, None)
        if running is None:
            self._leave(key)
            return
        self._observe_end(now_ms)
        decoded = self._decoding.pop(key, None) is not None
        if not decoded:
            del self._prefilling[key]
        elif output_tokens > 1:
            self._forecast.observe_decode(now_ms - running.prefilled_ms, output_tokens)
        ask = running.ask
        if ask.priority < Priority.JOB:
            self.live_ended_ms = now_ms
        used_tokens = ask.prefill_tokens + output_tokens
        self._classes[ask.priority].queue.charge(ask.tenant, used_tokens - ask.cost_tokens)

    def enter_again(self, ask: AdmissionRequest, now_ms: float) -> None:
        """Queue a request that has ended here and goes on. It is not preempted: its client has tokens."""
        preemptions = self._limits.max_preemptions
        self._enqueue(_Waiting(ask, now_ms, self._until_ms(ask, now_ms), preemptions))

    def poll(self, capacity: Capacity, now_ms: float) -> Changes:
        """Admit the requests that fit, in order, and drop those that waited too long."""
        expired = [
            key
            for of_class in self._classes.values()
            for key, waiting in of_class.waiting.items()
            if min(waiting.until_ms, self._latest_begin_ms(waiting.ask)) <= now_ms
        ]
        for key in expired:
            self._leave(key)
        admitted = []
        while (priority := self._next_class(now_ms)) is not None:
            of_class = self._classes[priority]
            head = of_class.queue.peek()
            assert head is not None
            waiting = of_class.waiting[head]
            outlook = self._outlook(waiting.ask, capacity, now_ms)
            if _is_late(waiting.ask, now_ms, outlook):
                self._leave(head)
                expired.append(head)
                continue
            if not self._fits(waiting.ask, capacity, outlook):
                break
            of_class.queue.pop()
            del of_class.waiting[head], self._where[head]
            self._served_promoted = self._is_promoted(priority)
            self._admit(waiting.ask, now_ms, outlook, preemptions=waiting.preemptions)
            admitted.append(head)
        return Changes(tuple(admitted), tuple(expired))

    # ---- room

    def _outlook(
        self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, *, without: Collection[str] = ()
    ) -> Outlook:
        """After all running requests but those in prefill named by `without`."""
        prefilling: Collection[Load] = self._prefilling.values()
        if without:
            prefilling = [running for key, running in self._prefilling.items() if key not in without]
        decoding = self._decoding.values()
        return self._forecast.outlook(ask.prefill_tokens, prefilling, decoding, capacity, now_ms)

    def _fits(
        self, ask: AdmissionRequest, capacity: Capacity, outlook: Outlook, *, without: Collection[str] = ()
    ) -> bool:
        """Whether the request may run now beside the others; `outlook` does not count those of `without`."""
        running = len(self._running) - len(without)
        if not running:
            return True
        if running >= self._limits.max_running:
            return False
        if outlook.wait_ms > self._limits.max_prefill_wait_ms:
            return False
        if capacity.decode_sequences and outlook.decode_sequences >= capacity.decode_sequences:
            return False
        needed = ask.context_tokens + self._forecast.output_tokens
        return not capacity.decode_tokens or outlook.decode_tokens + needed <= capacity.decode_tokens

    def _may_run(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, outlook: Outlook) -> bool:
        return self._fits(ask, capacity, outlook) or bool(self._victims(ask, capacity, now_ms))

    def _admit(self, ask: AdmissionRequest, now_ms: float, outlook: Outlook, *, preemptions: int) -> None:
        prefilled_ms = now_ms + outlook.wait_ms + outlook.prefill_ms
        running = _Running(
            ask.prefill_tokens, ask.context_tokens, now_ms, prefilled_ms, ask=ask, preemptions=preemptions
        )
        self._running[ask.key] = self._prefilling[ask.key] = running

    def _victims(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> list[str]:
        """The fewest requests of lower classes, lowest and newest first, without which it fits; else none."""
        candidates = [
            (running.ask.priority, running.admitted_ms, index, key)
            for index, (key, running) in enumerate(self._prefilling.items())
            if running.ask.priority > ask.priority
            and running.ask.may_wait
            and running.preemptions < self._limits.max_preemptions
        ]
        chosen: list[str] = []
        for _, _, _, key in sorted(candidates, reverse=True)[: self._limits.max_victims]:
            chosen += [key]
            outlook = self._outlook(ask, capacity, now_ms, without=chosen)
            if self._fits(ask, capacity, outlook, without=chosen):
                return chosen
        return []

    def _put_back(self, key: str, now_ms: float) -> str:
        """A request that has shown nothing yet waits again, for as long as a new one may."""
        running = self._running.pop(key)
        del self._prefilling[key]
        ask = running.ask
        until_ms = self._until_ms(ask, now_ms)
        self._classes[ask.priority].queue.charge(ask.tenant, -ask.cost_tokens)
        self._enqueue(_Waiting(ask, now_ms, until_ms, running.preemptions + 1))
        return key

    # ---- the queue

    def _until_ms(self, ask: AdmissionRequest, now_ms: float) -> float:
        until_ms = now_ms + self._limits.max_wait_ms[ask.priority]
        return until_ms if ask.deadline_ms is None else min(until_ms, ask.deadline_ms)

    def _latest_begin_ms(self, ask: AdmissionRequest) -> float:
        """The latest begin: a request that its deadline cuts off would waste its work."""
        if ask.deadline_ms is None:
            return math.inf
        return ask.deadline_ms - self._forecast.run_ms(ask.output_tokens)

    def _most_wait_ms(self, ask: AdmissionRequest, now_ms: float) -> float:
        """The longest expected wait with which a request enters the queue.

        A queue as long as deadlines allow would admit requests only shortly before their deadlines.
        """
        most_ms = self._limits.max_wait_ms[ask.priority]
        return min(most_ms, _WAIT_SHARE * (self._latest_begin_ms(ask) - now_ms))

    def _enqueue(self, waiting: _Waiting) -> None:
        ask = waiting.ask
        of_class = self._classes[ask.priority]
        of_class.queue.push(ask.tenant, ask.key, ask.cost_tokens)
        of_class.waiting[ask.key] = waiting
        self._where[ask.key] = ask.priority

    def _leave(self, key: str) -> None:
        priority = self._where.pop(key, None)
        if priority is not None:
            self._classes[priority].queue.remove(key)
            del self._classes[priority].waiting[key]

    def _is_full(self, priority: Priority) -> bool:
        return len(self._classes[priority].waiting) >= self._limits.max_waiting[priority]

    def _newest_of_longest(self, ask: AdmissionRequest) -> str | None:
        """The newest request of the tenant with the most in the queue, if that is another tenant."""
        queue = self._classes[ask.priority].queue
        longest = queue.longest()
        if longest is None or longest[2] < queue.waiting_of(ask.tenant) + 2:
            return None
        return longest[1]

    def _make_room(self, ask: AdmissionRequest) -> str:
        key = self._newest_of_longest(ask)
        assert key is not None
        self._leave(key)
        return key

    def _queued_before(self, priority: Priority) -> bool:
        """Whether requests wait that one of this class must not overtake."""
        return bool(self._where) and any(c.waiting for p, c in self._classes.items() if p <= priority)

    def _is_promoted(self, priority: Priority) -> bool:
        """Whether a class above waits while this one is served."""
        return any(c.waiting for p, c in self._classes.items() if p < priority)

    def _next_class(self, now_ms: float) -> Priority | None:
        """The class to serve: the highest with requests, or every other time one that has waited long."""
        waiting = [priority for priority in Priority if self._classes[priority].waiting]
        if not waiting:
            return None
        if not self._served_promoted:
            for priority in reversed(waiting[1:]):
                oldest = next(iter(self._classes[priority].waiting.values()))
                if now_ms - oldest.since_ms >= self._limits.promote_ms[priority]:
                    return priority
        return waiting[0]

    # ---- expected times

    def _observe_end(self, now_ms: float) -> None:
        """Measure the time between ends while requests wait: only then does an end admit another one."""
        if self._where and self._last_end_ms is not None:
            self._between_ends_ms = _END_DECAY * self._between_ends_ms + now_ms - self._last_end_ms
            self._ends = _END_DECAY * self._ends + 1.0
        self._last_end_ms = now_ms if self._where else None

    def _expected_wait_ms(self, priority: Priority, now_ms: float) -> float:
        """The expected wait after the requests of this class and those above.

        It is 0 in an empty queue: rejecting the first request by an old mean would end the measurement.
        Before the first end, the age of the oldest running request is the estimate.
        """
        ahead = sum(len(c.waiting) for p, c in self._classes.items() if p <= priority)
        if self._ends:
            return ahead * self._between_ends_ms / self._ends
        if not self._running:
            return 0.0
        oldest = next(iter(self._running.values()))
        return ahead * (now_ms - oldest.admitted_ms) / len(self._running)

    def _retry_after_ms(self, priority: Priority, now_ms: float) -> int:
        least, most = self._limits.min_retry_after_ms, self._limits.max_retry_after_ms
        return int(min(max(self._expected_wait_ms(priority, now_ms), least), most))


def _is_late(ask: AdmissionRequest, now_ms: float, outlook: Outlook) -> bool:
    """Whether its first token would come after its deadline even if it began now."""
    if ask.deadline_ms is None:
        return False
    return now_ms + outlook.wait_ms + outlook.prefill_ms > ask.deadline_ms
