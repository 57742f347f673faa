"""Finds short ways from a state of a grammar to its end, in tokens.

The first way goes by rules of thumb, with one mask where several tokens may follow. Where it is too long, a
search by breadth finds the shortest one, as long as few tokens may follow.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from libs.structured.key_guard import KeyGuard
from libs.structured.vocabulary import GrammarVocabulary

# A step of the engine waits for a look: 0.1 ms a mask. Answers of a grammar with slow masks may be cut.
_MAX_MASKS = 128
# A search takes at most so many masks of few tokens, 0.05 ms each. One of a free text counts as several.
_MAX_SEARCHED, _FREE_COST = 24, 8
_MAX_FREE_TOKENS = 12
_BYTES = 4  # of a token, about
_MAX_LOOK_S = 0.1
# A mask with more tokens is that of a free text.
_MAX_NARROW_TOKENS = 64
# A narrow way has few masks, so that a look after each token costs less than a step's other work.
_MAX_NARROW_MASKS = 16
# Letters that begin no value of JSON: where one may follow, a string is open.
_OF_TEXT = b"axZ~"
# What may end a string that a pattern or a least length keeps open.
_ENDINGS = (b'a"', b'0"', b'.aa"', b'@a.aa"', b' a"', b'-a"', b'/a"', b'.com"', b'://a.aa"', b'aaaa"')
# Where nothing closes: a sign of a pattern comes before the characters that repeat. What opens an array or an
# object comes after all other values, for a recursion may go on without an end. White space is last.
_CONTINUING = (
    bytes(byte for byte in string.punctuation.encode() if byte not in b"\\[{"),
    string.digits.encode(),
    b"t" + string.ascii_letters.encode(),  # `true` takes fewer tokens than `false`
    range(128, 256),
    b"\\",
    b"[{",
    range(33),
)
_Mask = npt.NDArray[np.uint32]


class WayOut(NamedTuple):
    """Tokens that lead to the end of a grammar, without the one that ends the answer. Immutable."""

    tokens: tuple[int, ...]
    is_narrow: bool  # few tokens may follow everywhere on it, so that it is quick to find again


class WayFinder:
    """Ways out of the grammars of one vocabulary. It holds no state of an answer; any thread may use it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._n_words = -(-vocabulary.size // 32)
        self._tokens = vocabulary.tokens
        self._end_token = min(vocabulary.end_ids)
        self._byte_ids = vocabulary.byte_ids
        self._ends, self._structure = vocabulary.end_ids, vocabulary.structure_ids
        self._text, self._closing_text, self._closing, *self._continuing = (
            [vocabulary.byte_ids[byte] for byte in group]
            for group in (_OF_TEXT, b'"', b'}]",:', *_CONTINUING)
        )
        self._digits = [vocabulary.byte_ids[byte] for byte in b"0123456789"]
        self._minus = [vocabulary.byte_ids[byte] for byte in b"-"]
        self._endings = [[vocabulary.byte_ids[byte] for byte in ending] for ending in _ENDINGS]

    def find(self, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> WayOut | None:
        """A way of at most `most` tokens. It is the shortest where the rules of thumb find none as short.

        The grammar stays as it is. Raises TimeoutError where masks take too long.
        """
        if most < 0:
            return None
        place = guard.place if guard is not None else None
        until_s = time.thread_time() + _MAX_LOOK_S
        try:
            found, is_free = self._by_rules(matcher.deep_copy(), guard, _BYTES * most + _BYTES, until_s)
        finally:
            if guard is not None and place is not None:
                guard.place = place
        if found is not None and len(found.tokens) > most:
            found = self._packed(found, matcher, guard, most)
        # A search would need the guard's state of each node, and finds nothing beyond a few free tokens.
        if found is not None or guard is not None or (is_free and most > _MAX_FREE_TOKENS):
            return found
        return self._shortest(matcher, most, until_s)

    def keeps_text(self, token: int, chosen: int, matcher: LLMatcher) -> bool:
        """Whether after `chosen` no other text than the rest of that of `token` may follow.

        Also where the text of `token` is the only one in any case. The state of the grammar changes.
        """
        text, own = self._tokens.of(token) or b"", self._tokens.of(chosen)
        if own and text.startswith(own) and matcher.consume_token(chosen):
            text = text[len(own) :]
        for byte in text:
            mask = self._mask(matcher, None)
            if _count(mask) > _MAX_NARROW_TOKENS:
                return False
            others = (self._tokens.of(other) for other in _all(mask))
            if any(raw is None or raw[0] != byte for raw in others):
                return False
            if not matcher.consume_token(self._byte_ids[byte]):
                return False
        return True

    def _packed(self, way: WayOut, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> WayOut | None:
        """A way with the text of `way` in fewer tokens. Rules of thumb take many tokens of one byte."""
        text = b"".join(self._tokens.of(token) or b"" for token in way.tokens)
        try:
            packed = self._tokens.encode(text.decode())
        except UnicodeDecodeError:  # the way begins amid a character
            return None
        if len(packed) > most or self.count_valid(packed, matcher, guard) <= len(packed):
            return None
        return way._replace(tokens=tuple(packed))

    def count_valid(self, tokens: Sequence[int], matcher: LLMatcher, guard: KeyGuard | None) -> int:
        """How many of the tokens may follow; one more where the answer may end after all of them."""
        if guard is not None and (n := guard.count_allowed(tokens)) < len(tokens):
            return n
        return int(matcher.validate_tokens([*tokens, self._end_token]))

    def _by_rules(
        self, matcher: LLMatcher, guard: KeyGuard | None, most: int, until_s: float
    ) -> tuple[WayOut | None, bool]:
        """The way, and whether it goes through a free text."""
        way: list[int] = []
        n_masks, is_free = 0, False
        while not matcher.is_accepting():
            following = matcher.compute_ff_tokens()
            if not following and n_masks < _MAX_MASKS:
                mask = self._mask(matcher, guard)
                is_free = is_free or _count(mask) > _MAX_NARROW_TOKENS
                following, n_masks = self._best(matcher, mask, way), n_masks + 1
            if not following or len(way) + len(following) > most:
                return None, is_free
            if time.thread_time() > until_s:
                raise TimeoutError
            for token in following:
                if not matcher.consume_token(token) or not (guard is None or guard.consume(token)):
                    return None, is_free
            way += following
        return WayOut(tuple(way), not is_free and n_masks <= _MAX_NARROW_MASKS), is_free

    def _shortest(self, matcher: LLMatcher, most: int, until_s: float) -> WayOut | None:
        """The way of the fewest tokens; of a free text only those that close something."""
        # Ways of equal length, each as the state before its last token, the way and its bytes.
        level: list[tuple[LLMatcher, tuple[int, ...], bytes]] = [(matcher, (), b"")]
        seen = {b""}
        n_searched, is_narrow = 0, True
        for n_left in range(most, -1, -1):
            following: list[tuple[LLMatcher, tuple[int, ...], bytes]] = []
            for before, way, text in level:
                if n_searched >= _MAX_SEARCHED:
                    return None
                if time.thread_time() > until_s:
                    raise TimeoutError
                state = before.deep_copy()
                if way and not state.consume_token(way[-1]):
                    continue
                mask = self._mask(state, None)
                if any(_allowed(mask, self._ends)):
                    return WayOut(way, is_narrow)
                is_free = _count(mask) > _MAX_NARROW_TOKENS
                is_narrow = is_narrow and not is_free
                n_searched += _FREE_COST if is_free else 1
                for token in self._going_on(state, mask, way, is_free=is_free) if n_left else ():
                    raw = self._tokens.of(token)
                    if raw is not None and text + raw not in seen:  # a control token begins a call
                        seen.add(text + raw)
                        following.append((state, (*way, token), text + raw))
            level = following
        return None

    def _going_on(self, matcher: LLMatcher, mask: _Mask, way: Sequence[int], *, is_free: bool) -> list[int]:
        """The tokens that a search follows."""
        if is_free:
            return [*self._best(matcher, mask, way)[:1], *_allowed(mask, self._structure)]
        return _all(mask)

    def _mask(self, matcher: LLMatcher, guard: KeyGuard | None) -> _Mask:
        row = np.zeros(self._n_words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if guard is not None:
            guard.restrict(row)
        return row.view(np.uint32)

    def _best(self, matcher: LLMatcher, mask: _Mask, way: Sequence[int]) -> list[int]:
        """The tokens that most likely lead to the end. One that continues a text is the least taken one."""
        is_text = any(_allowed(mask, self._text))
        for token in _allowed(mask, self._closing_text if is_text else self._closing):
            return [token]
        for ending in self._endings if is_text else ():
            if matcher.validate_tokens(ending) == len(ending):
                return ending
        begins_number = (not way or way[-1] not in self._digits) and any(_allowed(mask, self._minus))
        for group in (self._digits, *self._continuing) if begins_number else self._continuing:
            if found := list(_allowed(mask, group)):
                return [min(found, key=way.count)]
        return _first(mask)


def _allowed(mask: _Mask, tokens: Iterable[int]) -> Iterator[int]:
    return (token for token in tokens if mask[token // 32] >> np.uint32(token % 32) & 1)


def _all(mask: _Mask) -> list[int]:
    words = np.flatnonzero(mask)  # few of a large vocabulary
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, places = np.nonzero(bits)
    found: list[int] = (32 * words[rows] + places).tolist()
    return found


def _count(mask: _Mask) -> int:
    return int(np.bitwise_count(mask).sum())


def _first(mask: _Mask) -> list[int]:
    """The first token of the mask, such as a control token; none of an empty one."""
    for word in np.flatnonzero(mask)[:1].tolist():
        bits = int(mask[word])
        return [32 * word + (bits & -bits).bit_length() - 1]
    return []
