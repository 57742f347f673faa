"""Admission on the event loop: a ticket for each request, which is admitted, preempted or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from libs.common.cluster.worker_record import Role
from libs.common.rpc.raise_once import raise_once
from libs.common.telemetry.counters import Counters
from services.router.admission.controller import AdmissionController
from services.router.admission.forecast import Capacity
from services.router.admission.lateness import late_message
from services.router.admission.types import (
    BUSY_MESSAGE,
    AdmissionDecision,
    AdmissionLimits,
    AdmissionRequest,
    Priority,
    Verdict,
    WantedWorkers,
)
from services.router.workers.connection import WorkerConnection
from slipstream import errors

# The interval between polls while requests wait: the forecast changes with time.
TICK_S = 0.05
# A worker gets this many sequences for each place of its batch, so that the batch stays full.
BATCH_MARGIN = 1.25
# The weight of a finished prompt in the estimate of others. A short one counts for less: most of its tokens
# are the template's, and it says little about a long one. A longer one counts for twice as much at most.
_WEIGHT = 0.05
_TYPICAL_PROMPT_TOKENS = 100.0  # until prompts have ended


class AdmissionTicket:
    """One request's ticket of the controller. Its holder calls `end` in any case."""

    def __init__(self, gate: AdmissionGate, ask: AdmissionRequest, on_preempt: Callable[[], None]) -> None:
        self.ask = ask
        self.began = False  # admitted and started; set by its task
        self.preempted = False  # it stops and waits again; cleared by its task
        self.late_reason = ""  # of a request that is tried although its time limit seems too short
        self._gate = gate
        self._on_preempt: Callable[[], None] | None = on_preempt
        self._admitted = False
        self._error: errors.SlipstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def admitted(self) -> None:
        """Return when the request may run. Raises Overloaded when it is refused."""
        while not self._admitted:
            raise_once(self)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def first_token(self) -> None:
        """Report the first token."""
        self.late_reason = ""
        self._gate.controller.first_token(self.ask.key, self._gate.now_ms())

    def leave(self, *, output_tokens: int) -> None:
        """Give the place to others until `admitted_again`."""
        self._admitted = False
        self._gate.end(self, output_tokens=output_tokens)

    async def admitted_again(self) -> None:
        """Wait for a place after `leave`. Raises Overloaded when there is none in time."""
        self._gate.enter_again(self)
        await self.admitted()

    def end(self, *, output_tokens: int = 0) -> None:
        """Report the end, when the request holds nothing any more."""
        self._gate.end(self, output_tokens=output_tokens)

    def over(self) -> None:
        """Ignore preemption from now on."""
        self._on_preempt = None

    def admit(self) -> None:
        """Called by the gate."""
        self._admitted = True
        self._wake()

    def put_back(self) -> None:
        """Called by the gate."""
        self._admitted = False
        if self.began:
            self.began, self.preempted = False, True
            if self._on_preempt is not None:
                self._on_preempt()

    def refuse(self, error: errors.SlipstreamError) -> None:
        """Called by the gate."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AdmissionGate:
    """The controller with its clock, the capacity of the fleet, and the estimate of a request's tokens."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        links_of: Callable[[Role], Iterable[WorkerConnection]],
        counters: Counters,
        unplaced: Callable[[], int],
    ) -> None:
        """`unplaced`: how many admitted requests wait for a worker to be there."""
        self._unplaced = unplaced
        self.controller = AdmissionController(limits)
        self._links_of = links_of
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[str, AdmissionTicket] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._chars_per_token = 4.0
        self._uncached_share = 1.0
        self._prompt_tokens = _TYPICAL_PROMPT_TOKENS  # of the prompt of a token, on average

    def now_ms(self) -> float:
        """The event loop's clock."""
        return self._loop.time() * 1e3

    def estimate(self, chars: int) -> tuple[int, int]:
        """(tokens to compute, tokens of context) of a prompt of so many characters."""
        context = chars / self._chars_per_token
        return int(context * self._uncached_share), int(context)

    def observe_prompt(self, chars: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Correct the estimate by a finished request."""
        if chars and prompt_tokens:
            weight = _WEIGHT * min(prompt_tokens / self._prompt_tokens, 2.0)
            self._prompt_tokens += weight * (prompt_tokens - self._prompt_tokens)
            self._chars_per_token += weight * (chars / prompt_tokens - self._chars_per_token)
            self._uncached_share += weight * (1 - cached_tokens / prompt_tokens - self._uncached_share)

    def refuse_early(self, ask: AdmissionRequest) -> None:
        """Raises what `offer` would. Called while `crowded`, before the request is parsed, to
        save that work."""
        decision = self.controller.refuses(ask, self.capacity(), self.now_ms())
        if decision is not None:
            self._refuse(ask, decision)

    def waits(self, ask: AdmissionRequest) -> bool:
        """Whether `offer` would queue the request."""
        return self.controller.waits(ask, self.capacity(), self.now_ms())

    def offer(self, ask: AdmissionRequest, *, on_preempt: Callable[[], None]) -> AdmissionTicket:
        """A ticket for a request, admitted or waiting. A refusal raises at once: Overloaded, or
        DeadlineExceeded where the time limit is too short for the prompt alone."""
        decision = self.controller.offer(ask, self.capacity(), self.now_ms())
        for key in decision.preempted:
            self._counters.add("slipstream_admission_preempted_total")
            self._tickets[key].put_back()
        if decision.pushed_out:
            self._refuse_waiting(decision.pushed_out, decision.retry_after_ms)
        if decision.verdict is Verdict.REFUSED:
            self._refuse(ask, decision)
        ticket = self._tickets[ask.key] = AdmissionTicket(self, ask, on_preempt)
        if decision.verdict is Verdict.ADMITTED:
            ticket.late_reason = self._late_reason(ask, decision)
            ticket.admit()
        self._arm()
        return ticket

    def _refuse(self, ask: AdmissionRequest, decision: AdmissionDecision) -> NoReturn:
        self._counters.add("slipstream_admission_rejected_total")
        if reason := self._late_reason(ask, decision):
            raise errors.DeadlineExceeded(reason)
        raise errors.Overloaded(BUSY_MESSAGE, retry_after_ms=decision.retry_after_ms)

    def _late_reason(self, ask: AdmissionRequest, decision: AdmissionDecision) -> str:
        """Why the request's time limit is too short, where the prompt is the cause."""
        if not decision.late_ms or ask.deadline_ms is None:
            return ""
        return late_message(ask.deadline_ms - self.now_ms(), decision.late_ms)

    def end(self, ticket: AdmissionTicket, *, output_tokens: int) -> None:
        """Remove a ticket."""
        if self._tickets.get(ticket.ask.key) is ticket:
            del self._tickets[ticket.ask.key]
            self.controller.end(ticket.ask.key, self.now_ms(), output_tokens=output_tokens)
            self._poll()

    def enter_again(self, ticket: AdmissionTicket) -> None:
        """Queue a ticket that has left. Its request has begun, so it is neither refused nor preempted."""
        self._tickets[ticket.ask.key] = ticket
        self.controller.enter_again(ticket.ask, self.now_ms())
        self._poll()

    def wanted(self) -> WantedWorkers:
        """The queued work that more workers would run."""
        return self.controller.wanted(self.capacity(), self.now_ms())

    @property
    def admitted(self) -> int:
        """Live requests that take a place of `max_running`, also those without a worker yet."""
        return self.controller.above(Priority.JOB)[0]

    @property
    def running(self) -> int:
        """The admitted requests, without those that wait for a worker to be there."""
        return max(self.controller.running - self._unplaced(), 0)

    @property
    def waiting(self) -> int:
        """The requests that wait for admission, or for a worker to be there."""
        return self.controller.running + self.controller.waiting - self.running

    def gauges(self) -> dict[str, float]:
        """The metrics of admission."""
        return {
            "slipstream_requests_running": self.running,
            "slipstream_requests_waiting": self.waiting,
        }

    def close(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def capacity(self) -> Capacity:
        """The capacity of all ready workers; a figure that one of them does not report is unknown.

        It has no KV pages: sequences share the pages of their common prefixes, so only the workers know how
        many are free, and queue for them.
        """
        rates: list[float] = []
        batches: list[int] = []
        others = 0  # sequences of other routers
        for link in self._links_of(Role.PREFILL):
            if link.ready:
                report = link.report
                rates.append(report.prefill_tokens_per_s if report is not None else 0.0)
        for link in self._links_of(Role.DECODE):
            if link.ready:
                batches.append(link.worker.capacity.get("max_batch", 0))
                _, _, requests = link.load()
                others += requests - link.requests_in_flight
        known = batches and all(batches)
        return Capacity(
            prefill_tokens_per_ms=sum(rates) / 1e3 if all(rates) else 0.0,
            prefill_workers=max(1, len(rates)),
            decode_sequences=max(1, int(BATCH_MARGIN * sum(batches)) - others) if known else 0,
        )

    def _poll(self) -> None:
        if not self.controller.waiting:
            return
        changes = self.controller.poll(self.capacity(), self.now_ms())
        for key in changes.expired:
            self._counters.add("slipstream_admission_expired_total")
            self._refuse_waiting(key, retry_after_ms=1000)
        for key in changes.admitted:
            self._tickets[key].admit()
        self._arm()

    def _refuse_waiting(self, key: str, retry_after_ms: int) -> None:
        self._tickets.pop(key).refuse(errors.Overloaded(BUSY_MESSAGE, retry_after_ms=retry_after_ms))

    def _arm(self) -> None:
        if self._timer is None and self.controller.waiting:
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._poll()
        self._arm()


def priority_of(name: str) -> Priority:
    """The class by its name; "" is DEFAULT. KeyError for an unknown name."""
    return Priority[name.upper()] if name else Priority.DEFAULT
