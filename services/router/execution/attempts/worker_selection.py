"""Chooses the workers of a request's next attempt, and waits for workers where the request may wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Set

import msgspec

from libs.common.cluster.worker_record import Role
from libs.common.telemetry import tracing
from services.router.execution.context import RouterContext
from services.router.execution.dispatcher import Assignment, PlacementQuery
from services.router.execution.request_state import RequestState
from services.router.placement.decision_json import span_attributes
from services.router.request.prompt import default_seed
from services.router.workers.context_limit import longest_context_tokens
from slipstream import bounds, errors
from slipstream.bound import shown
from slipstream.v1 import common_pb2

_RETRY_PAUSE_S = 0.2


async def select_workers(state: RequestState) -> Assignment:
    """Choose workers for the next attempt. Raises Unavailable when there are none, and ContextExceeded when
    the ones that are there take no context of this length.

    A request that was placed before waits for workers, and a new one while an outage is young. A request
    that a worker refused for overload before its first token does not wait.
    """
    context = state.context
    fleet, clock = context.fleet, context.clock
    avoid, error = state.retry_policy.avoid, state.retry_policy.error
    is_overloaded = isinstance(error, errors.Overloaded) and not state.output.tokens
    wait_s = context.recovery_wait_s if error is not None else outage_wait_s(context)
    give_up_s = clock() + wait_s
    if state.retry_policy.reads_no_handoff:
        avoid.update(link.key for link in fleet.links_of(Role.PREFILL))
    while True:
        seen = fleet.version
        try:
            return choose_workers(state, avoid, may_skip_prefill=not is_overloaded)
        except errors.Unavailable as unavailable:
            if error is not None and (is_overloaded or isinstance(error, errors.ContextExceeded)):
                raise error from None
            if (too_small := _requested_without_room(state)) is not None:
                raise too_small from None
            no_room = _no_room(state)
            if no_room is not None and all(link.ready for link in fleet.links_of(Role.DECODE)):
                raise no_room from None
            if clock() >= give_up_s:
                raise (no_room or unavailable) from None
        prefills = {key for key in avoid if key.startswith(f"{Role.PREFILL}/")}
        if prefills and prefills != avoid:
            # A decode worker may only have failed to read their KV, and it computes prompts too.
            avoid &= prefills
            continue
        avoid.clear()  # a failed worker may have recovered
        with fleet.unplaced.waiting(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_PAUSE_S):
                await fleet.wait_changed(seen)


def outage_wait_s(context: RouterContext) -> float:
    """How long a new request waits for workers. A fleet that was never ready is not waited for."""
    return max(0.0, context.recovery_wait_s - context.fleet.outage_s)


async def await_fingerprint(context: RouterContext) -> common_pb2.Fingerprint:
    """The fingerprint of the fleet, after an outage that ends in time. Raises Unavailable."""
    fleet = context.fleet
    if (fingerprint := fleet.fingerprint()) is not None:
        return fingerprint
    try:
        with fleet.unplaced.waiting():
            async with asyncio.timeout(outage_wait_s(context)):
                while (fingerprint := fleet.fingerprint()) is None:
                    await fleet.wait_changed(fleet.version)
    except TimeoutError:
        raise errors.Unavailable("no decode worker is ready") from None
    return fingerprint


def choose_workers(state: RequestState, avoid: Set[str], *, may_skip_prefill: bool) -> Assignment:
    """Choose workers now, and record them in the state.

    Raises Unavailable, or InvalidArgument if the requested worker is not ready.
    """
    spec = state.spec
    requested = requested_prefill(state)
    if requested:
        link = state.context.fleet.find(Role.PREFILL, requested)
        if link is None or not link.ready or link.fingerprint != spec.fingerprint:
            raise bounds.REQUESTED_WORKER.refused(instance=shown(requested))
    is_computed_whole = spec.sampling.HasField("prompt_logprobs")  # no cached block is used
    query = PlacementQuery(
        tenant=state.caller.tenant,
        fingerprint=spec.fingerprint,
        prompt_tokens=len(spec.prompt) + len(state.output.tokens),
        hashes=() if is_computed_whole else state.hashes,
        seed=default_seed(spec.request_id),
        session=state.session.placement,
        known_tokens=0 if is_computed_whole else state.session.stored_tokens,
        max_output_tokens=state.max_tokens - len(state.output.tokens),
        without=avoid,
        requested_prefill=requested,
        may_skip_prefill=may_skip_prefill,
    )
    choose = _choose_in_span if tracing.enabled() else _choose
    for room in (possible := state.rooms):
        try:
            assignment = choose(state, msgspec.structs.replace(query, room=room))
        except errors.Unavailable:
            if room is possible[-1]:
                raise
        else:
            break
    note_assignment(state, assignment)
    return assignment


def _no_room(state: RequestState) -> errors.InvalidArgument | None:
    """The error of a request for which no decode worker that is ready has room; None where one has."""
    spec, emitted = state.spec, len(state.output.tokens)
    most = longest_context_tokens(
        link.worker
        for link in state.context.fleet.links_of(Role.DECODE)
        if link.ready and link.fingerprint == spec.fingerprint
    )
    if most is None or most >= state.rooms[-1].decode_tokens:
        return None
    prompt_tokens = len(spec.prompt)
    details = {"prompt_tokens": prompt_tokens, "max_context_tokens": most}
    if spec.output_room.is_open or emitted or prompt_tokens >= most:
        return bounds.PROMPT_TOKENS.refused(spec.output_room.prompt_field, **details)
    wanted = spec.sampling.max_tokens
    return bounds.CONTEXT.refused(
        spec.output_room.max_tokens_field, max_tokens=wanted, total=prompt_tokens + wanted, **details
    )


def _requested_without_room(state: RequestState) -> errors.InvalidArgument | None:
    """The error of a request whose requested prefill worker takes no prompt of this length."""
    link = state.context.fleet.find(Role.PREFILL, requested_prefill(state))
    if link is None or link.worker.takes(state.rooms[-1].prefill_tokens):
        return None
    return bounds.PROMPT_TOKENS.refused(
        state.spec.output_room.prompt_field,
        prompt_tokens=len(state.spec.prompt),
        max_context_tokens=link.worker.max_context_tokens,
    )


def requested_prefill(state: RequestState) -> str:
    """The prefill worker that the caller requested for the first attempt; empty if none."""
    return state.caller.requested_prefill or "" if state.stats.attempts == 1 else ""


def note_assignment(state: RequestState, assignment: Assignment) -> None:
    """Record where the latest attempt runs."""
    state.decision = assignment.decision
    state.stats.placed(assignment.decision, transport=assignment.workers.decode.transport)


def _choose(state: RequestState, query: PlacementQuery) -> Assignment:
    return state.context.dispatcher.choose(query)


def _choose_in_span(state: RequestState, query: PlacementQuery) -> Assignment:
    with tracing.span("placement"):
        assignment = state.context.dispatcher.choose(query)
        tracing.annotate(**span_attributes(assignment.decision))
    return assignment
