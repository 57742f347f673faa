"""Keys that a schema does not declare: how they are spelled, so that none spells a declared key. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from libs.structured.schema.schema_walk import Json, Parts, path_text

# Control characters that JSON spells by \u alone.
_SPELLED_BY_CODE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONSTANTS = frozenset(("const", "enum"))
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_CONTROL_CLASS = r"\x{0}-\x{1F}\x{7F}"
_ANY_TEXT = f"[^{_CONTROL_CLASS}]*"
# The pattern of other keys nests a group for each character, and regex crates bound the nesting.
_MAX_NAME_CHARS = 100


def forbids_unicode_escapes(parts: Parts) -> bool:
    r"""Whether the grammar has no \u, by which a key could spell a declared one, or one of a pattern."""
    return not needs_codes(parts) and any(_is_open(part) for _, part in parts)


def needs_codes(parts: Parts) -> bool:
    r"""Whether a constant has a control character, which JSON spells by \u alone."""
    return find_control_character(parts) is not None


def find_control_character(parts: Parts) -> str | None:
    """The path of the first constant with such a character."""
    for path, part in parts:
        for name in _CONSTANTS & part.keys():
            if any(
                isinstance(text, str) and _SPELLED_BY_CODE.search(text) for text in values(part.get(name))
            ):
                return path_text(path, name)
    return None


def can_spell_keys(parts: Parts) -> bool:
    """Whether `with_spelled_keys` has a pattern for all undeclared keys."""
    return all(_can_spell(part) for _, part in parts if _is_open(part))


def with_spelled_keys(part: Mapping[str, Any]) -> dict[str, Any]:
    r"""The schema with a pattern for its undeclared keys: llguidance spells no letter of a pattern by \u."""
    made = dict(part)
    if _is_open(part) and _can_spell(part):
        rest = part.get("additionalProperties", True)
        names = () if rest is True else tuple(map(str, part.get("properties") or ()))
        made["patternProperties"] = {f"^{_other_than(names)}$": rest}
        made["additionalProperties"] = False
    return made


def values(value: Any) -> Iterator[Any]:
    """All strings and numbers within a JSON value, keys too."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
        else:
            yield item


def _can_spell(part: Json) -> bool:
    names = part.get("properties") or ()
    return not part.get("patternProperties") and all(len(str(name)) <= _MAX_NAME_CHARS for name in names)


def _other_than(names: Iterable[str]) -> str:
    """A pattern of all texts without control characters but these names."""
    others = sorted({name for name in names if not _CONTROL.search(name)})
    return _going_on(others, 0) if others else _ANY_TEXT


def _going_on(names: Sequence[str], n_read: int) -> str:
    """A pattern of what may follow the begin of so many characters that these sorted names share."""
    is_name = len(names[0]) == n_read
    firsts, options = [], []
    for first, group in groupby(names[is_name:], key=lambda name: name[n_read]):
        firsts.append(_code(first))
        options.append(_code(first) + _going_on(list(group), n_read + 1))
    options.append(f"[^{_CONTROL_CLASS}{''.join(firsts)}]{_ANY_TEXT}")
    return f"(?:{'|'.join(options)}){'' if is_name else '?'}"


def _code(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"


def _is_open(part: Json) -> bool:
    """Whether the object may have keys beside those that it declares, or some for which a pattern decides."""
    is_declared = bool(part.get("properties") or part.get("required") or part.get("patternProperties"))
    return is_declared and part.get("additionalProperties") is not False
