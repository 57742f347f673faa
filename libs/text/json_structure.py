"""Measures how much of a JSON text is structure, which costs far more than strings do, and its levels. Pure.

A parser makes an object for each value: 8 MiB of `[],` take seconds, one string of 8 MiB a few milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

# A piece is so short that a thread that measures holds the interpreter for a few milliseconds only.
_PIECE_BYTES = 256 << 10
_STEPS = 32 << 10
_SPACE = b" \t\r\n"
_BRACKETS = b"[]{}"
# As signed bytes: one level more, or one less.
_LEVELS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


def value_levels(value: object) -> Iterator[list[object]]:
    """The values of a parsed JSON value, level by level: first itself, then what it holds, and so on."""
    level = [value]
    while level:
        yield level
        deeper: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                deeper.extend(item.values())
            elif isinstance(item, (list, tuple)):
                deeper.extend(item)
        level = deeper


def structure_bytes(text: bytes, *, at_most: int) -> int:
    """The bytes outside of strings and white space, with one for each string.

    Counting ends with the first piece above `at_most`, so that it takes no longer for a text to refuse.
    """
    count = n_strings = 0
    for n_strings, parts in _outside_strings(text):
        count += sum([len(part.translate(None, _SPACE)) for part in parts])
        if count + n_strings > at_most:
            break
    return count + n_strings


def is_nested_deeper(text: bytes, levels: int) -> bool:
    """Whether more brackets than so many are open at one place of a JSON text."""
    if text.count(b"[") + text.count(b"{") <= levels:
        return False  # of nearly all texts
    level = 0
    for _, parts in _outside_strings(text):
        steps = memoryview(b"".join(parts).translate(_LEVELS, _NO_BRACKETS)).cast("b")
        for start in range(0, len(steps), _STEPS):
            part = steps[start : start + _STEPS]
            if max(itertools.accumulate(part, initial=level)) > levels:
                return True
            level += sum(part)
    return False


def _outside_strings(text: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """For each piece: how many strings have ended so far, and the parts of the piece outside of strings."""
    n_quotes, held = 0, b""
    for start in range(0, len(text), _PIECE_BYTES):
        piece = (held + text[start : start + _PIECE_BYTES]).replace(b"\\\\", b"")
        # What the last backslash of a piece escapes is in the next one.
        held = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = parts[n_quotes % 2 :: 2]
        n_quotes += len(parts) - 1
        yield n_quotes // 2, outside
