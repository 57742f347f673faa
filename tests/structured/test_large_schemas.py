"""Schemas of many definitions: the work grows with their size, and no faster."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any

from libs.structured.schema.schema_walk import walk


class _CountedDefinitions(dict[str, Any]):
    """Definitions that count how often all of them are listed."""

    n_listed = 0

    def items(self) -> ItemsView[str, Any]:
        self.n_listed += 1
        return super().items()


def test_references_by_name_list_the_definitions_once() -> None:
    definitions = _CountedDefinitions({str(i): {"$ref": "x"} for i in range(100)})
    paths = [path for path, _ in walk({"$defs": definitions, "$ref": "x"})]
    assert paths == ["", *(f"$defs.{i}" for i in range(100))]
    assert definitions.n_listed == 1
