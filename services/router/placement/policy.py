"""Where a request runs: (request, fleet) -> (prefill, decode, kvstore, reasons). Pure.

Every way to run the request is priced in predicted milliseconds (terms: `types.Cost`, rates: `cost_model.py`,
columns: `pricing.py`), and the cheapest is chosen:

    prefill p, KV from s   wait for the prompts served first + prefill(what neither p nor s holds)
                           + load(what s holds) + delay of the prompts served later; s is a kvstore or a peer
    decode d               transfer(bytes that d lacks) + wait for pages
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
* A pinned prefill worker is used whatever it costs, and its load is not bounded.

docs/adr/0008-price-placements-in-predicted-milliseconds.md gives the reasons.
`tests/router/placement/reference.py` is the same decision, written for one worker at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from services.router.placement.explanation import (
    cost_reason,
    describe,
    forced_reason,
    margin_reason,
    pair_reason,
)
from services.router.placement.fleet_arrays import FleetArrays, Group, HeldColumns
from services.router.placement.kv_source import is_refused
from services.router.placement.pricing import LocalPricer, price_decode, price_prefill
from services.router.placement.selection import CandidateSet, Choice
from services.router.placement.types import (
    ChoiceReason,
    Cost,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    WorkerCandidate,
)
from slipstream.errors import Unavailable

# A request is cold if no prefill worker has more than this share of its prompt.
COLD_SHARE = 0.1
# A decode worker computes at most this many tokens of a prompt between the steps of its batch while a prefill
# worker is there, and only if that saves more than this time.
LOCAL_MAX_TOKENS = 512
LOCAL_MARGIN_MS = 25.0

_ListCandidates = Callable[[], tuple[WorkerCandidate, ...]]


@dataclass(slots=True)
class _Pair:
    """A prefill and a decode worker of one group."""

    prefill: Choice
    decode: Choice
    cost: Cost

    @property
    def name(self) -> str:
        return f"{self.prefill.candidate.instance} with {self.decode.candidate.instance}"


@dataclass(slots=True)
class _Local:
    """A decode worker that computes the prompt itself."""

    choice: Choice
    cost: Cost


def place(request: PlacementRequest, fleet: FleetArrays, held: HeldColumns) -> PlacementDecision:
    """Choose workers. Raises Unavailable when a tier has no usable worker. `held` stands for the maps of the
    request by instance, which are not read."""
    prices = price_decode(request, fleet.decode, held)
    decode = CandidateSet(request, prices, request.failed_decode)
    if not decode.usable:
        raise Unavailable(_no_worker("decode", decode))
    decode.bound_load()
    prefill = _prefill_candidates(request, fleet, held)
    cold = not prefill.is_cached_beyond(COLD_SHARE * request.prompt_tokens)
    pairs = _pairs(prefill.choose_by_group(cold=cold), decode.choose_by_group(cold=False), fleet)
    pricer, local = None, None
    most_tokens = LOCAL_MAX_TOKENS if pairs else request.prompt_tokens
    if request.may_skip_prefill and not request.pinned_prefill:
        pricer = LocalPricer(request, fleet, prices)
        if pricer.may_compute_at_most(most_tokens):
            local = _best_local(_on_decode(decode, pricer, most_tokens), fleet)

    def list_candidates() -> tuple[WorkerCandidate, ...]:
        sets = [prefill, decode]
        if pricer is not None:
            sets.append(_on_decode(decode, pricer, most_tokens))
        return tuple([candidate for part in sets for candidate in part.candidates()])

    if local is not None and (reason := _local_reason(local, pairs, prefill)):
        return _decide_local(request, fleet, local, reason, list_candidates)
    if not pairs:
        raise Unavailable(_no_worker("prefill", prefill))
    reasons = _pair_reasons(pairs, local)
    return _decide_pair(request, fleet, pairs[0], reasons, list_candidates, cold=cold)


def place_records(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision:
    """`place` for a fleet of records, as `slipstream route` and simulations have it."""
    arrays = FleetArrays(fleet)
    return place(request, arrays, HeldColumns.of(request, arrays))


def _prefill_candidates(request: PlacementRequest, fleet: FleetArrays, held: HeldColumns) -> CandidateSet:
    prefill = CandidateSet(request, price_prefill(request, fleet, held), request.failed_prefill)
    pinned = request.pinned_prefill
    if not pinned:
        prefill.bound_load()
        return prefill
    prefill.keep_only(pinned)
    if not prefill.usable:
        raise Unavailable(f"prefill worker {pinned} is not ready")
    return prefill


def _pairs(
    prefill: Mapping[Group, Choice], decode: Mapping[Group, Choice], fleet: FleetArrays
) -> list[_Pair]:
    """The best pair of each group, the cheapest first."""
    pairs = []
    for group in prefill:
        if group in decode:
            cost = prefill[group].candidate.cost.plus(decode[group].candidate.cost)
            pairs.append(_Pair(prefill[group], decode[group], _with_region(cost, group, fleet)))
    return sorted(pairs, key=lambda pair: pair.cost.total_ms)


def _on_decode(decode: CandidateSet, pricer: LocalPricer, most_tokens: int) -> CandidateSet:
    local = decode.with_prices(pricer.price())
    local.bound_computation(most_tokens)
    return local


def _best_local(on_decode: CandidateSet, fleet: FleetArrays) -> _Local | None:
    if not on_decode.usable:
        return None
    choice = on_decode.choose_of_all()
    return _Local(choice, _with_region(choice.candidate.cost, choice.candidate.group, fleet))


def _with_region(cost: Cost, group: Group, fleet: FleetArrays) -> Cost:
    region_ms = fleet.region_ms.get(group[1], 0.0)
    return replace(cost, region_ms=region_ms) if region_ms else cost


def _local_reason(local: _Local, pairs: Sequence[_Pair], prefill: CandidateSet) -> ChoiceReason | None:
    """Why the decode worker is to compute the prompt; None if a pair is to run the request."""
    instance = local.choice.candidate.instance
    if not pairs:
        return forced_reason(instance, _no_worker("prefill", prefill))
    pair = pairs[0]
    if local.cost.total_ms + LOCAL_MARGIN_MS < pair.cost.total_ms:
        return cost_reason("local", instance, local.cost, pair.name, pair.cost)
    return None


def _pair_reasons(pairs: Sequence[_Pair], local: _Local | None) -> list[ChoiceReason]:
    """Why the first pair was chosen over that of another group, and over a cheaper decode worker alone."""
    pair, reasons = pairs[0], []
    if len(pairs) > 1:
        reasons.append(pair_reason(pair.name, pair.cost, pairs[1].name, pairs[1].cost))
    if local is not None and local.cost.total_ms < pair.cost.total_ms:
        saved_ms = pair.cost.total_ms - local.cost.total_ms
        reasons.append(margin_reason(pair.name, local.choice.candidate.instance, saved_ms, LOCAL_MARGIN_MS))
    return reasons


def _decide_pair(
    request: PlacementRequest,
    fleet: FleetArrays,
    pair: _Pair,
    reasons: list[ChoiceReason],
    list_candidates: _ListCandidates,
    *,
    cold: bool,
) -> PlacementDecision:
    prefill, decode = pair.prefill.candidate, pair.decode.candidate
    words = [f"prefill {_describe(request, pair.prefill)}", f"decode {_describe(request, pair.decode)}"]
    return PlacementDecision(
        prefill=prefill.instance,
        decode=decode.instance,
        kvstore=(prefill.source if not prefill.from_peer else "") or _kvstore(request, fleet, prefill.group),
        peer=prefill.source if prefill.from_peer else "",
        source=prefill.source or ("worker" if prefill.held_tokens else "nothing"),
        reason="; ".join([*words, *[reason.text for reason in reasons]]),
        cold=cold,
        cached_tokens=prefill.held_tokens + prefill.loaded_tokens,
        uncached_tokens=prefill.uncached_tokens,
        cost=pair.cost,
        reasons=(*pair.prefill.reasons, *pair.decode.reasons, *reasons),
        chosen=(prefill, decode),
        list_candidates=list_candidates,
    )


def _decide_local(
    request: PlacementRequest,
    fleet: FleetArrays,
    local: _Local,
    reason: ChoiceReason,
    list_candidates: _ListCandidates,
) -> PlacementDecision:
    candidate = local.choice.candidate
    return PlacementDecision(
        prefill="",
        decode=candidate.instance,
        kvstore=candidate.source or _kvstore(request, fleet, candidate.group),
        source=candidate.source or ("worker" if candidate.held_tokens else "nothing"),
        reason=f"the decode worker computes the prompt: {_describe(request, local.choice)}; {reason.text}",
        cached_tokens=candidate.held_tokens + candidate.loaded_tokens,
        uncached_tokens=candidate.uncached_tokens,
        cost=local.cost,
        reasons=(*local.choice.reasons, reason),
        chosen=(candidate,),
        list_candidates=list_candidates,
    )


def _describe(request: PlacementRequest, choice: Choice) -> str:
    return describe(choice.candidate, choice.reasons, request.prompt_tokens)


def _kvstore(request: PlacementRequest, fleet: FleetArrays, group: Group) -> str:
    """The kvstore that holds most of the prompt, else one by rendezvous hashing of its content."""
    stores = [
        store.instance
        for store in fleet.stores
        if (store.transport, store.region) == group and not is_refused(store, request)
    ]
    if len(stores) <= 1:
        return stores[0] if stores else ""
    holders = [name for name in stores if name in request.store_held and request.store_held[name].tokens]
    if holders:
        return max(holders, key=lambda name: (request.store_held[name].tokens, name))
    return max(stores, key=lambda name: hashlib.blake2b(request.content_key + name.encode()).digest())


def _no_worker(role: str, candidates: CandidateSet) -> str:
    reasons = candidates.refusals()
    return f"no {role} worker is ready" + (f": {'; '.join(reasons)}" if reasons else "")
