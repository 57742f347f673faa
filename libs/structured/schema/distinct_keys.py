"""`minProperties` where keys are not declared: which schemas need the key guard, and how many keys.

llguidance counts a key that occurs twice as two, and a reader counts it once. A grammar cannot compare keys,
so `key_guard.py` does.
"""

from __future__ import annotations

from libs.structured.schema.key_count import may_lack_keys
from libs.structured.schema.schema_walk import Json, Parts, path_text

# No answer is as long.
_MOST = 10**9


def count_distinct_keys(parts: Parts) -> int:
    """How many keys an object has to have that repeats one; 0 where the key guard has nothing to compare."""
    return max((_least(part) for _, part in parts if "minProperties" in part), default=0)


def find_few_keys(parts: Parts, n_distinct: int) -> str | None:
    """The path of patterns that allow fewer keys than an object needs that repeats one.

    An answer that repeats all of them could not end.
    """
    few = (path for path, part in parts if n_distinct and may_lack_keys(part, n_distinct))
    return next((path_text(path, "patternProperties") for path in few), None)


def find_most_keys(parts: Parts, n_distinct: int) -> str | None:
    """The path of `maxProperties` in a schema whose repeated keys count once, with keys of patterns alone.

    The begin of a key may leave only one that repeats, and at the most keys such an object could not end.
    Both keywords may meet by a reference, so they count wherever they stand.
    """
    if not n_distinct or not any(_has_patterns_alone(part) for _, part in parts):
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
    is_met = not isinstance(least, (int, float)) or not least > len(named) + 1
    return 0 if is_met or is_closed else int(min(least, _MOST))
