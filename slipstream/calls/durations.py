"""Durations of callers, in seconds, as messages hold them. Pure."""

from __future__ import annotations

import math

from slipstream.errors import InvalidArgument

_MOST_SECONDS = 10**12  # what a message can hold; a router allows less


def milliseconds(field: str, seconds: float) -> int:
    """The seconds in whole milliseconds. Raises InvalidArgument naming the field."""
    if not 0 <= seconds < _MOST_SECONDS:
        raise InvalidArgument(field, f"must be from 0 to {_MOST_SECONDS} seconds")
    return math.ceil(seconds * 1e3)  # a part of a millisecond is not 0, the default
