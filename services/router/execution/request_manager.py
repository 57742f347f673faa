"""All requests of this router: admission, request ids, abort, drain, and release on the workers."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeVar

from libs.common import service_bounds
from libs.common.telemetry import tracing
from services.router.admission.fair_threads import FairThreads
from services.router.admission.gate import AdmissionGate, priority_of
from services.router.admission.tenant_shares import TextShares, TokenSlots
from services.router.admission.types import PRIORITIES, AdmissionLimits, AdmissionRequest, Priority
from services.router.execution.context import RouterContext
from services.router.execution.generation import GenerationTask
from services.router.execution.policies.job_holds import JobHolds
from services.router.execution.prompt_lengths import PromptLengths
from services.router.execution.request_stats import count_end, is_cancelled
from services.router.execution.running_request import RunningRequest, execute
from services.router.execution.takeovers import Takeovers
from services.router.recording.timeline import RequestTimeline
from services.router.request.output_constraints import OutputConstraints
from services.router.request.types import Caller, GenerationRequest
from services.router.request.validation import check_caller, check_values
from slipstream import errors
from slipstream.sampling import OutputConstraint

T = TypeVar("T")

# Longer messages are parsed and checked off the event loop.
INLINE_BYTES = 64 << 10
REVOKED = "the API key was revoked, or has expired"
_UNREAD_CHECK_S = 0.25
# Admission charges a tenant at most this many tokens for an answer until the answer ends.
_OUTPUT_TOKENS = 256


class RequestManager:
    """Admits requests, starts their tasks, and keeps them until the workers have released them."""

    def __init__(
        self,
        context: RouterContext,
        *,
        max_requests: int = service_bounds.MAX_RUNNING_REQUESTS,
        allow_requested_prefill: bool = False,
    ) -> None:
        self.context = context
        self.gate = AdmissionGate(
            AdmissionLimits(max_running=max_requests),
            links_of=context.fleet.links_of,
            counters=context.counters,
            unplaced=lambda: context.fleet.unplaced.n_waiting,
        )
        self.lengths = PromptLengths(context, self.gate)
        self.texts = TextShares()
        self.token_slots = TokenSlots(self.texts)
        self.jobs = JobHolds()
        self._constraints = OutputConstraints(context.card)
        # One check at a time, tenant by tenant, beside the threads of long messages.
        self._grammar_thread = FairThreads(n_threads=1)
        self._allow_requested_prefill = allow_requested_prefill
        self._runs: dict[tuple[str, str], RunningRequest] = {}
        self._takeovers = Takeovers(self._runs)
        # Requests that are over for their clients, which may use the ids again, but not yet on the workers.
        self._releasing: dict[RunningRequest, tuple[tuple[str, str], asyncio.Task[None]]] = {}
        self._unread_timer: asyncio.TimerHandle | None = None  # while requests run
        self._draining = False
        self._numbers = count()

    @property
    def held(self) -> int:
        """The number of requests that run or are not yet released on their workers."""
        return len(self._runs) + len(self._releasing)

    @property
    def running(self) -> list[RunningRequest]:
        """All requests that are not yet released on their workers."""
        return [*self._runs.values(), *self._releasing]

    async def read(self, caller: Caller, parse: Callable[[], T], *, n_bytes: int) -> T:
        """Parse a message of so many bytes with `parse`; a long one is parsed off the event loop.

        It counts for its tenant meanwhile. Raises what `parse` raises, Overloaded and DeadlineExceeded.
        """
        if n_bytes <= INLINE_BYTES:
            return parse()
        caller = caller.within_default(asyncio.get_running_loop().time())
        with self.texts.holding(caller.tenant, n_bytes, is_job=caller.is_job):
            return await self.context.threads.run_in_time(caller.tenant, parse, caller.deadline_s)

    async def begin(
        self,
        request: GenerationRequest,
        caller: Caller,
        *,
        n_bytes: int = 0,
        is_checked: bool = False,
        first: RunningRequest | None = None,
    ) -> RunningRequest:
        """Admit a request and start it.

        Raises InvalidArgument, NotFound, Overloaded, FailedPrecondition, DeadlineExceeded.
        `n_bytes` is the size of the client's message; a long one is checked off the event loop. Other choices
        have the constraint of the `first`; what `is_checked` is not checked again. A prompt that exceeds the
        context is InvalidArgument even under overload. A caller without a deadline gets the default one.
        """
        began_s = self.context.clock()
        caller = caller.within_default(asyncio.get_running_loop().time())
        try:
            await self._check(request, caller, n_bytes=n_bytes, is_checked=is_checked)
            constraint = await self._constrain(request, caller) if first is None else first.constraint
            self._check_draining()  # the router may have begun to drain during the wait
            run = await self._admit(request, caller, constraint, counts_prompt=not is_checked)
        except errors.SlipstreamError as refusal:
            self.context.counters.add("slipstream_requests_refused_total")
            if isinstance(refusal, errors.Overloaded | errors.DeadlineExceeded):
                await self._check_length(request, caller, n_bytes)
            raise
        self._start(run, request, caller, began_s)
        return run

    async def _check(
        self, request: GenerationRequest, caller: Caller, *, n_bytes: int, is_checked: bool
    ) -> None:
        """Refuse what the router takes from no caller now, and the values of the request."""
        check_caller(caller, allow_requested_prefill=self._allow_requested_prefill)
        self._check_draining()
        if self.gate.controller.crowded:
            self._refuse_early(request, caller)
        if not is_checked:
            await self.read(caller, partial(check_values, request, self.context.card), n_bytes=n_bytes)

    async def _admit(
        self,
        request: GenerationRequest,
        caller: Caller,
        constraint: OutputConstraint | None,
        *,
        counts_prompt: bool,
    ) -> RunningRequest:
        """Admit a checked request or let it wait, under an id that no other request has."""
        chars, is_measured = request.text_chars, True
        if self.lengths.may_exceed(chars) and self.gate.waits(self._admission(request, caller, "", chars)):
            # Otherwise an overlong prompt would occupy the queue, or get a retryable refusal.
            is_measured = await self.lengths.check(request, caller)
            self._check_draining()
        request_id = request.request_id or f"req-{os.urandom(12).hex()}"
        key = (caller.tenant, request_id)
        if _is_takeover(request, caller):
            await self._takeovers.take(key)
            self._check_draining()  # the router may have begun to drain during the wait
        else:
            self._takeovers.check_free(key)
        run = RunningRequest(
            request_id, movable=caller.attempt > 0, key_sha256=caller.key_sha256, text_chars=chars
        )
        run.constraint, run.is_measured = constraint, is_measured
        self._offer(run, request, caller, counts_prompt=counts_prompt)
        return run

    def _start(self, run: RunningRequest, request: GenerationRequest, caller: Caller, began_s: float) -> None:
        """Keep an admitted or queued request, and start its task."""
        self.context.counters.add("slipstream_requests_total")
        tracing.annotate(request_id=run.request_id)
        key = (caller.tenant, run.request_id)
        self._runs[key] = run
        # Admitted or queued: a client whose requests are refused must not hold the jobs of others.
        self.jobs.add(run, caller, self.jobs.live_arrived(caller), began_s=began_s)
        run.timeline = self._record(run, caller, began_s)
        self._watch_unread()
        work = execute(run, partial(self._make_generation, run, request, caller, began_s))
        task = run.start(work, deadline_s=caller.deadline_s)
        if not run.is_measured:
            run.measuring = asyncio.create_task(self.lengths.check_queued(run, request, caller))
        task.add_done_callback(partial(self._ended, run, key))

    def _offer(
        self, run: RunningRequest, request: GenerationRequest, caller: Caller, *, counts_prompt: bool
    ) -> None:
        """Admit the request or let it wait, with its text in the tenant's share. Raises Overloaded."""
        chars = run.text_chars
        admission = self._admission(request, caller, run.request_id, chars)
        self.texts.acquire(caller.tenant, chars, is_job=caller.is_job)
        try:
            if self.context.metering is not None:
                run.metered = self.context.metering.begin(caller, admission, counts_prompt=counts_prompt)
            run.ticket = self.gate.offer(admission, on_preempt=run.preempt)
        except BaseException as refusal:
            self.texts.release(caller.tenant, chars)
            run.end_metering(refusal)
            raise

    async def abort(self, tenant: str, request_id: str) -> None:
        """End a request, and wait until all with its id are released. Does nothing for an unknown id."""
        key = (tenant, request_id)
        with_id = [run for run, (used, _) in self._releasing.items() if used == key]
        if key in self._runs:
            self._runs[key].end()
            with_id.append(self._runs[key])
        for run in with_id:
            await run.released.wait()

    def end_revoked(self, counts: Callable[[bytes], bool]) -> None:
        """End the requests whose API key does not count now, by its hash."""
        for run in self.running:
            if not counts(run.key_sha256):
                run.end(errors.Unauthenticated(REVOKED))

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because this router is about to end."""
        return self._draining

    def drain(self) -> None:
        """Refuse new requests. Running requests continue."""
        self._draining = True

    def undrain(self) -> None:
        """Accept new requests again."""
        self._draining = False

    def hand_over(self) -> None:
        """End the requests whose clients can resume at another router."""
        for run in list(self._runs.values()):
            if run.movable:
                run.end(errors.Draining("this router is draining"))

    async def close(self) -> None:
        """End all requests and wait until they are released."""
        self.drain()
        for run in self.running:
            run.end(errors.Draining("the router is stopping"))
        for run in self.running:
            await run.released.wait()
        if self.context.metering is not None:
            await self.context.metering.close()
        self.gate.close()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self.context.threads.close()
        self.context.failover.close()
        self._grammar_thread.close()
        self._constraints.close()

    def _watch_unread(self) -> None:
        if self._unread_timer is None and self._runs:
            loop = asyncio.get_running_loop()
            self._unread_timer = loop.call_later(_UNREAD_CHECK_S, self._suspend_unread)

    def _suspend_unread(self) -> None:
        """Take the requests off their workers whose clients read nothing, if they hold up anyone.

        A full queue holds up the requests on the same workers. Else it takes requests that wait for a place.
        """
        self._unread_timer = None
        suspended: Counter[str] = Counter()
        for (tenant, _), run in self._runs.items():
            is_unread = run.sink.unread_s >= service_bounds.UNREAD_SUSPEND_S
            if is_unread and (run.sink.is_full or self.gate.controller.waiting):
                run.suspend()
            counts = run.is_suspended and run.hold is None
            suspended[tenant] += counts
            if counts and suspended[tenant] > service_bounds.MAX_TENANT_SUSPENDED:
                run.end(errors.Aborted("too many answers of this tenant are not read"))
        self._watch_unread()

    def _record(self, run: RunningRequest, caller: Caller, began_s: float) -> RequestTimeline:
        return self.context.recorder.begin(
            run.request_id,
            began_s=began_s,
            tenant=caller.tenant,
            session=caller.session,
            model=self.context.card.name,
            endpoint=caller.endpoint,
        )

    def _make_generation(
        self, run: RunningRequest, request: GenerationRequest, caller: Caller, began_s: float
    ) -> GenerationTask:
        run.end_wait(self.context.counters, self.context.clock())
        generation = run.generation = GenerationTask(
            context=self.context,
            request=request,
            caller=caller,
            request_id=run.request_id,
            # The random part keeps equal ids of different tenants and routers apart on the workers.
            worker_request_id=f"{run.request_id}.{os.urandom(6).hex()}",
            sink=run.sink,
            ticket=run.ticket,
            constraint=run.constraint,
            spawn=run.spawn_release,
            began_s=began_s,
            timeline=run.timeline,
            metered=run.metered,
            hold=run.hold,
            counted=run.counted,
        )
        return generation

    async def _constrain(self, request: GenerationRequest, caller: Caller) -> OutputConstraint | None:
        """The answer's constraint. A schema or grammar that is new here is checked off the event loop."""
        if self._constraints.is_known(request):
            return self._constraints.make(request)
        chars = request.text_chars  # held meanwhile, as while it runs
        with self.texts.holding(caller.tenant, chars, is_job=caller.is_job):
            make = partial(self._constraints.make, request)
            return await self._grammar_thread.run_in_time(caller.tenant, make, caller.deadline_s)

    def _refuse_early(self, request: GenerationRequest, caller: Caller) -> None:
        """Refuse without validating the request when admission has no room. Never refuses a takeover."""
        if _is_takeover(request, caller):
            return
        if (request.priority or caller.priority or "default") in PRIORITIES:
            self.gate.refuse_early(self._admission(request, caller, "", request.text_chars))

    async def _check_length(self, request: GenerationRequest, caller: Caller, n_bytes: int) -> None:
        """Raise InvalidArgument, which clients do not retry, for a prompt that exceeds the context.

        A refusal has to be cheap, so only prompts that may be too long are encoded, one at a time.
        """
        self.lengths.check_ids(request)
        if self.lengths.may_exceed(request.text_chars) and not self.lengths.turn.locked():
            await self.read(caller, partial(check_values, request, self.context.card), n_bytes=n_bytes)
            await self.lengths.check(request, caller)

    def _check_draining(self) -> None:
        if self._draining:
            raise errors.Draining("this router is draining")

    def _admission(
        self, request: GenerationRequest, caller: Caller, request_id: str, chars: int
    ) -> AdmissionRequest:
        """The request's cost for admission, estimated from its characters because it is not encoded yet."""
        prefill_tokens, context_tokens = self.gate.estimate(chars)
        assert caller.deadline_s is not None
        return AdmissionRequest(
            # The number, for the id may be used again before the workers have released this request.
            key=f"{request_id}@{caller.tenant}#{next(self._numbers)}",
            tenant=caller.tenant,
            priority=Priority.JOB if caller.is_job else priority_of(request.priority or caller.priority),
            prefill_tokens=prefill_tokens,
            context_tokens=context_tokens,
            output_tokens=min(request.sampling.max_tokens or _OUTPUT_TOKENS, _OUTPUT_TOKENS),
            may_wait=not (request.reject_if_busy or caller.reject_if_busy),
            deadline_ms=caller.deadline_s * 1e3,
        )

    def _ended(
        self,
        run: RunningRequest,
        key: tuple[str, str],
        task: asyncio.Task[errors.SlipstreamError | None],
    ) -> None:
        """Clean up after a request's task, which may have been cancelled before its first step."""
        error = run.ended_by if task.cancelled() else task.result()
        run.end_wait(self.context.counters, self.context.clock())
        count_end(self.context.counters, error, goes_on=run.goes_on)
        run.timeline.ended(
            code=type(error).__name__ if error is not None else "",
            error=error.message if error is not None else "",
            is_cancelled=is_cancelled(error, goes_on=run.goes_on),
        )
        run.end_metering(error)
        run.finish()
        sink = run.sink
        self.jobs.remove(run, now_s=self.context.clock(), is_whole=error is None)
        sink.close(error)
        if error is None:
            self.gate.observe_prompt(
                run.text_chars, prompt_tokens=sink.prompt_tokens, cached_tokens=sink.cached_tokens
            )
        del self._runs[key]
        if run.releasing:
            self._releasing[run] = key, asyncio.create_task(self._wait_released(run, key[0]))
        else:
            self._released(run, key[0])

    async def _wait_released(self, run: RunningRequest, tenant: str) -> None:
        await run.wait_released()
        del self._releasing[run]
        self._released(run, tenant)

    def _released(self, run: RunningRequest, tenant: str) -> None:
        self.texts.release(tenant, run.text_chars)
        if run.ticket is not None:
            run.ticket.end(output_tokens=run.sink.completion_tokens)
        run.released.set()


def _is_takeover(request: GenerationRequest, caller: Caller) -> bool:
    """Whether the request goes on for one with its id."""
    return caller.attempt > 1 or bool(request.resume_after_tokens)
