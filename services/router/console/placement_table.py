"""Why a request runs where it runs, as JSON: each candidate with each term of its price. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.placement.explanation import TERM_LABELS
from services.router.placement.types import ChoiceReason, PlacementCost, PlacementDecision, WorkerCandidate
from services.router.recording.timeline import KeptPlacement

MAX_ROWS = 64


def placement_json(kept: KeptPlacement, *, began_s: float) -> dict[str, Any]:
    """The placement of one attempt: what was chosen, why, and the cheapest candidates of each part."""
    decision = kept.decision
    return {
        "at_ms": round((kept.at_s - began_s) * 1e3, 3),
        "attempt": kept.attempt,
        "hedge": kept.is_hedge,
        "chosen": {"prefill": decision.prefill, "decode": decision.decode, "source": decision.source},
        "reason": decision.reason,
        "prompt_tokens": kept.prompt_tokens,
        "cached_tokens": decision.cached_tokens,
        "uncached_tokens": decision.uncached_tokens,
        "cold": decision.cold,
        "cost": {**terms_json(decision.cost), "total_ms": _ms(decision.cost.total_ms)},
        "reasons": [_reason_json(reason) for reason in decision.reasons],
        "candidates": [_row_json(row, decision) for row in table_rows(decision)],
        "candidates_total": len(decision.candidates),
    }


def table_rows(decision: PlacementDecision, *, limit: int = MAX_ROWS) -> Sequence[WorkerCandidate]:
    """The chosen candidates, then the usable ones by price, then the excluded ones: at most `limit`."""
    chosen = [id(candidate) for candidate in decision.chosen]

    def rank(candidate: WorkerCandidate) -> tuple[bool, bool, float, str, str]:
        is_other = id(candidate) not in chosen
        return is_other, bool(candidate.refused), candidate.total_ms, candidate.part, candidate.instance

    return sorted(decision.candidates, key=rank)[:limit]


def terms_json(cost: PlacementCost) -> dict[str, float]:
    """The terms of a price in milliseconds, by name without `_ms`."""
    return {name.removesuffix("_ms"): _ms(getattr(cost, name)) for name in TERM_LABELS}


def _row_json(row: WorkerCandidate, decision: PlacementDecision) -> dict[str, Any]:
    return {
        "part": row.part,
        "instance": row.instance,
        "prefill": row.instance if row.part == "prefill" else "",
        "decode": row.instance if row.part != "prefill" else "",
        "source": row.source,
        "chosen": any(row is chosen for chosen in decision.chosen),
        "total_ms": _ms(row.total_ms),
        "terms": terms_json(row.cost),
        "held_tokens": row.held_tokens,
        "loaded_tokens": row.loaded_tokens,
        "uncached_tokens": row.uncached_tokens,
        "excluded": row.refused or None,
    }


def _reason_json(reason: ChoiceReason) -> dict[str, Any]:
    return {
        "part": reason.part,
        "chosen": reason.chosen,
        "rule": reason.rule,
        "text": reason.text,
        "against": reason.against,
        "term": reason.term.removesuffix("_ms"),
        "difference_ms": _ms(reason.difference_ms),
    }


def _ms(value: float) -> float:
    return round(value, 3)
