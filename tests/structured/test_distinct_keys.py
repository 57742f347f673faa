"""Keys that the key guard compares: in which parts of an answer, with which schemas, and at which cost."""

from __future__ import annotations

import itertools
import json
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.structured.answer_grammar import OutputFormat
from libs.structured.constraint import GrammarConstraint
from libs.structured.grammar_cache import compile_grammar
from libs.structured.grammar_check import CheckRequest, check_grammar
from libs.structured.key_guard import KeyGuard
from libs.structured.stated_keys import TEXT, stated_keys
from libs.structured.token_bytes import TokenBytes
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.special_tokens import TOOL_CALL_ARGUMENT_BEGIN, TOOL_CALL_BEGIN, TOOL_CALL_END, special_ids
from libs.text.tokenizer import Tokenizer
from slipstream.errors import InvalidArgument
from slipstream.sampling import OutputConstraint
from tests.structured.random_answers import walk
from tests.structured.test_json_schema import accepts, defect
from tests.support.examples import examples

_THREE = {"type": "object", "minProperties": 3}
_FEW = {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}, "additionalProperties": False}


def _closed(*patterns: str, **more: Any) -> dict[str, Any]:
    patterns_ = {pattern: {"type": "null"} for pattern in patterns}
    return {"type": "object", "patternProperties": patterns_, "additionalProperties": False, **more}


def _state(grammar: str, vocabulary: GrammarVocabulary) -> GrammarConstraint:
    return GrammarConstraint(OutputConstraint(grammar), compile_grammar(grammar, vocabulary), vocabulary)


def _call(name: str, arguments: str, tokenizer: Tokenizer) -> list[int]:
    special, encode = tokenizer.special_ids, tokenizer.encode_text
    named = [special[TOOL_CALL_BEGIN], *encode(f"functions.{name}:0"), special[TOOL_CALL_ARGUMENT_BEGIN]]
    return [*named, *encode(arguments), special[TOOL_CALL_END]]


@pytest.mark.parametrize(
    "output",
    [
        None,
        OutputFormat("regex", r'\{("a",)*"a"\}', "guided_regex"),
        OutputFormat("json_schema", _FEW),
        OutputFormat("json_schema", {**_THREE, "minProperties": 4}),
    ],
)
def test_each_tool_and_the_text_compare_keys_by_their_own_schema(
    output: OutputFormat | None, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    tools = [CallableTool("f", _THREE), CallableTool("g", _FEW), CallableTool("h")]
    checked = check_grammar(CheckRequest(output, tools), vocabulary)
    assert not checked.reason
    grammar = checked.grammar

    def is_taken(*calls: tuple[str, str]) -> bool:
        state = _state(grammar, vocabulary)
        state.advance([token for name, text in calls for token in _call(name, text, tokenizer)])
        return not state.failure

    repeating = '{"a":1,"a":2}'
    assert is_taken(("g", repeating), ("h", repeating), ("g", repeating))
    assert is_taken(("h", repeating), ("f", '{"a":1,"a":2,"b":1,"c":1}'), ("g", repeating))
    assert not is_taken(("g", repeating), ("f", '{"a":1,"a":2,"b":1}'))
    assert is_taken(("h", '{"c":1}')) and not is_taken(("g", '{"c":1}'))
    if output is not None:
        texts = {"regex": '{"a","a"}', "json_schema": '{"a":1,"a":2,"a":3,"a":4}'}
        state = _state(grammar, vocabulary)
        state.advance(tokenizer.encode_text(texts[output.kind]))
        assert bool(state.failure) == ("minProperties" in (output.content or ()))
    for seed in range(6):
        answer = walk(
            _state(grammar, vocabulary), vocabulary, tokenizer, seed=seed, max_tokens=400, haste=0.3
        )
        assert answer is not None, "the answer does not end"


@pytest.mark.parametrize(
    ("patterns", "n_keys"),
    [
        (["^a$"], 1),
        (["^ab?$"], 2),
        (["^[ab]$"], 2),
        (["^(a|b)$", "^(c|d)$"], 4),
        (["^(a|b)(c|d)$"], 4),
        (["^(a|ab)(c|bc)$"], 3),
        (['^["\\\\]{1,2}$'], 6),
        (["^\\d$"], 10),
    ],
)
def test_patterns_of_too_few_keys_are_refused_and_others_held(
    patterns: list[str], n_keys: int, vocabulary: GrammarVocabulary
) -> None:
    if n_keys > 1:
        assert defect(_closed(*patterns, minProperties=n_keys), vocabulary) == ("", "")
    field, reason = defect(_closed(*patterns, minProperties=n_keys + 1), vocabulary)
    assert (field, reason) == (
        "schema.patternProperties",
        f"is not supported beside minProperties: fewer than {n_keys + 1} keys fit",
    )


@pytest.mark.parametrize("pattern", ["^foo|bar$", "^x-", "$", "^[a-z]+$", "^(a|b{2,})$"])
@pytest.mark.parametrize("n_keys", [3, 10_000])
def test_patterns_of_endlessly_many_keys_are_held(
    pattern: str, n_keys: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = _closed(pattern, minProperties=n_keys)
    assert defect(schema, vocabulary) == ("", "")


def test_all_keys_of_a_pattern_that_begins_or_ends_anywhere_are_taken(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    schema = _closed("^foo|bar$", minProperties=3)
    assert accepts(schema, '{"foo":null,"foot":null,"bar":null}', vocabulary, tokenizer)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"properties": {"p": _THREE, "q": _FEW}}, "schema.properties.q.patternProperties"),
        ({"anyOf": [_THREE, {"items": _FEW}]}, "schema.anyOf[1].items.patternProperties"),
        (
            {"properties": {"p": _THREE, "q": {"patternProperties": {"^..": False, "^[^a]": False}}}},
            "schema.properties.q.patternProperties",
        ),
        (
            _closed("^a{3,4}$", minProperties=10**300),
            "schema.patternProperties",
        ),
    ],
)
def test_an_object_that_could_not_end_beside_a_count_of_keys_is_refused(
    schema: Any, field: str, vocabulary: GrammarVocabulary
) -> None:
    assert defect(schema, vocabulary)[0] == field


def test_a_string_beside_patterns_of_few_keys_counts_none(vocabulary: GrammarVocabulary) -> None:
    schema = {"properties": {"p": _THREE, "q": {**_FEW, "type": "string"}}}
    assert defect(schema, vocabulary) == ("", "")


_N_KEYS = 2000


def _guard_after_keys(n_distinct: int, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> KeyGuard:
    guard = KeyGuard({TEXT: n_distinct}, vocabulary.tokens)
    keys = "".join(f'"k{i}":0,' for i in range(_N_KEYS))
    assert all(map(guard.consume, tokenizer.encode_text("{" + keys)))
    return guard


def test_a_mask_copies_no_keys(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    guard = _guard_after_keys(2 * _N_KEYS, vocabulary, tokenizer)
    assert all(map(guard.consume, tokenizer.encode_text('"k77')))
    inner = guard.place.around[-1]
    assert inner is not None
    assert len(inner) == _N_KEYS
    row = np.full((-(-vocabulary.size // 32),), -1, dtype=np.int32)
    quote = next(i for i in range(tokenizer.base_vocab_tokens) if tokenizer.token_bytes(i) == b'"')
    guard.restrict(row.copy())
    tracemalloc.start()
    try:
        guard.restrict(row)
        guard.count_allowed([quote])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not row.view(np.uint32)[quote // 32] >> (quote % 32) & 1, "the quote repeats k77"
    assert peak_bytes < sys.getsizeof(frozenset(inner)) / 2


def test_the_guard_keeps_no_more_keys_than_an_object_needs(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    guard = _guard_after_keys(5, vocabulary, tokenizer)
    inner = guard.place.around[-1]
    assert inner is not None
    assert sorted(inner) == [b"k0", b"k1", b"k2", b"k3", b"k4"]
    assert all(map(guard.consume, tokenizer.encode_text('"k1":0,"k1":0}')))


@pytest.fixture(scope="module")
def dense_tokens() -> TokenBytes:
    """All bytes, and all texts of two or three of the signs around keys."""
    texts = [bytes(signs) for n in (2, 3) for signs in itertools.product(b'"\\{}[,:a', repeat=n)]
    ranks = {text: token for token, text in enumerate([*(bytes((byte,)) for byte in range(256)), *texts])}
    return TokenBytes(Tokenizer(ranks, special_ids(len(ranks), None)))


_KEYS = st.sampled_from(["a", "aa", "", ",", "}", r"\\", r"\"a", r"a\\"])


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(_KEYS, values), max_size=5)
    return pairs.map(lambda items: "{" + ",".join(f'"{key}":{value}' for key, value in items) + "}")


_VALUES = st.recursive(
    st.sampled_from(["1", '""', '"a"', r'"\""', r'"\\"']),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: f"[{','.join(items)}]"),
        _objects(inner),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(12))
@given(_objects(_VALUES), st.floats(0, 1), st.integers(1, 4))
def test_a_mask_loses_the_tokens_that_repeat_a_key_or_end_too_early(
    dense_tokens: TokenBytes, text: str, part: float, n_distinct: int
) -> None:
    guard = KeyGuard({TEXT: n_distinct}, dense_tokens)
    all(map(guard.consume, text[: int(part * len(text))].encode()))
    n_tokens = 1 + max(max(tokens) for tokens in dense_tokens.by_head.values())
    row = np.full(-(-n_tokens // 32), -1, dtype=np.int32)
    guard.restrict(row)
    allowed = np.unpackbits(row.view(np.uint8), bitorder="little")
    for token in range(n_tokens):
        after = guard._after(guard.place, token)
        is_good = after is not None and after.n_repeated == guard.place.n_repeated
        assert allowed[token] == is_good, dense_tokens.of(token)


def test_a_token_that_repeats_a_key_stays_where_no_other_may_follow(dense_tokens: TokenBytes) -> None:
    guard = KeyGuard({TEXT: 2}, dense_tokens)
    assert all(map(guard.consume, b'{"a":1,"a'))
    row = np.zeros(20, dtype=np.int32)
    row[1] = only_a_quote = 1 << ord('"') % 32
    guard.restrict(row)
    assert row[1] == only_a_quote


@pytest.mark.parametrize("stated", [3, {"f": "3"}, [], None])
def test_a_malformed_number_of_keys_is_refused(stated: Any) -> None:
    with pytest.raises(InvalidArgument, match="x-slipstream-distinct-keys"):
        stated_keys(json.dumps({"x-slipstream-distinct-keys": stated, "grammars": []}))
