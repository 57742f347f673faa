"""Shares of a folder of schemas: sets by folder and name, both sides, and files without JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.structured.schema_set import measure_set
from libs.structured.grammar_check import CheckRequest
from models.settings import BASE_DIR
from services.router.request.grammar_checker import GrammarChecker
from slipstream.errors import Unavailable


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


def test_a_file_that_a_busy_machine_does_not_check_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("busy", "plain"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"enum": [name]}))
    check = GrammarChecker.check

    def busy_for_one(checker: GrammarChecker, request: CheckRequest) -> str:
        if "busy" in str(request):
            raise Unavailable("the machine is too busy to check the grammar")
        return check(checker, request)

    monkeypatch.setattr(GrammarChecker, "check", busy_for_one)
    report = measure_set(tmp_path, BASE_DIR, answers=0, max_tokens=0, check_limit_s=30.0)
    assert report["unchecked"] == ["busy.json"]
    assert [report[side]["schemas"] for side in ("slipstream", "llguidance")] == [1, 1]
