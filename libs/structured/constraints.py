"""Makes the constraints of a worker's sequences. Any thread may use it."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from libs.structured.answer_closer import AnswerCloser
from libs.structured.constraint import GrammarConstraint
from libs.structured.grammar_cache import MAX_CACHED_GRAMMARS, GrammarCache, grammar_digest
from libs.structured.mask_filler import GrammarMasks
from libs.structured.vocabulary import GrammarVocabulary
from slipstream.errors import InvalidArgument
from slipstream.sampling import OutputConstraint


class ConstraintFactory:
    """The vocabulary, which loads once, the cache of grammars, and the filler that all constraints share."""

    def __init__(self, load: Callable[[], GrammarVocabulary], *, n_threads: int) -> None:
        self._lock = threading.Lock()
        self._vocabulary = functools.cache(load)
        self._filler = GrammarMasks(n_threads)
        self.grammars = GrammarCache()
        self._closers: OrderedDict[bytes, AnswerCloser] = OrderedDict()  # by the grammar's digest

    def warm_up(self) -> None:
        """Load the vocabulary now."""
        with self._lock:
            self._vocabulary()

    def make(
        self, rules: OutputConstraint, emitted: Sequence[int], *, max_tokens: int = 0, salt: bytes = b""
    ) -> GrammarConstraint:
        """A constraint in the state after `emitted`. Raises InvalidArgument for a bad grammar.

        Takes as long as the grammar compiles, the first time. `salt`: that of the tenant. `max_tokens`: by
        which the answer ends; 0: it may be cut.
        """
        with self._lock:
            vocabulary = self._vocabulary()
            closer = self._closer(grammar_digest(rules.grammar, salt), vocabulary) if max_tokens else None
        try:
            matcher = self.grammars.get(rules.grammar, vocabulary, salt=salt)
        except InvalidArgument as error:
            raise InvalidArgument(rules.field, error.reason) from None
        discard = functools.partial(self.grammars.discard, rules.grammar, salt=salt)
        constraint = GrammarConstraint(
            rules,
            matcher,
            vocabulary,
            closer=closer,
            max_tokens=max_tokens,
            filler=self._filler,
            on_failure=discard,
        )
        constraint.advance(emitted)
        return constraint

    def _closer(self, digest: bytes, vocabulary: GrammarVocabulary) -> AnswerCloser:
        closer = self._closers.setdefault(digest, AnswerCloser(vocabulary))
        self._closers.move_to_end(digest)
        if len(self._closers) > MAX_CACHED_GRAMMARS:
            self._closers.popitem(last=False)
        return closer
