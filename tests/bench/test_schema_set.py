"""Shares of a folder of schemas: sets by folder and name, both sides, and files without JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.structured.schema_set import measure_set
from models.settings import BASE_DIR


def _test(valid: bool, data: Any) -> dict[str, Any]:
    return {"description": "", "valid": valid, "data": data}


def test_shares_of_a_folder(tmp_path: Path) -> None:
    keys = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}}
    tests = [_test(True, {"a": True, "b": False}), _test(False, {"a": True})]
    places = {"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False, "maxItems": 1}
    (tmp_path / "folder").mkdir()
    files: dict[str, Any] = {
        "keys---1.json": {"schema": keys, "tests": tests},
        "places_12.json": {"schema": places, "tests": [_test(True, [None]), _test(False, [1])]},
        "folder/plain.json": {"enum": [1, "a"]},
        "folder/not.json": {"not": {"type": "null"}},
        "folder/list.json": [1],
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "folder" / "no.json").write_text("// a comment")
    report = measure_set(tmp_path, BASE_DIR, answers=2, max_tokens=200, check_limit_s=30.0)
    assert report["unreadable"] == ["folder/no.json"]
    assert set(report["sets"]) == {"folder", "keys", "places"}
    assert report["sets"]["folder"]["slipstream"]["compiled"] == 0.3333
    for name in ("keys", "places"):
        ours = report["sets"][name]["slipstream"]
        assert (ours["compiled"], ours["valid_accepted"], ours["invalid_refused"]) == (1, 1, 1)
        assert ours["valid_answers"] == 1
    assert report["sets"]["places"]["llguidance"]["invalid_refused"] == 0
    assert "places_12.json" in [differing["file"] for differing in report["differing"]]
