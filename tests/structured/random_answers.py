"""Answers of a model with random logits at temperature 1.5, constrained by a grammar."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.constraint import GrammarConstraint, Phase
from libs.structured.grammar_cache import compile_grammar
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint

TEMPERATURE = 1.5


def constraint_of(output: OutputFormat, vocabulary: GrammarVocabulary) -> GrammarConstraint:
    grammar = answer_grammar(output, (), {})
    return GrammarConstraint(OutputConstraint(grammar), compile_grammar(grammar, vocabulary), vocabulary)


def random_answers(
    output: OutputFormat,
    vocabulary: GrammarVocabulary,
    tokenizer: Tokenizer,
    *,
    seeds: Iterable[int],
    max_tokens: int,
) -> list[str | None]:
    """Answers under one grammar, which compiles once, as on a worker."""
    rules = OutputConstraint(answer_grammar(output, (), {}))
    compiled = compile_grammar(rules.grammar, vocabulary)
    states = [(seed, GrammarConstraint(rules, compiled.deep_copy(), vocabulary)) for seed in seeds]
    return [walk(state, vocabulary, tokenizer, seed=seed, max_tokens=max_tokens) for seed, state in states]


def random_answer(
    output: OutputFormat,
    vocabulary: GrammarVocabulary,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_tokens: int,
) -> str | None:
    """The text of one answer; None for one that has not ended after `max_tokens`."""
    constraint = constraint_of(output, vocabulary)
    return walk(constraint, vocabulary, tokenizer, seed=seed, max_tokens=max_tokens)


@functools.cache
def closing_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The tokens that begin with the end of a string, an array or an object."""
    closing = (b'"', b"]", b"}")
    return np.array(
        [i for i in range(tokenizer.base_vocab_tokens) if tokenizer.token_bytes(i)[:1] in closing]
    )


def walk(
    constraint: GrammarConstraint,
    vocabulary: GrammarVocabulary,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_tokens: int,
    haste: float = 0.0,
) -> str | None:
    """The text of the answer that this constraint holds; None for one without an end.

    `haste` is the chance of a token that closes something, where one is allowed.
    """
    random = np.random.default_rng(seed)
    closing = closing_tokens(tokenizer)
    masks = np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        assert constraint.fill((), masks) == [None]
        assert not constraint.failure
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: vocabulary.size]
        allowed = np.flatnonzero(bits)
        assert len(allowed), tokenizer.decode(tokens)
        if haste and random.random() < haste:
            ends = np.intersect1d(allowed, list(vocabulary.end_ids))
            closes = ends if len(ends) else np.intersect1d(allowed, closing)
            allowed = closes if len(closes) else allowed
        # The largest of logits with Gumbel noise is a sample of their softmax.
        logits = random.normal(size=len(allowed)) / TEMPERATURE + random.gumbel(size=len(allowed))
        token = int(allowed[logits.argmax()])
        constraint.advance((token,))
        if constraint.phase is Phase.ENDED:
            return tokenizer.decode_bytes(tokens).decode()
        tokens.append(token)
    return None
