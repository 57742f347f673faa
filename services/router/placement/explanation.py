"""Which rule and which term of the cost decided a placement, in words. Pure.

A choice by cost is explained against the cheapest usable alternative. The text names the term by which that
alternative exceeds the chosen worker most. A worker that holds more KV than the chosen one is named as well,
with the reason why it was passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, sub

from services.router.placement.types import ChoiceReason, PlacementCost, WorkerCandidate

# Values of `ChoiceReason.rule`.
BY_COST = "cost"  # it costs least
BY_ROUND_ROBIN = "round_robin"  # of workers that cost about the same, it got a cold prompt longest ago
BY_HELD = "held"  # of workers that cost the same, it holds most of the prompt
BY_DRAW = "draw"  # of workers that are equal, the seed picked it
BY_NAME = "name"  # of pairs that cost the same, its group comes first by name
ONLY_ONE = "only"  # no other worker of its group may be used
REQUESTED = "requested"  # the client named it
REFUSED = "refused"  # `against` holds more KV and may not be used
MARGIN = "margin"  # `against` would save too little time to disturb a decode batch

TERM_LABELS = {
    "queue_ms": "prefill wait",
    "prefill_ms": "prompt computation",
    "load_ms": "KV load",
    "transfer_ms": "KV transfer",
    "decode_queue_ms": "wait for the batch",
    "step_ms": "decode time",
    "others_ms": "delay of other requests",
    "region_ms": "network time",
}
_TERMS = tuple(TERM_LABELS)
_term_values = attrgetter(*_TERMS)


def largest_difference(chosen: PlacementCost, other: PlacementCost) -> tuple[str, float]:
    """The term by which `other` exceeds `chosen` most, and by how many milliseconds."""
    differences_ms = list(map(sub, _term_values(other), _term_values(chosen)))
    difference_ms = max(differences_ms)
    return _TERMS[differences_ms.index(difference_ms)], difference_ms


def cost_reason(
    part: str, chosen: str, cost: PlacementCost, against: str, other: PlacementCost, *, holds: str = ""
) -> ChoiceReason:
    """`against` costs more. `holds`: words on what it holds, if that is why it is named."""
    term, difference_ms = largest_difference(cost, other)
    longer = f"{TERM_LABELS[term]} is {difference_ms:.1f} ms longer on {against}"
    if holds:
        longer = f"{against} {holds} but its {TERM_LABELS[term]} is {difference_ms:.1f} ms longer"
    return ChoiceReason(part, chosen, BY_COST, longer, against, term, difference_ms)


def choice_reason(
    chosen: WorkerCandidate, rule: str, against: WorkerCandidate | None, *, n_alike: int, limit_ms: float
) -> ChoiceReason:
    """Why a worker was chosen for one part. `against`: the cheapest other; `n_alike`: the workers among which
    the rule picked, which cost at most `limit_ms`."""
    if rule == BY_COST and against is not None:
        return cost_reason(chosen.part, chosen.instance, chosen.cost, against.instance, against.cost)
    if rule == ONLY_ONE:
        may = "that may compute the prompt" if chosen.part == "local" else "that may be used"
        text = f"is the only worker of its group {may}"
    elif rule == REQUESTED:
        text = "is the requested worker"
    else:
        alike = f"{n_alike} workers that cost at most {limit_ms:.1f} ms"
        turn = "got a cold prompt longest ago of"
        if not chosen.last_cold:
            turn = "got no cold prompt yet, unlike the others of"
        text = {
            BY_ROUND_ROBIN: f"{turn} {alike}",
            BY_HELD: f"holds most of {alike}",
            BY_DRAW: f"was drawn by the seed from {alike}",
        }[rule]
    return ChoiceReason(chosen.part, chosen.instance, rule, text)


def holder_reason(chosen: WorkerCandidate, holder: WorkerCandidate) -> list[ChoiceReason]:
    """Why the worker that holds most of the prompt was passed over; empty if it costs no more."""
    holds = f"holds {holder.held_tokens} tokens"
    if holder.refused:
        text = f"{holder.instance} {holds} but is refused: {holder.refused}"
        return [ChoiceReason(chosen.part, chosen.instance, REFUSED, text, holder.instance)]
    if holder.total_ms <= chosen.total_ms:
        return []
    return [cost_reason(chosen.part, chosen.instance, chosen.cost, holder.instance, holder.cost, holds=holds)]


def pair_reason(chosen: str, cost: PlacementCost, against: str, other: PlacementCost) -> ChoiceReason:
    """Why a pair of workers was chosen over the one of another group, which costs no less."""
    if other.total_ms > cost.total_ms:
        return cost_reason("pair", chosen, cost, against, other)
    return ChoiceReason("pair", chosen, BY_NAME, f"{against} costs the same", against)


def margin_reason(chosen: str, local: str, saved_ms: float, margin_ms: float) -> ChoiceReason:
    """Why the prompt is not computed on a decode worker although that costs less."""
    needed = f"more than {margin_ms:.0f} ms are needed"
    text = f"computing the prompt on {local} would save {saved_ms:.1f} ms, but {needed}"
    return ChoiceReason("pair", chosen, MARGIN, text, local)


def forced_reason(chosen: str, no_prefill: str) -> ChoiceReason:
    """Why a decode worker computes the prompt whatever it costs: `no_prefill`, in words."""
    return ChoiceReason("local", chosen, ONLY_ONE, no_prefill)


def describe(candidate: WorkerCandidate, reasons: Sequence[ChoiceReason], prompt_tokens: int) -> str:
    """A chosen candidate with its KV, its cost and the reasons of its part."""
    kv = f" holds {candidate.held_tokens} of {prompt_tokens} tokens" if candidate.held_tokens else ""
    if candidate.loaded_tokens:
        kv += f"{' and' if kv else ''} loads {candidate.loaded_tokens} tokens from {candidate.source}"
    why = ", ".join([reason.text for reason in reasons])
    return f"{candidate.instance}{kv} ({candidate.total_ms:.1f} ms): {why}"
