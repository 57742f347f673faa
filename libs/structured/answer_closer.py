"""Ends an answer that a grammar holds before its token limit, so that it is whole whatever the model does.

Without it an answer that reaches its limit is cut amid a string or an object, and no parser takes it. At a
few counts of tokens left the closer looks for a short way to the end of the grammar. The answer takes that
way where the next look may be too late. So what an answer becomes is a function of its tokens and its limit,
and any worker continues it in the same way.
"""

from __future__ import annotations

import itertools
import string
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from libs.structured.key_guard import KeyGuard
from libs.structured.vocabulary import GrammarVocabulary

# Tokens left at which the closer looks, and its next look.
_LOOKS = (
    512,
    384,
    256,
    192,
    160,
    *range(128, 64, -16),
    *range(64, 32, -8),
    *range(32, 16, -4),
    *range(16, -1, -1),
)
_NEXT_LOOK = dict(itertools.pairwise(_LOOKS))
# A step of the engine waits for a look. An ambiguous grammar takes longer, and its answers may be cut.
_MAX_LOOK_S = 0.05
# Letters that begin no value of JSON: where one may follow, a string is open.
_OF_TEXT = b"axZ~"
# Where nothing closes: a sign of a pattern comes before the characters that repeat, and white space last.
_CONTINUING = (
    string.punctuation.replace("\\", "").encode(),
    string.digits.encode(),
    string.ascii_letters.encode(),
    range(128, 256),
    b"\\",
    range(33),
)
_Mask = npt.NDArray[np.uint32]


class AnswerCloser:
    """The ways out of the grammars of one vocabulary, for answers of `max_tokens`. One thread at a time."""

    def __init__(self, vocabulary: GrammarVocabulary, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._n_words = -(-vocabulary.size // 32)
        self._text, self._closing_text, self._closing, *self._continuing = (
            [vocabulary.byte_ids[byte] for byte in group if byte in vocabulary.byte_ids]
            for group in (_OF_TEXT, b'"', b'}]",:', *_CONTINUING)
        )

    def looks(self, n_tokens: int, n_more: int = 0) -> bool:
        """Whether it looks at an answer of so many tokens, or after one of the next `n_more`."""
        left = self.max_tokens - n_tokens
        return any(left - more in _NEXT_LOOK for more in range(n_more + 1))

    def plan(self, matcher: LLMatcher, guard: KeyGuard | None, n_tokens: int) -> tuple[int, ...] | None:
        """The tokens that end an answer of so many, if it has to end now. Changes no state."""
        left = self.max_tokens - n_tokens
        place = guard.place if guard is not None else None
        try:
            way = self._way_out(matcher.deep_copy(), guard, left)
        finally:
            if guard is not None and place is not None:
                guard.place = place
        if way is None:
            return None
        # Until the next look the answer may open something that takes tokens to close.
        next_left = _NEXT_LOOK[left]
        return tuple(way) if len(way) + (left - next_left) // 2 + 2 >= next_left else None

    def _way_out(self, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> list[int] | None:
        """A short way to the end of the grammar; None if it has more than `most` tokens or takes too long."""
        until_s = time.thread_time() + _MAX_LOOK_S
        way: list[int] = []
        while not matcher.is_accepting():
            following = matcher.compute_ff_tokens() or self._best(self._mask(matcher, guard), way)
            if not following or len(way) + len(following) > most or time.thread_time() > until_s:
                return None
            for token in following:
                if not matcher.consume_token(token) or not (guard is None or guard.take(token)):
                    return None
            way += following
        return way

    def _mask(self, matcher: LLMatcher, guard: KeyGuard | None) -> _Mask:
        row = np.zeros(self._n_words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if guard is not None:
            guard.restrict(row)
        return row.view(np.uint32)

    def _best(self, mask: _Mask, way: Sequence[int]) -> list[int]:
        """The token that most likely leads to the end. One that continues a text is the least taken one."""
        is_text = any(_allowed(mask, self._text))
        for token in _allowed(mask, self._closing_text if is_text else self._closing):
            return [token]
        for group in self._continuing:
            if found := list(_allowed(mask, group)):
                return [min(found, key=way.count)]
        return _first(mask)


def _allowed(mask: _Mask, tokens: Sequence[int]) -> Iterator[int]:
    return (token for token in tokens if mask[token // 32] >> np.uint32(token % 32) & 1)


def _first(mask: _Mask) -> list[int]:
    """The first token of the mask, such as a control token; none of an empty one."""
    for word in np.flatnonzero(mask)[:1].tolist():
        bits = int(mask[word])
        return [32 * word + (bits & -bits).bit_length() - 1]
    return []
