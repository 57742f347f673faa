"""Placement written for one worker at a time: the readable form of services/router/placement/policy.py.

Both forms give the same decisions, costs and reasons to the last bit (test_placement_reference.py), and
`python -m bench.placement.decision` compares their speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from msgspec.structs import replace

from services.router.placement import explanation
from services.router.placement.policy import COLD_SHARE, LOCAL_MARGIN_MS, LOCAL_MAX_TOKENS
from services.router.placement.selection import COLD_BAND, COLD_BAND_MS, LOAD_BOUND
from services.router.placement.types import (
    ChoiceReason,
    Cost,
    DecodeWorker,
    KvStore,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
    WorkerCandidate,
)
from slipstream.errors import Unavailable
from tests.router.placement.reference_pricing import (
    decode_candidate,
    lenders,
    local_candidate,
    prefill_candidate,
)

_Worker = TypeVar("_Worker", PrefillWorker, DecodeWorker, KvStore)
_Pair = tuple[WorkerCandidate, WorkerCandidate, Cost]


def place(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision:
    """The decision, with every candidate. Raises Unavailable when a tier has no usable worker."""
    fleet = _without_failed(request, fleet)
    decode = _bound_load([decode_candidate(request, w) for w in fleet.decode], request.prompt_tokens)
    best_decode = _best_by_group(decode, request, cold=False)
    if not best_decode:
        raise Unavailable(_no_worker("decode", decode))
    prefill = _prefill_candidates(request, fleet)
    much_tokens = COLD_SHARE * request.prompt_tokens
    cold = not [c for c in prefill if not c.refused and c.held_tokens + c.loaded_tokens > much_tokens]
    best_prefill = _best_by_group(prefill, request, cold=cold)
    pairs = [
        (p, d, _with_region(p.cost.plus(d.cost), d, fleet))
        for p in best_prefill
        for d in best_decode
        if p.group == d.group
    ]
    pairs.sort(key=lambda pair: pair[2].total_ms)
    local: list[WorkerCandidate] = []
    if request.may_skip_prefill and not request.pinned_prefill:
        most = LOCAL_MAX_TOKENS if pairs else request.prompt_tokens
        local = [
            local_candidate(request, worker, fleet, decode=candidate, max_tokens=most)
            for worker, candidate in zip(fleet.decode, decode, strict=True)
        ]
    alone = [candidate for candidate in local if not candidate.refused]
    candidates = (*prefill, *decode, *local)
    extra: list[ChoiceReason] = []
    if alone:
        chosen, _, _, _ = _best(alone, request, cold=False)
        cost = _with_region(chosen.cost, chosen, fleet)
        if not pairs:
            reason = explanation.forced_reason(chosen.instance, _no_worker("prefill", prefill))
            return _decide_local(request, fleet, chosen, cost, candidates, reason)
        best_ms = pairs[0][2].total_ms
        if cost.total_ms + LOCAL_MARGIN_MS < best_ms:
            reason = explanation.cost_reason("local", chosen.instance, cost, _name(pairs[0]), pairs[0][2])
            return _decide_local(request, fleet, chosen, cost, candidates, reason)
        if cost.total_ms < best_ms:
            saved_ms = best_ms - cost.total_ms
            extra.append(
                explanation.margin_reason(_name(pairs[0]), chosen.instance, saved_ms, LOCAL_MARGIN_MS)
            )
    if not pairs:
        raise Unavailable(_no_worker("prefill", prefill))
    if len(pairs) > 1:
        extra.insert(0, explanation.pair_reason(_name(pairs[0]), pairs[0][2], _name(pairs[1]), pairs[1][2]))
    return _decide_pair(request, fleet, pairs[0], candidates, extra, cold=cold)


def _without_failed(request: PlacementRequest, fleet: PlacementFleet) -> PlacementFleet:
    def mark(workers: Sequence[_Worker], failed: Set[str]) -> tuple[_Worker, ...]:
        return tuple(
            replace(worker, refused="failed this request") if worker.instance in failed else worker
            for worker in workers
        )

    return replace(
        fleet,
        prefill=mark(fleet.prefill, request.failed_prefill),
        decode=mark(fleet.decode, request.failed_decode),
        stores=mark(fleet.stores, request.failed_stores),
    )


def _prefill_candidates(request: PlacementRequest, fleet: PlacementFleet) -> list[WorkerCandidate]:
    peers = lenders(request, fleet)
    candidates = [prefill_candidate(request, worker, fleet, peers) for worker in fleet.prefill]
    pinned = request.pinned_prefill
    if not pinned:
        return _bound_load(candidates, request.prompt_tokens)
    candidates = [
        c if c.refused or c.instance == pinned else replace(c, refused="another worker is pinned")
        for c in candidates
    ]
    if all(candidate.refused for candidate in candidates):
        raise Unavailable(f"prefill worker {pinned} is not ready")
    return candidates


def _bound_load(candidates: list[WorkerCandidate], incoming_tokens: int) -> list[WorkerCandidate]:
    """Refuses workers beyond the bound of their group; its least loaded one stays usable."""
    loads: dict[tuple[str, str], list[int]] = {}
    for candidate in candidates:
        if not candidate.refused:
            loads.setdefault(candidate.group, []).append(candidate.load_tokens)
    fair = {group: (sum(tokens) + incoming_tokens) / len(tokens) for group, tokens in loads.items()}
    return [
        replace(c, refused=f"{c.load_tokens} tokens in flight, {fair[c.group]:.0f} would be fair")
        if not c.refused and c.load_tokens > LOAD_BOUND * fair[c.group] + c.held_tokens
        else c
        for c in candidates
    ]


def _best_by_group(
    candidates: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool
) -> list[WorkerCandidate]:
    groups: dict[tuple[str, str], list[WorkerCandidate]] = {}
    for candidate in candidates:
        if not candidate.refused:
            groups.setdefault(candidate.group, []).append(candidate)
    return [_best(groups[group], request, cold=cold)[0] for group in sorted(groups)]


def _best(
    candidates: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool
) -> tuple[WorkerCandidate, str, int, float]:
    """(the best, the rule that picked it, from how many, which cost at most so many milliseconds)."""
    if len(candidates) == 1:
        pinned = request.pinned_prefill and candidates[0].part == "prefill"
        return candidates[0], explanation.PINNED if pinned else explanation.ONLY_ONE, 1, 0.0
    limit_ms = min([candidate.cost.total_ms for candidate in candidates])
    if cold:
        limit_ms = limit_ms * (1 + COLD_BAND) + COLD_BAND_MS
    alike = [candidate for candidate in candidates if candidate.cost.total_ms <= limit_ms]
    if len(alike) == 1:
        return alike[0], explanation.BY_COST, 1, limit_ms

    def rank(candidate: WorkerCandidate) -> int:
        return candidate.cold_turn if cold else -candidate.held_tokens

    best = [candidate for candidate in alike if rank(candidate) == min(map(rank, alike))]
    if len(best) == 1:
        return best[0], explanation.BY_TURN if cold else explanation.BY_HELD, len(alike), limit_ms
    draw = _draw(request.seed)
    return min(best, key=lambda c: draw(c.instance)), explanation.BY_DRAW, len(best), limit_ms


def _draw(seed: int) -> Callable[[str], bytes]:
    """An order of instances that depends on the seed, and for two of them not on the others."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return lambda instance: hashlib.blake2b(instance.encode(), key=key, digest_size=8).digest()


def _with_region(cost: Cost, candidate: WorkerCandidate, fleet: PlacementFleet) -> Cost:
    region_ms = fleet.region_ms.get(candidate.group[1], 0.0)
    return replace(cost, region_ms=region_ms) if region_ms else cost


def _name(pair: _Pair) -> str:
    return f"{pair[0].instance} with {pair[1].instance}"


def _reasons(
    chosen: WorkerCandidate, candidates: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool
) -> list[ChoiceReason]:
    """Against the cheapest other one, and against the one that holds most."""
    mine = [c for c in candidates if c.part == chosen.part]
    if chosen.part != "local":
        mine = [c for c in mine if c.group == chosen.group]
    usable = [c for c in mine if not c.refused]
    best, rule, n_alike, limit_ms = _best(usable, request, cold=cold)
    assert best is chosen
    against = None
    if rule == explanation.BY_COST:
        against = min([c for c in usable if c is not chosen], key=lambda c: c.cost.total_ms)
    reasons = [explanation.choice_reason(chosen, rule, against=against, n_alike=n_alike, limit_ms=limit_ms)]
    holder = max(mine, key=lambda c: c.held_tokens)
    if rule != explanation.PINNED and holder.held_tokens > chosen.held_tokens and holder is not against:
        reasons += explanation.holder_reason(chosen, holder)
    return reasons


def _decide_pair(
    request: PlacementRequest,
    fleet: PlacementFleet,
    pair: _Pair,
    candidates: tuple[WorkerCandidate, ...],
    extra: list[ChoiceReason],
    *,
    cold: bool,
) -> PlacementDecision:
    prefill, decode, cost = pair
    why_prefill = _reasons(prefill, candidates, request, cold=cold)
    why_decode = _reasons(decode, candidates, request, cold=False)
    words = [
        f"prefill {explanation.describe(prefill, why_prefill, request.prompt_tokens)}",
        f"decode {explanation.describe(decode, why_decode, request.prompt_tokens)}",
        *[reason.text for reason in extra],
    ]
    return PlacementDecision(
        prefill=prefill.instance,
        decode=decode.instance,
        kvstore=(prefill.source if not prefill.from_peer else "") or _kvstore(request, fleet, prefill.group),
        peer=prefill.source if prefill.from_peer else "",
        source=prefill.source or ("worker" if prefill.held_tokens else "nothing"),
        reason="; ".join(words),
        cold=cold,
        cached_tokens=prefill.held_tokens + prefill.loaded_tokens,
        uncached_tokens=prefill.uncached_tokens,
        cost=cost,
        reasons=(*why_prefill, *why_decode, *extra),
        chosen=(prefill, decode),
        list_candidates=lambda: candidates,
    )


def _decide_local(
    request: PlacementRequest,
    fleet: PlacementFleet,
    chosen: WorkerCandidate,
    cost: Cost,
    candidates: tuple[WorkerCandidate, ...],
    reason: ChoiceReason,
) -> PlacementDecision:
    why = _reasons(chosen, candidates, request, cold=False)
    words = explanation.describe(chosen, why, request.prompt_tokens)
    return PlacementDecision(
        prefill="",
        decode=chosen.instance,
        kvstore=chosen.source or _kvstore(request, fleet, chosen.group),
        source=chosen.source or ("worker" if chosen.held_tokens else "nothing"),
        reason=f"the decode worker computes the prompt: {words}; {reason.text}",
        cached_tokens=chosen.held_tokens + chosen.loaded_tokens,
        uncached_tokens=chosen.uncached_tokens,
        cost=cost,
        reasons=(*why, reason),
        chosen=(chosen,),
        list_candidates=lambda: candidates,
    )


def _kvstore(request: PlacementRequest, fleet: PlacementFleet, group: tuple[str, str]) -> str:
    """The kvstore that holds most of the prompt, else one by rendezvous hashing of its content."""
    stores = [s.instance for s in fleet.stores if not s.refused and (s.transport, s.region) == group]
    if len(stores) <= 1:
        return stores[0] if stores else ""
    holders = [name for name in stores if name in request.store_held and request.store_held[name].tokens]
    if holders:
        return max(holders, key=lambda name: (request.store_held[name].tokens, name))
    return max(stores, key=lambda name: hashlib.blake2b(request.content_key + name.encode()).digest())


def _no_worker(role: str, candidates: Sequence[WorkerCandidate]) -> str:
    reasons = sorted({candidate.refused for candidate in candidates if candidate.refused})
    return f"no {role} worker is ready" + (f": {'; '.join(reasons)}" if reasons else "")
