"""One supervised process by itself: the environment it gets, and starts that fail."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import INCARNATION_VARIABLE
from libs.common.runtime.exit_codes import MODEL_UNUSABLE
from slipstream.errors import FailedPrecondition
from supervisor.configuration.plan import ProcessPlan
from supervisor.forking.launcher import RunningProcess
from supervisor.logs import ProcessLogs
from supervisor.process import SupervisedProcess
from supervisor.process_state import ProcessState
from tests.support.processes.launching import session_launcher

_PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


class _Owner:
    """The owner of a process that is never ready."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def until_ready(self, plan: ProcessPlan) -> None:
        await asyncio.Event().wait()

    def state_changed(self) -> None:
        return

    def say(self, line: str) -> None:
        self.said.append(line)

    def drained_by(self, plan: ProcessPlan) -> str:
        return ""

    def died(self, plan: ProcessPlan, incarnation: str, *, crashed: bool) -> None:
        return


class _SatisfiedOwner(_Owner):
    """The owner of a process that is ready at once."""

    async def until_ready(self, plan: ProcessPlan) -> None:
        return


class _FailingLauncher:
    """The session's launcher on a machine that has no process left for the first starts."""

    def __init__(self, *, n_failures: int) -> None:
        self._n_failures = n_failures

    async def launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> RunningProcess:
        if self._n_failures:
            self._n_failures -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await session_launcher().launch(command, environment, output)

    def close(self) -> None:
        return


async def environment_of(plan: ProcessPlan, folder: Path) -> dict[str, str]:
    """The environment of a process that the supervisor starts."""
    logs = ProcessLogs(folder, on_problem=print)
    process = SupervisedProcess(plan, logs, session_launcher(), _Owner())
    process.start()
    async with asyncio.timeout(60):
        while not logs.tail(plan.instance):
            await asyncio.sleep(0.02)
    await process.stop(grace_s=60)
    logs.close()
    found: dict[str, str] = json.loads(logs.tail(plan.instance).splitlines()[0])
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
    found = await environment_of(plan, tmp_path)
    settings = {name: text for name, text in found.items() if name.startswith("SLIPSTREAM_")}
    assert settings.pop(INCARNATION_VARIABLE) not in ("", "of-the-shell")
    assert settings == {"SLIPSTREAM_MAX_BATCH": "4"}
    assert found["OTEL_SERVICE_NAME"] == "kept"
    assert found["PATH"] == os.environ["PATH"]


async def test_a_model_that_cannot_be_used_is_not_tried_again_and_again(tmp_path: Path) -> None:
    plan = ProcessPlan(
        instance="decode-0",
        role=Role.DECODE,
        wave=0,
        endpoint="127.0.0.1:1",
        command=(sys.executable, "-c", f"raise SystemExit({MODEL_UNUSABLE})"),
    )
    owner = _Owner()
    logs = ProcessLogs(tmp_path, on_problem=print)
    process = SupervisedProcess(plan, logs, session_launcher(), owner)
    process.start()
    async with asyncio.timeout(60):
        with pytest.raises(FailedPrecondition, match="decode-0 does not start"):
            await process.wait_ready()
        while process.state is not ProcessState.BACKING_OFF:
            await asyncio.sleep(0.02)
    assert owner.said == ["decode-0 cannot use its model (exit code 78)"]
    assert process.restarts == 0
    await process.stop(grace_s=60)


async def test_a_model_that_was_usable_is_tried_again_soon_and_then_seldom(tmp_path: Path) -> None:
    plan = ProcessPlan(
        instance="decode-0",
        role=Role.DECODE,
        wave=0,
        endpoint="127.0.0.1:1",
        command=(sys.executable, "-c", f"raise SystemExit({MODEL_UNUSABLE})"),
    )
    owner = _SatisfiedOwner()
    logs = ProcessLogs(tmp_path, on_problem=print)
    process = SupervisedProcess(plan, logs, session_launcher(), owner)
    process.start()
    async with asyncio.timeout(60):
        while len(owner.said) < 3:
            await asyncio.sleep(0.02)
    await process.stop(grace_s=60)
    logs.close()
    ended = "decode-0 cannot use its model (exit code 78); starting it again in"
    assert owner.said == [f"{ended} {pause_s} s" for pause_s in ("0.5", "1", "60")]


async def test_a_process_is_started_once_the_machine_has_room_for_it(tmp_path: Path) -> None:
    plan = ProcessPlan(
        instance="decode-0",
        role=Role.DECODE,
        wave=0,
        endpoint="127.0.0.1:1",
        command=(sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"),
    )
    owner = _Owner()
    logs = ProcessLogs(tmp_path, on_problem=print)
    process = SupervisedProcess(plan, logs, _FailingLauncher(n_failures=2), owner)
    process.start()
    async with asyncio.timeout(60):
        while not logs.tail(plan.instance):
            await asyncio.sleep(0.02)
    failure = f"decode-0 cannot be started: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
    assert owner.said[0] == owner.said[2] == failure
    assert process.restarts == 2
    await process.stop(grace_s=60)
    logs.close()
