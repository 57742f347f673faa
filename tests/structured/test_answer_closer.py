"""Constrained answers end before their limit of tokens, whole and in the same way on every worker."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.structured import way_finder
from libs.structured.answer_closer import AnswerCloser
from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.constraint import GrammarConstraint, Phase
from libs.structured.grammar_cache import compile_grammar
from libs.structured.mask_filler import GrammarMasks
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint
from tests.structured.generated_schemas import Schema, schemas
from tests.support.examples import examples

PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 1000},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
        "mail": {"type": "string", "pattern": "^[a-z0-9]+@[a-z]+[.]com$"},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags", "mail", "born"],
    "additionalProperties": False,
}


@functools.cache
def filler() -> GrammarMasks:
    return GrammarMasks(1)


def state(output: OutputFormat, vocabulary: GrammarVocabulary, max_tokens: int) -> GrammarConstraint:
    grammar = answer_grammar(output, (), {})
    return constraint_of(grammar, vocabulary, max_tokens)


def constraint_of(grammar: str, vocabulary: GrammarVocabulary, max_tokens: int) -> GrammarConstraint:
    matcher, rules = compile_grammar(grammar, vocabulary), OutputConstraint(grammar)
    closer = AnswerCloser(vocabulary) if max_tokens else None
    return GrammarConstraint(
        rules, matcher, vocabulary, closer=closer, max_tokens=max_tokens, filler=filler()
    )


def allowed_rows(
    constraint: GrammarConstraint, vocabulary: GrammarVocabulary, drafts: Sequence[int] = ()
) -> list[list[int]]:
    """The tokens that the next row and those after drafts allow."""
    masks = np.zeros((1 + len(drafts), -(-vocabulary.size // 32)), dtype=np.int32)
    constraint.filler.fill([(constraint, drafts)], masks)
    assert not constraint.failure
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : vocabulary.size]
    return [np.flatnonzero(row).tolist() for row in bits]


def settled(constraint: GrammarConstraint, token: int, drafts: Sequence[int] = ()) -> int:
    """The token of the model, or the one that comes in its place."""
    return min(constraint.settle(drafts, token), default=token)


def answer(
    constraint: GrammarConstraint, vocabulary: GrammarVocabulary, *, seed: int, max_tokens: int
) -> list[int]:
    """The tokens of a model with equal logits, without the one that ends them."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        [allowed] = allowed_rows(constraint, vocabulary)
        token = settled(constraint, int(random.choice(allowed)))
        constraint.advance((token,))
        if constraint.phase is Phase.ENDED:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("max_tokens", [80, 120, 400])
def test_an_answer_of_a_form_without_bounds_is_whole(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, max_tokens: int
) -> None:
    output = OutputFormat("json_schema", PERSON)
    for seed in range(8):
        constraint = state(output, vocabulary, max_tokens)
        tokens = answer(constraint, vocabulary, seed=seed, max_tokens=max_tokens)
        found = json.loads(tokenizer.decode(tokens))
        jsonschema.validate(found, PERSON)


def test_answers_of_many_forms_are_whole(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    ended = 0
    for number, schema in enumerate(schemas(40)):
        constraint = state(OutputFormat("json_schema", schema), vocabulary, 300)
        text = tokenizer.decode(answer(constraint, vocabulary, seed=number, max_tokens=300))
        try:
            found = json.loads(text)
        except ValueError:
            continue
        ended += 1
        jsonschema.validate(found, schema)
    assert ended >= 39


@pytest.mark.parametrize(
    "output",
    [
        OutputFormat("json_object"),
        OutputFormat("regex", "[a-z ]+!"),
        OutputFormat("lark", 'start: item+ "end"\nitem: /[a-c]+/ ","\n'),
    ],
    ids=lambda output: output.kind,
)
def test_other_forms_close_too(output: OutputFormat, vocabulary: GrammarVocabulary) -> None:
    for seed in range(5):
        constraint = state(output, vocabulary, 50)
        answer(constraint, vocabulary, seed=seed, max_tokens=50)
        assert constraint.phase is Phase.ENDED or constraint.matcher.is_accepting()


@pytest.mark.parametrize("recursive", [{"type": "object"}, {"type": "array", "minItems": 1}])
def test_a_recursion_ends_with_another_value(recursive: Schema, vocabulary: GrammarVocabulary) -> None:
    """What opens one level more comes after `null` and numbers."""
    again = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    held = {"properties": {"next": again}, "required": ["next"], "additionalProperties": False}
    schema = {**recursive, **held} if recursive["type"] == "object" else {**recursive, "items": again}
    for seed in range(5):
        constraint = state(OutputFormat("json_schema", schema), vocabulary, 40)
        answer(constraint, vocabulary, seed=seed, max_tokens=40)
        assert constraint.phase is Phase.ENDED or constraint.matcher.is_accepting()


def test_a_continued_answer_closes_in_the_same_way_and_so_does_one_with_drafts(
    vocabulary: GrammarVocabulary,
) -> None:
    """After right drafts each token of the model settles as after single steps, also where closing begins."""
    output, max_tokens = OutputFormat("json_schema", PERSON), 90
    random = np.random.default_rng(3)
    single = state(output, vocabulary, max_tokens)
    wanted, tokens = [], []
    while single.phase is not Phase.ENDED:
        wanted.append(int(random.choice(allowed_rows(single, vocabulary)[0])))
        tokens.append(settled(single, wanted[-1]))
        single.advance(tokens[-1:])
    assert single.is_closing and wanted != tokens and len(tokens) <= max_tokens
    n_drafts = 0
    for begin in range(0, len(tokens), 3):
        continued = state(output, vocabulary, max_tokens)
        continued.advance(tokens[:begin])
        assert wanted[begin] == tokens[begin] or not continued.count_allowed([wanted[begin]])
        drafts = tokens[begin : begin + 5]
        drafts = drafts[: continued.count_allowed(drafts)]
        n_drafts += len(drafts)
        allowed_rows(continued, vocabulary, drafts)  # changes no state
        for n in {0, len(drafts)}:
            assert settled(continued, wanted[begin + n], drafts[:n]) == tokens[begin + n]
        continued.advance([*drafts, tokens[begin + len(drafts)]])
        after = begin + len(drafts) + 1
        assert continued.phase is Phase.ENDED or settled(continued, wanted[after]) == tokens[after]
    assert n_drafts > len(tokens)


def test_an_answer_with_room_is_left_alone(vocabulary: GrammarVocabulary) -> None:
    output = OutputFormat("json_schema", PERSON)
    tokens = answer(state(output, vocabulary, 0), vocabulary, seed=1, max_tokens=150)
    free, held = state(output, vocabulary, 0), state(output, vocabulary, 4096)
    for token in tokens:
        assert allowed_rows(free, vocabulary) == allowed_rows(held, vocabulary)
        free.advance((token,))
        held.advance((token,))
    assert not held.is_closing


def test_drafts_are_allowed_up_to_the_next_look(vocabulary: GrammarVocabulary) -> None:
    output = OutputFormat("json_schema", PERSON)
    tokens = answer(state(output, vocabulary, 0), vocabulary, seed=1, max_tokens=150)
    constraint = state(output, vocabulary, 200)
    end = constraint._end
    assert end is not None and end.way is None
    assert 0 < constraint.count_allowed(tokens) == end.n_left - end.look_at - 1 < len(tokens)


def test_a_text_that_may_end_within_a_token_is_not_kept(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    [token], [other] = tokenizer.encode_text(" item"), tokenizer.encode_text("x")
    finder = way_finder.WayFinder(vocabulary)
    for grammar, is_kept in (('start: " item"', True), ('start: " it" "em"?', False)):
        assert finder.keeps_text(token, other, compile_grammar(grammar, vocabulary)) is is_kept


def test_a_call_is_cut_so_that_it_does_not_look_whole(vocabulary: GrammarVocabulary) -> None:
    grammar = answer_grammar(None, [CallableTool("look", PERSON)], vocabulary.special_ids)
    constraint = constraint_of(grammar, vocabulary, 120)
    assert len(answer(constraint, vocabulary, seed=1, max_tokens=120)) == 120
    assert not constraint.is_closing


def test_an_answer_of_slow_masks_may_be_cut(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_finder, "_MAX_LOOK_S", -1.0)
    constraint = state(OutputFormat("json_schema", PERSON), vocabulary, 90)
    assert len(answer(constraint, vocabulary, seed=2, max_tokens=90)) == 90
    assert not constraint.is_closing and constraint.count_allowed([]) == 0


Choices = list[str]
CHOICES = st.lists(st.text("Every item has 12 months.", min_size=1, max_size=24), min_size=1, max_size=4)


def chosen(
    constraint: GrammarConstraint, vocabulary: GrammarVocabulary, *, seed: int, max_tokens: int
) -> list[int]:
    """The tokens of a model whose wish is a function of the tokens so far, with the one that ends them."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and constraint.phase is not Phase.ENDED:
        [allowed] = allowed_rows(constraint, vocabulary)
        wish = np.random.default_rng([seed, *tokens]).choice(allowed)
        tokens.append(settled(constraint, int(wish)))
        constraint.advance(tokens[-1:])
    return tokens


def least_limit(choices: Choices, tokenizer: Tokenizer) -> int:
    """The least limit at which every answer is whole, in tokens.

    A search finds the shortest of the choices where it can look at all their beginnings; a rule of thumb
    finds any one of them.
    """
    beginnings = {choice[:n] for choice in choices for n in range(len(choice) + 1)}
    counts = [len(tokenizer.encode_text(choice)) for choice in choices]
    return min(counts) if len(beginnings) <= way_finder._MAX_SEARCHED else max(counts)


@settings(max_examples=examples(20), deadline=None)
@given(choices=CHOICES, seed=st.integers(0, 99))
@example(choices=["E1E1E1E1E1E1", "1E1E1E1EE1E111"], seed=1)
def test_a_choice_is_whole_and_the_models_own_wherever_it_fits(
    choices: Choices, seed: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    output = OutputFormat("choice", choices)
    free = chosen(state(output, vocabulary, 0), vocabulary, seed=seed, max_tokens=100)
    for max_tokens in range(least_limit(choices, tokenizer), len(free) + 3):
        constraint = state(output, vocabulary, max_tokens)
        tokens = chosen(constraint, vocabulary, seed=seed, max_tokens=max_tokens)
        has_end = tokens[-1] in vocabulary.end_ids
        assert tokenizer.decode(tokens[: len(tokens) - has_end]) in choices
        if max_tokens >= len(free):
            assert tokens == free and not constraint.is_closing
        else:
            assert constraint.is_closing or not has_end or len(tokens) < len(free)


@pytest.mark.parametrize(
    ("output", "max_tokens", "wishes", "text", "is_closing"),
    [
        (OutputFormat("json_schema", {"type": "boolean"}), 3, ["t"], "true", False),
        (OutputFormat("json_schema", {"type": "boolean"}), 3, ["f"], "true", True),
        (OutputFormat("choice", ["yes", "no"]), 3, ["y"], "yes", False),
        (OutputFormat("choice", ["yes", "no"]), 2, ["y"], "no", True),
        (OutputFormat("choice", ["Every", "Every item has"]), 3, ["Every", " item"], "Every", True),
    ],
)
def test_an_answer_closes_only_where_its_text_is_not_the_models(
    output: OutputFormat,
    max_tokens: int,
    wishes: list[str],
    text: str,
    is_closing: bool,
    vocabulary: GrammarVocabulary,
    tokenizer: Tokenizer,
) -> None:
    """Fewer tokens for the text that the model has begun change nothing."""
    tokens: list[int] = []
    constraint = state(output, vocabulary, max_tokens)
    while constraint.phase is not Phase.ENDED:
        [allowed] = allowed_rows(constraint, vocabulary)
        wish = tokenizer.encode_text(wishes[len(tokens)])[0] if len(tokens) < len(wishes) else allowed[0]
        tokens.append(settled(constraint, wish))
        constraint.advance(tokens[-1:])
    assert (tokenizer.decode(tokens), constraint.is_closing) == (text, is_closing)
    assert len(tokens) <= max_tokens


def test_answers_whose_looks_take_a_step_too_long_look_no_more(vocabulary: GrammarVocabulary) -> None:
    def begun() -> GrammarConstraint:
        constraint = state(OutputFormat("json_schema", PERSON), vocabulary, 40)
        for _ in range(4):  # each takes the model off the way that is known
            allowed = allowed_rows(constraint, vocabulary)[0]
            constraint.advance([max(allowed)])
        return constraint

    masks = np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
    for limit_s, is_slow in ((10.0, False), (0.0, True)):
        constraint = begun()
        GrammarMasks(1, limit_s=limit_s).fill([(constraint, ())], masks)
        assert constraint._closer is not None and constraint._closer.is_slow is is_slow
        assert constraint.take_look_s() == 0.0
