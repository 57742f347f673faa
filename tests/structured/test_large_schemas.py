"""Schemas of many definitions: the work grows with their size, and no faster."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from libs.structured.schema.endless_schemas import find_endless
from libs.structured.schema.json_schema import find_unsupported
from libs.structured.schema.schema_walk import path_text, resolve, walk


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
