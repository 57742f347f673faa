"""A fleet and a request for placement, from JSON: the fields of `types.py`, with the same defaults. Pure.

People write these files: every value is checked, and an error names the path of the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from services.router.placement.cost_model import DecodeModel, PrefillModel
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)
from slipstream.errors import InvalidArgument

T = TypeVar("T", bound=msgspec.Struct)
Read = Callable[[Any, str], Any]

_MOST = 1 << 63


def fleet_from_json(document: Any) -> PlacementFleet:
    """{"prefill": [..], "decode": [..], "stores": [..], "region_ms": {..}}. Raises InvalidArgument."""
    fleet = _record(
        PlacementFleet,
        document,
        "fleet",
        prefill=_list_of(_record_of(PrefillWorker, model=_record_of(PrefillModel))),
        decode=_list_of(
            _record_of(
                DecodeWorker,
                model=_record_of(DecodeModel),
                prefill_model=_record_of(PrefillModel),
                block_tokens=_positive,
            )
        ),
        stores=_list_of(_record_of(KvStore)),
    )
    for name in ("prefill", "decode", "stores"):
        _check_names(getattr(fleet, name), name)
    return fleet


def request_from_json(document: Any) -> PlacementRequest:
    """The fields of `PlacementRequest`; `content_key` in hex. Raises InvalidArgument."""
    return _record(
        PlacementRequest,
        document,
        "request",
        prompt_tokens=_positive,
        seed=_whole,
        store_held=_map_of(_record_of(HeldTokens)),
    )


def _record(kind: type[T], document: Any, path: str, **readers: Read) -> T:
    """A record, read by the types of its fields; `readers` are for fields with a bound."""
    if not isinstance(document, Mapping):
        raise InvalidArgument(path, "must be an object")
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise InvalidArgument(f"{path}.{unknown[0]}", f"is not one of {', '.join(sorted(known))}")
    inside = "" if path == "fleet" else f"{path}."
    values = {
        name: (readers.get(name) or _READERS[known[name].type])(value, f"{inside}{name}")
        for name, value in document.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidArgument(path, str(error)) from None


def _record_of(kind: type[Any], **readers: Read) -> Read:
    return lambda value, path: _record(kind, value, path, **readers)


def _list_of(read: Read) -> Read:
    def read_all(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise InvalidArgument(path, "must be a list")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_all


def _map_of(read: Read) -> Read:
    def read_all(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidArgument(path, "must be an object")
        return {name: read(item, f"{path}.{name}") for name, item in value.items()}

    return read_all


def _whole(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MOST:
        raise InvalidArgument(path, f"must be a whole number up to {_MOST}")
    return value


def _count(value: Any, path: str) -> int:
    if _whole(value, path) < 0:
        raise InvalidArgument(path, "must not be negative")
    return int(value)


def _positive(value: Any, path: str) -> int:
    if _whole(value, path) < 1:
        raise InvalidArgument(path, "must be at least 1")
    return int(value)


def _milliseconds(value: Any, path: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise InvalidArgument(path, f"must be a number from 0 to {_MOST}")
    return float(value)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidArgument(path, "must be a string of characters that can be printed")
    return value


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(path, "must be true or false")
    return value


def _hex(value: Any, path: str) -> bytes:
    try:
        return bytes.fromhex(value)
    except (ValueError, TypeError):
        raise InvalidArgument(path, "must be hexadecimal") from None


def _optional(read: Read) -> Read:
    return lambda value, path: None if value is None else read(value, path)


def _check_names(rows: tuple[Any, ...], path: str) -> None:
    """Refuse equal names, for which the maps of a request would count twice, and empty ones, which stand for
    no worker in a decision."""
    seen: set[str] = set()
    for index, row in enumerate(rows):
        if not row.instance:
            raise InvalidArgument(f"{path}[{index}].instance", "must not be empty")
        if row.instance in seen:
            raise InvalidArgument(f"{path}[{index}].instance", f"{row.instance!r} is there twice")
        seen.add(row.instance)


# By the annotation of a field.
_READERS: Mapping[object, Read] = {
    int: _count,
    float: _milliseconds,
    str: _text,
    bool: _flag,
    bytes: _hex,
    int | None: _optional(_count),
    tuple[int, ...]: _list_of(_count),
    Mapping[str, int]: _map_of(_count),
    Mapping[str, float]: _map_of(_milliseconds),
}
