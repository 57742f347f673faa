"""How a process of the cluster begins: by exec, or as a fork of a process that has imported its modules."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from libs.common.cluster.worker_record import Role
from supervisor.forking.client import ForkServer
from supervisor.forking.starts import SPAWN

SERVICE_MODULES = tuple(f"services.{role}.__main__" for role in Role)
# What workers with the torch engine import when they load their model.
ENGINE_MODULES = ("libs.engine.core.build", "libs.engine.eagle.drafter")
_ENGINE_ROLES = (Role.PREFILL, Role.DECODE, Role.DRAFTER)
_GUARD = Path(__file__).parents[1] / "exec_guard.py"
# A fork server on a busy machine imports for seconds, and then answers quickly. One that was stopped never
# answers, and a crashed service waits meanwhile.
_FIRST_ANSWER_S = 60.0
_ANSWER_S = 10.0


def guarded(command: Sequence[str]) -> list[str]:
    """The command behind what has the kernel end it with this process. It keeps the process id."""
    return [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *command]


class RunningProcess(Protocol):
    """A process that was started, as `asyncio.subprocess.Process` has it."""

    @property
    def pid(self) -> int:
        """The process's pid."""

    @property
    def returncode(self) -> int | None:
        """The exit code once `wait` has returned; negative: the signal."""

    def send_signal(self, signal: int, /) -> None:
        """Send a signal. Raises ProcessLookupError after the end."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL."""

    async def wait(self) -> int:
        """The exit code, at the end."""


class ProcessLauncher(Protocol):
    """Starts processes in new sessions, without input, that the kernel kills when this process ends."""

    async def launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> RunningProcess:
        """Start the command. What it writes goes to the descriptor `output`."""

    def close(self) -> None:
        """Free what the launcher holds. Its processes run on."""


class ExecLauncher:
    """Each process is a new interpreter."""

    async def launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> asyncio.subprocess.Process:
        """Start the command. What it writes goes to the descriptor `output`."""
        return await asyncio.create_subprocess_exec(
            *guarded(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            # In a new session: Ctrl-C in the terminal is for the supervisor, which stops in order.
            start_new_session=True,
        )

    def close(self) -> None:
        """Nothing is held."""


class ForkLauncher:
    """Python modules are forks of two fork servers, one of them with the engine; all else is exec'd."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = SERVICE_MODULES) -> None:
        """`environment`: of the fork servers. `modules`: what they import, beside those of the engine."""
        self._environment = dict(environment)
        self._modules = tuple(modules)
        self._servers: dict[bool, ForkServer] = {}  # by whether it has the engine's modules
        self._lock = threading.Lock()
        self._exec = ExecLauncher()

    def prepare(self, *, with_engine: bool) -> None:
        """Begin to import, so that the first process waits less. Returns at once."""
        self._server(with_engine=with_engine)

    async def launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> RunningProcess:
        """Start the command. Fork servers that ended are replaced once; then the command is a new process."""
        for _ in range(2):
            try:
                server = self._server(with_engine=loads_engine(command))
            except OSError:
                break
            request = server.request_for(command, environment)
            if request is None:
                break
            try:
                async with asyncio.timeout(_ANSWER_S if server.has_answered else _FIRST_ANSWER_S):
                    return await server.start(request, output)
            except (OSError, EOFError):
                self._discard(server)
        return await self._exec.launch(command, environment, output)

    def close(self) -> None:
        """End the fork servers."""
        with self._lock:
            self._end_servers(ForkServer.close)

    def _server(self, *, with_engine: bool) -> ForkServer:
        with self._lock:
            if False not in self._servers:
                self._servers[False] = ForkServer.open(self._modules, self._environment)
            if with_engine and True not in self._servers:
                self._servers[True] = self._servers[False].branch(ENGINE_MODULES)
            return self._servers[with_engine]

    def _discard(self, server: ForkServer) -> None:
        """Kill the servers, unless another start has replaced this one already."""
        with self._lock:
            if server in self._servers.values():
                self._end_servers(ForkServer.kill)

    def _end_servers(self, end: Callable[[ForkServer], None]) -> None:
        for with_engine in sorted(
            self._servers, reverse=True
        ):  # a branch before its parent, which reaps both
            end(self._servers.pop(with_engine))


def loads_engine(command: Sequence[str]) -> bool:
    """Whether the command is a worker with the torch engine. A wrong answer costs time only."""
    options = dict(itertools.pairwise(command))
    role = options.get("--instance", "").rpartition("-")[0]
    return role in _ENGINE_ROLES and options.get("--engine", "torch") == "torch"


def open_launcher(
    start: str, commands: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> ProcessLauncher:
    """The launcher of a cluster's services. With fork servers, their imports begin at once."""
    if start == SPAWN:
        return ExecLauncher()
    modules = dict.fromkeys(_main_module(command[2]) for command in commands if command[1] == "-m")
    launcher = ForkLauncher(environment, tuple(modules))
    launcher.prepare(with_engine=any(map(loads_engine, commands)))
    return launcher


def _main_module(module: str) -> str:
    """The module that `python -m MODULE` runs."""
    found = importlib.util.find_spec(module)
    is_package = found is not None and found.submodule_search_locations is not None
    return f"{module}.__main__" if is_package else module
