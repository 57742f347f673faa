"""What a grammar states to the key guard: how many keys an object has to have that repeats one. Pure.

The numbers hold for the text and for the arguments of each tool apart. Text that is no JSON has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.errors import InvalidArgument

# The name of the answer's text among those of tools, which are never empty.
TEXT = ""
_FIELD = "x-slipstream-distinct-keys"
# llguidance takes the field for an annotation. It comes first, so no text of a client can be in its place.
_BEGIN = f'{{"{_FIELD}": '


def with_stated_keys(n_distinct: Mapping[str, int], grammars: Sequence[Mapping[str, Any]]) -> str:
    """The whole grammar with the numbers by name before its parts; without any it states nothing."""
    stated = {_FIELD: n_distinct} if n_distinct else {}
    return json.dumps({**stated, "grammars": grammars})


def stated_keys(grammar: str) -> dict[str, int]:
    """The numbers by name that a grammar states before its parts. Raises InvalidArgument for other values."""
    if not grammar.startswith(_BEGIN):
        return {}
    try:
        stated, _ = json.JSONDecoder().raw_decode(grammar, len(_BEGIN))
        return msgspec.convert(stated, dict[str, int])
    except (ValueError, RecursionError):
        raise InvalidArgument("grammar", f"has a malformed {_FIELD}") from None
