"""Schemas that llguidance alone compiles and does not hold exactly: valid answers alone, and all of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.constraint import GrammarConstraint
from libs.structured.constraints import ConstraintFactory
from libs.structured.grammar_check import Checked, CheckRequest, check_grammar
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.special_tokens import TOOL_CALL_ARGUMENT_BEGIN, TOOL_CALL_BEGIN
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint
from tests.structured.random_answers import constraint_of, walk
from tests.structured.test_json_schema import accepts

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_CLOSED = {"type": "object", "patternProperties": {"^(a|b)$": _NUMBER}, "additionalProperties": False}
_CODE = {"enum": ["\x01", "x"]}

# A schema, valid texts, and invalid ones.
_CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "object", "minProperties": 2},
        ['{"a":1,"b":2}', '{"a":1,"a":2,"b":{}}'],
        ['{"a":1}', '{"a":1,"a":2}', '{"a":1,"\\u0061":2}', '{"a":{},"a":{"b":1,"c":2}}'],
    ),
    (
        {
            "type": "object",
            "properties": {"feeds": {"type": "object", "minProperties": 3, "additionalProperties": _TEXT}},
            "required": ["feeds"],
        },
        ['{"feeds":{"a":"}","b":"\\"","c":""}}'],
        ['{"feeds":{"a":"","b":"","a":""}}', '{"feeds":{"a":"","a\\n":"","a\\n":""}}'],
    ),
    (
        {
            "type": "object",
            "minProperties": 2,
            "patternProperties": {"^[0-9]{2}$": _NUMBER},
            "additionalProperties": False,
        },
        ['{"11":1,"12":2}'],
        ['{"11":1}', '{"11":1,"11":2}'],
    ),
    (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 3},
        ['{"a":1,"b":1,"c":1}'],
        ['{"a":1,"b":1,"b":1}'],
    ),
    (
        {"type": "array", "prefixItems": [_TEXT, _NUMBER], "items": [_TEXT, {"minimum": 3}]},
        ["[]", '["a"]', '["a",3]'],
        ["[1]", '["a",2]', '["a",3,4]'],
    ),
    (
        {"type": "array", "prefixItems": [_TEXT], "additionalItems": False},
        ['["a"]', '["a",1]'],
        ["[1]", "[1,2]"],
    ),
    (
        {"type": "array", "prefixItems": [_TEXT], "items": _NUMBER, "additionalItems": False},
        ['["a"]', '["a",1]'],
        ["[1]", '["a","b"]'],
    ),
    (
        {"$schema": _DRAFT_7, "type": "array", "prefixItems": [_TEXT], "items": [_NUMBER]},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]'],
    ),
    (
        {"$schema": _DRAFT_7, "type": "array", "prefixItems": [_TEXT], "items": _NUMBER},
        ["[]", "[1,2]"],
        ['["a"]'],
    ),
    (
        {"type": "object", "properties": {"a": _CODE}},
        ['{"a":"\\u0001"}', '{"a":"x","b":[1]}', "{}"],
        ['{"a":"y"}', '{"\\u0061":"y"}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": _CODE, "größe": _NUMBER, "": _NUMBER},
            "additionalProperties": _TEXT,
        },
        ['{"a":"\\u0001","größe":1,"":1}', '{"b":"","grö":"","größer":""}'],
        ['{"größe":""}', '{"":""}', '{"b":1}', '{"\\u0061":"y"}'],
    ),
    (
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}, "y": {}}, "$defs": {"a": _ENDLESS}},
        ["{}", '{"y":1}'],
        ['{"x":{}}', '{"x":{"n":{}}}'],
    ),
    ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": _ENDLESS}}, ["[]"], ["[{}]"]),
    (
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": _ENDLESS}},
        ["null"],
        ["{}", '{"n":null}'],
    ),
    (
        {"type": "string", "format": "time"},
        ['"15:59:60-08:00"', '"01:29:60.5+01:30"', '"00:29:60-23:30"', '"23:59:60.25z"', '"05:44:60+05:45"'],
        ['"15:59:60-07:00"', '"23:59:60+00:30"', '"23:58:60Z"', '"05:44:60-05:45"'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), _CASES)
def test_all_valid_texts_and_no_others(
    schema: Any, good: list[str], bad: list[str], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    part = OutputFormat("json_schema", schema)
    assert check_grammar(CheckRequest(part), vocabulary) == Checked(answer_grammar(part, (), {}))
    for text in good:
        assert accepts(schema, text, vocabulary, tokenizer), text
    for text in bad:
        assert not accepts(schema, text, vocabulary, tokenizer), text


@pytest.mark.parametrize(("schema", "good", "bad"), _CASES)
def test_random_answers_are_valid(
    schema: Any, good: list[str], bad: list[str], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    output = OutputFormat("json_schema", schema)
    answers = [
        walk(constraint_of(output, vocabulary), vocabulary, tokenizer, seed=seed, max_tokens=300, haste=0.3)
        for seed in range(8)
    ]
    ended = [json.loads(answer) for answer in answers if answer is not None]
    assert ended
    for instance in ended:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(instance)


def _allowed(state: GrammarConstraint, vocabulary: GrammarVocabulary) -> set[int]:
    masks = np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
    assert state.filler is None or state.filler.fill([(state, ())], masks) == [None]
    if state.filler is None:
        assert state.fill((), masks) == [None]
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def _token(text: bytes, tokenizer: Tokenizer) -> int:
    return next(i for i in range(tokenizer.base_vocab_tokens) if tokenizer.token_bytes(i) == text)


def test_a_mask_leaves_no_token_that_repeats_a_key_or_ends_the_object_with_it(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "minProperties": 2, "additionalProperties": _NUMBER}
    quote, brace = _token(b'"', tokenizer), _token(b"}", tokenizer)
    factory = ConstraintFactory(lambda: vocabulary, n_threads=1)
    grammar = answer_grammar(OutputFormat("json_schema", schema), (), {})
    state = factory.make(OutputConstraint(grammar), tokenizer.encode_text('{"key":1,"ke'))
    assert quote in _allowed(state, vocabulary)
    state.advance([_token(b"y", tokenizer)])
    assert quote not in _allowed(state, vocabulary)
    repeated = factory.make(OutputConstraint(grammar), tokenizer.encode_text('{"key":1,"key":2'))
    assert not repeated.failure
    assert brace not in _allowed(repeated, vocabulary)
    repeated.advance([brace])
    assert repeated.failure
    enough = factory.make(OutputConstraint(grammar), tokenizer.encode_text('{"key":1,"key":2,"k":3'))
    assert brace in _allowed(enough, vocabulary)


def test_a_key_that_a_pattern_forces_may_repeat_and_the_object_goes_on(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    patterns = {"^[a-z]x$": _NUMBER}
    schema = {
        "type": "object",
        "minProperties": 2,
        "patternProperties": patterns,
        "additionalProperties": False,
    }
    state = constraint_of(OutputFormat("json_schema", schema), vocabulary)
    state.advance(tokenizer.encode_text('{"ax":1,"ax'))
    assert _token(b'"', tokenizer) in _allowed(state, vocabulary)
    state.advance(tokenizer.encode_text('":1'))
    assert _token(b"}", tokenizer) not in _allowed(state, vocabulary)
    state.advance(tokenizer.encode_text(',"bx":1}'))
    assert not state.failure
    assert state.matcher.is_accepting()


def test_drafts_that_end_an_object_too_early_are_cut_and_leave_no_trace(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    grammar = answer_grammar(OutputFormat("json_schema", {"type": "object", "minProperties": 2}), (), {})
    state = ConstraintFactory(lambda: vocabulary, n_threads=1).make(
        OutputConstraint(grammar), tokenizer.encode_text('{"a":1,"a":2')
    )
    early = [_token(b"}", tokenizer)]
    going_on = tokenizer.encode_text(',"b":3}')
    assert state.count_allowed(early) == 0
    assert state.count_allowed(going_on) == len(going_on)
    before = _allowed(state, vocabulary)
    masks = np.zeros((1 + len(going_on), -(-vocabulary.size // 32)), dtype=np.int32)
    assert state.filler is not None
    state.filler.fill([(state, going_on)], masks)
    assert _allowed(state, vocabulary) == before
    state.advance(going_on)
    assert not state.failure
    assert state.matcher.is_accepting()


def test_keys_of_each_tool_call_are_distinct(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    tool = CallableTool("f", {"type": "object", "minProperties": 2, "additionalProperties": _NUMBER})
    special = tokenizer.special_ids
    rules = OutputConstraint(answer_grammar(None, [tool], special), awaits_calls=True)
    call = [special[TOOL_CALL_BEGIN], *tokenizer.encode_text("functions.f:0")]
    call.append(special[TOOL_CALL_ARGUMENT_BEGIN])
    factory = ConstraintFactory(lambda: vocabulary, n_threads=1)
    state = factory.make(rules, tokenizer.encode_text('Some {"text'))
    good, bad = (tokenizer.encode_text(text) for text in ('{"a":1,"b":1}', '{"a":1,"a":1}'))
    assert state.count_allowed([*call, *good]) == len(call) + len(good)
    assert state.count_allowed([*call, *bad]) < len(call) + len(bad)
    state.advance([*call, *good])
    assert not state.failure


@pytest.mark.parametrize(
    ("schema", "field", "reason"),
    [
        (
            {"minProperties": 3, "additionalProperties": {"const": "\x01"}},
            "response_format.additionalProperties.const",
            "has a control character, and minProperties distinguishes undeclared keys",
        ),
        (
            {**_CLOSED, "minProperties": 2, "maxProperties": 2},
            "response_format.maxProperties",
            "is not supported beside minProperties of keys that patterns alone allow",
        ),
        (
            {"allOf": [{**_CLOSED, "minProperties": 2}, {"maxProperties": 2}]},
            "response_format.allOf[1].maxProperties",
            "is not supported beside minProperties of keys that patterns alone allow",
        ),
    ],
)
def test_what_no_answer_could_have_beside_distinct_keys_is_refused(
    schema: Any, field: str, reason: str, vocabulary: GrammarVocabulary
) -> None:
    part = OutputFormat("json_schema", schema)
    assert check_grammar(CheckRequest(part), vocabulary) == Checked(field=field, reason=reason)


_STATING = '{"x-slipstream-distinct-keys": 3, "grammars": '


@pytest.mark.parametrize(
    "output",
    [
        OutputFormat("json_schema", {**_CLOSED, "x-slipstream-distinct-keys": 3}),
        OutputFormat("json_schema", {**_CLOSED, "description": _STATING}),
        OutputFormat("choice", [_STATING, '{"a":1,"a":2}']),
        OutputFormat("regex", r'\{"a":1,"a":2\}|x-slipstream-distinct-keys": 3, '),
        OutputFormat("lark", 'start: "{" %json {"x-slipstream-distinct-keys": 3, "type": "null"}'),
    ],
)
def test_no_text_of_a_client_makes_keys_distinct(
    output: OutputFormat, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    state = constraint_of(output, vocabulary)
    assert state.guard is None
    if output.kind != "lark":
        state.advance(tokenizer.encode_text('{"a":1,"a":2}'))
        assert not state.failure
        assert state.matcher.is_accepting()


def test_a_pattern_that_matches_anywhere_in_a_key_is_held(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    """The first fuel of llguidance's lexer does not suffice for keys without escapes."""
    schema = {"patternProperties": {"[A-Za-z0-9-_.:]{1,255}": {"type": "string", "format": "uri"}}}
    assert accepts(schema, '{"child-3":"https://example.com/child-3"}', vocabulary, tokenizer)
    assert not accepts(schema, '{"child-3":1}', vocabulary, tokenizer)
