"""A placement and the reasons for it, as JSON. Pure.

The fields are those of `types.py`. `slipstream route`, traces and the debug header show them. `fleet_json.py`
reads the input of `slipstream route`.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import asdict, fields

from services.router.placement.types import PlacementCost, PlacementDecision, WorkerCandidate

# A client that sends DEBUG_HEADER "1" gets the placement under PLACEMENT_HEADER: a header of the HTTP answer,
# a trailer of the gRPC one.
DEBUG_HEADER = "x-slipstream-debug"
PLACEMENT_HEADER = "x-slipstream-placement"

# The bound of a header. The cheapest candidates are listed first, and of these no more than fit.
HEADER_BYTES = 4 << 10
_HEADER_CANDIDATES = 8


def explanation(decision: PlacementDecision) -> dict[str, Any]:
    """All of a decision: the choice, its reasons and terms, and every candidate with its terms."""
    shown = {
        field.name: getattr(decision, field.name)
        for field in fields(PlacementDecision)
        if field.name not in ("cost", "reasons", "chosen", "candidates")
    }
    return {
        **shown,
        "cost": _terms(decision.cost),
        "reasons": [asdict(reason) for reason in decision.reasons],
        "candidates": [_candidate(candidate) for candidate in decision.candidates],
    }


def header_text(decision: PlacementDecision) -> str:
    """An explanation for a header: ASCII, one line, bounded; the cheapest candidates of each part."""
    shown = explanation(decision)
    del shown["reasons"]  # in words in "reason"
    candidates = sorted(shown["candidates"], key=lambda c: (bool(c["refused"]), c["cost"]["total_ms"]))
    for count in range(_HEADER_CANDIDATES, -1, -1):
        shown["candidates"] = candidates[:count]
        text = json.dumps(shown, separators=(",", ":"))
        if len(text) <= HEADER_BYTES:
            return text
    return json.dumps({"prefill": decision.prefill, "decode": decision.decode})


def span_attributes(decision: PlacementDecision) -> dict[str, str | float | int | bool]:
    """The choice and its terms, flat, for a trace."""
    terms = {f"placement.{name}": value for name, value in _terms(decision.cost).items()}
    return {
        "placement.prefill": decision.prefill,
        "placement.decode": decision.decode,
        "placement.kvstore": decision.kvstore,
        "placement.peer": decision.peer,
        "placement.source": decision.source,
        "placement.reason": decision.reason,
        "placement.cold": decision.cold,
        "placement.cached_tokens": decision.cached_tokens,
        "placement.uncached_tokens": decision.uncached_tokens,
        **terms,
    }


def _candidate(candidate: WorkerCandidate) -> dict[str, Any]:
    row = {name: value for name, value in asdict(candidate).items() if not name.endswith("_ms")}
    row["cost"] = _terms(candidate.cost)
    row["transport"], row["region"] = row.pop("group")
    return row


def _terms(cost: PlacementCost) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(cost).items()}
