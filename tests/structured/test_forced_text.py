"""Repetitions of much text are refused before llguidance makes the text, and no other ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.structured import grammar_check
from libs.structured.answer_grammar import FormatKind, OutputFormat
from libs.structured.forced_text import FORCED_REASON, MAX_FORCED_CHARS, forces_much
from libs.structured.grammar_check import CheckRequest, check_grammar
from libs.structured.vocabulary import GrammarVocabulary


@pytest.mark.parametrize(
    ("kind", "content", "field"),
    [
        ("regex", "a{1000000}", "f"),
        ("regex", "x(?:(ab|c){1000}d?){1000,}", "f"),
        ("regex", r"(\u0061{9999999999999})*", "f"),
        ("regex", "((((((a{9}){9}){9}){9}){9}){9})", "f"),
        ("lark", "start: A | B\nA: /b/\nB: /(a{1000}){1000}/", "f"),
        ("json_schema", {"items": {"pattern": "^a{99999}$"}, "type": "array"}, "f.items.pattern"),
        ("json_schema", {"patternProperties": {"^a{99999}$": {}}}, "f.patternProperties"),
    ],
)
def test_a_long_repetition_is_refused_before_it_is_compiled(
    kind: FormatKind, content: Any, field: str, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "compile_grammar", None)
    checked = check_grammar(CheckRequest(OutputFormat(kind, content, "f")), vocabulary)
    assert (checked.field, checked.reason) == (field, FORCED_REASON)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("regex", "a{1000}"),
        ("regex", "[a-z]{1000000}"),
        ("regex", "a{0,1000000}"),
        ("regex", r"(\d{3}-){0,1000}\p{Lu}{100000}"),
        ("lark", "start: /[0-9]{1,1000}/ /a{0,1000}/"),
        ("json_schema", {"type": "string", "maxLength": 1_000_000}),
        ("json_schema", {"type": "string", "pattern": "^[0-9]{1,1000000}$"}),
        ("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}),
    ],
)
def test_ordinary_long_forms_are_held(kind: FormatKind, content: Any, vocabulary: GrammarVocabulary) -> None:
    checked = check_grammar(CheckRequest(OutputFormat(kind, content, "f")), vocabulary)
    assert checked.grammar, checked.reason


def test_the_bound_counts_text_of_the_longest_branch() -> None:
    assert not forces_much(f"a{{{MAX_FORCED_CHARS}}}")
    assert forces_much(f"a{{{MAX_FORCED_CHARS}}}b")
    assert not forces_much(f"a{{{MAX_FORCED_CHARS}}}|bc")
    assert forces_much(f"(a|bc){{{MAX_FORCED_CHARS // 2 + 1}}}")


@given(st.text(st.sampled_from("ab{}[]()|\\\\?*+,019p<"), max_size=60))
def test_any_text_is_read(regex: str) -> None:
    assert forces_much(f"{regex}{{{MAX_FORCED_CHARS}}}") in (True, False)
