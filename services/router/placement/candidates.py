"""The price of each way to run a part of a request. Pure; see placement.py."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement.kv_source import NOWHERE, best_source, usable
from services.router.placement.prefill_queue import load_of, turn_of
from services.router.placement.types import (
    Cost,
    DecodeWorker,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
    WorkerCandidate,
)

# A millisecond of a decode step weighs as much as this many milliseconds before the first token.
STEP_WEIGHT_TOKENS = 16


def prefill_leg(
    request: PlacementRequest,
    worker: PrefillWorker,
    fleet: PlacementFleet,
    peers: Sequence[PrefillWorker] = (),
) -> WorkerCandidate:
    """The prompt on a prefill worker, with KV from its own pages and the best source for it. `peers`: the
    `lenders` of the fleet."""
    model = worker.model
    held = usable(request, request.prefill_held.get(worker.instance, 0))
    told = min(held, request.prefill_told.get(worker.instance, held))
    group = (worker.transport, worker.region)
    # What it is only about to hold may come late, and computing that again would cost far more than a read.
    source = NOWHERE
    if fleet.stores or peers:
        source = best_source(request, fleet, group=group, held=told, model=model, peers=peers)
    cached = max(held, told + source.tokens)
    uncached = request.prompt_tokens - cached
    turn = turn_of(uncached, worker)
    return WorkerCandidate(
        part="prefill",
        instance=worker.instance,
        cost=Cost(
            queue_ms=model.queue_ms(turn.ahead_tokens, turn.ahead_requests, turn.behind_tokens),
            prefill_ms=model.compute_ms(uncached, request.prompt_tokens),
            load_ms=source.load_ms,
            others_ms=model.queue_ms(uncached, 1) * turn.delays,
        ),
        held_tokens=cached - source.tokens,
        source=source.instance,
        from_peer=source.peer,
        loaded_tokens=source.tokens,
        ahead_tokens=turn.ahead_tokens,
        ahead_requests=turn.ahead_requests,
        longer_tokens=turn.behind_tokens,
        uncached_tokens=uncached,
        load_tokens=load_of(request.prompt_tokens, worker),
        group=group,
        cold_turn=worker.cold_turn,
        refused=_refused(worker, request),
    )


def decode_leg(request: PlacementRequest, worker: DecodeWorker) -> WorkerCandidate:
    """The sequence on a decode worker that pulls the prompt's KV."""
    held = min(request.decode_held.get(worker.instance, 0), request.prompt_tokens)
    missing_blocks = -(-(request.prompt_tokens - held) // worker.block_tokens)
    wait_ms, step_ms, others_ms = _batch_terms(request, worker)
    return WorkerCandidate(
        part="decode",
        instance=worker.instance,
        cost=Cost(
            transfer_ms=worker.model.transfer_ms(missing_blocks * worker.block_bytes),
            decode_queue_ms=wait_ms,
            step_ms=step_ms,
            others_ms=others_ms,
        ),
        held_tokens=held,
        load_tokens=worker.context_tokens,
        group=(worker.transport, worker.region),
        refused=_refused(worker, request),
    )


def local_leg(
    request: PlacementRequest,
    worker: DecodeWorker,
    fleet: PlacementFleet,
    *,
    decode: WorkerCandidate,
    max_tokens: int,
) -> WorkerCandidate:
    """Prompt and sequence on one decode worker, of which `decode` is the decode leg. `max_tokens`: the most
    that may be computed between the steps of a batch."""
    held = usable(request, request.decode_held.get(worker.instance, 0))
    group = (worker.transport, worker.region)
    model = worker.prefill_model
    source = best_source(request, fleet, group=group, held=held, model=model) if fleet.stores else NOWHERE
    uncached = request.prompt_tokens - held - source.tokens
    refused = decode.refused
    if not refused and uncached > max_tokens:
        refused = f"{uncached} tokens to compute are too many between steps"
    compute_ms = model.compute_ms(uncached, request.prompt_tokens)
    return WorkerCandidate(
        part="local",
        instance=worker.instance,
        cost=Cost(
            queue_ms=model.queue_ms(worker.queued_tokens, 0),
            prefill_ms=compute_ms,
            load_ms=source.load_ms,
            decode_queue_ms=decode.cost.decode_queue_ms,
            step_ms=decode.cost.step_ms,
            # The batch stands still while the prompt is computed.
            others_ms=decode.cost.others_ms + worker.sequences * compute_ms,
        ),
        held_tokens=held,
        source=source.instance,
        loaded_tokens=source.tokens,
        uncached_tokens=uncached,
        load_tokens=worker.context_tokens,
        group=group,
        refused=refused,
    )


def _batch_terms(request: PlacementRequest, worker: DecodeWorker) -> tuple[float, float, float]:
    """Milliseconds until it may run, of its own steps, and added to the steps of the others."""
    model = worker.model
    context = request.prompt_tokens + request.output_tokens // 2
    before_ms = model.step_ms(worker.sequences, worker.context_tokens)
    after_ms = model.step_ms(worker.sequences + 1, worker.context_tokens + context)
    # The batch turns over once in the time of a whole answer, its pages as its places.
    turnover_ms = request.output_tokens * before_ms
    wait_ms = 0.0
    if worker.free_blocks is not None and worker.context_tokens:
        needed = -(-(request.prompt_tokens + request.output_tokens) // worker.block_tokens)
        missing_tokens = max(needed - worker.free_blocks, 0) * worker.block_tokens
        wait_ms = turnover_ms * missing_tokens / worker.context_tokens
    if worker.max_sequences and worker.sequences >= worker.max_sequences:
        ahead = worker.sequences - worker.max_sequences + 1
        wait_ms = max(wait_ms, turnover_ms * ahead / worker.max_sequences)
    added_ms = after_ms - before_ms
    return (
        wait_ms,
        STEP_WEIGHT_TOKENS * after_ms,
        STEP_WEIGHT_TOKENS * worker.sequences * added_ms,
    )


def _refused(worker: PrefillWorker | DecodeWorker, request: PlacementRequest) -> str:
    if worker.refused:
        return worker.refused
    return "" if worker.fingerprint == request.fingerprint else "runs another model"
