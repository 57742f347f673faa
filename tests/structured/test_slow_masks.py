"""A grammar whose masks grow slower with each token fails its own sequence, and none beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.structured.answer_grammar import OutputFormat
from libs.structured.constraint import GrammarConstraint
from libs.structured.grammar_cache import compile_grammar
from libs.structured.grammar_check import Checked, CheckRequest, check_grammar
from libs.structured.mask_filler import GrammarMasks, costliest
from libs.structured.schema.large_unions import find_large_union
from libs.structured.schema.schema_walk import walk
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint

_AMBIGUOUS = "start: e\ne: e e | /[a-z ]/\n"
_PLAIN = "start: /[a-z ]+/\n"
_MOST_TOKENS = 400


class _Clock:
    """Counts masks as time: each that a step computes alone takes `cost_s`."""

    def __init__(self, costs_s: Sequence[float] = ()) -> None:
        self.now_s = 0.0
        self.costs_s = list(costs_s)

    def read(self) -> float:
        self.now_s += self.costs_s.pop(0) if self.costs_s else 0.0
        return self.now_s


def _constraint(grammar: str, vocabulary: GrammarVocabulary, filler: GrammarMasks) -> GrammarConstraint:
    rules = OutputConstraint(grammar)
    return GrammarConstraint(rules, compile_grammar(grammar, vocabulary), vocabulary, filler=filler)


def _masks(n_rows: int, vocabulary: GrammarVocabulary) -> np.ndarray:
    return np.zeros((n_rows, -(-vocabulary.size // 32)), dtype=np.int32)


def test_an_ambiguous_grammar_ends_alone_before_its_masks_take_long(vocabulary: GrammarVocabulary) -> None:
    filler = GrammarMasks(1, limit_s=0.01)
    costly, plain = (_constraint(grammar, vocabulary, filler) for grammar in (_AMBIGUOUS, _PLAIN))
    chance = random.Random(0)
    for _ in range(_MOST_TOKENS):
        masks = _masks(2, vocabulary)
        filler.fill([(costly, ()), (plain, ())], masks)
        assert not plain.failure
        if costly.failure:
            break
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[0])
        letters = [int(token) for token in allowed if token not in vocabulary.end_ids]
        for constraint in (costly, plain):
            constraint.advance([chance.choice(letters)])
    assert "is too complex" in costly.failure


@pytest.mark.parametrize(("n_rules", "is_failed"), [(400, False), (1500, True)])
def test_items_that_are_open_at_once_are_limited(
    n_rules: int, is_failed: bool, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    rules = "\n".join([f'r{n}: "b{n}" /[0-9]/' for n in range(n_rules)])
    grammar = f'start: "a" e\ne: {" | ".join([f"r{n}" for n in range(n_rules)])}\n{rules}\n'
    constraint = _constraint(grammar, vocabulary, GrammarMasks(1))
    constraint.advance(tokenizer.encode_text("a"))
    assert ("items; max is 1500" in constraint.failure) == is_failed


def test_a_mask_that_is_slow_once_fails_nothing(vocabulary: GrammarVocabulary) -> None:
    wall, cpu = _Clock([0, 0.5, 0, 0.1, 0, 0.5]), _Clock([0, 0.02, 0, 0.02])
    filler = GrammarMasks(1, limit_s=0.1, now_s=wall.read, cpu_s=cpu.read)
    pair = [(_constraint(_PLAIN, vocabulary, filler), ()) for _ in range(2)]
    for _ in range(3):
        filler.fill(pair, _masks(2, vocabulary))
    assert not any(constraint.failure for constraint, _ in pair)


def test_a_grammar_that_is_slow_at_some_tokens_fails(vocabulary: GrammarVocabulary) -> None:
    wall = _Clock([0, 0.5, 0, 0.1, 0, 0.1, 0, 0.5])
    cpu = _Clock([0, 0.02, 0, 0.02, 0, 0.2])
    filler = GrammarMasks(1, limit_s=0.1, now_s=wall.read, cpu_s=cpu.read)
    constraint = _constraint(_PLAIN, vocabulary, filler)
    for n_steps in range(1, 5):
        filler.fill([(constraint, ())], _masks(1, vocabulary))
        assert bool(constraint.failure) == (n_steps == 4)


def test_the_step_after_a_slow_one_fails_the_costliest(vocabulary: GrammarVocabulary) -> None:
    wall, cpu = _Clock([0, 0.5]), _Clock([0, 0.02, 0, 0.09])
    filler = GrammarMasks(1, limit_s=0.1, now_s=wall.read, cpu_s=cpu.read)
    pair = [(_constraint(_PLAIN, vocabulary, filler), ()) for _ in range(2)]
    for _ in range(2):
        filler.fill(pair, _masks(2, vocabulary))
    assert [bool(constraint.failure) for constraint, _ in pair] == [False, True]


@given(st.lists(st.floats(0, 10), max_size=20), st.floats(0, 20))
def test_the_costliest_are_the_fewest_that_bring_the_rest_below_the_limit(
    costs_s: list[float], limit_s: float
) -> None:
    found = costliest(costs_s, limit_s)
    kept = [cost_s for number, cost_s in enumerate(costs_s) if number not in found]
    assert sum(kept) <= limit_s + 1e-9
    if found:
        assert sum(kept) + min(costs_s[number] for number in found) > limit_s - 1e-9
        assert max(kept, default=0.0) <= min(costs_s[number] for number in found)


@pytest.mark.parametrize("n_drafts", [0, 3])
def test_measured_masks_equal_those_computed_together(
    n_drafts: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    together, measured = GrammarMasks(2), GrammarMasks(2, limit_s=-1.0)
    drafts = tokenizer.encode_text("a") * n_drafts
    rows = []
    for filler in (together, measured):
        for _ in range(2):  # the second step of `measured` is the one that measures
            work = [(_constraint(_PLAIN, vocabulary, filler), drafts) for _ in range(2)]
            masks = _masks(2 * (1 + n_drafts), vocabulary)
            assert filler.fill(work, masks) == [None] * len(masks)
        rows.append(masks)
    assert np.array_equal(rows[0], rows[1])


def _many_rules(n_rules: int) -> str:
    """Rules that are ambiguous only behind a text that no trial by chance meets."""
    rules = "\n".join([f'n{n}: s "a" | "b" s | /[a-z]/' for n in range(n_rules)])
    joined = " | ".join([f"s n{n} | n{n} s" for n in range(n_rules)])
    return f'start: /x{{40}}/ s\ns: {joined} | "a"\n{rules}\n'


def test_a_grammar_of_many_rules_is_refused_and_one_of_few_has_quick_masks(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    def check(n_rules: int) -> Checked:
        return check_grammar(
            CheckRequest(OutputFormat("lark", _many_rules(n_rules), "guided_grammar")), vocabulary
        )

    assert check(100).field == "guided_grammar"
    assert check(100).reason == "is too complex: its rules have more than 300 symbols"
    constraint = _constraint(check(20).grammar, vocabulary, GrammarMasks(1))
    constraint.advance(tokenizer.encode_text("x" * 40))
    constraint.fill((), _masks(1, vocabulary))
    assert "Too many items (limit 2000" in constraint.failure


def _nested_union(n: int, *, held: str) -> dict[str, Any]:
    arrays = [{"type": "array", "items": {"$ref": f"#/$defs/{held}"}, "maxItems": 100 + i} for i in range(n)]
    leaf = {"anyOf": [{"type": "array", "items": {"type": "null"}}] * n}
    return {"properties": {"b": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"anyOf": arrays}, "leaf": leaf}}


@pytest.mark.parametrize("held", ["s", "leaf"])
def test_large_unions_below_each_other_are_refused(held: str, vocabulary: GrammarVocabulary) -> None:
    def check(n: int) -> Checked:
        output = OutputFormat("json_schema", _nested_union(n, held=held))
        return check_grammar(CheckRequest(output), vocabulary)

    assert check(60).grammar
    refused = check(65)
    assert refused.field == "response_format.properties.b"
    assert refused.reason == "has 65 arrays and objects that hold another union of more than 64"


@pytest.mark.parametrize(
    ("union", "n"),
    [
        ({"anyOf": [{"type": "object"}] * 256}, 256),
        ({"oneOf": [{"type": "array"}] * 257}, 257),
        ({"anyOf": [{"anyOf": [{"type": "object"}, True]}] * 129}, 258),
        ({"allOf": [{"anyOf": [{"type": "object"}] * 20}, {"oneOf": [{"type": "object"}] * 20}]}, 400),
        ({"patternProperties": {f"^{n}": {"type": "array"} for n in range(300)}}, 300),
        ({"anyOf": [{"type": "string"}, {"const": {}}, {"enum": [[]]}, False] * 100}, 0),
        ({"anyOf": [{"type": ["null", "array"]}, {"type": "integer"}] * 150}, 150),
    ],
)
def test_alternatives_at_one_place_are_counted(union: dict[str, Any], n: int) -> None:
    schema = {"type": "object", "properties": {"a": union}}
    found = find_large_union(schema, list(walk(schema)))
    assert (found is not None) == (n > 256)
    if found is not None:
        assert found == (
            f"properties.a.{next(iter(union)) if 'allOf' not in union else ''}".rstrip("."),
            f"has {n} arrays and objects at one place: at most 256",
        )
