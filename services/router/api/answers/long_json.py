"""JSON with long parts, which is encoded in pieces. Pure.

One string or list of megabytes takes tens of milliseconds to encode and to copy, and all else waits so long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

# A piece takes 0.1 ms. Strings are cut after as many characters.
JSON_PIECE_BYTES = 64 << 10
# No JSON has this byte.
_PLACE = b"\0"


class LongJson:
    """A part of an object that `json_pieces` encodes; `pieces` makes its JSON each time it is called."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Callable[[], Iterable[bytes]]) -> None:
        self.pieces = pieces


def json_pieces(value: Any) -> Iterator[bytes]:
    """The value as JSON, in pieces. Each part that is no `LongJson` is encoded at once."""
    return _filled(_pieces_of(value))


def long_parts(value: Any) -> Any:
    """The value, with its long strings and long encoded parts as `LongJson`."""
    match value:
        case str():
            return long_text(value)
        case msgspec.Raw():
            data = memoryview(value)
            return LongJson(partial(_slices, data)) if len(data) > JSON_PIECE_BYTES else value
        case dict():
            return {name: long_parts(part) for name, part in value.items()}
        case list():
            return [long_parts(part) for part in value]
    return value


def long_text(text: str) -> str | LongJson:
    """The text itself where it is short."""
    return text if len(text) <= JSON_PIECE_BYTES else LongJson(partial(_string_pieces, text))


def _pieces_of(value: Any) -> Iterator[bytes]:
    parts: list[LongJson] = []

    def leave_out(part: LongJson) -> msgspec.Raw:
        parts.append(part)
        return msgspec.Raw(_PLACE)

    first, *others = msgspec.json.encode(value, enc_hook=leave_out).split(_PLACE)
    yield first
    for part, following in zip(parts, others, strict=True):
        yield from part.pieces()
        yield following


def _filled(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes joined into pieces of full size; the last one may be shorter."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= JSON_PIECE_BYTES:
            yield bytes(data)
            data.clear()
    if data:
        yield bytes(data)


def _slices(data: memoryview) -> Iterator[bytes]:
    for begin in range(0, len(data), JSON_PIECE_BYTES):
        yield bytes(data[begin : begin + JSON_PIECE_BYTES])


def _string_pieces(text: str) -> Iterator[bytes]:
    yield b'"'
    for begin in range(0, len(text), JSON_PIECE_BYTES):
        yield msgspec.json.encode(text[begin : begin + JSON_PIECE_BYTES])[1:-1]
    yield b'"'
