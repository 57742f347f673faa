"""`minProperties` where keys are not declared: which schemas need the key guard, and how many keys.

llguidance counts a key that occurs twice as two, and a reader counts it once. A grammar cannot compare keys,
so `key_guard.py` does.
"""

from __future__ import annotations

import re

from libs.structured.schema.schema_walk import Json, Parts, path_text

# The field by which a whole grammar states the number. llguidance takes it for an annotation. It comes first,
# so that no text of a client can be in its place.
DISTINCT_KEYS = "x-slipstream-distinct-keys"
_STATED = re.compile(rf'\{{"{DISTINCT_KEYS}": ([0-9]{{1,9}}), ')
_ESCAPES_AND_CLASSES = re.compile(r"\\[wdsWDSpP]|\[(?:\\.|[^\]\\])*\]")
_REPEATS = re.compile(r"[.*+{]")


def count_distinct_keys(parts: Parts) -> int:
    """How many keys an object has to have that repeats one; 0 where the key guard has nothing to compare."""
    return max((_least(part) for _, part in parts if "minProperties" in part), default=0)


def stated_distinct_keys(grammar: str) -> int:
    """The number that a grammar states before its parts."""
    stated = _STATED.match(grammar)
    return int(stated.group(1)) if stated is not None else 0


def find_few_keys(parts: Parts) -> str | None:
    """The path of patterns that allow fewer keys, in a schema whose repeated keys need more.

    An answer that repeats all of them could not end.
    """
    n_distinct = count_distinct_keys(parts)
    for path, part in parts:
        patterns = part.get("patternProperties") or {}
        if _has_patterns_alone(part) and all(map(_is_list, patterns)):
            n_keys = sum(1 + pattern.count("|") for pattern in patterns) + len(part.get("properties") or ())
            if n_keys < n_distinct:
                return path_text(path, "patternProperties")
    return None


def find_most_keys(parts: Parts) -> str | None:
    """The path of `maxProperties` in a schema that tells keys apart and has keys of patterns alone.

    The begin of a key may leave only one that repeats, and at the most keys such an object could not end.
    Both keywords may meet by a reference, so they count wherever they stand.
    """
    if not count_distinct_keys(parts) or not any(_has_patterns_alone(part) for _, part in parts):
        return None
    paths = (path for path, part in parts if "maxProperties" in part)
    return next((path_text(path, "maxProperties") for path in paths), None)


def _has_patterns_alone(part: Json) -> bool:
    patterns = part.get("patternProperties")
    return isinstance(patterns, dict) and bool(patterns) and part.get("additionalProperties") is False


def _least(part: Json) -> int:
    """`minProperties`, where declared keys and one other do not reach it."""
    least, required = part.get("minProperties", 0), part.get("required")
    named = set(map(str, required)) if isinstance(required, list) else set()
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    is_met = not isinstance(least, (int, float)) or least <= len(named) + 1
    return 0 if is_met or is_closed else int(least)


def _is_list(pattern: str) -> bool:
    """Whether the pattern spells its keys."""
    is_whole = pattern.startswith("^") and pattern.endswith("$")
    return is_whole and not _ESCAPES_AND_CLASSES.search(pattern) and not _REPEATS.search(pattern)
