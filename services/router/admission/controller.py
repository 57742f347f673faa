"""Admits, queues or refuses requests: one controller for live and queued work. Pure.

    controller = AdmissionController(AdmissionLimits())
    decision = controller.offer(ask, capacity, now_ms)     # ADMITTED, QUEUED or REFUSED, at once
    controller.first_token(key, now_ms)                    # from here on it cannot be preempted
    controller.end(key, now_ms, output_tokens=...)         # ended, in whatever way and state
    changes = controller.poll(capacity, now_ms)            # after any of these, and periodically while
                                                           # requests wait: which ones left the queue

Order: classes are strict, but work of a lower class that has waited `promote_ms` goes before every second
request of a higher one. In a class tenants share by tokens (fair_queue.py). A request runs when it fits: a
place is free, its prefill begins in time and decode will have room when its prefill is done (forecast.py).
A request that would run alone always fits. A tenant with fewer places than its share may take one of the
reserve (tenant_reserve.py), and overtakes tenants that have theirs. A full queue pushes out the newest
request of the tenant with the most. A higher class may preempt requests of lower classes that have no token
yet. Work that is not urgent is of class BULK; with `may_wait` False it runs now or is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.router.admission.class_queues import ClassQueues, WaitingRequest
from services.router.admission.end_pace import EndPace
from services.router.admission.forecast import Capacity, Forecast, Load, PredictedLoad
from services.router.admission.lateness import is_late, is_late_alone
from services.router.admission.tenant_reserve import TenantReserve, with_reserve
from services.router.admission.types import (
    AdmissionDecision,
    AdmissionLimits,
    AdmissionRequest,
    Priority,
    QueueChanges,
    Verdict,
    WantedWorkers,
)

# A request enters the queue if its expected wait is at most this share of the time to its latest begin.
_WAIT_SHARE = 0.5
_ADMITTED = AdmissionDecision(Verdict.ADMITTED)


@dataclass(slots=True)
class _Running(Load):
    ask: AdmissionRequest = field(kw_only=True)
    preemptions: int = field(kw_only=True)


class AdmissionController:
    """See the module's text. Not thread-safe; keys are unique among what runs and waits."""

    def __init__(self, limits: AdmissionLimits, *, naive_forecast: bool = False) -> None:
        self._limits = limits
        self._forecast = Forecast(naive=naive_forecast)
        self._running: dict[str, _Running] = {}
        # The same requests by phase. Few are in prefill; of the others the forecast needs only the number.
        self._prefilling: dict[str, _Running] = {}
        self._decoding: dict[str, _Running] = {}
        self._queues = ClassQueues(limits)
        self._reserve = TenantReserve()
        self._end_pace = EndPace()
        self.live_ended_ms = -math.inf  # when the last request ended that was no job

    @property
    def running(self) -> int:
        """Requests admitted and not ended."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queues)

    def wanted(self, capacity: Capacity, now_ms: float) -> WantedWorkers:
        """The queued work that more workers would run. A queue behind `max_running` wants none."""
        room = self._limits.max_running - len(self._running)
        head = self._queues.next_head(now_ms)
        if head is None or room <= 0:
            return WantedWorkers()
        tokens = sum(waiting.ask.prefill_tokens for waiting in self._queues)
        predicted = self._predict(head.ask, capacity, now_ms)
        late = predicted.wait_ms > self._limits.max_prefill_wait_ms
        if late or self._has_decode_room(head.ask, capacity, predicted):
            return WantedWorkers(tokens)
        return WantedWorkers(tokens, min(len(self._queues), room))

    def above(self, priority: Priority) -> tuple[int, int]:
        """How many requests of higher classes run, and how many wait."""
        running = sum([each.ask.priority < priority for each in self._running.values()])
        return running, self._queues.count(Priority(priority - 1)) if priority else 0

    @property
    def prefilling(self) -> int:
        """Running requests without a first token."""
        return len(self._prefilling)

    @property
    def crowded(self) -> bool:
        """Whether requests wait or all places are taken."""
        return bool(self._queues) or len(self._running) >= self._limits.max_running

    # ---- events

    def offer(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> AdmissionDecision:
        """Admit, queue or refuse a new request."""
        predicted = self._predict(ask, capacity, now_ms)
        late, behind = self._is_late(ask, now_ms, predicted), self._queued_before(ask.priority)
        if not late and self._may_begin(ask, capacity, predicted):
            self._admit(ask, now_ms, predicted, preemptions=0)
            late_ms = predicted.prefill_ms if is_late(ask, now_ms, predicted) else 0.0
            return AdmissionDecision(Verdict.ADMITTED, late_ms=late_ms) if late_ms else _ADMITTED
        refusal = self._refusal(ask, capacity, now_ms, predicted)
        if refusal is not None:
            return refusal
        if not behind:
            victims = self._victims(ask, capacity, now_ms)
            if victims:
                put_back = tuple(self._put_back(key, now_ms) for key in victims)
                self._admit(ask, now_ms, self._predict(ask, capacity, now_ms), preemptions=0)
                return AdmissionDecision(Verdict.ADMITTED, preempted=put_back)
        pushed_out = self._make_room(ask) if self._queues.is_full(ask.priority) else ""
        self._enqueue(WaitingRequest(ask, now_ms, self._until_ms(ask, now_ms)))
        retry_after_ms = self._retry_after_ms(ask.priority, now_ms)
        return AdmissionDecision(Verdict.QUEUED, pushed_out=pushed_out, retry_after_ms=retry_after_ms)

    def refuses(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> AdmissionDecision | None:
        """The refusal that `offer` would return, if it would. Changes nothing."""
        return self._refusal(ask, capacity, now_ms, self._predict(ask, capacity, now_ms))

    def waits(self, ask: AdmissionRequest, capacity: Capacity, now_ms: float) -> bool:
        """Whether `offer` would queue the request. Changes nothing."""
        predicted = self._predict(ask, capacity, now_ms)
        if self._refusal(ask, capacity, now_ms, predicted) is not None:
            return False
        return self._must_wait(ask, capacity, now_ms, predicted)

    def _refusal(
        self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, predicted: PredictedLoad
    ) -> AdmissionDecision | None:
        reason = ""
        if self._is_late(ask, now_ms, predicted):
            if is_late_alone(ask, now_ms, predicted):
                return AdmissionDecision(Verdict.REFUSED, "too late alone", late_ms=predicted.prefill_ms)
            reason = "cannot begin in time"
        elif not self._must_wait(ask, capacity, now_ms, predicted):
            return None
        elif not ask.may_wait:
            reason = "busy"
        elif self._expected_wait_ms(ask.priority, now_ms) >= self._most_wait_ms(ask, now_ms):
            reason = "cannot begin in time"
        elif self._queues.is_full(ask.priority) and self._queues.newest_of_longest(ask) is None:
            reason = "queue full"
        if not reason:
            return None
        return AdmissionDecision(Verdict.REFUSED, reason, self._retry_after_ms(ask.priority, now_ms))

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
        self._reserve.end(running.ask.tenant)
        self._end_pace.observe(now_ms, is_waited_for=bool(self._queues))
        decoded = self._decoding.pop(key, None) is not None
        if not decoded:
            del self._prefilling[key]
        elif output_tokens > 1:
            self._forecast.observe_decode(now_ms - running.prefilled_ms, output_tokens)
        ask = running.ask
        if ask.priority < Priority.JOB:
            self.live_ended_ms = now_ms
        used_tokens = ask.prefill_tokens + output_tokens
        self._queues.charge(ask, used_tokens - ask.cost_tokens)

    def enter_again(self, ask: AdmissionRequest, now_ms: float) -> None:
        """Queue a request that has ended here and goes on. It is not preempted: its client has tokens."""
        preemptions = self._limits.max_preemptions
        self._enqueue(WaitingRequest(ask, now_ms, self._until_ms(ask, now_ms), preemptions))

    def poll(self, capacity: Capacity, now_ms: float) -> QueueChanges:
        """Admit the requests that fit, in order, and drop those that waited too long."""
        expired = [
            waiting.ask.key
            for waiting in self._queues
            if min(waiting.until_ms, self._latest_begin_ms(waiting.ask)) <= now_ms
        ]
        for key in expired:
            self._leave(key)
        admitted = []
        while (head := self._queues.next_head(now_ms)) is not None:
            predicted = self._predict(head.ask, capacity, now_ms)
            if self._is_late(head.ask, now_ms, predicted):
                self._leave(head.ask.key)
                expired.append(head.ask.key)
                continue
            if not self._fits(head.ask, capacity, predicted):
                break
            admitted.append(self._begin_waiting(head, now_ms, predicted))
        admitted += self._admit_to_reserve(capacity, now_ms)
        return QueueChanges(tuple(admitted), tuple(expired))

    def _begin_waiting(self, head: WaitingRequest, now_ms: float, predicted: PredictedLoad) -> str:
        self._queues.pop_head(head.ask.key)
        self._reserve.leave(head.ask.tenant)
        self._admit(head.ask, now_ms, predicted, preemptions=head.preemptions)
        return head.ask.key

    def _admit_to_reserve(self, capacity: Capacity, now_ms: float) -> Iterator[str]:
        """Admit the first requests of tenants below their share, of the highest class that waits."""
        heads = self._queues.heads()
        while heads:
            ask = heads[0].ask
            predicted = self._predict(ask, capacity, now_ms)
            if self._is_late(ask, now_ms, predicted) or not self._fits_in_reserve(ask, capacity, predicted):
                del heads[0]
                continue
            yield self._begin_waiting(heads[0], now_ms, predicted)
            heads = self._queues.heads()

    # ---- room

    def _predict(
        self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, *, without: Collection[str] = ()
    ) -> PredictedLoad:
        """After all running requests but those in prefill named by `without`."""
        prefilling: Collection[Load] = self._prefilling.values()
        if without:
            prefilling = [running for key, running in self._prefilling.items() if key not in without]
        decoding = self._decoding.values()
        return self._forecast.predict(ask.prefill_tokens, prefilling, decoding, capacity, now_ms)

    def _fits(
        self,
        ask: AdmissionRequest,
        capacity: Capacity,
        predicted: PredictedLoad,
        *,
        without: Collection[str] = (),
    ) -> bool:
        """Whether the request may run now beside others; `predicted` does not count those of `without`."""
        running = len(self._running) - len(without)
        if not running:
            return True
        if running >= self._limits.max_running:
            return False
        if predicted.wait_ms > self._limits.max_prefill_wait_ms:
            return False
        return self._has_decode_room(ask, capacity, predicted)

    def _has_decode_room(self, ask: AdmissionRequest, capacity: Capacity, predicted: PredictedLoad) -> bool:
        if capacity.decode_sequences and predicted.decode_sequences >= capacity.decode_sequences:
            return False
        needed = ask.context_tokens + self._forecast.output_tokens
        return not capacity.decode_tokens or predicted.decode_tokens + needed <= capacity.decode_tokens

    def _may_begin(self, ask: AdmissionRequest, capacity: Capacity, predicted: PredictedLoad) -> bool:
        """Whether a new request need not wait behind others."""
        if not self._queued_before(ask.priority):
            return self._fits(ask, capacity, predicted) or self._fits_in_reserve(ask, capacity, predicted)
        # What waits of tenants below their share finds the reserve full, or `poll` would have admitted it.
        return not self._queues.has_above(ask.priority) and self._fits_in_reserve(ask, capacity, predicted)

    def _fits_in_reserve(self, ask: AdmissionRequest, capacity: Capacity, predicted: PredictedLoad) -> bool:
        """Whether a tenant below its share may run this beyond the places of all.

        Workers share their prefills among tenants, so the prompts of others do not delay it for long.
        """
        places = self._limits.max_running
        if len(self._running) >= with_reserve(places) or ask.priority is Priority.JOB:
            return False
        if capacity.decode_sequences:
            places = min(places, capacity.decode_sequences)
            if predicted.decode_sequences >= with_reserve(capacity.decode_sequences):
                return False
        needed = predicted.decode_tokens + ask.context_tokens + self._forecast.output_tokens
        if capacity.decode_tokens and needed > with_reserve(capacity.decode_tokens):
            return False
        return self._reserve.is_below_share(ask.tenant, places)

    def _must_wait(
        self, ask: AdmissionRequest, capacity: Capacity, now_ms: float, predicted: PredictedLoad
    ) -> bool:
        if self._may_begin(ask, capacity, predicted):
            return False
        return self._queued_before(ask.priority) or not self._victims(ask, capacity, now_ms)

    def _admit(
        self, ask: AdmissionRequest, now_ms: float, predicted: PredictedLoad, *, preemptions: int
    ) -> None:
        prefilled_ms = now_ms + predicted.wait_ms + predicted.least_prefill_ms
        running = _Running(
            ask.prefill_tokens, ask.context_tokens, now_ms, prefilled_ms, ask=ask, preemptions=preemptions
        )
        self._running[ask.key] = self._prefilling[ask.key] = running
        self._forecast.observe_admitted(ask.prefill_tokens)
        self._reserve.begin(ask.tenant)

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
            predicted = self._predict(ask, capacity, now_ms, without=chosen)
            if self._fits(ask, capacity, predicted, without=chosen):
                return chosen
        return []

    def _put_back(self, key: str, now_ms: float) -> str:
        """A request that has shown nothing yet waits again, for as long as a new one may."""
        running = self._running.pop(key)
        del self._prefilling[key]
        ask = running.ask
        self._reserve.end(ask.tenant)
        until_ms = self._until_ms(ask, now_ms)
        self._queues.charge(ask, -ask.cost_tokens)
        self._enqueue(WaitingRequest(ask, now_ms, until_ms, running.preemptions + 1))
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

    def _enqueue(self, waiting: WaitingRequest) -> None:
        self._queues.push(waiting)
        self._reserve.enter(waiting.ask.tenant)

    def _leave(self, key: str) -> None:
        left = self._queues.remove(key)
        if left is not None:
            self._reserve.leave(left.ask.tenant)

    def _make_room(self, ask: AdmissionRequest) -> str:
        key = self._queues.newest_of_longest(ask)
        assert key is not None
        self._leave(key)
        return key

    def _queued_before(self, priority: Priority) -> bool:
        """Whether requests wait that one of this class must not overtake."""
        return self._queues.count(priority) > 0

    # ---- expected times

    def _is_late(self, ask: AdmissionRequest, now_ms: float, predicted: PredictedLoad) -> bool:
        """Whether a request is too late to begin. What would run alone is tried (lateness.py)."""
        return bool(self._running) and is_late(ask, now_ms, predicted)

    def _expected_wait_ms(self, priority: Priority, now_ms: float) -> float:
        """The expected wait after the requests of this class and those above.

        It is 0 in an empty queue: refusing the first request by an old mean would end the measurement.
        Before the first end, the age of the oldest running request is the estimate.
        """
        ahead = self._queues.count(priority)
        if self._end_pace.mean_ms is not None:
            return ahead * self._end_pace.mean_ms
        if not self._running:
            return 0.0
        oldest = next(iter(self._running.values()))
        return ahead * (now_ms - oldest.admitted_ms) / len(self._running)

    def _retry_after_ms(self, priority: Priority, now_ms: float) -> int:
        least, most = self._limits.min_retry_after_ms, self._limits.max_retry_after_ms
        return int(min(max(self._expected_wait_ms(priority, now_ms), least), most))
