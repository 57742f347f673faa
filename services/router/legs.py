"""The price of each way to run a part of a request. Pure; see placement.py."""

from __future__ import annotations

from services.router.cost_model import PrefillModel
from services.router.placement_types import Cost, DecodeWorker, Fleet, Held, Leg, PrefillWorker, Request

# A millisecond of a decode step weighs as much as this many milliseconds before the first token.
STEP_WEIGHT_TOKENS = 16
# A millisecond of work put on a worker that is busy for a share r of the time delays those who come after
# by about r / (1 - r) milliseconds in all (M/G/1). At a light load 0 does better, at a heavy one 1.
DELAY_FACTOR = 1.0
_MAX_BUSY_SHARE = 0.75


def prefill_leg(request: Request, worker: PrefillWorker, fleet: Fleet) -> Leg:
    """The prompt on a prefill worker, with KV from its own pages and the best kvstore for it."""
    held = _usable(request, request.prefill_held.get(worker.instance, 0))
    group = (worker.transport, worker.region)
    source, loaded, load_ms = _best_store(request, fleet, group, held, worker.model)
    uncached = request.prompt_tokens - held - loaded
    compute_ms = worker.model.compute_ms(uncached, request.prompt_tokens)
    return Leg(
        part="prefill",
        instance=worker.instance,
        cost=Cost(
            queue_ms=worker.model.queue_ms(worker.queued_tokens, worker.queued_requests),
            prefill_ms=compute_ms,
            load_ms=load_ms,
            others_ms=_delay_weight(fleet) * compute_ms,
        ),
        held_tokens=held,
        source=source,
        loaded_tokens=loaded,
        uncached_tokens=uncached,
        load_tokens=worker.queued_tokens,
        group=group,
        cold_turn=worker.cold_turn,
        refused=_refused(worker, request),
    )


def decode_leg(request: Request, worker: DecodeWorker) -> Leg:
    """The sequence on a decode worker that pulls the prompt's KV."""
    held = min(request.decode_held.get(worker.instance, 0), request.prompt_tokens)
    missing_blocks = -(-(request.prompt_tokens - held) // worker.block_tokens)
    wait_ms, step_ms, others_ms = _batch_terms(request, worker)
    return Leg(
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


def local_leg(request: Request, worker: DecodeWorker, fleet: Fleet, *, refused: str) -> Leg:
    """Prompt and sequence on one decode worker. `refused`: as its decode leg is."""
    held = _usable(request, request.decode_held.get(worker.instance, 0))
    group = (worker.transport, worker.region)
    model = worker.prefill_model
    source, loaded, load_ms = _best_store(request, fleet, group, held, model)
    uncached = request.prompt_tokens - held - loaded
    compute_ms = model.compute_ms(uncached, request.prompt_tokens)
    wait_ms, step_ms, others_ms = _batch_terms(request, worker)
    return Leg(
        part="local",
        instance=worker.instance,
        cost=Cost(
            queue_ms=model.queue_ms(worker.queued_tokens, 0),
            prefill_ms=compute_ms,
            load_ms=load_ms,
            decode_queue_ms=wait_ms,
            step_ms=step_ms,
            # The batch stands still while the prompt is computed.
            others_ms=others_ms + worker.sequences * compute_ms,
        ),
        held_tokens=held,
        source=source,
        loaded_tokens=loaded,
        uncached_tokens=uncached,
        load_tokens=worker.context_tokens,
        group=group,
        refused=refused,
    )


def _delay_weight(fleet: Fleet) -> float:
    busy = min(fleet.prefill_busy_share, _MAX_BUSY_SHARE)
    return DELAY_FACTOR * busy / (1 - busy)


def _batch_terms(request: Request, worker: DecodeWorker) -> tuple[float, float, float]:
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


def _best_store(
    request: Request, fleet: Fleet, group: tuple[str, str], held: int, model: PrefillModel
) -> tuple[str, int, float]:
    """(kvstore, tokens from it beyond `held`, milliseconds to load them), or ("", 0, 0).

    Loading that takes longer than computing is not planned for.
    """
    best = ("", 0, 0.0)
    best_ms = model.compute_ms(request.prompt_tokens - held, request.prompt_tokens)
    for store in fleet.stores:
        at_store = request.store_held.get(store.instance, Held())
        loaded = _usable(request, at_store.tokens) - held
        if store.refused or (store.transport, store.region) != group or loaded <= 0:
            continue
        dram = min(max(at_store.dram_tokens - held, 0), loaded)
        load_ms = model.load_ms(dram, loaded - dram)
        total_ms = load_ms + model.compute_ms(request.prompt_tokens - held - loaded, request.prompt_tokens)
        if total_ms < best_ms:
            best, best_ms = (store.instance, loaded, load_ms), total_ms
    return best


def _usable(request: Request, held_tokens: int) -> int:
    """At least one token is computed, always."""
    return max(0, min(held_tokens, request.prompt_tokens - 1))


def _refused(worker: PrefillWorker | DecodeWorker, request: Request) -> str:
    if worker.refused:
        return worker.refused
    return "" if worker.fingerprint == request.fingerprint else "runs another model"
