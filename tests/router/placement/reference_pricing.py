"""The prices of one worker at a time, in the most readable form: see reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from libs.common.prefill_order import goes_before
from services.router.placement.cost_model import PrefillModel
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)

STEP_WEIGHT_TOKENS = 16
PEER_GAIN_MS = 5.0


class ReferenceCost(msgspec.Struct, frozen=True, gc=False):
    """Predicted milliseconds, term by term."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    load_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_queue_ms: float = 0.0
    step_ms: float = 0.0
    others_ms: float = 0.0
    region_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """The sum of the terms."""
        return (
            self.queue_ms
            + self.prefill_ms
            + self.load_ms
            + self.transfer_ms
            + self.decode_queue_ms
            + self.step_ms
            + self.others_ms
            + self.region_ms
        )

    def plus(self, other: ReferenceCost) -> ReferenceCost:
        """Term by term."""
        return ReferenceCost(
            self.queue_ms + other.queue_ms,
            self.prefill_ms + other.prefill_ms,
            self.load_ms + other.load_ms,
            self.transfer_ms + other.transfer_ms,
            self.decode_queue_ms + other.decode_queue_ms,
            self.step_ms + other.step_ms,
            self.others_ms + other.others_ms,
            self.region_ms + other.region_ms,
        )


class ReferenceLeg(msgspec.Struct, frozen=True, gc=False):
    """The fields of WorkerCandidate."""

    part: str
    instance: str
    cost: ReferenceCost
    held_tokens: int = 0
    source: str = ""
    from_peer: bool = False
    loaded_tokens: int = 0
    ahead_tokens: int = 0
    ahead_requests: int = 0
    longer_tokens: int = 0
    uncached_tokens: int = 0
    load_tokens: int = 0
    group: tuple[str, str] = ("", "")
    last_cold: int = 0
    refused: str = ""


class ReferenceDelay(msgspec.Struct, frozen=True, gc=False):
    """The wait of a prompt on a worker, and the delay of the longer prompts there: see prefill_queue.py."""

    ahead_tokens: int
    ahead_requests: int
    behind_tokens: int
    delays: float


def delay_of(uncached_tokens: int, worker: PrefillWorker) -> ReferenceDelay:
    """The delay for a prompt that needs so many tokens."""
    tokens = requests = behind_tokens = 0
    delays = 0.0
    for theirs in worker.queue:
        if goes_before(theirs, uncached_tokens):
            tokens, requests = tokens + theirs, requests + 1
        else:
            behind_tokens += theirs
            delays += uncached_tokens / theirs
    other_tokens, others = _others(worker, tokens + behind_tokens)
    if others and not goes_before(other_tokens, uncached_tokens * others):
        behind_tokens, delays = behind_tokens + other_tokens - uncached_tokens * others, delays + others
    else:
        tokens, requests = tokens + other_tokens, requests + others
    return ReferenceDelay(tokens, requests, behind_tokens, delays)


def load_of(prompt_tokens: int, worker: PrefillWorker) -> int:
    """The load that bounded load compares: no queued prompt counts for more than this one."""
    own = known = 0
    for tokens in worker.queue:
        known += tokens
        own += tokens if tokens < prompt_tokens else prompt_tokens
    other_tokens, others = _others(worker, known)
    return own + (min(other_tokens, prompt_tokens * others) if others else other_tokens)


def _others(worker: PrefillWorker, known_tokens: int) -> tuple[int, int]:
    """Tokens and number of the requests of other routers. `known_tokens`: of the queue."""
    tokens, requests = worker.queued_tokens - known_tokens, worker.queued_requests - len(worker.queue)
    return tokens if tokens > 0 else 0, requests if requests > 0 else 0


class ReferenceRead(msgspec.Struct, frozen=True, gc=False):
    """`tokens` beyond those held, and the milliseconds to read them. `peer`: a prefill worker, no kvstore."""

    instance: str = ""
    peer: bool = False
    tokens: int = 0
    load_ms: float = 0.0


NOWHERE = ReferenceRead()
NOTHING = HeldTokens()


def lenders(request: PlacementRequest, fleet: PlacementFleet) -> list[PrefillWorker]:
    """Prefill workers that lend some of the prompt, the most first; of equal ones the least busy."""
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
) -> ReferenceRead:
    """The source of a worker of `group` that holds `held` tokens. `peers`: `lenders`."""
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
        # Of equal ones the same in any order of the fleet.
        if total_ms < best_ms or (total_ms == best_ms and store.instance > best.instance > ""):
            best, best_ms = ReferenceRead(store.instance, False, loaded, load_ms), total_ms
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
            return ReferenceRead(peer.instance, True, loaded, load_ms)
        return best
    return best


def usable(request: PlacementRequest, held_tokens: int) -> int:
    """At least one token is always computed."""
    return max(0, min(held_tokens, request.prompt_tokens - 1))


def prefill_leg(
    request: PlacementRequest,
    worker: PrefillWorker,
    fleet: PlacementFleet,
    peers: Sequence[PrefillWorker] = (),
) -> ReferenceLeg:
    """The prompt on a prefill worker, with KV from its own pages and the best source for it."""
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
    delay = delay_of(uncached, worker)
    return ReferenceLeg(
        part="prefill",
        instance=worker.instance,
        cost=ReferenceCost(
            queue_ms=model.queue_ms(delay.ahead_tokens, delay.ahead_requests, delay.behind_tokens),
            prefill_ms=model.compute_ms(uncached, request.prompt_tokens),
            load_ms=source.load_ms,
            others_ms=model.queue_ms(uncached, 1) * delay.delays,
        ),
        held_tokens=cached - source.tokens,
        source=source.instance,
        from_peer=source.peer,
        loaded_tokens=source.tokens,
        ahead_tokens=delay.ahead_tokens,
        ahead_requests=delay.ahead_requests,
        longer_tokens=delay.behind_tokens,
        uncached_tokens=uncached,
        load_tokens=load_of(request.prompt_tokens, worker),
        group=group,
        last_cold=worker.last_cold,
        refused=_refused(worker, request),
    )


def decode_leg(request: PlacementRequest, worker: DecodeWorker) -> ReferenceLeg:
    """The sequence on a decode worker that pulls the prompt's KV."""
    held = min(request.decode_expected_tokens.get(worker.instance, 0), request.prompt_tokens)
    missing_blocks = -(-(request.prompt_tokens - held) // worker.block_tokens)
    wait_ms, step_ms, others_ms = _batch_terms(request, worker)
    return ReferenceLeg(
        part="decode",
        instance=worker.instance,
        cost=ReferenceCost(
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
    decode: ReferenceLeg,
    max_tokens: int,
) -> ReferenceLeg:
    """Prompt and sequence on one decode worker, of which `decode` is the decode leg."""
    held = usable(request, request.decode_expected_tokens.get(worker.instance, 0))
    group = (worker.transport, worker.region)
    model = worker.prefill_model
    source = best_source(request, fleet, group=group, held=held, model=model) if fleet.stores else NOWHERE
    uncached = request.prompt_tokens - held - source.tokens
    refused = decode.refused
    if not refused and uncached > max_tokens:
        refused = f"{uncached} tokens to compute are too many between steps"
    compute_ms = model.compute_ms(uncached, request.prompt_tokens)
    return ReferenceLeg(
        part="local",
        instance=worker.instance,
        cost=ReferenceCost(
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
    """Milliseconds: until it may run, of the sequence's steps, and added to the steps of the others."""
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
