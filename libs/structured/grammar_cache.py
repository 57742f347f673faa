"""Compiles grammars, and caches the compiled ones by digest. Any thread may use it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from libs.structured.answer_grammar import is_of_client
from libs.structured.vocabulary import GrammarVocabulary
from slipstream.errors import InvalidArgument

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 16 << 20  # of grammar text
# Compiling takes a few milliseconds.
MAX_USES = 16
# A mask beyond these limits fails its request alone, at the same token on every worker. Compiling spends the
# first fuel, of which llguidance's default is 1,000,000: keys without \u beside patterns take more. Error
# messages have no text of the grammar.
#
# 2,366 valid instances of schemas of MaskBench were walked on a vocabulary of 163,584: with 8,000 items a
# mask as many go on as with 20,000. Those of 9,795 schemas have rows of at most 1,039 items.
# With 2,000 states of the lexer all 2,791 that were walked go on; 50,000 take up to 45 MB.
_limits = partial(LLParserLimits, initial_lexer_fuel=4_000_000, max_lexer_states=50_000, verbose_errors=False)
LIMITS = _limits(step_max_items=8_000, max_items_in_row=1_500)
# A client's own grammar may be ambiguous in every way, so that a mask takes the cube of its size. With these
# limits a mask takes up to 10 ms. The choices of one request have as many masks in a step.
_client_limits = partial(_limits, step_max_items=2_000, max_items_in_row=300)
CLIENT_LIMITS = _client_limits()
MAX_CLIENT_SYMBOLS = 300
ALONE_LIMITS = _client_limits(max_grammar_size=MAX_CLIENT_SYMBOLS)


def compile_grammar(
    grammar: str,
    vocabulary: GrammarVocabulary,
    *,
    field: str = "grammar",
    limits: LLParserLimits | None = None,
) -> LLMatcher:
    """A matcher in its first state. Raises InvalidArgument naming `field`. Holds no interpreter lock.

    `limits`: by default those that fit the origin of the grammar.
    """
    if limits is None:
        limits = CLIENT_LIMITS if is_of_client(grammar) else LIMITS
    matcher = LLMatcher(vocabulary.trie, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidArgument(field, f"cannot be compiled: {first_lines(matcher.get_error())}")
    return matcher


def first_lines(error: str) -> str:
    """The reason of an error of llguidance, without the dump of its state."""
    if error.startswith("panic"):  # of a repetition or a grammar that is too large
        return "it is too complex"
    return " ".join(error.split("<state>")[0].replace("<non-verbose/>", "").split())


@dataclass(slots=True, eq=False)
class _Compiled:
    matcher: Future[LLMatcher]
    n_bytes: int
    n_uses: int = 0


class GrammarCache:
    """Compiled grammars, the least recently used removed first. Threads that need the same one share it.

    The copies of a matcher share the states of its lexer, which grow with each answer. At their limit all
    answers by that grammar fail, so tenants share none, and a grammar is compiled again after some uses.
    """

    def __init__(
        self,
        *,
        max_grammars: int = MAX_CACHED_GRAMMARS,
        max_bytes: int = MAX_CACHED_BYTES,
        max_uses: int = MAX_USES,
    ) -> None:
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._max_uses = max_uses
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, grammar: str, vocabulary: GrammarVocabulary, *, salt: bytes = b"") -> LLMatcher:
        """A fresh matcher of the grammar. Raises InvalidArgument when it cannot be compiled.

        `salt`: that of the tenant.
        """
        digest = grammar_digest(grammar, salt)
        mine: _Compiled | None = None
        with self._lock:
            found = self._compiled.get(digest)
            if found is None or found.n_uses >= self._max_uses:
                self._remove(digest)
                found = mine = _Compiled(Future(), len(grammar))
                self._keep(digest, mine)
            found.n_uses += 1
            self._compiled.move_to_end(digest)
        if mine is not None:
            try:
                mine.matcher.set_result(compile_grammar(grammar, vocabulary))
            except BaseException as error:
                mine.matcher.set_exception(error)
                self._drop(digest, mine)
                raise
        return found.matcher.result().deep_copy()

    def discard(self, grammar: str, *, salt: bytes = b"") -> None:
        """Compile the grammar again when it is needed: the lexer of the present one is at its limit."""
        with self._lock:
            self._remove(grammar_digest(grammar, salt))

    def _keep(self, digest: bytes, compiled: _Compiled) -> None:
        self._compiled[digest] = compiled
        self._n_bytes += compiled.n_bytes
        while len(self._compiled) > self._max_grammars or (
            self._n_bytes > self._max_bytes and len(self._compiled) > 1
        ):
            self._remove(next(iter(self._compiled)))

    def _remove(self, digest: bytes) -> None:
        removed = self._compiled.pop(digest, None)
        if removed is not None:
            self._n_bytes -= removed.n_bytes

    def _drop(self, digest: bytes, compiled: _Compiled) -> None:
        """Forget a grammar that failed, so that a later request compiles it again."""
        with self._lock:
            if self._compiled.get(digest) is compiled:
                self._remove(digest)


def grammar_digest(grammar: str, salt: bytes) -> bytes:
    """The name of a tenant's grammar."""
    return hashlib.blake2b(grammar.encode(), digest_size=16, key=hashlib.sha256(salt).digest()).digest()
