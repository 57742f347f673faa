"""What makes a client's test run, skip or fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import client_scripts
from tests.clients.client_scripts import ClientScript


def test_an_environment_that_is_there_and_runs_nothing_is_no_reason_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_scripts, "VENVS", tmp_path)
    monkeypatch.setattr(client_scripts, "NODE_MODULES", tmp_path / "node_modules")
    monkeypatch.setenv("PATH", str(tmp_path))
    scripts = (ClientScript("openai3", "run_openai.py"), ClientScript("node", "run_openai.mjs"))
    assert [script.is_set_up for script in scripts] == [False, False]
    (tmp_path / "openai3").mkdir()
    (tmp_path / "node_modules").mkdir()
    assert [script.is_set_up for script in scripts] == [True, True]
    assert [script.command() for script in scripts] == [[], []]
