"""The cost of one candidate at a time: the readable form of services/router/placement/pricing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.common.prefill_order import goes_before
from services.router.placement.cost_model import PrefillModel
from services.router.placement.kv_source import PEER_GAIN_MS
from services.router.placement.pricing import STEP_WEIGHT_TOKENS
from services.router.placement.types import (
    Cost,
    DecodeWorker,
    HeldTokens,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
    WorkerCandidate,
)


def prefill_candidate(
    request: PlacementRequest,
    worker: PrefillWorker,
    fleet: PlacementFleet,
    peers: Sequence[PrefillWorker] = (),
) -> WorkerCandidate:
    """The prompt on a prefill worker, with KV from its own pages and from the best source for it. `peers`:
    the `lenders` of the fleet."""
    model = worker.model
    held = usable(request, request.prefill_expected_tokens.get(worker.instance, 0))
    confirmed = min(held, request.prefill_confirmed_tokens.get(worker.instance, held))
    group = (worker.transport, worker.region)
    # Predicted KV may come late, and computing it again costs far more than a read.
    source = NOWHERE
    if fleet.stores or peers:
        source = best_source(request, fleet, group=group, held=confirmed, model=model, peers=peers)
    cached = max(held, confirmed + source.tokens)
    uncached = request.prompt_tokens - cached
    turn = queue_delay(uncached, worker)
    return WorkerCandidate(
        part="prefill",
        instance=worker.instance,
        cost=Cost(
            queue_ms=model.queue_ms(turn.ahead_tokens, turn.ahead_requests, turn.longer_tokens),
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
        longer_tokens=turn.longer_tokens,
        uncached_tokens=uncached,
        load_tokens=bounded_load_tokens(request.prompt_tokens, worker),
        group=group,
        cold_turn=worker.cold_turn,
        refused=_refused(worker, request),
    )


def decode_candidate(request: PlacementRequest, worker: DecodeWorker) -> WorkerCandidate:
    """The sequence on a decode worker, which pulls the prompt's KV."""
    held = min(request.decode_expected_tokens.get(worker.instance, 0), request.prompt_tokens)
    missing_blocks = -(-(request.prompt_tokens - held) // worker.block_tokens)
    wait_ms, step_ms, others_ms = batch_terms_ms(request, worker)
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


def local_candidate(
    request: PlacementRequest,
    worker: DecodeWorker,
    fleet: PlacementFleet,
    *,
    decode: WorkerCandidate,
    max_tokens: int,
) -> WorkerCandidate:
    """Prompt and sequence on the decode worker of the candidate `decode`. `max_tokens`: the most that the
    worker may compute between the steps of its batch."""
    held = usable(request, request.decode_expected_tokens.get(worker.instance, 0))
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


def batch_terms_ms(request: PlacementRequest, worker: DecodeWorker) -> tuple[float, float, float]:
    """Milliseconds of waiting for the batch, of the sequence's own steps, and added to other sequences."""
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


@dataclass(frozen=True, slots=True)
class QueueDelay:
    """The same numbers as in services/router/placement/prefill_queue.py, for one worker."""

    ahead_tokens: int
    ahead_requests: int
    longer_tokens: int
    delays: float


def queue_delay(uncached_tokens: int, worker: PrefillWorker) -> QueueDelay:
    """The delay of a prompt that computes so many tokens on this worker."""
    tokens = requests = longer_tokens = 0
    delays = 0.0
    for theirs in worker.queue:
        if goes_before(theirs, uncached_tokens):
            tokens, requests = tokens + theirs, requests + 1
        else:
            longer_tokens += theirs
            delays += uncached_tokens / theirs
    other_tokens, others = _others(worker, tokens + longer_tokens)
    if others and not goes_before(other_tokens, uncached_tokens * others):
        # They wait for this prompt. Their delays count in full, so only what they need beyond this prompt is
        # in `longer_tokens`: one more, however short, adds.
        longer_tokens, delays = longer_tokens + other_tokens - uncached_tokens * others, delays + others
    else:
        tokens, requests = tokens + other_tokens, requests + others
    return QueueDelay(tokens, requests, longer_tokens, delays)


def bounded_load_tokens(prompt_tokens: int, worker: PrefillWorker) -> int:
    """The load that bounded load compares: no queued prompt counts for more than the new one."""
    own = known = 0
    for tokens in worker.queue:
        known += tokens
        own += tokens if tokens < prompt_tokens else prompt_tokens
    other_tokens, others = _others(worker, known)
    return own + (min(other_tokens, prompt_tokens * others) if others else other_tokens)


def _others(worker: PrefillWorker, known_tokens: int) -> tuple[int, int]:
    """Tokens and number of requests that only the worker's report counts; `known_tokens`: of the queue."""
    tokens, requests = worker.queued_tokens - known_tokens, worker.queued_requests - len(worker.queue)
    return tokens if tokens > 0 else 0, requests if requests > 0 else 0


@dataclass(frozen=True, slots=True)
class KvSource:
    """`tokens` beyond those held, and the time to read them. `peer`: the instance is a prefill worker."""

    instance: str = ""
    peer: bool = False
    tokens: int = 0
    load_ms: float = 0.0


NOWHERE = KvSource()
NOTHING = HeldTokens()


def lenders(request: PlacementRequest, fleet: PlacementFleet) -> list[PrefillWorker]:
    """Prefill workers that lend KV of this prompt, the most first; of equal ones the least busy."""
    if not request.prefill_lendable_tokens:
        return []
    able = [
        worker
        for worker in fleet.prefill
        if not worker.refused
        and worker.fingerprint == request.fingerprint
        and request.prefill_lendable_tokens.get(worker.instance, 0)
    ]
    return sorted(
        able, key=lambda w: (-request.prefill_lendable_tokens[w.instance], w.queued_tokens, w.instance)
    )


def best_source(
    request: PlacementRequest,
    fleet: PlacementFleet,
    *,
    group: tuple[str, str],
    held: int,
    model: PrefillModel,
    peers: Sequence[PrefillWorker] = (),
) -> KvSource:
    """The source for a worker of `group` that holds `held` tokens. `peers`: `lenders`, of which the first of
    the group counts."""
    prompt = request.prompt_tokens
    best, best_ms = NOWHERE, -1.0
    for store in fleet.stores:
        at_store = request.store_held.get(store.instance, NOTHING)
        loaded = usable(request, at_store.tokens) - held
        if loaded <= 0 or store.refused or (store.transport, store.region) != group:
            continue
        if best_ms < 0:
            best_ms = model.compute_ms(prompt - held, prompt)
        dram = min(max(at_store.dram_tokens - held, 0), loaded)
        load_ms = model.load_ms(dram, loaded - dram)
        total_ms = load_ms + model.compute_ms(prompt - held - loaded, prompt)
        # Of equal stores the last by name wins, in whatever order the fleet lists them.
        if total_ms < best_ms or (total_ms == best_ms and store.instance > best.instance > ""):
            best, best_ms = KvSource(store.instance, False, loaded, load_ms), total_ms
    for peer in peers:
        if (peer.transport, peer.region) != group:
            continue
        loaded = usable(request, request.prefill_lendable_tokens[peer.instance]) - held
        if loaded <= 0:
            return best
        if best_ms < 0:
            best_ms = model.compute_ms(prompt - held, prompt)
        load_ms = model.load_ms(0, 0, loaded)
        limit_ms = best_ms - PEER_GAIN_MS if best.instance else best_ms
        if load_ms + model.compute_ms(prompt - held - loaded, prompt) < limit_ms:
            return KvSource(peer.instance, True, loaded, load_ms)
        return best
    return best


def usable(request: PlacementRequest, held_tokens: int) -> int:
    """The held tokens that save work: a worker always computes at least one token."""
    return max(0, min(held_tokens, request.prompt_tokens - 1))
