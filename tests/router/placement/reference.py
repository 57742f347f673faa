"""Placement in its most readable form: every worker priced and every way compared, whatever that costs.

`services/router/placement/policy.py` decides the same, to the last bit (test_placement_reference.py).
`python -m bench.placement.decision` compares the speed of the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from services.router.placement.types import PlacementFleet, PlacementRequest
from slipstream.errors import Unavailable
from tests.router.placement.reference_pricing import (
    ReferenceCost,
    ReferenceLeg,
    decode_leg,
    lenders,
    local_leg,
    prefill_leg,
)

LOAD_BOUND = 1.25
# See policy.py and selection.py, which have these values too.
COLD_SHARE = 0.1
COLD_BAND = 0.1
COLD_BAND_MS = 2.0
LOCAL_MAX_TOKENS = 512
LOCAL_MARGIN_MS = 25.0


class ReferenceDecision(msgspec.Struct, frozen=True, gc=False):
    """The fields of PlacementDecision without words, and all legs."""

    prefill: str
    decode: str
    kvstore: str
    source: str
    peer: str = ""
    cold: bool = False
    cached_tokens: int = 0
    uncached_tokens: int = 0
    cost: ReferenceCost = msgspec.field(default_factory=ReferenceCost)
    legs: tuple[ReferenceLeg, ...] = ()


def place(request: PlacementRequest, fleet: PlacementFleet) -> ReferenceDecision:
    """The decision, with all legs. Raises Unavailable when a tier has no worker."""
    decode = _bound_load([decode_leg(request, w) for w in fleet.decode], request.prompt_tokens)
    best_decode = _best_by_group(decode, request, cold=False)
    if not best_decode:
        raise Unavailable(_no_worker("decode", decode))
    prefill = _prefill_legs(request, fleet)
    much_tokens = COLD_SHARE * request.prompt_tokens
    cold = not [
        leg for leg in prefill if not leg.refused and leg.held_tokens + leg.loaded_tokens > much_tokens
    ]
    best_prefill = _best_by_group(prefill, request, cold=cold)
    pairs = [(p, d) for p in best_prefill for d in best_decode if p.group == d.group]
    local: list[ReferenceLeg] = []
    alone: list[ReferenceLeg] = []
    if request.may_skip_prefill and not request.requested_prefill:
        most = LOCAL_MAX_TOKENS if pairs else request.prompt_tokens
        local = [
            local_leg(request, worker, fleet, decode=leg, max_tokens=most)
            for worker, leg in zip(fleet.decode, decode, strict=True)
        ]
        alone = [leg for leg in local if not leg.refused]
    legs = (*prefill, *decode, *local)
    best_pair, pair_cost = _cheapest(pairs, fleet)
    if alone:
        ways = [(_with_way(leg.cost, leg, fleet), leg) for leg in _best_by_group(alone, request, cold=False)]
        cost, chosen = min(ways, key=lambda way: way[0].total_ms)
        margin_ms = LOCAL_MARGIN_MS if best_pair else 0.0
        if best_pair is None or cost.total_ms + margin_ms < pair_cost.total_ms:
            return _decide_local(request, fleet, chosen, cost, legs)
    if best_pair is None:
        raise Unavailable(_no_pair(prefill))
    return _decide_pair(request, fleet, best_pair, pair_cost, legs, cold=cold)


def _prefill_legs(request: PlacementRequest, fleet: PlacementFleet) -> list[ReferenceLeg]:
    peers = lenders(request, fleet)
    legs = [prefill_leg(request, worker, fleet, peers) for worker in fleet.prefill]
    requested = request.requested_prefill
    if not requested:
        return _bound_load(legs, request.prompt_tokens)
    legs = [
        leg
        if leg.refused or leg.instance == requested
        else replace(leg, refused="another worker is requested")
        for leg in legs
    ]
    if all(leg.refused for leg in legs):
        raise Unavailable(f"prefill worker {requested} is not ready")
    return legs


def _bound_load(legs: list[ReferenceLeg], incoming_tokens: int) -> list[ReferenceLeg]:
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
    legs: Sequence[ReferenceLeg], request: PlacementRequest, *, cold: bool
) -> list[ReferenceLeg]:
    groups: dict[tuple[str, str], list[ReferenceLeg]] = {}
    for leg in legs:
        if not leg.refused:
            groups.setdefault(leg.group, []).append(leg)
    return [_best(groups[group], request, cold=cold) for group in sorted(groups)]


def _best(legs: Sequence[ReferenceLeg], request: PlacementRequest, *, cold: bool) -> ReferenceLeg:
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
        return min(alike, key=lambda leg: (leg.last_cold, draw(leg.instance)))
    return min(alike, key=lambda leg: (-leg.held_tokens, draw(leg.instance)))


def _draw(seed: int) -> Callable[[str], bytes]:
    """An order of instances that depends on the seed, and for two of them not on the others."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return lambda instance: hashlib.blake2b(instance.encode(), key=key, digest_size=8).digest()


def _with_way(cost: ReferenceCost, leg: ReferenceLeg, fleet: PlacementFleet) -> ReferenceCost:
    way_ms = fleet.region_ms.get(leg.group[1], 0.0)
    return replace(cost, region_ms=way_ms) if way_ms else cost


def _cheapest(
    pairs: Sequence[tuple[ReferenceLeg, ReferenceLeg]], fleet: PlacementFleet
) -> tuple[tuple[ReferenceLeg, ReferenceLeg] | None, ReferenceCost]:
    best, best_cost = None, ReferenceCost()
    for pair in pairs:
        prefill, decode = pair
        cost = _with_way(prefill.cost.plus(decode.cost), decode, fleet)
        if best is None or cost.total_ms < best_cost.total_ms:
            best, best_cost = pair, cost
    return best, best_cost


def _decide_pair(
    request: PlacementRequest,
    fleet: PlacementFleet,
    pair: tuple[ReferenceLeg, ReferenceLeg],
    cost: ReferenceCost,
    legs: tuple[ReferenceLeg, ...],
    *,
    cold: bool,
) -> ReferenceDecision:
    prefill, decode = pair
    return ReferenceDecision(
        prefill=prefill.instance,
        decode=decode.instance,
        kvstore=(prefill.source if not prefill.from_peer else "") or _kvstore(request, fleet, prefill.group),
        peer=prefill.source if prefill.from_peer else "",
        source=prefill.source or ("worker" if prefill.held_tokens else "nothing"),
        cold=cold,
        cached_tokens=prefill.held_tokens + prefill.loaded_tokens,
        uncached_tokens=prefill.uncached_tokens,
        cost=cost,
        legs=legs,
    )


def _decide_local(
    request: PlacementRequest,
    fleet: PlacementFleet,
    leg: ReferenceLeg,
    cost: ReferenceCost,
    legs: tuple[ReferenceLeg, ...],
) -> ReferenceDecision:
    return ReferenceDecision(
        prefill="",
        decode=leg.instance,
        kvstore=leg.source or _kvstore(request, fleet, leg.group),
        source=leg.source or ("worker" if leg.held_tokens else "nothing"),
        cached_tokens=leg.held_tokens + leg.loaded_tokens,
        uncached_tokens=leg.uncached_tokens,
        cost=cost,
        legs=legs,
    )


def _kvstore(request: PlacementRequest, fleet: PlacementFleet, group: tuple[str, str]) -> str:
    """The one that holds most of the prompt, else by rendezvous hashing of its content."""
    stores = [s.instance for s in fleet.stores if not s.refused and (s.transport, s.region) == group]
    if len(stores) <= 1:
        return stores[0] if stores else ""
    holders = [name for name in stores if name in request.store_held and request.store_held[name].tokens]
    if holders:
        return max(holders, key=lambda name: (request.store_held[name].tokens, name))
    return max(stores, key=lambda name: hashlib.blake2b(request.content_key + name.encode()).digest())


def _no_pair(prefill: Sequence[ReferenceLeg]) -> str:
    if any(not leg.refused for leg in prefill):
        return "no usable prefill worker has the transport and the region of a usable decode worker"
    return _no_worker("prefill", prefill)


def _no_worker(role: str, legs: Sequence[ReferenceLeg]) -> str:
    reasons = sorted({leg.refused for leg in legs if leg.refused})
    return f"no {role} worker is ready" + (f": {'; '.join(reasons)}" if reasons else "")
