"""What a schema's grammar accepts and refuses, token by token, and the paths of what it cannot hold."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from libs.structured.answer_grammar import OutputFormat
from libs.structured.grammar_check import CheckRequest, check_grammar
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from tests.structured.generated_schemas import schemas
from tests.structured.random_answers import constraint_of, random_answer


def accepts(schema: Any, text: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> bool:
    """Whether the grammar takes the text as a whole answer."""
    state = constraint_of(OutputFormat("json_schema", schema), vocabulary)
    state.advance(tokenizer.encode_text(text))
    return not state.failure and state.matcher.is_accepting()


def defect(schema: Any, vocabulary: GrammarVocabulary) -> tuple[str, str]:
    part = OutputFormat("json_schema", schema, "schema")
    found = check_grammar(CheckRequest(part), vocabulary)
    return found.field, found.reason


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"type": "array", "uniqueItems": True}, "schema.uniqueItems"),
        ({"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}, "schema.properties.a.anyOf[1].not"),
        ({"items": {"if": {}, "then": {}}}, "schema.items.if"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}, "schema.$defs.a.contains"),
        ({"properties": {"a": {"format": "iban"}}}, "schema.properties.a.format"),
        ({"type": "integer", "divisibleBy": 3}, "schema.divisibleBy"),
        ({"$ref": "https://example.com/x"}, "schema.$ref"),
        ({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, "schema.properties.p.pattern"),
        ({"items": {"oneOf": [{"minLength": 2}, {"maxLength": 5}]}}, "schema.items.oneOf"),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "schema.maxProperties"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"patternProperties": {"^x": {"const": 1}, "y$": {}}}}},
            "schema.$defs.a.patternProperties",
        ),
        ({"anyOf": [{"const": 1}, {"enum": ["a", {"n": [2**53 + 1]}]}]}, "schema.anyOf[1].enum"),
        (
            {"properties": {"a": {"const": "\x01"}}, "patternProperties": {"^x": {}}},
            "schema.properties.a.const",
        ),
        ({"prefixItems": [{"not": {}}], "items": [{}]}, "schema.prefixItems[0].not"),
        ({"$ref": "#there", "$defs": {"a": {"$anchor": "there", "enum": [2**60]}}}, "schema.$defs.a.enum"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"divisibleBy": 2}}}, "schema.$defs.a%20b.divisibleBy"),
        ({"$ref": "#"}, "schema"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "schema.minimum"),
        (False, "schema"),
        (
            {
                "type": "object",
                "minProperties": 3,
                "patternProperties": {"^(a|b)$": {}},
                "additionalProperties": False,
            },
            "schema.patternProperties",
        ),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "schema"),
    ],
)
def test_what_cannot_be_held_is_named(schema: Any, field: str, vocabulary: GrammarVocabulary) -> None:
    assert defect(schema, vocabulary)[0] == field


def test_definitions_that_nothing_refers_to_do_not_count(vocabulary: GrammarVocabulary) -> None:
    assert defect({"type": "string", "$defs": {"a": {"not": {}}}}, vocabulary) == ("", "")


def test_a_recursion_that_can_end_and_a_count_of_declared_keys_are_held(
    vocabulary: GrammarVocabulary,
) -> None:
    node = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert defect({**node, "required": ["n"], "minProperties": 2}, vocabulary) == ("", "")
    tree = {"type": "array", "items": {"$ref": "#"}, "minItems": 0}
    assert defect(tree, vocabulary) == ("", "")


@pytest.mark.parametrize(
    ("kind", "content", "word"),
    [
        ("lark", "start: <|tool_call_begin|>", "<"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "uniqueItems"),
        ("regex", "(", "regex"),
    ],
)
def test_grammars_with_a_defect_are_refused(
    kind: Any, content: str, word: str, vocabulary: GrammarVocabulary
) -> None:
    part = OutputFormat(kind, content, "guided")
    found = check_grammar(CheckRequest(part), vocabulary)
    assert found.field == "guided"
    assert word in found.reason


def test_an_escape_spells_no_declared_key(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(schema, '{"a":1,"b":"x"}', vocabulary, tokenizer)
    assert not accepts(schema, '{"a":1,"\\u0061":"x"}', vocabulary, tokenizer)
    by_pattern = {
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert accepts(by_pattern, '{"a":1,"b":"x"}', vocabulary, tokenizer)
    assert not accepts(by_pattern, '{"\\u0061":"x"}', vocabulary, tokenizer)


def test_an_unknown_keyword_is_an_annotation(vocabulary: GrammarVocabulary) -> None:
    assert defect({"type": "string", "extends": "types.json#/text", "x-order": 1}, vocabulary) == ("", "")


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.25"], ["1", "1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.6"]),
        ({"exclusiveMinimum": 1, "minimum": 1.2, "maximum": 1.5}, ["1.2"], ["1", "1.1"]),
        ({"minimum": 0, "exclusiveMinimum": True}, ["0.1", "7"], ["0"]),
        ({"type": "integer", "maximum": 2**53 + 3}, [str(2**53)], [str(2**53 + 4)]),
        ({"type": "integer", "exclusiveMinimum": -(2**53) - 3}, [str(-(2**53))], [str(-(2**53) - 4)]),
    ],
)
def test_bounds_of_numbers_are_exact(
    bounds: Any, good: list[str], bad: list[str], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = {"type": "number", **bounds}
    for text in good:
        assert accepts(schema, text, vocabulary, tokenizer), text
    for text in bad:
        assert not accepts(schema, text, vocabulary, tokenizer), text


def test_white_space_has_an_end(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    assert accepts({"type": "object"}, '{\n  "a": [\n    1\n  ]\n}', vocabulary, tokenizer)
    assert not accepts({"type": "object"}, "{" + " " * 100 + "}", vocabulary, tokenizer)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("date", ["2020-02-29", "2000-02-29", "2023-12-31"], ["2021-02-29", "1900-02-29", "2023-04-31"]),
        (
            "date-time",
            ["2020-02-29T00:00:00Z", "1998-12-31T23:59:60Z", "2020-01-01T10:00:00.5+01:00"],
            ["2021-02-29T00:00:00Z", "1998-12-31T12:59:60Z", "2020-01-01 10:00:00Z"],
        ),
        ("time", ["23:59:60Z", "12:30:00+02:00"], ["12:30:60Z", "24:00:00Z"]),
        ("ipv4", ["1.2.3.4"], ["1.2.3.256"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ],
)
def test_formats_are_exact(
    kind: str, good: list[str], bad: list[str], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    for schema in ({"type": "string", "format": kind}, {"format": kind, "pattern": "[0-9]"}):
        for text in good:
            assert accepts(schema, json.dumps(text), vocabulary, tokenizer), text
        for text in bad:
            assert not accepts(schema, json.dumps(text), vocabulary, tokenizer), text


def test_a_format_is_exact_under_a_key_named_like_a_keyword(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"default": {"type": "string", "format": "date"}}}
    assert accepts(schema, '{"default":"2020-02-29"}', vocabulary, tokenizer)
    assert not accepts(schema, '{"default":"2021-02-29"}', vocabulary, tokenizer)


def test_a_format_inside_data_is_data(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    schema = {"const": {"format": "date"}}
    assert accepts(schema, '{"format":"date"}', vocabulary, tokenizer)


def test_instances_are_judged_as_jsonschema_judges_them(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    """Answers of other schemas, and answers with one change, are valid for both or for neither."""
    chance, made = random.Random(7), schemas(24, first=300_009)
    texts = []
    for number, schema in enumerate(made):
        output = OutputFormat("json_schema", schema)
        text = random_answer(output, vocabulary, tokenizer, seed=number, max_tokens=400)
        if text is not None:
            texts.append((schema, json.loads(text)))
    n_valid = n_invalid = 0
    draft = jsonschema.Draft202012Validator
    for schema, instance in texts:
        judge = draft(schema, format_checker=draft.FORMAT_CHECKER)
        for changed in (instance, _changed(instance, chance), chance.choice(texts)[1]):
            is_valid = judge.is_valid(changed)
            compact = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
            if is_valid and changed is not instance:
                continue  # another order of the properties may be valid and not accepted
            assert accepts(schema, compact, vocabulary, tokenizer) == is_valid, (schema, compact)
            n_valid, n_invalid = n_valid + is_valid, n_invalid + (not is_valid)
    assert n_valid > 15
    assert n_invalid > 15


def _changed(instance: Any, chance: random.Random) -> Any:
    """The instance with one value replaced or one key removed."""
    if isinstance(instance, dict) and instance:
        key = chance.choice(list(instance))
        if chance.random() < 0.3:
            return {name: value for name, value in instance.items() if name != key}
        return {**instance, key: _changed(instance[key], chance)}
    if isinstance(instance, list) and instance:
        return [_changed(instance[0], chance), *instance[1:]]
    return {"unexpected": True} if not isinstance(instance, dict) else "unexpected"


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
    ],
)
def test_keywords_that_say_nothing_are_taken(
    keyword: dict[str, Any], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = {"properties": {"a": {"type": ["array", "object"], **keyword}}, **keyword}
    assert defect(schema, vocabulary) == ("", "")
    assert accepts(schema, '{"a":[1,1]}', vocabulary, tokenizer)
