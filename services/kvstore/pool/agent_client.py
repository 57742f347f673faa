"""A node's side of its pool agent: starts it, calls it with time-outs, ends it.

Calls are bounded in number and in time. One that is late is given up by whoever waits, but what it may
still write to stays taken until the agent says that it has ended, or is dead. An agent that dies, or whose
call or late reads hang beyond HANG_S, is killed and started anew: all that costs is the part of the pool it
held.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.common.transport.mooncake import engine_environment
from services.kvstore.pool.agent.protocol import MAX_LINE_BYTES, packed, unpacked
from services.kvstore.pool.agent.staging import Extent, Extents, SharedMemory
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.health import PoolHealth
from slipstream.errors import SlipstreamError, Unavailable

log = logging.getLogger(__name__)

AGENT = "services.kvstore.pool.agent"
# Calls on their way at once, those given up included.
AT_ONCE = {"find": 4, "drop": 2, "clear": 1, "get": 8, "put": 2, "list": 1, "heads": 1}
START_S = 30.0  # a new leader takes 6 s, and setup holds on for that
HANG_S = 45.0  # the engine gives up a stopped master after 30 s
PROBE_S = 1.0
# The segment leaves the pool at once; what follows may take 5 s where the master is elected, for nothing.
CLOSE_S = 3.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
# Calls that only ask the master: when one is late or fails, the pool is away.
_ASKS_MASTER = ("find", "drop", "clear")
_PROBE_KEY = bytes(16)


@dataclass(slots=True, eq=False)
class Staged:
    """Extents of one call; free again when the caller and the agent both are done with them."""

    extents: Sequence[Extent]
    users: set[str] = field(default_factory=lambda: {"caller", "agent"})


@dataclass(slots=True, eq=False)
class _Call:
    kind: str
    answer: asyncio.Future[dict[str, Any]]
    begun_s: float
    staged: Staged | None
    given_up: bool = False  # by whoever waited for the answer


@dataclass(frozen=True, slots=True)
class _Settling:
    """Extents that late reads of an answered call may still reach."""

    begun_s: float  # the call's
    staged: Staged


class AgentClient:
    """Event loop only."""

    def __init__(
        self,
        options: PoolOptions,
        *,
        agent: str = AGENT,
        hang_s: float = HANG_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`agent`: the module that is run; `hang_s`: what a call may take before the agent is killed."""
        self.options = options
        self._agent = agent
        self._hang_s = hang_s
        self.memory = SharedMemory(options.staging_bytes)
        self.health = PoolHealth()
        self.on_state: Callable[[], None] = lambda: None
        self.probe_keys: Callable[[], list[bytes]] = list  # blocks that a probe asks for
        self.on_probe: Callable[[dict[bytes, int]], None] = lambda sizes: None  # what it found
        self.restarts = 0
        self.pid: int | None = None
        self.segment = ""  # what the node's part of the pool is called; another name after each start
        self._clock_s = clock_s
        self._extents = Extents(options.staging_bytes)
        self._room = asyncio.Event()
        self._slots = {kind: asyncio.Semaphore(count) for kind, count in AT_ONCE.items()}
        self._calls: dict[int, _Call] = {}
        self._settling: dict[int, _Settling] = {}
        self._next_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    @property
    def available(self) -> bool:
        """Whether calls are worth the wait."""
        return self._writer is not None and not self.health.away and not self._closing

    @property
    def staged_bytes(self) -> int:
        """Shared memory in use; 0 when nothing runs."""
        return self._extents.taken_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Of it, what calls that nobody waits for and late reads may still write to."""
        late = [settling.staged for settling in self._settling.values()]
        late += [call.staged for call in self._calls.values() if call.given_up and call.staged is not None]
        return sum(extent.n_bytes for staged in late for extent in staged.extents)

    def start(self) -> None:
        """Start the agent and keep it running; needs a running loop."""
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._probe_for_ever())]

    async def stage(self, sizes: Sequence[int], *, timeout_s: float) -> Staged:
        """Extents for values of these sizes. Raises Unavailable when there is no room in time."""
        give_up_at_s = self._clock_s() + timeout_s
        while True:
            taken = []
            for n_bytes in sizes:
                extent = self._extents.take(n_bytes)
                if extent is None:
                    break
                taken.append(extent)
            if len(taken) == len(sizes):
                return Staged(taken)
            for extent in taken:
                self._extents.give_back(extent)
            self._room.clear()
            try:
                async with asyncio.timeout(max(0.0, give_up_at_s - self._clock_s())):
                    await self._room.wait()
            except TimeoutError:
                raise Unavailable("the pool's staging memory is in use") from None

    def done_with(self, staged: Staged, user: str) -> None:
        """The "caller" or the "agent" touches the extents no more. Idempotent."""
        if user in staged.users:
            staged.users.remove(user)
            if not staged.users:
                for extent in staged.extents:
                    self._extents.give_back(extent)
                self._room.set()

    async def call(
        self, kind: str, *, timeout_s: float, staged: Staged | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The agent's answer. Raises Unavailable when there is none in time, or it is an error. Whatever
        comes of it, `staged` is the agent's until it has ended."""
        begun_s, call = self._clock_s(), None
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots[kind].acquire()
                if self._writer is None or self._closing:
                    self._slots[kind].release()
                    raise Unavailable("the pool is away")
                call = self._send(kind, staged, fields)
                return await asyncio.shield(call.answer)
        except TimeoutError:
            if kind in _ASKS_MASTER:
                self._failed(f"a {kind} took more than {self._clock_s() - begun_s:.1f} s")
            raise Unavailable(f"the pool did not answer a {kind} in time") from None
        finally:
            if call is not None:
                call.given_up = not call.answer.done()
            elif staged is not None:
                self.done_with(staged, "agent")

    async def close(self) -> None:
        """Let calls end, end the agent, within CLOSE_S."""
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

    def _failed(self, why: str) -> None:
        if self.health.failed(now_s=self._clock_s()):
            log.warning("pool: away: %s", why)
            self.on_state()

    async def _probe_for_ever(self) -> None:
        """Ask whether the pool is there; kill an agent whose call hangs."""
        while True:
            await asyncio.sleep(min(0.25, max(0.02, self.health.probe_in_s(now_s=self._clock_s()))))
            begun_s = [call.begun_s for call in self._calls.values()]
            begun_s += [settling.begun_s for settling in self._settling.values()]
            oldest_s = min(begun_s, default=self._clock_s())
            if self._clock_s() - oldest_s > self._hang_s and self._process is not None:
                log.error("pool: a call or its reads do not end; the agent is started anew")
                self._signal(signal.SIGKILL)
            due = not self.health.probe_in_s(now_s=self._clock_s())
            asking = any(call.kind in _ASKS_MASTER for call in self._calls.values())
            if self._writer is None or not due or asking:
                continue
            with contextlib.suppress(Unavailable):
                asked = self.probe_keys()
                hexed = [key.hex() for key in (_PROBE_KEY, *asked)]
                answer = await self.call("find", timeout_s=PROBE_S, keys=hexed)
                if self.health.answered(now_s=self._clock_s()):
                    log.info("pool: back")
                    self.on_state()
                else:
                    self.on_probe(dict(zip(asked, answer["sizes"][1:], strict=True)))

    async def _keep_running(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            begun_s = self._clock_s()
            try:
                await self._run_once()
            except (OSError, ValueError, SlipstreamError) as error:
                log.warning("pool: %s", error)
            except Exception:  # a defect: the next agent may do better
                log.exception("pool: its agent was not understood")
            self._failed("its agent ended")
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
                self._heard(unpacked(line))
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
        """The agent is gone when this returns, and nothing of it can write any more."""
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
                self._release(call)
                if not call.answer.done():
                    call.answer.set_exception(Unavailable("the pool's agent ended"))
                    call.answer.exception()  # seen, also when nobody waits
            for settling in self._settling.values():
                self.done_with(settling.staged, "agent")
            self._calls.clear()
            self._settling.clear()

    def _heard(self, message: dict[str, Any]) -> None:
        if "settled" in message:
            if (settling := self._settling.pop(message["settled"], None)) is not None:
                self.done_with(settling.staged, "agent")
            return
        call = self._calls.pop(message["id"])
        if message.get("late") and call.staged is not None:
            self._settling[message["id"]] = _Settling(call.begun_s, call.staged)
            call.staged = None
        self._release(call)
        if "error" in message:
            self._failed(message["error"])
        if call.answer.done():
            return
        if "error" in message:
            call.answer.set_exception(Unavailable(message["error"]))
            call.answer.exception()
        else:
            call.answer.set_result(message)

    def _release(self, call: _Call) -> None:
        self._slots[call.kind].release()
        if call.staged is not None:
            self.done_with(call.staged, "agent")
            call.staged = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
