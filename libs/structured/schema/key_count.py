"""How many different keys an object may have, counted in llguidance's grammar of them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from libs.structured.schema.schema_walk import Json

# Without \u: a key that is not declared could spell a declared one with it, and one key has one spelling.
PLAIN_ESCAPES = 'nrbtf\\"'
# Counting takes about 50 us of CPU time a key.
_MAX_COUNTED = 4096
_QUOTE, _BACKSLASH = b'"\\'
_LEAF = {"type": "null"}
_ESCAPES_AND_CLASSES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
_INNER_GROUP = re.compile(r"\([^()^$]*\)")
_ENDLESS_REPEAT = re.compile(r"[*+]|\{[0-9]+,\}")


def may_lack_keys(part: Json, n_keys: int) -> bool:
    """Whether fewer than `n_keys` different keys fit. Beyond 4,096 only endless patterns have enough."""
    patterns = part.get("patternProperties")
    if not isinstance(patterns, Mapping) or not patterns or not _may_be_object(part):
        return False
    forbids = any(value is False for value in patterns.values())
    is_closed = part.get("additionalProperties") is False
    if not forbids and not is_closed:
        return False
    grammar = _first_keys(part)
    if grammar.is_error():
        return False  # the whole schema does not compile either
    if not _has_keys(grammar, min(n_keys, _MAX_COUNTED)):
        return True
    return n_keys > _MAX_COUNTED and is_closed and not any(map(_is_endless, patterns))


def _may_be_object(part: Json) -> bool:
    kind = part.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _is_endless(pattern: str) -> bool:
    """Whether the pattern repeats without an end, or has a branch that begins or ends anywhere in a key."""
    text = _ESCAPES_AND_CLASSES.sub("a", pattern)
    if _ENDLESS_REPEAT.search(text):
        return True
    while (shorter := _INNER_GROUP.sub("a", text)) != text:
        text = shorter
    branches = text.split("|")
    return "(" not in text and any(not (item[:1] == "^" and item[-1:] == "$") for item in branches)


def _first_keys(part: Json) -> LLMatcher:
    """A grammar of bytes that allows each key of the object as its first."""

    def leaves(name: str) -> dict[str, Any]:
        found = part.get(name)
        items = found.items() if isinstance(found, Mapping) else ()
        return {key: False if value is False else _LEAF for key, value in items}

    schema = {
        "type": "object",
        "properties": leaves("properties"),
        "patternProperties": leaves("patternProperties"),
        "additionalProperties": False if part.get("additionalProperties") is False else _LEAF,
        "x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": PLAIN_ESCAPES},
    }
    return LLMatcher(LLTokenizer("byte"), json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0)


def _has_keys(grammar: LLMatcher, n_keys: int) -> bool:
    """Whether the grammar has so many keys, read byte by byte.

    Each begin of a key leads to at least one key that no other begin of its length leads to.
    """
    grammar.consume_tokens(list(b"{"))
    if _QUOTE not in _allowed(grammar):
        return n_keys <= 0
    grammar.consume_token(_QUOTE)
    n_ended = 0
    begins = [(grammar, False)]
    while begins:
        longer: list[tuple[LLMatcher, bool]] = []
        for begin, is_escaped in begins:
            following = _allowed(begin)
            if not is_escaped and _QUOTE in following:
                following.remove(_QUOTE)
                n_ended += 1
            for i, byte in enumerate(following):
                next_one = begin if i == len(following) - 1 else begin.deep_copy()
                next_one.consume_token(byte)
                longer.append((next_one, byte == _BACKSLASH and not is_escaped))
                if n_ended + len(longer) >= n_keys:
                    return True
        begins = longer
    return n_ended >= n_keys


def _allowed(grammar: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed: Sequence[int] = np.flatnonzero(bits[:256]).tolist()
    return list(allowed)
