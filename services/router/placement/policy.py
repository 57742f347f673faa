"""Where a request runs: (request, fleet) -> (prefill, decode, kvstore, reasons). Pure.

Every way to run the request is priced in predicted milliseconds, and the cheapest is chosen (terms:
`types.PlacementCost`, rates: `cost_model.py`, prices: `pricing.py`):

    prefill p, KV from s   wait for the prompts served first + prefill(what neither p nor s holds)
                           + load(what s holds) + delay of the prompts served later; s is a kvstore or a peer
    decode d               transfer(bytes that d lacks) + wait for pages or a place
                           + weight x (own steps + delay of the batch)
    local, d alone         both on d, without a transfer; the sequences of d stand still meanwhile

KV moves only between workers of one group (transport and region). A pair is therefore the best prefill worker
and the best decode worker of one group, plus the network time to its region. Rules beside the cost:

* Load is bounded: a worker gets a request only while its tokens in flight are at most 1.25 times the fair
  share of its group (bounded-load hashing, Mirrokni et al. 2018), plus the tokens that it holds of this
  prompt. A queued prompt counts for no more than this one. The rule needs no model, so that a wrong fit
  cannot make a hot spot.
* A request is cold when no prefill worker has much of its prompt, held or loadable. Of the prefill workers
  that cost about the same it goes to the one that got a cold request longest ago: caches fill evenly, and
  bursts do not all follow the latest report. The rule does not apply to decode workers.
* Of the workers of a group that cost the same, the one that holds most of the prompt is chosen. If several
  hold as much, `PlacementRequest.seed` picks one. Of groups that cost the same, the first by name is chosen.
* A requested prefill worker is used whatever it costs, and its load is not bounded.

docs/adr/0008-price-placements-in-predicted-milliseconds.md gives the reasons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from services.router.placement.explanation import (
    cost_reason,
    describe,
    forced_reason,
    margin_reason,
    pair_reason,
)
from services.router.placement.kv_source import KvSources, find_sources
from services.router.placement.pricing import price_decode, price_local, price_prefill
from services.router.placement.selection import Choice, bound_load, choose, usable_by_group
from services.router.placement.types import (
    ChoiceReason,
    Group,
    PlacementCost,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    WorkerCandidate,
)
from slipstream.errors import Unavailable

# A request is cold if no prefill worker has more than this share of its prompt.
COLD_SHARE = 0.1
# A decode worker computes at most this many tokens of a prompt between the steps of its batch while a prefill
# worker is there. It does so only if that saves more than this time.
LOCAL_MAX_TOKENS = 512
LOCAL_MARGIN_MS = 25.0

_PART_WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "local": "the decode worker computes the prompt:",
}

_Candidates = Sequence[WorkerCandidate]
_Sources = Mapping[Group, KvSources]


class _PricedWay(msgspec.Struct, frozen=True, gc=False):
    """A way to run the whole request: a prefill and a decode worker of one group, or part "local" alone."""

    choices: tuple[Choice, ...]
    cost: PlacementCost

    @property
    def name(self) -> str:
        return " with ".join([choice.candidate.instance for choice in self.choices])


def place(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision:
    """Choose workers. Raises Unavailable when a tier has no usable worker."""
    decode = price_decode(request, fleet.decode)
    usable_decode = bound_load(usable_by_group(decode), request.prompt_tokens)
    if not usable_decode:
        raise Unavailable(_no_worker("decode", decode))
    sources = find_sources(request, fleet)
    prefill = price_prefill(request, fleet.prefill, sources)
    usable_prefill = _usable_prefill(prefill, request)
    much_tokens = COLD_SHARE * request.prompt_tokens
    cold = not [
        each
        for usable in usable_prefill.values()
        for each in usable
        if each.held_tokens + each.loaded_tokens > much_tokens
    ]
    pairs = []
    for group, usable in usable_prefill.items():
        if group in usable_decode:
            decode_choice = choose(usable_decode[group], request, cold=False)
            pairs.append(_pair(choose(usable, request, cold=cold), decode_choice, fleet))
    pairs.sort(key=lambda pair: pair.cost.total_ms)
    local = _price_local(request, fleet, decode, sources, has_pairs=bool(pairs))
    alone = _cheapest_alone(local, request, fleet)
    parts = {"prefill": prefill, "decode": decode, "local": local}
    if alone is not None and (reason := _local_reason(alone, pairs, prefill)):
        return _decide(request, fleet, alone, [reason], parts)
    if not pairs:
        raise Unavailable(_no_pair(prefill))
    return _decide(request, fleet, pairs[0], _pair_reasons(pairs, alone), parts, cold=cold)


def _usable_prefill(prefill: _Candidates, request: PlacementRequest) -> Mapping[Group, list[WorkerCandidate]]:
    usable, requested = usable_by_group(prefill), request.requested_prefill
    if not requested:
        return bound_load(usable, request.prompt_tokens)
    for candidate in prefill:
        if candidate.instance != requested and not candidate.refused:
            candidate.refused = "another worker is requested"
    usable = usable_by_group(prefill)
    if not usable:
        raise Unavailable(f"prefill worker {requested} is not ready")
    return usable


def _price_local(
    request: PlacementRequest,
    fleet: PlacementFleet,
    decode: _Candidates,
    sources: _Sources,
    *,
    has_pairs: bool,
) -> list[WorkerCandidate]:
    """The decode workers that may compute the prompt: not too much of it between the steps of a batch."""
    if not request.may_skip_prefill or request.requested_prefill:
        return []
    least_tokens = request.prompt_tokens - LOCAL_MAX_TOKENS if has_pairs else 0
    stored_tokens = max([store.tokens for each in sources.values() for store in each.stores], default=0)
    local = [
        price_local(request, worker, candidate, sources.get(candidate.group))
        for worker, candidate in zip(fleet.decode, decode, strict=True)
        if not candidate.refused and (stored_tokens >= least_tokens or candidate.held_tokens >= least_tokens)
    ]
    return [candidate for candidate in local if candidate.cached_tokens >= least_tokens]


def _pair(prefill: Choice, decode: Choice, fleet: PlacementFleet) -> _PricedWay:
    p, d = prefill.candidate, decode.candidate
    terms_ms = (
        *(p.queue_ms, p.prefill_ms, p.load_ms, d.transfer_ms, d.decode_queue_ms, d.step_ms),
        *(p.others_ms + d.others_ms, fleet.region_ms.get(p.group[1], 0.0)),
    )
    return _PricedWay((prefill, decode), PlacementCost(*terms_ms, sum(terms_ms)))


def _cheapest_alone(
    local: _Candidates, request: PlacementRequest, fleet: PlacementFleet
) -> _PricedWay | None:
    """The best decode worker of a group, and of these the one that is cheapest with the way to its region."""
    groups = usable_by_group(local).values()
    ways = [_alone(choose(usable, request, cold=False), fleet) for usable in groups]
    return min(ways, key=lambda way: way.cost.total_ms, default=None)


def _alone(local: Choice, fleet: PlacementFleet) -> _PricedWay:
    cost, region_ms = local.candidate.cost, fleet.region_ms.get(local.candidate.group[1], 0.0)
    return _PricedWay((local,), replace(cost, region_ms=region_ms, total_ms=cost.total_ms + region_ms))


def _local_reason(
    alone: _PricedWay, pairs: Sequence[_PricedWay], prefill: _Candidates
) -> ChoiceReason | None:
    """Why a decode worker is to compute the prompt; None if a pair is to run the request."""
    if not pairs:
        return forced_reason(alone.name, _no_pair(prefill))
    if alone.cost.total_ms + LOCAL_MARGIN_MS < pairs[0].cost.total_ms:
        return cost_reason("local", alone.name, alone.cost, pairs[0].name, pairs[0].cost)
    return None


def _pair_reasons(pairs: Sequence[_PricedWay], alone: _PricedWay | None) -> list[ChoiceReason]:
    """Why the first pair was chosen over that of another group, and over a cheaper decode worker alone."""
    pair, reasons = pairs[0], []
    if len(pairs) > 1:
        reasons.append(pair_reason(pair.name, pair.cost, pairs[1].name, pairs[1].cost))
    if alone is not None and alone.cost.total_ms < pair.cost.total_ms:
        saved_ms = pair.cost.total_ms - alone.cost.total_ms
        reasons.append(margin_reason(pair.name, alone.name, saved_ms, LOCAL_MARGIN_MS))
    return reasons


def _decide(
    request: PlacementRequest,
    fleet: PlacementFleet,
    way: _PricedWay,
    reasons: list[ChoiceReason],
    parts: Mapping[str, _Candidates],
    *,
    cold: bool = False,
) -> PlacementDecision:
    """The decision for `way`; `reasons`: why it was chosen among other ways."""
    computes, decode = way.choices[0].candidate, way.choices[-1].candidate
    words, all_reasons = [], []
    for choice in way.choices:
        part = choice.candidate.part
        why = choice.reasons(parts[part])
        words.append(f"{_PART_WORDS[part]} {describe(choice.candidate, why, request.prompt_tokens)}")
        all_reasons += why
    store = "" if computes.from_peer else computes.source
    return PlacementDecision(
        prefill="" if computes is decode else computes.instance,
        decode=decode.instance,
        kvstore=store or _kvstore(request, fleet, computes.group),
        source=computes.source or ("worker" if computes.held_tokens else "nothing"),
        reason="; ".join([*words, *[reason.text for reason in reasons]]),
        peer=computes.source if computes.from_peer else "",
        cold=cold,
        cached_tokens=computes.cached_tokens,
        uncached_tokens=computes.uncached_tokens,
        cost=way.cost,
        reasons=(*all_reasons, *reasons),
        chosen=tuple([choice.candidate for choice in way.choices]),
        candidates=tuple(chain.from_iterable(parts.values())),
    )


def _kvstore(request: PlacementRequest, fleet: PlacementFleet, group: Group) -> str:
    """The kvstore that holds most of the prompt, else one by rendezvous hashing of its content."""
    stores = [s.instance for s in fleet.stores if not s.refused and (s.transport, s.region) == group]
    if len(stores) <= 1:
        return stores[0] if stores else ""
    holders = [name for name in stores if name in request.store_held and request.store_held[name].tokens]
    if holders:
        return max(holders, key=lambda name: (request.store_held[name].tokens, name))
    return max(stores, key=lambda name: hashlib.blake2b(request.content_key + name.encode()).digest())


def _no_pair(prefill: _Candidates) -> str:
    """Why no prefill worker can run a prompt for a decode worker."""
    if usable_by_group(prefill):
        return "no usable prefill worker has the transport and the region of a usable decode worker"
    return _no_worker("prefill", prefill)


def _no_worker(role: str, candidates: _Candidates) -> str:
    reasons = sorted({candidate.refused for candidate in candidates if candidate.refused})
    return f"no {role} worker is ready" + (f": {'; '.join(reasons)}" if reasons else "")
