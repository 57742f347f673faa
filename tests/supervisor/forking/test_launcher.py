"""Processes that begin as forks or by exec: both are the same to their parent and to themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor import process_stats
from supervisor.forking import launcher as launchers
from supervisor.forking.forked_process import ForkedProcess, reap_group
from supervisor.forking.launcher import (
    SERVICE_MODULES,
    ExecLauncher,
    ForkLauncher,
    ProcessLauncher,
    RunningProcess,
    loads_engine,
    open_launcher,
)
from supervisor.forking.messages import environment_change
from supervisor.process import service_environment
from tests.support.processes.process_checks import alive, eventually

PROBE = "tests.supervisor.forking.probe"
WAIT_S = 100.0


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkLauncher]:
    launcher = ForkLauncher(service_environment({}), (PROBE, "no.such.module"))
    yield launcher
    launcher.close()


@pytest.fixture(params=["fork", "exec"])
def launcher(request: pytest.FixtureRequest, forks: ForkLauncher) -> ProcessLauncher:
    return forks if request.param == "fork" else ExecLauncher()


class Probe:
    """A started probe and what it printed."""

    def __init__(self, process: RunningProcess, output: Path) -> None:
        self.process = process
        self._output = output

    async def lines(self, count: int = 1) -> list[str]:
        """What it printed, when that has `count` lines."""
        await eventually(lambda: self._output.read_text().count("\n") >= count)
        return self._output.read_text().splitlines()

    async def facts(self) -> dict[str, Any]:
        """The first line."""
        found: dict[str, Any] = json.loads((await self.lines())[0])
        return found

    async def end(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def probe(launcher: ProcessLauncher, folder: Path, how: str, **variables: str) -> AsyncIterator[Probe]:
    output = folder / "output"
    with output.open("wb") as file:
        command = [sys.executable, "-m", PROBE, how]
        process = await launcher.launch(command, service_environment(variables), file.fileno())
    try:
        yield Probe(process, output)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def servers() -> list[int]:
    """The fork servers of this file among this process's children."""
    found = []
    for pid in process_stats.children(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"supervisor.forking.server" in command and PROBE.encode() in command and alive(pid):
                found.append(pid)
    return found


async def test_a_fork_is_what_a_new_interpreter_is(forks: ForkLauncher, tmp_path: Path) -> None:
    found = []
    for launcher in (forks, ExecLauncher()):
        async with probe(launcher, tmp_path, "exit", SLIPSTREAM_DRAIN_S="7") as started:
            assert isinstance(started.process, ForkedProcess) == (launcher is forks)
            found.append(await started.facts())
            assert found[-1]["pid"] == started.process.pid
            assert await started.end() == 3
    fork, execed = (one["facts"] for one in found)
    assert fork == execed
    assert fork["parent"] == os.getpid()
    assert fork["death_signal"] == signal.SIGKILL
    assert fork["environment"]["SLIPSTREAM_DRAIN_S"] == "7"
    assert PROBE in fork["command"]


async def test_no_two_forks_draw_the_same_numbers(forks: ForkLauncher, tmp_path: Path) -> None:
    drawn = set()
    for _ in range(2):
        async with probe(forks, tmp_path, "exit") as started:
            drawn.add((await started.facts())["drawn"])
            await started.end()
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("exit", 3, "at exit"),
        ("say", 1, "at exit"),
        ("raise", 1, "at exit"),
        ("abort", -signal.SIGABRT, ""),
    ],
)
async def test_each_end_is_reported_exactly(
    launcher: ProcessLauncher, tmp_path: Path, how: str, code: int, last: str
) -> None:
    async with probe(launcher, tmp_path, how) as started:
        assert await started.end() == code
        assert started.process.returncode == code
        lines = await started.lines()
    words = {"say": "some words", "raise": "ValueError: no way"}.get(how, "")
    assert last in lines[1:] or not last
    assert any(words in line for line in lines)
    assert ("Traceback (most recent call last):" in lines) == (how == "raise")


async def test_a_fork_runs_all_exit_handlers_and_destroys_no_module(
    forks: ForkLauncher, tmp_path: Path
) -> None:
    async with probe(forks, tmp_path, "keep") as started:
        assert await started.end() == 0
        assert (await started.lines())[1:] == ["at exit", "end of __main__", f"end of {PROBE}"]
    async with probe(ExecLauncher(), tmp_path, "keep") as started:  # the premise
        assert await started.end() == 0
        assert (await started.lines())[1:] == ["at exit", "end of __main__", "destroyed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_ends_it_and_is_reported(
    launcher: ProcessLauncher, tmp_path: Path, number: signal.Signals
) -> None:
    async with probe(launcher, tmp_path, "wait") as started:
        await started.facts()
        started.process.send_signal(number)
        assert await started.end() == -number
        with pytest.raises(ProcessLookupError):
            started.process.send_signal(number)


async def test_a_killed_fork_server_ends_no_service_and_is_replaced(
    forks: ForkLauncher, tmp_path: Path
) -> None:
    async with probe(forks, tmp_path, "wait") as first:
        await first.facts()
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        await eventually(lambda: not alive(server))
        (tmp_path / "second").mkdir()
        async with probe(forks, tmp_path / "second", "exit") as second:
            assert isinstance(second.process, ForkedProcess)
            assert await second.end() == 3
        assert servers() not in ([], [server])
        assert alive(first.process.pid)
        first.process.terminate()
        assert await first.end() == -signal.SIGTERM


async def test_a_stopped_fork_server_is_replaced(
    forks: ForkLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.prepare(with_engine=False)
    await eventually(servers)
    (server,) = servers()
    os.kill(server, signal.SIGSTOP)
    monkeypatch.setattr(launchers, "_FIRST_ANSWER_S", 0.5)
    async with probe(forks, tmp_path, "exit") as started:
        assert await started.end() == 3
    assert not alive(server)


async def test_a_fork_server_that_stops_after_its_imports_is_replaced_sooner(
    forks: ForkLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with probe(forks, tmp_path, "exit") as started:
        assert await started.end() == 3
    (server,) = servers()
    os.kill(server, signal.SIGSTOP)
    assert launchers._ANSWER_S < launchers._FIRST_ANSWER_S
    monkeypatch.setattr(launchers, "_ANSWER_S", 0.5)
    (tmp_path / "second").mkdir()
    async with probe(forks, tmp_path / "second", "exit") as second:
        assert isinstance(second.process, ForkedProcess)
        assert await second.end() == 3
    assert not alive(server)


async def test_orphans_of_a_fork_are_reaped(forks: ForkLauncher, tmp_path: Path) -> None:
    async with probe(forks, tmp_path, "breed") as started:
        orphan = int((await started.lines(2))[1])
        started.process.kill()
        await started.end()
        assert alive(orphan)
        os.killpg(started.process.pid, signal.SIGKILL)
        await reap_group(started.process.pid, timeout_s=WAIT_S)
        assert process_stats.start_ticks(orphan) is None


def test_a_variable_that_libraries_read_when_they_load_needs_a_new_interpreter() -> None:
    old = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "SLIPSTREAM_A": "1"}
    assert environment_change(old, old) == ({}, ())
    assert environment_change(old, {**old, "SLIPSTREAM_B": "2"}) == ({"SLIPSTREAM_B": "2"}, ())
    delay = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # read when tracing is configured
    assert environment_change(old, {**old, **delay}) == (delay, ())
    assert environment_change(old, {"PATH": "/bin", "OMP_NUM_THREADS": "1"}) == ({}, ("SLIPSTREAM_A",))
    for new in ({**old, "OMP_NUM_THREADS": "2"}, {**old, "LD_PRELOAD": "x.so"}, {"PATH": "/bin"}):
        assert environment_change(old, new) is None


def test_no_import_of_the_launcher_changes_the_environment_of_services() -> None:
    """In a new interpreter, which has imported no service yet; a change would make each start an exec."""
    code = (
        "from supervisor.process import service_environment as e; from supervisor.forking import launcher;"
        "from supervisor.forking.messages import environment_change as change;"
        "old = e({}); launcher._main_module('services.router'); print(change(old, e({})))"
    )
    # This process has imported services, whose variables its children would have.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("GRPC_")}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean)
    assert said.stdout.strip() == "({}, ())"


async def test_such_a_variable_is_effective(forks: ForkLauncher, tmp_path: Path) -> None:
    async with probe(forks, tmp_path, "exit", OMP_NUM_THREADS="3") as started:
        assert not isinstance(started.process, ForkedProcess)
        assert (await started.facts())["facts"]["environment"]["OMP_NUM_THREADS"] == "3"


async def test_the_modules_of_the_services_start_no_thread(tmp_path: Path) -> None:
    """A fork copies no other thread, and keeps the locks that they hold."""
    others = servers()
    environment = service_environment({"OMP_NUM_THREADS": "1"})
    launcher = ForkLauncher(environment, (*SERVICE_MODULES, PROBE))
    try:
        launcher.prepare(with_engine=True)
        with (tmp_path / "output").open("wb") as file:
            command = [sys.executable, "-m", PROBE, "exit", "--instance", "decode-0"]
            assert loads_engine(command)
            assert await (await launcher.launch(command, environment, file.fileno())).wait() == 3
        (server,) = [pid for pid in servers() if pid not in others]
        (branch,) = process_stats.children(server)
        for pid in (server, branch):
            assert Path(f"/proc/{pid}/status").read_text().count("Threads:\t1\n") == 1  # noqa: ASYNC240
        assert "torch" in Path(f"/proc/{branch}/maps").read_text()  # noqa: ASYNC240
        assert "torch" not in Path(f"/proc/{server}/maps").read_text()  # noqa: ASYNC240
    finally:
        launcher.close()
    assert not alive(server) and not alive(branch)


async def test_other_programs_are_executed(forks: ForkLauncher, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        process = await forks.launch(["/bin/sh", "-c", "exit 4"], service_environment({}), file.fileno())
    assert await process.wait() == 4


def test_only_workers_with_the_torch_engine_load_it() -> None:
    def command(role: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"services.{role}", "--instance", f"{role}-0", *arguments]

    assert [role for role in ("router", "kvstore", "prefill") if loads_engine(command(role))] == ["prefill"]
    assert loads_engine(command("drafter", "--engine", "torch"))
    assert not loads_engine(command("decode", "--engine", "fake"))


def test_spawn_opens_no_fork_server() -> None:
    before = servers()
    assert isinstance(open_launcher("spawn", [], {}), ExecLauncher)
    assert servers() == before
