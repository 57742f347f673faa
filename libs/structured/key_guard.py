"""Keeps an object that repeats a key open until it has enough different keys.

The guard reads the bytes of the answer beside the grammar. It takes away tokens that repeat a key where
others are allowed, and those that would end such an object too early. Its grammars spell a key in one way.
An object with enough keys may repeat them, so the guard keeps no more keys than that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from libs.structured.stated_keys import TEXT
from libs.structured.token_bytes import TokenBytes, starts_escaped

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
# What stands before the arguments of a call, between two control tokens.
_CALLED = re.compile(rb"functions\.(.+):[0-9]+")
_MAX_CALLED_BYTES = 128
# A key that is read copies the recent ones, and not all of them.
_MAX_RECENT = 64


@dataclass(frozen=True, slots=True)
class _Object:
    """The different keys of an object so far, the last few of them apart."""

    keys: frozenset[bytes] = frozenset()
    recent: frozenset[bytes] = frozenset()
    repeats: bool = False

    def __len__(self) -> int:
        return len(self.keys) + len(self.recent)

    def __contains__(self, key: bytes) -> bool:
        return key in self.recent or key in self.keys

    def __iter__(self) -> Iterator[bytes]:
        yield from self.keys
        yield from self.recent

    def merged(self) -> _Object:
        """An object with these keys, none of which is recent."""
        return _Object(self.keys | self.recent, repeats=self.repeats)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the answer is: in a text, before a call, or in the arguments of a call."""

    n_distinct: int = 0  # keys that an object has to have that repeats one; 0: there is nothing to compare
    called: bytes = b""  # what stands since the last control token, where there is nothing to compare
    around: tuple[_Object | None, ...] = ()  # objects, and None for arrays, the innermost last
    expects_key: bool = False
    string: bytes | None = None  # what a string has so far; of values always empty
    is_key: bool = False
    is_escaped: bool = False
    n_repeated: int = 0


class KeyGuard:
    """The state of one answer. One thread at a time.

    `n_distinct`: how many keys an object has to have that repeats one, by tool, and as TEXT in the text.
    """

    def __init__(self, n_distinct: Mapping[str, int], tokens: TokenBytes) -> None:
        self.place = _Place(n_distinct.get(TEXT, 0))
        self._n_distinct = {name.encode(): n for name, n in n_distinct.items()}
        self._tokens = tokens
        tokens.prepare()  # no step of the engine should wait for the tables

    def consume(self, token: int) -> bool:
        """Read a token; False for one that ends an object too early."""
        after = self._after(self.place, token)
        if after is None:
            return False
        inner = after.around[-1] if after.around else None
        if inner is not None and len(inner.recent) > _MAX_RECENT:
            after = replace(after, around=(*after.around[:-1], inner.merged()))
        self.place = after
        return True

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
        if not self.place.n_distinct:
            return
        bits = row.view(np.uint32)
        unread = list(self._candidates())
        repeating: list[int] = []
        early: list[int] = []
        for token in _allowed(self._ending(), bits):
            # One that ends the key and the object may do so too early.
            (unread if b"}" in (self._tokens.of(token) or b"") else repeating).append(token)
        for token in _allowed(unread, bits):
            after = self._after(self.place, token)
            if after is None:
                early.append(token)
            elif after.n_repeated > self.place.n_repeated:
                repeating.append(token)
        _clear_bits(early, bits)
        kept = bits.copy()
        _clear_bits(repeating, bits)
        if not bits.any():
            bits[:] = kept

    def _ending(self) -> Iterator[int]:
        """The tokens that end a key which the object has."""
        place, tokens = self.place, self._tokens
        inner = place.around[-1] if place.around else None
        if inner is None or not place.is_key or place.is_escaped or len(inner) >= place.n_distinct:
            return
        assert place.string is not None
        if len(tokens.by_head) < len(inner):
            for head, ending in tokens.by_head.items():
                if place.string + head in inner:
                    yield from ending
        else:
            for key in inner:
                if key.startswith(place.string):
                    yield from tokens.by_head.get(key[len(place.string) :], ())

    def _candidates(self) -> Iterator[int]:
        """The other tokens that may repeat a key, or end an object that does."""
        place, tokens = self.place, self._tokens
        if any(item is not None and _is_short(item, place) for item in place.around):
            yield from tokens.closing
        if place.is_escaped:
            yield from tokens.quoting
        elif place.is_key:
            # A key may end in a token that begins amid the rest of it.
            yield from tokens.many_quotes
        else:
            yield from tokens.two_quotes

    def _after(self, place: _Place, token: int) -> _Place | None:
        raw = self._tokens.of(token)
        if raw is None:
            called = _CALLED.fullmatch(place.called)
            return _Place(self._n_distinct.get(called.group(1), 0) if called else 0)
        if not place.n_distinct:
            return replace(place, called=(place.called + raw)[:_MAX_CALLED_BYTES])
        for byte in raw:
            if place.string is not None:
                place = _in_string(place, byte)
            elif byte == _CLOSE_OBJECT and place.around and (item := place.around[-1]) is not None:
                if _is_short(item, place):
                    return None
                place = replace(place, around=place.around[:-1], expects_key=False)
            else:
                place = _between(place, byte)
        return place


def _allowed(tokens: Iterable[int], bits: npt.NDArray[np.uint32]) -> list[int]:
    """The tokens that the mask allows, each once."""
    found = np.unique(np.fromiter(tokens, dtype=np.uint32))
    is_allowed = (bits[found // 32] >> (found % 32)) & np.uint32(1)
    allowed: list[int] = found[is_allowed.astype(np.bool_)].tolist()
    return allowed


def _clear_bits(tokens: Sequence[int], bits: npt.NDArray[np.uint32]) -> None:
    taken = np.array(tokens, dtype=np.uint32)
    np.bitwise_and.at(bits, taken // 32, ~(np.uint32(1) << (taken % 32)))


def _is_short(item: _Object, place: _Place) -> bool:
    return item.repeats and len(item) < place.n_distinct


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
    is_repeated = len(inner) < place.n_distinct and key in inner
    if is_repeated:
        inner = replace(inner, repeats=True)
    elif len(inner) < place.n_distinct:
        inner = replace(inner, recent=inner.recent | {key})
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
