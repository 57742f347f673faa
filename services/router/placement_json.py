"""Placement as JSON: a fleet and a request to weigh, and what was decided and why. Pure.

The fields are those of `placement_types`; what is left out has its default. Used by `slipstream route`,
by traces and by the debug header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from libs.common.errors import InvalidArgument
from services.router.cost_model import DecodeModel, PrefillModel
from services.router.placement_types import (
    Cost,
    Decision,
    DecodeWorker,
    Fleet,
    Held,
    KvStore,
    Leg,
    PrefillWorker,
    Request,
)

T = TypeVar("T")

# A client that sends DEBUG_HEADER "1" is told the placement under PLACEMENT_HEADER: a header of the HTTP
# answer, a trailer of the gRPC one.
DEBUG_HEADER = "x-slipstream-debug"
PLACEMENT_HEADER = "x-slipstream-placement"

# A header or trailer has room for no more; the cheapest candidates are the ones of interest.
HEADER_BYTES = 4 << 10
_HEADER_CANDIDATES = 8


def fleet_from_json(document: Any) -> Fleet:
    """{"prefill": [..], "decode": [..], "stores": [..], "region_ms": {..}}. Raises InvalidArgument."""
    _check_fields(document, Fleet, "fleet")
    return Fleet(
        prefill=tuple(_prefill(row, f"prefill[{i}]") for i, row in enumerate(document.get("prefill", ()))),
        decode=tuple(_decode(row, f"decode[{i}]") for i, row in enumerate(document.get("decode", ()))),
        stores=tuple(_make(KvStore, row, f"stores[{i}]") for i, row in enumerate(document.get("stores", ()))),
        region_ms=document.get("region_ms", {}),
    )


def request_from_json(document: Any) -> Request:
    """The fields of `Request`; `content_key` in hex. Raises InvalidArgument."""
    _check_fields(document, Request, "request")
    values = dict(document)
    if "content_key" in values:
        try:
            values["content_key"] = bytes.fromhex(values["content_key"])
        except (ValueError, TypeError):
            raise InvalidArgument("request.content_key", "must be hexadecimal") from None
    stores = values.get("store_held", {})
    values["store_held"] = {name: _make(Held, row, f"store_held.{name}") for name, row in stores.items()}
    return _make(Request, values, "request")


def explanation(decision: Decision) -> dict[str, Any]:
    """All of a decision: the choice, its terms, and every candidate with its terms."""
    said = {f.name: getattr(decision, f.name) for f in fields(Decision) if f.name not in ("cost", "legs")}
    candidates = [_candidate(leg) for leg in decision.legs]
    return {**said, "cost": _terms(decision.cost), "candidates": candidates}


def header_text(decision: Decision) -> str:
    """An explanation for a header: ASCII, one line, bounded; the cheapest candidates of each part."""
    said = explanation(decision)
    candidates = sorted(said["candidates"], key=lambda c: (bool(c["refused"]), c["cost"]["total_ms"]))
    for count in range(_HEADER_CANDIDATES, -1, -1):
        said["candidates"] = candidates[:count]
        text = json.dumps(said, separators=(",", ":"))
        if len(text) <= HEADER_BYTES:
            return text
    return json.dumps({"prefill": decision.prefill, "decode": decision.decode})


def span_attributes(decision: Decision) -> dict[str, str | float | int | bool]:
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


def _candidate(leg: Leg) -> dict[str, Any]:
    row = asdict(leg)
    row["cost"] = _terms(leg.cost)
    row["transport"], row["region"] = row.pop("group")
    return row


def _terms(cost: Cost) -> dict[str, float]:
    terms = {f.name: round(getattr(cost, f.name), 3) for f in fields(Cost)}
    return {**terms, "total_ms": round(cost.total_ms, 3)}


def _prefill(row: Any, path: str) -> PrefillWorker:
    _check_fields(row, PrefillWorker, path)
    model = _make(PrefillModel, row.get("model", {}), f"{path}.model")
    return _make(PrefillWorker, {**row, "model": model, "queue": tuple(row.get("queue", ()))}, path)


def _decode(row: Any, path: str) -> DecodeWorker:
    _check_fields(row, DecodeWorker, path)
    models = {
        "model": _make(DecodeModel, row.get("model", {}), f"{path}.model"),
        "prefill_model": _make(PrefillModel, row.get("prefill_model", {}), f"{path}.prefill_model"),
    }
    return _make(DecodeWorker, {**row, **models}, path)


def _make(kind: type[T], values: Any, path: str) -> T:
    _check_fields(values, kind, path)
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidArgument(path, str(error).partition("() ")[2] or str(error)) from None


def _check_fields(document: Any, kind: type[Any], path: str) -> None:
    if not isinstance(document, Mapping):
        raise InvalidArgument(path, "must be an object")
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(document) - known)
    if unknown:
        raise InvalidArgument(f"{path}.{unknown[0]}", f"is not one of {', '.join(sorted(known))}")
