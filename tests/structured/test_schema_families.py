"""Schemas of many kinds are held, or refused by the path of a keyword; never silently less."""

from __future__ import annotations

import json

import jsonschema
import pytest

from libs.structured.answer_grammar import OutputFormat
from libs.structured.constraint import GrammarConstraint
from libs.structured.grammar_cache import compile_grammar
from libs.structured.grammar_check import CheckRequest, check_grammar
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint
from tests.structured.random_answers import walk
from tests.structured.schema_families import FamilyMaker, Schema


def _ended(schema: Schema, n: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> int | None:
    """How many of `n` answers have ended, all of them valid; None for a schema that is refused by name."""
    part = OutputFormat("json_schema", schema, "schema")
    checked = check_grammar(CheckRequest(part), vocabulary)
    if checked.reason:
        assert checked.field.startswith("schema")
        return None
    rules = OutputConstraint(checked.grammar)
    compiled = compile_grammar(rules.grammar, vocabulary)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    n_ended = 0
    for seed in range(n):
        state = GrammarConstraint(rules, compiled.deep_copy(), vocabulary)
        answer = walk(state, vocabulary, tokenizer, seed=seed, max_tokens=400, haste=0.3)
        if answer is not None:
            errors = [error.message for error in judge.iter_errors(json.loads(answer))]
            assert not errors, (schema, answer, errors)
            n_ended += 1
    return n_ended


def _check(numbers: range, n: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> tuple[int, int]:
    """How many of these schemas are held, and how many of their answers have ended."""
    ended = [_ended(FamilyMaker(number).schema(), n, vocabulary, tokenizer) for number in numbers]
    held = [count for count in ended if count is not None]
    return len(held), sum(held)


def test_answers_under_schemas_of_many_kinds_are_valid(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    n_held, n_ended = _check(range(60), 1, vocabulary, tokenizer)
    assert n_held > 20
    assert n_ended > 15


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(12))
def test_answers_under_thousands_of_schemas_are_valid(
    part: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    n_held, n_ended = _check(range(250 * part, 250 * (part + 1)), 8, vocabulary, tokenizer)
    assert n_held > 100
    assert n_ended > 800
