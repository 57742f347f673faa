"""Ends an answer that a grammar holds before its token limit, so that it is whole whatever the model does.

Without it an answer that reaches its limit is cut amid a string or an object, and no parser takes it. The
closer looks for a short way to the end of the grammar, at a few counts of tokens left, and after each token
where little is left. Near its limit the answer always has such a way. A token of the model after which none
fits is replaced by the next one of the way. So what may follow is a function of tokens and limit, and any
worker continues the answer in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llguidance import LLMatcher

from libs.structured.key_guard import KeyGuard
from libs.structured.vocabulary import GrammarVocabulary
from libs.structured.way_finder import WayFinder, WayOut

# A token may open something that takes so many others to close.
_SPARE_TOKENS = 18
# With so few tokens left the closer looks after each one.
_CLOSE_TOKENS = 32
# The looks of answers that began together come in different steps, up to so many.
_MAX_SPREAD_TOKENS = 64
_MAX_WAY_TOKENS = 4096
# So many rests of a way are tried before a look.
_MAX_RESTS = 16


class AnswerEnd(NamedTuple):
    """How far an answer is from its end. Immutable."""

    n_left: int  # tokens until its limit
    look_at: int = 0  # tokens left at which the closer looks, without a way
    spread: int = 1  # over how many tokens that look may be put off
    way: WayOut | None = None  # near its limit: it ends the answer within `n_left`


class AnswerCloser:
    """The ends of the answers of one grammar. It holds no state of an answer; any thread may use it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._finder = WayFinder(vocabulary)
        self.is_slow = False  # its masks take too long: it looks no more
        self._whole: WayOut | None = None  # the way from the grammar's first state
        self._has_begun = False

    def begin(self, matcher: LLMatcher, guard: KeyGuard | None, n_left: int) -> AnswerEnd:
        """The end of an answer without tokens yet. `matcher` is in its first state, and stays there."""
        if not self._has_begun:  # two threads would find the same
            self._whole = self._find(matcher, guard, _MAX_WAY_TOKENS)
            self._has_begun = True
        if self._whole is not None and len(self._whole.tokens) < n_left:
            return _planned(n_left, self._whole)
        return self._look(matcher, guard, n_left)

    def after(
        self, end: AnswerEnd, token: int, matcher: LLMatcher, guard: KeyGuard | None
    ) -> AnswerEnd | None:
        """The end after one more token, which the grammar has taken; the grammar stays as it is.

        None: the answer had a way to its end before that token, and has none after it.
        """
        n_left = end.n_left - 1
        if end.way is not None:
            # The token that ends the answer keeps its room where it has one.
            most = n_left - (len(end.way.tokens) < end.n_left)
            way = self._rest(end.way, token, most, matcher, guard) or self._find(matcher, guard, most)
            if self.is_slow:
                return unplanned(n_left)
            return None if way is None else _planned(n_left, way)
        if n_left > end.look_at or self.is_slow:
            return end._replace(n_left=n_left)
        if end.spread > 1 and (late := token % end.spread):
            return AnswerEnd(n_left, n_left - late)
        return self._look(matcher, guard, n_left)

    def keeps_text(self, token: int, chosen: int, matcher: LLMatcher, drafts: Sequence[int]) -> bool:
        """Whether after these drafts `chosen` would lead to the text of `token`, too, by more tokens."""
        after = matcher.deep_copy()
        return bool(after.consume_tokens(list(drafts))) and self._finder.keeps_text(token, chosen, after)

    def _look(self, matcher: LLMatcher, guard: KeyGuard | None, n_left: int) -> AnswerEnd:
        """The end by a new way, if it can be with room for the token that ends the answer."""
        way = self._find(matcher, guard, n_left - 1) or self._find(matcher, guard, n_left)
        return _planned(n_left, way)

    def _rest(
        self, way: WayOut, token: int, most: int, matcher: LLMatcher, guard: KeyGuard | None
    ) -> WayOut | None:
        """What is left of a way after a token, at most `most` tokens. It needs no mask."""
        tokens = way.tokens
        if tokens[:1] == (token,):
            return way._replace(tokens=tokens[1:])
        first = max(0, len(tokens) - most)
        for begin in range(first, min(len(tokens) + 1, first + _MAX_RESTS)):
            rest = tokens[begin:]
            if self._finder.count_valid(rest, matcher, guard) > len(rest):
                return way._replace(tokens=rest)
        return None

    def _find(self, matcher: LLMatcher, guard: KeyGuard | None, most: int) -> WayOut | None:
        if self.is_slow:
            return None
        try:
            return self._finder.find(matcher, guard, most)
        except TimeoutError:
            self.is_slow = True
            return None


def unplanned(n_left: int) -> AnswerEnd:
    """The plan of an answer without a way to its end: it may be cut. Pure."""
    return AnswerEnd(n_left, n_left * 7 // 8)


def _planned(n_left: int, way: WayOut | None) -> AnswerEnd:
    """The plan after a look that found `way`; None: the look found none. Pure."""
    if way is None or len(way.tokens) > n_left:
        return unplanned(n_left)
    n_way = len(way.tokens)
    room = n_left - n_way
    if way.is_narrow or n_left <= _CLOSE_TOKENS or room <= _SPARE_TOKENS + n_way // 4:
        return AnswerEnd(n_left, way=way)
    return AnswerEnd(n_left, n_way + room * 3 // 4, max(1, min(room // 8, _MAX_SPREAD_TOKENS)))
