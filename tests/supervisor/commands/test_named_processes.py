"""Commands of one process of the local cluster: how it is named, and what they say of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.errors import SlipstreamError
from supervisor.drain_marks import drained_by, set_drained
from tests.support.clusters.recorded import recorded, recorded_cluster


def invoke(run_dir: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--run-dir", str(run_dir)])


def words(run_dir: Path, *arguments: str) -> str:
    """The refusal of a command."""
    error = invoke(run_dir, *arguments).exception
    assert isinstance(error, SlipstreamError), error
    return error.message


@pytest.mark.parametrize("name", ["decode-0", "decode/decode-0"])
def test_a_process_is_named_with_its_tier_or_without(tmp_path: Path, name: str) -> None:
    with recorded_cluster(tmp_path, recorded("router-0"), recorded("decode-0", "drained", pid=None)):
        set_drained(tmp_path, "decode-0", by="ann")
        assert invoke(tmp_path, "drain", name).output == "decode-0 is drained already\n"
        assert words(tmp_path, "kill", name) == "decode-0 is not running at the moment (drained)"
        assert words(tmp_path, "status", name).startswith("decode-0 is drained: ann asked for it")
        for command in ("undrain", "restart"):
            set_drained(tmp_path, "decode-0", by="ann")
            late = words(tmp_path, command, name, "--timeout-s", "0.1")
            assert late == "decode-0 is not back after 0.1 s"
            assert not drained_by(tmp_path, "decode-0")
        assert words(tmp_path, "kill", "prefill/decode-0").startswith("no process 'prefill/decode-0'; there")
