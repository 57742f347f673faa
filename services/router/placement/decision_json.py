"""What placement decided and why, as JSON. Pure.

The fields are those of `placement_types`. Used by `slipstream route`, by traces and by the debug header; what
`slipstream route` reads is in `placement_input.py`.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import asdict, fields

from services.router.placement.types import Cost, PlacementDecision, WorkerCandidate

# A client that sends DEBUG_HEADER "1" is told the placement under PLACEMENT_HEADER: a header of the HTTP
# answer, a trailer of the gRPC one.
DEBUG_HEADER = "x-slipstream-debug"
PLACEMENT_HEADER = "x-slipstream-placement"

# A header or trailer has room for no more; the cheapest candidates are the ones of interest.
HEADER_BYTES = 4 << 10
_HEADER_CANDIDATES = 8


def explanation(decision: PlacementDecision) -> dict[str, Any]:
    """All of a decision: the choice, its terms, and every candidate with its terms."""
    said = {
        f.name: getattr(decision, f.name) for f in fields(PlacementDecision) if f.name not in ("cost", "legs")
    }
    candidates = [_candidate(leg) for leg in decision.legs]
    return {**said, "cost": _terms(decision.cost), "candidates": candidates}


def header_text(decision: PlacementDecision) -> str:
    """An explanation for a header: ASCII, one line, bounded; the cheapest candidates of each part."""
    said = explanation(decision)
    candidates = sorted(said["candidates"], key=lambda c: (bool(c["refused"]), c["cost"]["total_ms"]))
    for count in range(_HEADER_CANDIDATES, -1, -1):
        said["candidates"] = candidates[:count]
        text = json.dumps(said, separators=(",", ":"))
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


def _candidate(leg: WorkerCandidate) -> dict[str, Any]:
    row = asdict(leg)
    row["cost"] = _terms(leg.cost)
    row["transport"], row["region"] = row.pop("group")
    return row


def _terms(cost: Cost) -> dict[str, float]:
    terms = {f.name: round(getattr(cost, f.name), 3) for f in fields(Cost)}
    return {**terms, "total_ms": round(cost.total_ms, 3)}
