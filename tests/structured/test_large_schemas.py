"""Schemas of many definitions: the work grows with their size, and no faster."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from libs.structured.answer_grammar import OutputFormat
from libs.structured.grammar_check import Checked, CheckRequest, check_grammar
from libs.structured.schema.endless_schemas import find_endless
from libs.structured.schema.json_schema import find_unsupported
from libs.structured.schema.open_keys import with_spelled_keys
from libs.structured.schema.schema_walk import path_text, resolve, walk
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary


class _CountedDefinitions(dict[str, Any]):
    """Definitions that count how often all of them are listed."""

    n_listed = 0

    def items(self) -> Any:
        self.n_listed += 1
        return super().items()


def test_references_by_name_list_the_definitions_once() -> None:
    definitions = _CountedDefinitions({str(i): {"$ref": "x"} for i in range(100)})
    paths = [path_text(path) for path, _ in walk({"$defs": definitions, "$ref": "x"})]
    assert paths == ["", *(f"$defs.{i}" for i in range(100))]
    assert definitions.n_listed == 1


@pytest.mark.parametrize("leaf", [{"type": "null"}, {"$ref": "#/$defs/0"}])
def test_each_definition_is_settled_once(leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definitions stand in the order in which each one waits for the one before."""
    n = 500
    definitions = {"0": leaf, **{str(i): {"$ref": f"#/$defs/{i - 1}"} for i in range(1, n)}}
    schema = {"$defs": definitions, "allOf": [{"$ref": f"#/$defs/{i}"} for i in range(n)]}
    parts = list(walk(schema))
    resolved: list[str] = []

    def counted(root: object, reference: str) -> object:
        resolved.append(reference)
        return resolve(root, reference)

    monkeypatch.setattr("libs.structured.schema.endless_schemas.resolve", counted)
    endless = find_endless(schema, parts)
    assert len(endless) == (0 if leaf == {"type": "null"} else len(parts))
    n_references = sum("$ref" in part for _, part in parts)
    assert len(resolved) == n_references >= 2 * n - 1


def test_parts_below_a_long_name_copy_it_into_no_path() -> None:
    name, n = "a" * 20_000, 500
    below = {"type": "object", "properties": {str(i): {} for i in range(n)}}
    schema = {"type": "object", "properties": {name: below}}
    tracemalloc.start()
    try:
        parts = list(walk(schema))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(parts) == n + 2
    assert peak_bytes < n * len(name) / 10


def test_a_path_shows_the_begin_of_a_long_name() -> None:
    schema = {"type": "object", "properties": {"a" * 20_000: {"anyOf": [{}, {"not": {}}]}}}
    assert find_unsupported(schema) == (f"properties.{'a' * 61}....anyOf[1].not", "is not supported")


_CODE = {"const": "\x01"}  # such a constant has the keys that a schema does not declare spelled


class _CountedName(str):
    """A name that counts how often a character of any such name is read."""

    n_read = 0

    def __str__(self) -> str:
        return self

    def __getitem__(self, index: Any) -> Any:
        _CountedName.n_read += 1
        return super().__getitem__(index)


def test_each_name_is_read_once_a_level() -> None:
    """No two names begin with the same character."""
    n = 500
    names: dict[str, Any] = {_CountedName(chr(0x4E00 + i) + "x"): {} for i in range(n)}
    part = {"type": "object", "properties": names, "additionalProperties": {"type": "string"}}
    _CountedName.n_read = 0
    spelled = with_spelled_keys(part)
    assert spelled["patternProperties"]
    assert 0 < _CountedName.n_read <= 4 * n


_LONG = {"type": "object", "properties": {"a" * 1200: {}}, "additionalProperties": {"type": "string"}}


def test_a_long_name_beside_a_control_character_is_refused_by_path(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "properties": {"k": _CODE, "o": _LONG}}
    checked = check_grammar(CheckRequest(OutputFormat("json_schema", schema)), vocabulary)
    assert checked.field == "response_format.properties.k.const"
    assert "names beyond 100 characters" in checked.reason


def test_a_long_name_that_nothing_refers_to_is_not_spelled(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "properties": {"k": _CODE}, "$defs": {"o": _LONG}}
    checked = check_grammar(CheckRequest(OutputFormat("json_schema", schema)), vocabulary)
    assert checked.grammar


def test_a_schema_that_is_nested_too_deep_is_refused(vocabulary: GrammarVocabulary) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(480):
        schema = {"type": "array", "items": schema}
    checked = check_grammar(CheckRequest(tools=[CallableTool("f", schema, "tools[0]")]), vocabulary)
    assert checked == Checked(field="tools[0]", reason="is nested too deep")
