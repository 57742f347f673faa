"""Compiled grammars are shared, bounded, and compiled again before their lexers have grown for long."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLMatcher

from libs.structured import constraints, grammar_cache
from libs.structured.constraints import ConstraintFactory
from libs.structured.grammar_cache import LIMITS, GrammarCache
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.errors import InvalidArgument
from slipstream.sampling import OutputConstraint


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled, in order."""
    found: list[str] = []
    compile_grammar = grammar_cache.compile_grammar

    def note(grammar: str, vocabulary: GrammarVocabulary) -> LLMatcher:
        found.append(grammar)
        return compile_grammar(grammar, vocabulary)

    monkeypatch.setattr(grammar_cache, "compile_grammar", note)
    return found


def rule(text: str) -> str:
    return f'start: "{text}"\n'


def test_a_grammar_is_compiled_again_after_some_uses(
    compiled: list[str], vocabulary: GrammarVocabulary
) -> None:
    cache = GrammarCache(max_uses=3)
    matchers = [cache.get(rule("a"), vocabulary) for _ in range(7)]
    assert len(compiled) == 3 and len(cache) == 1
    assert not any(matcher.is_error() for matcher in matchers)


def test_tenants_share_no_lexer(compiled: list[str], vocabulary: GrammarVocabulary) -> None:
    """One whose answers bring a shared lexer to its limit would end the answers of another."""
    cache = GrammarCache()
    for salt in (b"anna", b"bert", b"anna"):
        cache.get(rule("a"), vocabulary, salt=salt)
    assert len(compiled) == len(cache) == 2


def test_threads_share_one_compilation(compiled: list[str], vocabulary: GrammarVocabulary) -> None:
    cache = GrammarCache()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: cache.get(rule("a"), vocabulary), range(grammar_cache.MAX_USES)))
    assert compiled == [rule("a")]


def test_the_least_recently_used_are_removed(compiled: list[str], vocabulary: GrammarVocabulary) -> None:
    cache = GrammarCache(max_grammars=2)
    for text in "abac":
        cache.get(rule(text), vocabulary)
    assert len(cache) == 2
    cache.get(rule("a"), vocabulary)
    assert compiled == [rule(text) for text in "abc"]
    for max_bytes, n_kept in ((2 * len(rule("a")), 2), (1, 1)):
        cache = GrammarCache(max_bytes=max_bytes)
        for text in "abc":
            cache.get(rule(text), vocabulary)
        assert len(cache) == n_kept


def test_a_grammar_that_fails_is_forgotten(compiled: list[str], vocabulary: GrammarVocabulary) -> None:
    cache = GrammarCache()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="cannot be compiled"):
            cache.get("start: x\n", vocabulary)
    assert len(compiled) == 2 and not len(cache)


def test_the_lexer_of_a_grammar_is_bounded() -> None:
    assert LIMITS.max_lexer_states == grammar_cache.CLIENT_LIMITS.max_lexer_states == 50_000


def test_a_lexer_at_its_limit_fails_no_later_answer(
    monkeypatch: pytest.MonkeyPatch, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(grammar_cache, "LIMITS", grammar_cache._limits(max_lexer_states=400))
    rules = OutputConstraint("start: /[ab]*a[ab]{14}c/\n")
    factory = ConstraintFactory(lambda: vocabulary, n_threads=1)
    chance, masks = random.Random(0), np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
    letters = [tokenizer.encode_text(letter) for letter in "ab"]
    worn = factory.make(rules, ())
    for _ in range(2_000):
        worn.advance(chance.choice(letters))
        worn.fill((), masks)
        if worn.failure:
            break
    assert "too many states" in worn.failure and not len(factory.grammars)
    fresh = factory.make(rules, ())
    fresh.fill((), masks)
    assert not fresh.failure and len(factory.grammars) == 1


def test_the_ends_of_the_least_recently_used_grammars_are_removed(
    monkeypatch: pytest.MonkeyPatch, vocabulary: GrammarVocabulary
) -> None:
    monkeypatch.setattr(constraints, "MAX_CACHED_GRAMMARS", 2)
    factory = ConstraintFactory(lambda: vocabulary, n_threads=1)
    closers = []
    for text in "abacac":
        closers.append(factory.make(OutputConstraint(rule(text)), (), max_tokens=8)._closer)
        assert len(factory._closers) <= 2
    assert closers[0] is closers[2] is closers[4] and closers[3] is closers[5]


def test_what_llguidance_gives_up_is_too_complex() -> None:
    assert grammar_cache.first_lines("panic: called `Result::unwrap()`\n<backtrace>") == "it is too complex"
