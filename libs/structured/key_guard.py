"""Keeps an object that repeats a key open until it has enough different keys.

The guard reads the bytes of the answer beside the grammar. It takes away tokens that repeat a key where
others are allowed, and those that would end such an object too early. Its grammars spell a key in one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from libs.structured.token_bytes import TokenBytes, starts_escaped

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"


@dataclass(frozen=True, slots=True)
class _Object:
    """The keys of an object so far."""

    keys: frozenset[bytes] = frozenset()
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a JSON text the answer is."""

    around: tuple[_Object | None, ...] = ()  # objects, and None for arrays, the innermost last
    expects_key: bool = False
    string: bytes | None = None  # what a string has so far; of values always empty
    is_key: bool = False
    is_escaped: bool = False
    n_repeated: int = 0


class KeyGuard:
    """The state of one answer. One thread at a time."""

    def __init__(self, n_distinct: int, tokens: TokenBytes) -> None:
        self.place = _Place()
        self._n_distinct = n_distinct
        self._tokens = tokens
        tokens.prepare()  # no step of the engine should wait for the tables

    def take(self, token: int) -> bool:
        """Read a token; False for one that ends an object too early."""
        after = self._after(self.place, token)
        if after is not None:
            self.place = after
        return after is not None

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many leading tokens end no object too early. The state does not change."""
        place: _Place | None = self.place
        for n, token in enumerate(tokens):
            assert place is not None
            place = self._after(place, token)
            if place is None:
                return n
        return len(tokens)

    def restrict(self, row: npt.NDArray[np.int32]) -> None:
        """Take tokens away from a mask. One that repeats a key stays where the grammar has no other."""
        bits = row.view(np.uint32)
        repeating = []
        for token in set(self._candidates()):
            if not bits[token // 32] & np.uint32(1 << (token % 32)):
                continue
            after = self._after(self.place, token)
            if after is None:
                bits[token // 32] &= ~np.uint32(1 << (token % 32))
            elif after.n_repeated > self.place.n_repeated:
                repeating.append(token)
        kept = bits.copy()
        for token in repeating:
            bits[token // 32] &= ~np.uint32(1 << (token % 32))
        if not bits.any():
            bits[:] = kept

    def _candidates(self) -> Iterator[int]:
        """The tokens that may repeat a key or end an object that does."""
        place, tokens = self.place, self._tokens
        if any(item is not None and self._is_short(item) for item in place.around):
            yield from tokens.closing
        if place.is_escaped:
            yield from tokens.quoting
        elif place.string is not None and place.is_key:
            inner = place.around[-1]
            assert inner is not None
            for key in inner.keys:
                if key.startswith(place.string):
                    yield from tokens.by_head.get(key[len(place.string) :], ())
            # A key may end in a token that begins amid the rest of it.
            yield from tokens.many_quotes
        else:
            yield from tokens.two_quotes

    def _is_short(self, item: _Object) -> bool:
        return item.repeats and len(item.keys) < self._n_distinct

    def _after(self, place: _Place, token: int) -> _Place | None:
        raw = self._tokens.of(token)
        if raw is None:  # a control token begins or ends a text
            return _Place()
        for byte in raw:
            if place.string is not None:
                place = _in_string(place, byte)
            elif byte == _CLOSE_OBJECT and place.around and (item := place.around[-1]) is not None:
                if self._is_short(item):
                    return None
                place = replace(place, around=place.around[:-1], expects_key=False)
            else:
                place = _between(place, byte)
        return place


def _in_string(place: _Place, byte: int) -> _Place:
    assert place.string is not None
    if byte == _QUOTE and not place.is_escaped:
        return _key_read(place) if place.is_key else replace(place, string=None)
    is_escaped = starts_escaped(byte, place.is_escaped)
    if place.is_key:
        return replace(place, string=place.string + bytes((byte,)), is_escaped=is_escaped)
    return place if is_escaped == place.is_escaped else replace(place, is_escaped=is_escaped)


def _key_read(place: _Place) -> _Place:
    inner, key = place.around[-1], place.string
    assert inner is not None
    assert key is not None
    is_repeated = key in inner.keys
    inner = _Object(inner.keys | {key}, inner.repeats or is_repeated)
    return replace(
        place,
        around=(*place.around[:-1], inner),
        string=None,
        is_key=False,
        expects_key=False,
        n_repeated=place.n_repeated + is_repeated,
    )


def _between(place: _Place, byte: int) -> _Place:
    if byte == _QUOTE:
        return replace(place, string=b"", is_key=place.expects_key)
    if byte == _OPEN_OBJECT:
        return replace(place, around=(*place.around, _Object()), expects_key=True)
    if byte == _OPEN_ARRAY:
        return replace(place, around=(*place.around, None), expects_key=False)
    if byte == _CLOSE_ARRAY:
        return replace(place, around=place.around[:-1], expects_key=False)
    if byte == _COMMA:
        return replace(place, expects_key=bool(place.around) and place.around[-1] is not None)
    return place
