"""`slipstream config check` and `show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.errors import InvalidArgument
from supervisor.configuration.cluster_options import ROOT

EXAMPLE = str(ROOT / "docs" / "examples" / "cluster.toml")


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["config", *arguments], env=env)


def test_check_names_the_sections_of_a_right_file() -> None:
    shown = invoke("check", EXAMPLE)
    assert shown.exit_code == 0, shown.exception
    assert "[common], [router], [prefill], [decode], [kvstore], [drafter], [up]" in shown.output


@pytest.mark.parametrize("tier", ["router", "prefill", "decode", "kvstore", "drafter", "up", "common"])
def test_check_finds_a_wrong_key_in_any_section(tmp_path: Path, tier: str) -> None:
    (tmp_path / "c.toml").write_text(f"[{tier}]\nwrong_key_here = 1\n")
    refused = invoke("check", str(tmp_path / "c.toml"))
    assert isinstance(refused.exception, InvalidArgument)
    assert f"[{tier}] no setting is named wrong_key_here" in refused.exception.message


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[decode\n")
    for name, why in (("c.toml", "is not TOML"), ("none.toml", "cannot be read")):
        file = str(tmp_path / name)
        error = invoke("check", file).exception
        assert isinstance(error, InvalidArgument)
        assert why in error.message and error.message.count(file) == 1


def test_check_asks_for_files_where_the_flag_says_so(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[router]\napi_keys = "/none"\n')
    assert invoke("check", str(tmp_path / "c.toml")).exit_code == 0
    assert "/none cannot be read" in str(invoke("check", str(tmp_path / "c.toml"), "--files").exception)


def test_show_says_where_each_value_comes_from_and_shows_no_secret() -> None:
    env = {"SLIPSTREAM_LOG_FORMAT": "json", "SLIPSTREAM_CLUSTER_SECRET": "very-secret-text"}
    shown = invoke("show", EXAMPLE, "--tier", "decode", "--json", "--flag=--max-batch=8", env=env)
    assert shown.exit_code == 0, shown.exception
    assert "very-secret-text" not in shown.output
    rows = {row["setting"]: (row["value"], row["source"]) for row in json.loads(shown.output)["decode"]}
    assert rows["max_batch"] == (8, "--max-batch")
    assert rows["log_format"] == ("json", "SLIPSTREAM_LOG_FORMAT")
    assert rows["drafts"] == ("auto", "[decode]")
    assert rows["transport"] == ("auto", "[common]")
    assert rows["step_tokens"] == (512, "default")
    assert rows["cluster_secret"][1] == "SLIPSTREAM_CLUSTER_SECRET"
    changed = invoke("show", EXAMPLE, "--tier", "router", "--changed").output
    assert "max_requests" in changed and "region_ms" not in changed
    assert isinstance(invoke("show", "--tier", "decod").exception, InvalidArgument)
