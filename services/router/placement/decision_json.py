"""A placement decision and its reasons as JSON. Pure.

The fields are those of `types.py`. `slipstream route`, traces and the debug header use them; `fleet_json.py`
reads the input of `slipstream route`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from msgspec.structs import asdict

from services.router.placement.types import Cost, PlacementDecision, WorkerCandidate

# A client that sends DEBUG_HEADER "1" gets the placement under PLACEMENT_HEADER, in a header of an HTTP
# response or in a trailer of a gRPC one.
DEBUG_HEADER = "x-slipstream-debug"
PLACEMENT_HEADER = "x-slipstream-placement"

# The room in a header or trailer. It lists the cheapest candidates.
HEADER_BYTES = 4 << 10
_HEADER_CANDIDATES = 8


_OWN_FORM = ("cost", "chosen", "list_candidates")  # fields of a decision with a form of their own, or none


def explanation(decision: PlacementDecision) -> dict[str, Any]:
    """A decision as a document: the choice, its terms and reasons, and all candidates with their terms."""
    document = {
        field.name: getattr(decision, field.name)
        for field in dataclasses.fields(PlacementDecision)
        if field.name not in _OWN_FORM
    }
    return {
        **document,
        "reasons": [asdict(reason) for reason in decision.reasons],
        "cost": _terms(decision.cost),
        "candidates": [_candidate(candidate) for candidate in decision.candidates],
    }


def header_text(decision: PlacementDecision) -> str:
    """An explanation for a header: ASCII, one line, at most HEADER_BYTES, with the cheapest candidates."""
    document = explanation(decision)
    candidates = sorted(document["candidates"], key=lambda c: (bool(c["refused"]), c["cost"]["total_ms"]))
    for count in range(_HEADER_CANDIDATES, -1, -1):
        document["candidates"] = candidates[:count]
        text = json.dumps(document, separators=(",", ":"))
        if len(text) <= HEADER_BYTES:
            return text
    return json.dumps({"prefill": decision.prefill, "decode": decision.decode})


def span_attributes(decision: PlacementDecision) -> dict[str, str | float | int | bool]:
    """The choice and its terms as attributes of a trace span."""
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
    row = asdict(candidate)
    row["cost"] = _terms(candidate.cost)
    row["transport"], row["region"] = row.pop("group")
    return row


def _terms(cost: Cost) -> dict[str, float]:
    terms = {name: round(value, 3) for name, value in asdict(cost).items()}
    return {**terms, "total_ms": round(cost.total_ms, 3)}
