"""Starts of service processes in tests: forks of one fork server, which lives as long as pytest's process.

A handful of tests starts `python -m` itself, so that this way is tested too.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import signal
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import IO, Any

from supervisor.configuration.plan import thread_limits
from supervisor.forking.launcher import SERVICE_MODULES, ForkLauncher, RunningProcess
from supervisor.process import service_environment

# What most workers of tests import beside the services.
_TEST_MODULES = ("libs.engine.core.fake", "tests.support.clusters.engine_gate")


def fork_launcher(variables: Mapping[str, str] | None = None) -> ForkLauncher:
    """A launcher of processes with the present environment and these variables; close it at the end."""
    environment = service_environment({**thread_limits(), **(variables or {})})
    return ForkLauncher(environment, (*SERVICE_MODULES, *_TEST_MODULES))


@functools.cache
def session_launcher() -> ForkLauncher:
    """The launcher of all tests in this process."""
    launcher = fork_launcher()
    atexit.register(launcher.close)
    return launcher


async def start_service(
    command: Sequence[str], output: IO[bytes], variables: Mapping[str, str] | None = None
) -> RunningProcess:
    """Start a service with the environment that a supervisor gives it, and with these variables."""
    environment = service_environment({**thread_limits(), **(variables or {})})
    return await session_launcher().launch(command, environment, output.fileno())


class ServiceProcess:
    """A service process for synchronous tests."""

    def __init__(
        self, command: Sequence[str], output: IO[bytes], variables: Mapping[str, str] | None = None
    ) -> None:
        self._process: RunningProcess = _call(start_service(command, output, variables), timeout_s=200)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code after the end, else None."""
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; without effect after the end."""
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            pass

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code at the end. Raises TimeoutError."""
        code: int = _call(self._process.wait(), timeout_s=timeout)
        return code


def run_service(
    command: Sequence[str], variables: Mapping[str, str] | None = None, *, timeout_s: float = 120
) -> tuple[int, str]:
    """Run a service that ends by itself; returns its exit code and what it wrote."""
    with tempfile.TemporaryFile() as output:
        process = ServiceProcess(command, output, variables)
        try:
            code = process.wait(timeout_s)
        except TimeoutError:
            process.kill()
            raise
        output.seek(0)
        return code, output.read().decode()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="service-processes").start()
    return loop


def _call(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result(timeout_s)
