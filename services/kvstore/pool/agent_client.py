"""Client of a node's pool agent: starts the process, calls it with time-outs, ends it.

Calls are bounded in number and in time. A caller abandons a late call, but the memory that the call may
still write stays allocated until the agent reports its end or is dead. The client kills and restarts an
agent that dies, or whose call or late reads hang beyond HANG_S; that costs only the agent's pool segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from libs.common.transport.mooncake import engine_environment
from services.kvstore.pool.agent.protocol import MAX_LINE_BYTES, packed, unpacked
from services.kvstore.pool.agent.staging import Extent, Extents, SharedMemory
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.health import PoolHealth
from slipstream.errors import SlipstreamError, Unavailable

log = logging.getLogger(__name__)

AGENT = "services.kvstore.pool.agent"
# Concurrent calls of each kind, abandoned ones included.
AT_ONCE = {"find": 4, "drop": 2, "clear": 1, "get": 8, "put": 2, "list": 1, "headers": 1}
START_S = 30.0  # the election of a leader takes 6 s, during which setup blocks
HANG_S = 45.0  # the engine gives up on a stopped master after 30 s
PROBE_S = 1.0
# The segment leaves the pool at once; with an elected master the rest of a close may take 5 s.
CLOSE_S = 3.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
# Calls that only ask the master. A late or failed one marks the pool as unavailable.
_ASKS_MASTER = ("find", "drop", "clear")
_PROBE_KEY = bytes(16)


@dataclass(slots=True, eq=False)
class Staged:
    """Extents of one call, freed when the caller and the agent have both released them."""

    extents: Sequence[Extent]
    users: set[str] = field(default_factory=lambda: {"caller", "agent"})


@dataclass(slots=True, eq=False)
class _Call:
    kind: str
    answer: asyncio.Future[dict[str, Any]]
    begun_s: float
    staged: Staged | None
    abandoned: bool = False  # the caller no longer waits


@dataclass(frozen=True, slots=True)
class _LateReads:
    """Extents that late reads of an answered call may still write."""

    begun_s: float  # of the call
    staged: Staged


class PoolListener(Protocol):
    """Learns of the pool's state; called on the event loop."""

    def pool_changed(self) -> None:
        """The pool became available or unavailable."""
        ...

    def probe_keys(self) -> list[bytes]:
        """Blocks that the next probe asks for."""
        ...

    def probed(self, sizes: Mapping[bytes, int]) -> None:
        """A probe found these sizes, 0 for a miss."""
        ...


class AgentClient:
    """The node's end of the agent's socket. Event loop only."""

    def __init__(
        self,
        options: PoolOptions,
        *,
        agent: str = AGENT,
        hang_s: float = HANG_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`agent`: the module to run. `hang_s`: the longest call before the agent is killed."""
        self.options = options
        self._agent = agent
        self._hang_s = hang_s
        self.memory = SharedMemory(options.staging_bytes)
        self.health = PoolHealth()
        self.listener: PoolListener | None = None
        self.restarts = 0
        self.pid: int | None = None
        self.segment = ""  # name of the node's segment, different after each start
        self._clock_s = clock_s
        self._extents = Extents(options.staging_bytes)
        self._room = asyncio.Event()
        self._slots = {kind: asyncio.Semaphore(count) for kind, count in AT_ONCE.items()}
        self._calls: dict[int, _Call] = {}
        self._late_reads: dict[int, _LateReads] = {}
        self._next_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    @property
    def available(self) -> bool:
        """Whether the pool is reachable, so that calls are worth their wait."""
        return self._writer is not None and not self.health.unavailable and not self._closing

    @property
    def staged_bytes(self) -> int:
        """Shared memory in use; 0 when no call runs."""
        return self._extents.allocated_bytes

    @property
    def quarantined_bytes(self) -> int:
        """The part of it that abandoned calls and late reads may still write."""
        late = [late.staged for late in self._late_reads.values()]
        late += [call.staged for call in self._calls.values() if call.abandoned and call.staged is not None]
        return sum(extent.n_bytes for staged in late for extent in staged.extents)

    def start(self) -> None:
        """Start the agent and keep it running; needs a running loop."""
        self._tasks = [asyncio.create_task(self._run_forever()), asyncio.create_task(self._probe_forever())]

    async def stage(self, sizes: Sequence[int], *, timeout_s: float) -> Staged:
        """Allocate extents for values of these sizes. Raises Unavailable when there is no room in time."""
        deadline_s = self._clock_s() + timeout_s
        while True:
            taken = []
            for n_bytes in sizes:
                extent = self._extents.allocate(n_bytes)
                if extent is None:
                    break
                taken.append(extent)
            if len(taken) == len(sizes):
                return Staged(taken)
            for extent in taken:
                self._extents.free(extent)
            self._room.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._clock_s())):
                    await self._room.wait()
            except TimeoutError:
                raise Unavailable("the pool's staging memory is in use") from None

    def release(self, staged: Staged, user: str) -> None:
        """Release the extents for one user, the "caller" or the "agent". Idempotent."""
        if user in staged.users:
            staged.users.remove(user)
            if not staged.users:
                for extent in staged.extents:
                    self._extents.free(extent)
                self._room.set()

    async def call(
        self, kind: str, *, timeout_s: float, staged: Staged | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Call the agent and return its answer. Raises Unavailable on a time-out or an error.

        The agent releases `staged` when the call has ended, however it ends.
        """
        begun_s, call = self._clock_s(), None
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots[kind].acquire()
                if self._writer is None or self._closing:
                    self._slots[kind].release()
                    raise Unavailable("the pool is unavailable")
                call = self._send(kind, staged, fields)
                return await asyncio.shield(call.answer)
        except TimeoutError:
            if kind in _ASKS_MASTER:
                self._mark_unavailable(f"a {kind} took more than {self._clock_s() - begun_s:.1f} s")
            raise Unavailable(f"the pool did not answer a {kind} in time") from None
        finally:
            if call is not None:
                call.abandoned = not call.answer.done()
            elif staged is not None:
                self.release(staged, "agent")

    async def close(self) -> None:
        """End the agent within CLOSE_S."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.memory.close()

    def _send(self, kind: str, staged: Staged | None, fields: dict[str, Any]) -> _Call:
        self._next_id += 1
        call = _Call(kind, asyncio.get_running_loop().create_future(), self._clock_s(), staged)
        self._calls[self._next_id] = call
        assert self._writer is not None
        self._writer.write(packed({"id": self._next_id, "do": kind, **fields}))
        return call

    def _mark_unavailable(self, why: str) -> None:
        if self.health.record_failure(now_s=self._clock_s()):
            log.warning("pool: unavailable: %s", why)
            self._notify()

    def _notify(self) -> None:
        if self.listener is not None:
            self.listener.pool_changed()

    async def _probe_forever(self) -> None:
        """Probe the pool, and kill an agent whose call hangs."""
        while True:
            await asyncio.sleep(min(0.25, max(0.02, self.health.probe_in_s(now_s=self._clock_s()))))
            begun_s = [call.begun_s for call in self._calls.values()]
            begun_s += [late.begun_s for late in self._late_reads.values()]
            oldest_s = min(begun_s, default=self._clock_s())
            if self._clock_s() - oldest_s > self._hang_s and self._process is not None:
                log.error("pool: a call or its reads do not end; restarting the agent")
                self._signal(signal.SIGKILL)
            due = not self.health.probe_in_s(now_s=self._clock_s())
            asking = any(call.kind in _ASKS_MASTER for call in self._calls.values())
            if self._writer is None or not due or asking:
                continue
            with contextlib.suppress(Unavailable):
                asked = self.listener.probe_keys() if self.listener is not None else []
                hexed = [key.hex() for key in (_PROBE_KEY, *asked)]
                answer = await self.call("find", timeout_s=PROBE_S, keys=hexed)
                if self.health.record_success(now_s=self._clock_s()):
                    log.info("pool: back")
                    self._notify()
                elif self.listener is not None:
                    self.listener.probed(dict(zip(asked, answer["sizes"][1:], strict=True)))

    async def _run_forever(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            begun_s = self._clock_s()
            try:
                await self._run_once()
            except (OSError, ValueError, SlipstreamError) as error:
                log.warning("pool: %s", error)
            except Exception:  # a defect: the next agent may work
                log.exception("pool: invalid message of its agent")
            self._mark_unavailable("its agent ended")
            pause_s = FIRST_PAUSE_S if self._clock_s() - begun_s > START_S else min(MAX_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)
            self.restarts += 1

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        try:
            with theirs:
                self._process = await self._spawn(theirs)
            self.pid = self._process.pid
            try:
                async with asyncio.timeout(START_S):
                    hello = unpacked(await reader.readline() or b"{}")
            except TimeoutError:
                raise Unavailable(f"no master at {self.options.master} yet") from None
            if "ready" not in hello:
                raise Unavailable(f"the agent did not start: {hello.get('error', 'it ended')}")
            self.segment = str(hello["ready"])
            log.info("pool: %s contributes %d bytes", hello["ready"], self.options.segment_bytes)
            self._writer = writer
            while line := await reader.readline():
                self._receive(unpacked(line))
        finally:
            await self._end(writer)

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        options = self.options
        fields = {
            "node-pid": os.getpid(),
            "socket-fd": theirs.fileno(),
            "memory-fd": self.memory.fd,
            "memory-bytes": self.memory.n_bytes,
            "segment-bytes": options.segment_bytes,
            "replicas": options.replicas,
            "host": options.host,
            "master": options.master,
            "protocol": options.protocol,
            "devices": ",".join(options.devices),
            "admin": ",".join(options.admin),
            "instance": options.instance,
            "log-format": options.log_format,
        }
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._agent,
            *(f"--{name}={value}" for name, value in fields.items()),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **engine_environment(options.host), "GLOG_minloglevel": "3"},
            pass_fds=(theirs.fileno(), self.memory.fd),
        )

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        """End the agent's process, so that it no longer writes to shared memory, and fail its calls."""
        was_ready, self._writer = self._writer is not None, None
        process = self._process
        try:
            if process is not None and process.returncode is None:
                if was_ready and self._closing:
                    writer.write(packed({"do": "close"}))
                    await asyncio.wait({asyncio.create_task(process.wait())}, timeout=CLOSE_S)
                self._signal(signal.SIGKILL)
                await process.wait()
        finally:
            self._process, self.pid = None, None
            writer.close()
            for call in self._calls.values():
                self._end_call(call)
                if not call.answer.done():
                    call.answer.set_exception(Unavailable("the pool's agent ended"))
                    call.answer.exception()  # marks the exception as retrieved
            for late in self._late_reads.values():
                self.release(late.staged, "agent")
            self._calls.clear()
            self._late_reads.clear()

    def _receive(self, message: dict[str, Any]) -> None:
        if "reads_ended" in message:
            if (late := self._late_reads.pop(message["reads_ended"], None)) is not None:
                self.release(late.staged, "agent")
            return
        call = self._calls.pop(message["id"])
        if message.get("late") and call.staged is not None:
            self._late_reads[message["id"]] = _LateReads(call.begun_s, call.staged)
            call.staged = None
        self._end_call(call)
        if "error" in message:
            self._mark_unavailable(message["error"])
        if call.answer.done():
            return
        if "error" in message:
            call.answer.set_exception(Unavailable(message["error"]))
            call.answer.exception()
        else:
            call.answer.set_result(message)

    def _end_call(self, call: _Call) -> None:
        self._slots[call.kind].release()
        if call.staged is not None:
            self.release(call.staged, "agent")
            call.staged = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
