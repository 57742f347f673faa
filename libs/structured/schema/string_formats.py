"""Patterns for what llguidance's formats leave open: leap days, leap seconds, the year 0. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = f"(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-[0-9]{{2}}|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_FRACTION = "[.0-9]*"  # of the form that llguidance's own format gives it


def _leap_second(hour: int) -> str:
    """The leap second at this local hour, 23:59:60 UTC, with the offsets of time zones: :00, :30 and :45."""
    west = 23 - hour
    zones = [f"59:60{_FRACTION}(?:\\+{(hour + 1) % 24:02}|-{west:02}):00"]
    zones += [
        f"{minutes - 1}:60{_FRACTION}\\+{hour:02}:{minutes}|{59 - minutes}:60{_FRACTION}-{west:02}:{minutes}"
        for minutes in (30, 45)
    ]
    return f"{hour:02}:(?:{'|'.join(zones)})"


_LEAP_SECONDS = "|".join(map(_leap_second, range(24)))
_SECOND = f"(?:[0-9]{{2}}:[0-9]{{2}}:[0-5]|(?:23:59:60{_FRACTION}[Zz]|{_LEAP_SECONDS})$)"
_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DAY}$",
    "date-time": f"^{_DAY}[Tt]{_SECOND}",
    "time": f"^{_SECOND}",
}


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a pattern beside its format of dates and times."""
    stated = schema.get("format")
    pattern = _PATTERNS.get(stated) if isinstance(stated, str) else None
    if pattern is None:
        return schema
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    if isinstance(schema.get("allOf", []), list):
        return {**schema, "allOf": [*schema.get("allOf", []), {"pattern": pattern}]}
    return schema
