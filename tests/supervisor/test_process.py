"""One supervised process by itself: the environment it gets."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import INCARNATION_VARIABLE
from supervisor.plan import ProcessPlan
from supervisor.process import _spawn

_PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


async def environment_of(plan: ProcessPlan) -> dict[str, str]:
    """The environment of a process that the supervisor starts."""
    read_end, write_end = os.pipe()
    try:
        process = await _spawn(plan, "incarnation-1", write_end)
    finally:
        os.close(write_end)
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    with os.fdopen(read_end) as output:
        found: dict[str, str] = json.load(output)
    return found


async def test_settings_of_the_shell_reach_no_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_DRAIN_S", "9999")
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv(INCARNATION_VARIABLE, "of-the-shell")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kept")
    plan = ProcessPlan(
        instance="decode-0",
        role=Role.DECODE,
        wave=0,
        endpoint="127.0.0.1:1",
        command=(sys.executable, "-c", _PRINT_ENVIRONMENT),
        env={"SLIPSTREAM_MAX_BATCH": "4"},
    )
    found = await environment_of(plan)
    settings = {name: text for name, text in found.items() if name.startswith("SLIPSTREAM_")}
    assert settings == {INCARNATION_VARIABLE: "incarnation-1", "SLIPSTREAM_MAX_BATCH": "4"}
    assert found["OTEL_SERVICE_NAME"] == "kept"
    assert found["PATH"] == os.environ["PATH"]
