"""Where a request runs: (request, fleet) -> (prefill, decode, kvstore, reason). Pure.

Every way to run the request is priced in predicted milliseconds (terms: `placement_types.Cost`, rates:
`cost_model.py`), and the cheapest is taken:

    prefill p, KV from s   those before it + prefill(what neither p nor s holds) + load(what s holds)
                           + delay of those after it; s is a kvstore or another prefill worker
    decode d               transfer(bytes d lacks) + wait for pages + weight x (own step + delay of others)
    local, d alone         as both on d, without a transfer; and those that run there stand still meanwhile

KV moves only between workers of one group (transport and region), so a pair is the best prefill worker
and the best decode worker of one group, plus the way to its region. Three rules stand above the price:

* Load is bounded: a worker gets a request only while its tokens in flight are at most 1.25 times the fair
  share (bounded-load hashing, Mirrokni et al. 2018), or as many more as it holds of this prompt. Prompts
  there count for no more than this one. This needs no model, so that a wrong fit cannot make a hot spot.
* A request that nobody holds much of goes, among the workers that cost about the same, to the one that got
  such a request longest ago: caches fill evenly and bursts do not chase the latest report.
* What is left equal is settled by the request's seed.

docs/adr/0008-price-placements-in-predicted-milliseconds.md says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from services.router.placement.candidates import decode_leg, local_leg, prefill_leg
from services.router.placement.kv_source import lenders
from services.router.placement.types import (
    Cost,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    WorkerCandidate,
)
from slipstream.errors import Unavailable

LOAD_BOUND = 1.25
# Below this share of the prompt held by any worker a request is cold; workers that cost at most this
# much more than the cheapest are alike to it.
COLD_SHARE = 0.1
COLD_BAND = 0.1
COLD_BAND_MS = 2.0
# Prompts with more to compute are not put between the steps of a batch while a prefill worker is there,
# and nor are others unless it saves this much.
LOCAL_MAX_TOKENS = 512
LOCAL_MARGIN_MS = 25.0


def place(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision:
    """The decision, with everything that was weighed. Raises Unavailable when a tier has no worker."""
    decode = _bound_load([decode_leg(request, w) for w in fleet.decode], request.prompt_tokens)
    best_decode = _best_by_group(decode, request, cold=False)
    if not best_decode:
        raise Unavailable(_nobody("decode", decode))
    prefill = _prefill_legs(request, fleet)
    much_tokens = COLD_SHARE * request.prompt_tokens
    cold = not [
        leg for leg in prefill if not leg.refused and leg.held_tokens + leg.loaded_tokens > much_tokens
    ]
    best_prefill = _best_by_group(prefill, request, cold=cold)
    pairs = [(p, d) for p in best_prefill for d in best_decode if p.group == d.group]
    local: list[WorkerCandidate] = []
    alone: list[WorkerCandidate] = []
    if request.may_skip_prefill and not request.pinned_prefill:
        most = LOCAL_MAX_TOKENS if pairs else request.prompt_tokens
        local = [
            local_leg(request, worker, fleet, decode=leg, max_tokens=most)
            for worker, leg in zip(fleet.decode, decode, strict=True)
        ]
        alone = [leg for leg in local if not leg.refused]
    legs = (*prefill, *decode, *local)
    best_pair, pair_cost = _cheapest(pairs, fleet)
    if alone:
        chosen = _best(alone, request, cold=False)
        margin_ms = LOCAL_MARGIN_MS if best_pair else 0.0
        cost = _with_way(chosen.cost, chosen, fleet)
        if best_pair is None or cost.total_ms + margin_ms < pair_cost.total_ms:
            return _decide_local(request, fleet, chosen, cost, legs, forced=best_pair is None)
    if best_pair is None:
        raise Unavailable(_nobody("prefill", prefill))
    return _decide_pair(request, fleet, best_pair, pair_cost, legs, cold=cold)


def _prefill_legs(request: PlacementRequest, fleet: PlacementFleet) -> list[WorkerCandidate]:
    peers = lenders(request, fleet)
    legs = [prefill_leg(request, worker, fleet, peers) for worker in fleet.prefill]
    pinned = request.pinned_prefill
    if not pinned:
        return _bound_load(legs, request.prompt_tokens)
    legs = [leg if leg.instance == pinned else replace(leg, refused="another is pinned") for leg in legs]
    if all(leg.refused for leg in legs):
        raise Unavailable(f"prefill worker {pinned} is not ready")
    return legs


def _bound_load(legs: list[WorkerCandidate], incoming_tokens: int) -> list[WorkerCandidate]:
    """Refuses workers beyond the bound of their group; its least loaded one never is."""
    if len(legs) == 1:
        return legs
    loads: dict[tuple[str, str], list[int]] = {}
    for leg in legs:
        if not leg.refused:
            loads.setdefault(leg.group, []).append(leg.load_tokens)
    fair = {group: (sum(tokens) + incoming_tokens) / len(tokens) for group, tokens in loads.items()}
    return [
        replace(leg, refused=f"{leg.load_tokens} tokens in flight, {fair[leg.group]:.0f} would be fair")
        if not leg.refused and leg.load_tokens > LOAD_BOUND * fair[leg.group] + leg.held_tokens
        else leg
        for leg in legs
    ]


def _best_by_group(
    legs: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool
) -> list[WorkerCandidate]:
    groups: dict[tuple[str, str], list[WorkerCandidate]] = {}
    for leg in legs:
        if not leg.refused:
            groups.setdefault(leg.group, []).append(leg)
    return [_best(groups[group], request, cold=cold) for group in sorted(groups)]


def _best(legs: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool) -> WorkerCandidate:
    """The cheapest. Nothing here prefers a worker more when its load grows."""
    if len(legs) == 1:
        return legs[0]
    total_ms = [leg.cost.total_ms for leg in legs]
    limit_ms = min(total_ms)
    if cold:
        limit_ms = limit_ms * (1 + COLD_BAND) + COLD_BAND_MS
    alike = [leg for leg, leg_ms in zip(legs, total_ms, strict=True) if leg_ms <= limit_ms]
    if len(alike) == 1:
        return alike[0]
    draw = _draw(request.seed)
    if cold:
        return min(alike, key=lambda leg: (leg.cold_turn, draw(leg.instance)))
    return min(alike, key=lambda leg: (-leg.held_tokens, draw(leg.instance)))


def _draw(seed: int) -> Callable[[str], bytes]:
    """An order of instances that depends on the seed, and for two of them not on the others."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return lambda instance: hashlib.blake2b(instance.encode(), key=key, digest_size=8).digest()


def _with_way(cost: Cost, leg: WorkerCandidate, fleet: PlacementFleet) -> Cost:
    way_ms = fleet.region_ms.get(leg.group[1], 0.0)
    return replace(cost, region_ms=way_ms) if way_ms else cost


def _cheapest(
    pairs: Sequence[tuple[WorkerCandidate, WorkerCandidate]], fleet: PlacementFleet
) -> tuple[tuple[WorkerCandidate, WorkerCandidate] | None, Cost]:
    best, best_cost = None, Cost()
    for pair in pairs:
        prefill, decode = pair
        cost = _with_way(prefill.cost.plus(decode.cost), decode, fleet)
        if best is None or cost.total_ms < best_cost.total_ms:
            best, best_cost = pair, cost
    return best, best_cost


def _decide_pair(
    request: PlacementRequest,
    fleet: PlacementFleet,
    pair: tuple[WorkerCandidate, WorkerCandidate],
    cost: Cost,
    legs: tuple[WorkerCandidate, ...],
    *,
    cold: bool,
) -> PlacementDecision:
    prefill, decode = pair
    why = "pinned" if request.pinned_prefill else _why(prefill, legs, request, cold=cold)
    return PlacementDecision(
        prefill=prefill.instance,
        decode=decode.instance,
        kvstore=(prefill.source if not prefill.from_peer else "") or _kvstore(request, fleet, prefill.group),
        peer=prefill.source if prefill.from_peer else "",
        source=prefill.source or ("worker" if prefill.held_tokens else "nothing"),
        reason=f"prefill {prefill.instance} {why} ({prefill.cost.total_ms:.1f} ms); "
        f"decode {decode.instance} {_why(decode, legs, request)} ({decode.cost.total_ms:.1f} ms)",
        cold=cold,
        cached_tokens=prefill.held_tokens + prefill.loaded_tokens,
        uncached_tokens=prefill.uncached_tokens,
        cost=cost,
        legs=legs,
    )


def _decide_local(
    request: PlacementRequest,
    fleet: PlacementFleet,
    leg: WorkerCandidate,
    cost: Cost,
    legs: tuple[WorkerCandidate, ...],
    *,
    forced: bool,
) -> PlacementDecision:
    why = "no prefill worker is ready" if forced else f"only {leg.uncached_tokens} tokens are not held there"
    return PlacementDecision(
        prefill="",
        decode=leg.instance,
        kvstore=leg.source or _kvstore(request, fleet, leg.group),
        source=leg.source or ("worker" if leg.held_tokens else "nothing"),
        reason=f"{why}: the decode worker computes the prompt on {leg.instance} ({cost.total_ms:.1f} ms)",
        cached_tokens=leg.held_tokens + leg.loaded_tokens,
        uncached_tokens=leg.uncached_tokens,
        cost=cost,
        legs=legs,
    )


def _why(
    chosen: WorkerCandidate, legs: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool = False
) -> str:
    most = chosen
    for leg in legs:
        if leg.held_tokens > most.held_tokens and leg.part == chosen.part:
            most = leg
    if most is not chosen:
        state = "may not be used" if most.refused and not most.load_tokens else "is busier"
        return f"costs least: {most.instance} holds {most.held_tokens} tokens but {state}"
    if chosen.held_tokens:
        return f"holds {chosen.held_tokens} of {request.prompt_tokens} tokens"
    if chosen.source:
        return f"loads {chosen.loaded_tokens} tokens from {chosen.source}"
    return "is next in turn for what nobody holds" if cold else "has the least to do"


def _kvstore(request: PlacementRequest, fleet: PlacementFleet, group: tuple[str, str]) -> str:
    """The one that holds most of the prompt, else by rendezvous hashing of its content."""
    stores = [s.instance for s in fleet.stores if not s.refused and (s.transport, s.region) == group]
    if len(stores) <= 1:
        return stores[0] if stores else ""
    holders = [name for name in stores if name in request.store_held and request.store_held[name].tokens]
    if holders:
        return max(holders, key=lambda name: (request.store_held[name].tokens, name))
    return max(stores, key=lambda name: hashlib.blake2b(request.content_key + name.encode()).digest())


def _nobody(role: str, legs: Sequence[WorkerCandidate]) -> str:
    reasons = sorted({leg.refused for leg in legs if leg.refused})
    return f"no {role} worker is ready" + (f": {'; '.join(reasons)}" if reasons else "")
