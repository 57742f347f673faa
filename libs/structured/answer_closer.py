"""Ends an answer that a grammar holds before its token limit, so that it is whole whatever the model does.

Without it an answer that reaches its limit is cut amid a string or an object, and no parser takes it. At a
few counts of tokens left the closer looks for a short way to the end of the grammar. The answer takes that
way where the next look may be too late. So what an answer becomes is a function of its tokens and its limit,
and any worker continues it in the same way.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from libs.structured.key_guard import KeyGuard
from libs.structured.vocabulary import GrammarVocabulary

# An answer may open something that takes tokens to close, until the next look and while it is put off.
_SPARE_TOKENS, _LEAST_SPARE_TOKENS = 18, 6
# With so few tokens left the closer looks after each one.
_CLOSE_TOKENS = 32
# The looks of answers that began together come in different steps, up to so many.
_MAX_SPREAD_TOKENS = 64
# A step of the engine waits for a look: 0.1 ms a mask. Answers of a grammar with slow masks may be cut.
_MAX_MASKS = 128
_MAX_WAY_TOKENS = 4096
_MAX_LOOK_S = 0.1
# Letters that begin no value of JSON: where one may follow, a string is open.
_OF_TEXT = b"axZ~"
# What may end a string that a pattern or a least length keeps open.
_ENDINGS = (b'a"', b'0"', b'.aa"', b'@a.aa"', b' a"', b'-a"', b'/a"', b'.com"', b'://a.aa"', b'aaaa"')
# Where nothing closes: a sign of a pattern comes before the characters that repeat. What opens an array or an
# object comes after all other values, for a recursion may go on without an end. White space is last.
_CONTINUING = (
    bytes(byte for byte in string.punctuation.encode() if byte not in b"\\[{"),
    string.digits.encode(),
    string.ascii_letters.encode(),
    range(128, 256),
    b"\\",
    b"[{",
    range(33),
)
_Mask = npt.NDArray[np.uint32]


class AnswerEnd(NamedTuple):
    """How far an answer is from its end. Immutable."""

    n_left: int  # tokens until its limit
    look_at: int  # tokens left at which the closer looks
    spread: int = 1  # over how many tokens that look may be put off
    way: tuple[int, ...] | None = None  # the tokens that end it, once it has to


class AnswerCloser:
    """The ways out of one grammar. It holds no state of an answer; any thread may use it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._n_words = -(-vocabulary.size // 32)
        self._text, self._closing_text, self._closing, *self._continuing = (
            [vocabulary.byte_ids[byte] for byte in group if byte in vocabulary.byte_ids]
            for group in (_OF_TEXT, b'"', b'}]",:', *_CONTINUING)
        )
        self._endings = [[vocabulary.byte_ids[byte] for byte in ending] for ending in _ENDINGS]
        self.is_slow = False  # its masks take too long: it looks no more
        self._whole: tuple[int, ...] | None = None  # the way from the grammar's first state
        self._has_begun = False

    def begin(self, matcher: LLMatcher, max_tokens: int) -> AnswerEnd:
        """The end of an answer without tokens yet. `matcher` is in its first state, and stays there."""
        if not self._has_begun:  # two threads would find the same
            self._whole = self._find_end(matcher, None, _MAX_WAY_TOKENS)
            self._has_begun = True
        end = _planned(AnswerEnd(max_tokens, max_tokens), self._whole)
        return end if end.way is None else AnswerEnd(max_tokens, max_tokens)  # after its first token

    def after(self, end: AnswerEnd, token: int, matcher: LLMatcher, guard: KeyGuard | None) -> AnswerEnd:
        """The end of an answer whose newest token the grammar has taken. The grammar stays as it is."""
        if end.way is not None:
            return end._replace(way=end.way[1:] if end.way[:1] == (token,) else None)
        if end.n_left > end.look_at or self.is_slow:
            return end
        if end.spread > 1 and (late := token % end.spread):
            return end._replace(look_at=end.n_left - late, spread=1)
        return _planned(end, self._find_end(matcher, guard, end.n_left))

    def _find_end(self, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> tuple[int, ...] | None:
        place = guard.place if guard is not None else None
        try:
            way = self._way_out(matcher.deep_copy(), guard, most)
        except TimeoutError:
            self.is_slow = True
            return None
        finally:
            if guard is not None and place is not None:
                guard.place = place
        return None if way is None else tuple(way)

    def _way_out(self, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> list[int] | None:
        """A short way to the end of the grammar; None beyond `most` tokens. Raises TimeoutError."""
        until_s = time.thread_time() + _MAX_LOOK_S
        way: list[int] = []
        n_masks = 0
        while not matcher.is_accepting():
            following = matcher.compute_ff_tokens()
            if not following and n_masks < _MAX_MASKS:
                following, n_masks = self._best(matcher, self._mask(matcher, guard), way), n_masks + 1
            if not following or len(way) + len(following) > most:
                return None
            if time.thread_time() > until_s:
                raise TimeoutError
            for token in following:
                if not matcher.consume_token(token) or not (guard is None or guard.consume(token)):
                    return None
            way += following
        return way

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
        for group in self._continuing:
            if found := list(_allowed(mask, group)):
                return [min(found, key=way.count)]
        return _first(mask)


def _planned(end: AnswerEnd, way: tuple[int, ...] | None) -> AnswerEnd:
    """The plan after a look that found `way`; None: the look found none. Pure."""
    n_left = end.n_left
    if way is None or len(way) > n_left:
        return AnswerEnd(n_left, n_left * 7 // 8)
    room = n_left - len(way)
    # Much to spare would change short answers that the model ends by itself.
    if room <= min(_SPARE_TOKENS + len(way) // 4, max(_LEAST_SPARE_TOKENS, n_left // 4)):
        return AnswerEnd(n_left, 0, way=way)
    if n_left <= _CLOSE_TOKENS:
        return AnswerEnd(n_left, n_left - 1)
    return AnswerEnd(n_left, len(way) + room * 3 // 4, max(1, min(room // 8, _MAX_SPREAD_TOKENS)))


def _allowed(mask: _Mask, tokens: Sequence[int]) -> Iterator[int]:
    return (token for token in tokens if mask[token // 32] >> np.uint32(token % 32) & 1)


def _first(mask: _Mask) -> list[int]:
    """The first token of the mask, such as a control token; none of an empty one."""
    for word in np.flatnonzero(mask)[:1].tolist():
        bits = int(mask[word])
        return [32 * word + (bits & -bits).bit_length() - 1]
    return []
