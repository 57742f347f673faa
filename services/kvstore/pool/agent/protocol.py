"""Messages between a node and its pool agent: one JSON object per line over a socket pair.

node -> agent   {"id": 7, "do": "find", "keys": [hex, ..]}
                {"id": 8, "do": "get" | "put", "keys": [..], "at": [offset, ..], "sizes": [..]}
                {"id": 9, "do": "drop", "keys": [..]}    {"id": 10, "do": "clear"}    {"do": "close"}
                {"id": 11, "do": "list", "whole": bool}  all values, or the changes since the last list
                {"id": 12, "do": "headers", "keys": [..], "at": [offset, ..]}   the headers of values
agent -> node   {"ready": "host:port"}                   once, when its segment is in the pool
                {"id": 7, "sizes": [..]}                 0 = miss
                {"id": 8, "outcome": [..], "late": bool, "failovers": n, "removed": n}
                                                         each is a length, MISSING, UNREACHABLE or CORRUPT
                {"id": 9, "dropped": n}
                {"id": 11, "new": [..], "gone": [..], "more": bool, "segments": [name, ..]}
                or {"id": 11, "list_error": "why"}
                {"id": 12, "arrived": [bool, ..], "late": bool}
                {"id": 8, "error": "..."}                the call failed
                {"reads_ended": 8}                       after late: no byte of it can land any more
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# A line has about 40 bytes per block.
MAX_LINE_BYTES = 4 << 20
# Outcomes of a value that a get did not read.
MISSING, UNREACHABLE, CORRUPT = 0, -1, -2


def packed(message: Mapping[str, Any]) -> bytes:
    """The message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def unpacked(line: bytes) -> dict[str, Any]:
    """The message of a line. Raises ValueError if it is not an object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def keys_of(message: Mapping[str, Any]) -> list[bytes]:
    """The hashes in a message."""
    return [bytes.fromhex(text) for text in message["keys"]]
