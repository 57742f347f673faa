"""One supervised process: started, watched until ready, restarted with back-off, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from typing import Protocol

from libs.common.cluster.worker_service import INCARNATION_VARIABLE, new_incarnation
from libs.common.runtime.exit_codes import MODEL_UNUSABLE, count_oom_kills, is_crash
from services import GRPC_VERBOSITY
from slipstream.errors import FailedPrecondition
from supervisor.configuration.plan import ProcessPlan
from supervisor.forking.forked_process import reap_group
from supervisor.forking.launcher import ProcessLauncher, RunningProcess
from supervisor.logs import ProcessLogs
from supervisor.process_state import ProcessState, how_ended

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
# Before the next try of a model that cannot be used, unless someone mends it.
_UNUSABLE_PAUSE_S = 60.0
# After this time of readiness the next failure starts at the first pause again.
_PROVEN_S = 30.0
_FAILED_STARTS = 3
_DRAINED_POLL_S = 0.1
# For the rest of the output after the end; a descendant outside the session may hold the pipe longer.
_LAST_OUTPUT_S = 2.0


class ProcessOwner(Protocol):
    """Owns supervised processes; called on the event loop."""

    async def until_ready(self, plan: ProcessPlan) -> None:
        """Return when the process of the plan is ready."""
        ...

    def state_changed(self) -> None:
        """A process is in another state."""
        ...

    def say(self, line: str, /) -> None:
        """Pass a line on to the user."""
        ...

    def drained_by(self, plan: ProcessPlan) -> str:
        """Who asked that the process stays down after its end; empty where no user did."""
        ...

    def died(self, plan: ProcessPlan, incarnation: str, *, crashed: bool) -> None:
        """A run of the process ended, and the supervisor did not order it."""
        ...


class SupervisedProcess:
    """Keeps one process of the plan running until `stop`."""

    def __init__(
        self,
        plan: ProcessPlan,
        logs: ProcessLogs,
        launcher: ProcessLauncher,
        owner: ProcessOwner,
    ) -> None:
        self.plan = plan
        self.state = ProcessState.STOPPED
        self.pid: int | None = None
        self.restarts = 0
        self.exit_code: int | None = None  # of its last end
        self._logs = logs
        self._launcher = launcher
        self._owner = owner
        self._process: RunningProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Begin to keep the process running. Returns at once."""
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise-{self.plan.instance}")

    async def wait_ready(self) -> None:
        """Return when the process is ready. `FailedPrecondition`, with its last lines, if it cannot start."""
        assert self._task is not None
        ready = asyncio.create_task(self._ready.wait())
        failed = asyncio.create_task(self._failed.wait())
        try:
            done, _ = await asyncio.wait({ready, failed, self._task}, return_when="FIRST_COMPLETED")
        finally:
            ready.cancel()
            failed.cancel()
        if self._task in done:
            self._task.result()
        if ready not in done:
            raise FailedPrecondition(f"{self.plan.instance} does not start; {self._last_words()}")

    def kill(self) -> None:
        """SIGKILL; the process is started again after the pause."""
        self._signal(signal.SIGKILL)

    async def hold(self) -> None:
        """SIGKILL, and keep the process down until `release`."""
        self._may_run.clear()
        self.kill()
        while self.state is not ProcessState.HELD:
            await asyncio.sleep(0.02)

    async def release(self) -> None:
        """Let a held process run again; returns when it is ready."""
        self._ready.clear()
        self._may_run.set()
        await self.wait_ready()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when the process and what it started is gone."""
        self._stopping.set()
        self._may_run.set()
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            self._owner.say(f"{self.plan.instance} did not stop within {grace_s:g} s and was killed")
            self._signal(signal.SIGKILL)
        await asyncio.wait({self._task})

    def kill_now(self) -> None:
        """SIGKILL without any restart; for a second Ctrl-C."""
        self._stopping.set()
        self._may_run.set()
        self._signal(signal.SIGKILL)

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = self.exit_code = await self._run_once()
            if self._stopping.is_set():
                break
            if by := self._owner.drained_by(self.plan):
                await self._stay_drained(code, by)
            elif code == 0 and self._ready.is_set():
                # An orderly end from outside: restart without a pause.
                failures = 0
                self._owner.say(f"{self.plan.instance} ended; starting it again")
            elif self._may_run.is_set():
                ready_before = self._ready.is_set()
                failures = 1 if time.monotonic() - started_s > _PROVEN_S else failures + 1
                unusable = code == MODEL_UNUSABLE
                pause_s = min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S)
                # A model that was usable may lack only the memory that the process before still gives back.
                if unusable and (failures >= _FAILED_STARTS or not ready_before):
                    pause_s = _UNUSABLE_PAUSE_S
                again = f"; starting it again in {pause_s:g} s"
                if (unusable or failures >= _FAILED_STARTS) and not ready_before:
                    self._failed.set()
                    again = ""  # the command that waits for the start gives up
                self._owner.say(f"{self.plan.instance} {how_ended(code)}{again}")
                self._enter(ProcessState.BACKING_OFF)
                await self._pause(pause_s)
            if not self._may_run.is_set():
                self._enter(ProcessState.HELD)
                await self._may_run.wait()
            self.restarts += 1
        self._enter(ProcessState.STOPPED)

    async def _run_once(self) -> int:
        """Run the process to its end; returns its exit code (negative: the signal)."""
        plan, incarnation = self.plan, new_incarnation()
        try:
            process, output, transport = await self._launch(incarnation)
        except OSError as failure:  # such as no process or descriptor left, maybe for now only
            self._owner.say(f"{plan.instance} cannot be started: {failure}")
            return os.EX_OSERR
        self._process, self.pid = process, process.pid
        self._enter(ProcessState.STARTING)
        if self._stopping.is_set():
            self._signal(signal.SIGKILL)
        copy = asyncio.create_task(self._logs.copy(plan.instance, output))
        watch = asyncio.create_task(self._watch_readiness())
        oom_kills = count_oom_kills()
        try:
            code = await process.wait()
            if not self._stopping.is_set():
                crashed = is_crash(code, oom_kills=count_oom_kills() - oom_kills)
                self._owner.died(plan, incarnation, crashed=crashed)
            return code
        finally:
            watch.cancel()
            # What the process itself had started goes with it, also when it crashed.
            _kill_group(process.pid)
            self._process, self.pid = None, None
            await reap_group(process.pid, timeout_s=_LAST_OUTPUT_S)
            await asyncio.wait({copy}, timeout=_LAST_OUTPUT_S)
            copy.cancel()
            transport.close()
            for error in await asyncio.gather(watch, copy, return_exceptions=True):
                if isinstance(error, Exception):
                    self._owner.say(f"{plan.instance} | supervision failed: {error!r}")

    async def _launch(
        self, incarnation: str
    ) -> tuple[RunningProcess, asyncio.StreamReader, asyncio.ReadTransport]:
        """Start the process; returns it with its output, and what closes that. Raises OSError."""
        # Our own pipe: with asyncio's, wait() would wait for all children of the process to close it too.
        output, transport, their_end = await _open_pipe()
        # Not the supervisor's own incarnation.
        environment = service_environment({INCARNATION_VARIABLE: incarnation, **self.plan.env})
        try:
            return await self._launcher.launch(self.plan.command, environment, their_end), output, transport
        except BaseException:
            transport.close()
            raise
        finally:
            os.close(their_end)

    async def _watch_readiness(self) -> None:
        await self._owner.until_ready(self.plan)
        self._ready.set()
        self._enter(ProcessState.READY)

    async def _stay_drained(self, code: int, by: str) -> None:
        state = "is drained" if code == 0 else f"{how_ended(code)} and stays ended"
        self._owner.say(f"{self.plan.instance} {state}: {by} asked for it")
        self._enter(ProcessState.DRAINED)
        while self._owner.drained_by(self.plan) and not self._stopping.is_set():
            await self._pause(_DRAINED_POLL_S)
        if not self._stopping.is_set():
            self._owner.say(f"{self.plan.instance} is undrained; starting it again")

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _enter(self, state: ProcessState) -> None:
        self.state = state
        self._owner.state_changed()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _last_words(self) -> str:
        path = self._logs.path(self.plan.instance)
        if self._logs.ends_with_problem(self.plan.instance):  # which was said
            return f"see {path}"
        return f"the last lines of {path}:\n{self._logs.tail(self.plan.instance) or '(nothing was written)'}"


def service_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service with these variables."""
    return {
        # A setting of the shell would reach every service; the plan's variables and flags are the settings.
        **{name: text for name, text in os.environ.items() if not name.startswith("SLIPSTREAM_")},
        "PYTHONUNBUFFERED": "1",
        # As services set it when they are imported: a fork server with another value would not fit then.
        "GRPC_VERBOSITY": GRPC_VERBOSITY,
        **variables,
    }


async def _open_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, int]:
    """A pipe: our end as a stream and its transport, and the descriptor to write to; close both."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
    )
    return reader, transport, write_end


def _kill_group(leader_pid: int) -> None:
    try:
        os.killpg(leader_pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
