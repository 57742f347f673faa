"""Arrays with places, in the one form of which llguidance holds all. Pure.

Drafts up to 2019-09 write places as a list of `items`, and 2020-12 as `prefixItems`. llguidance ignores
`prefixItems` beside a list of `items` and beside `additionalItems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BEFORE_2020 = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")


def has_items_as_places(root: object) -> bool:
    """Whether the schema states a draft to which `prefixItems` is an annotation."""
    draft = root.get("$schema") if isinstance(root, Mapping) else None
    return isinstance(draft, str) and any(name in draft for name in _BEFORE_2020)


def with_one_form(part: dict[str, Any], *, is_old: bool) -> dict[str, Any]:
    """The schema without a mix of forms, for arrays that are valid under every draft that it may mean."""
    first, listed = part.get("prefixItems"), part.get("items")
    if not isinstance(first, list):
        return part
    made = dict(part)
    if is_old:
        del made["prefixItems"]
    elif isinstance(listed, list):
        rest = made.pop("additionalItems", True)
        n = max(len(first), len(listed))
        made["prefixItems"] = [
            _both(first[i] if i < len(first) else True, listed[i] if i < len(listed) else rest)
            for i in range(n)
        ]
        made["items"] = False  # what follows the places is undefined in 2020-12
    else:
        made.pop("additionalItems", None)  # of no effect without a list of `items`, in every draft
    return made


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    parts = [schema for schema in (one, other) if schema is not True]
    return {"allOf": parts} if len(parts) > 1 else (parts[0] if parts else True)
