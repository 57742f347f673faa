"""The one thread that touches an engine: it steps while there is work and runs commands between steps.

    thread = EngineThread(build, on_step=deliver)   # build() runs on the thread: it loads the model there
    info = await thread.start()
    reservation = await thread.call(lambda engine: engine.reserve(spec))
    await thread.stop()

Commands run in the order they were submitted, before the next step; only `release` does not wait for the
step in progress: a sequence without rows in it is released at once, ahead of the commands that wait, and
where most of the step's rows are not wanted any more it is cut short. Step outputs reach
`on_step` on the event loop, one call a step; an output may still be on its way when its sequence's
release is submitted, so the owner must drop outputs of sequences it released.

A step that raises fails whatever runs: the thread stands still until the owner has dealt with all
sequences and called `resume`. Several failures in a row mean that the engine itself is broken.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from libs.engine.step.types import Engine, EngineInfo, EngineLedger, PageChange, StepOutput
from slipstream import errors

log = logging.getLogger(__name__)

T = TypeVar("T")

Drafts = Mapping[str, Sequence[int]]
_NO_DRAFTS: Drafts = {}

MAX_FAILED_STEPS_IN_ROW = 3


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave and how long it took (the wait for drafts not counted)."""

    outputs: Sequence[StepOutput]
    step_ms: float


class Drafter(Protocol):
    """Where drafts come from; called on the engine's thread."""

    def drafts(self) -> Drafts:
        """Those for the next step; may wait a little."""
        ...

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """What the last step did."""
        ...


class EngineListener(Protocol):
    """What the event loop side hears of the engine."""

    def on_step(self, step: Step) -> None:
        """One step was done."""
        ...

    def on_step_error(self, error: Exception) -> None:
        """A step raised: end all sequences that were started, then `resume`."""
        ...

    def on_broken(self, error: BaseException) -> None:
        """The engine is gone for good; the process should end."""
        ...


class EngineThread:
    """Owns an engine."""

    def __init__(
        self,
        build: Callable[[], Engine],
        listener: EngineListener,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        self._build = build
        self._listener = listener
        self._drafter = drafter
        # Told, on the event loop, which blocks the engine's cache has gained and lost; set it before `start`.
        self.on_blocks: Callable[[Sequence[PageChange]], None] | None = None
        # Told, on the event loop, that a sequence which found no pages may find some now.
        self.on_room: Callable[[], None] = lambda: None
        self._engine: Engine | None = None  # once it is built
        self._telling = threading.Lock()  # so that what is told last is the latest
        self._room_pages = 0
        self._standing = False
        self._failed_steps = 0
        # What the engine held after the latest command or step; any thread may read it.
        self.ledger = EngineLedger(0, 0, 0)
        self._commands: collections.deque[Callable[[Engine], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> EngineInfo:
        """Build the engine on the thread; raises what building it raised."""
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = self._loop.create_future()
        # A daemon: a step that hangs must not keep a process alive that was told to stop.
        self._thread = threading.Thread(target=self._run, args=(built,), name="engine", daemon=True)
        self._thread.start()
        return await built

    def submit(self, command: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queue `command`; it runs between steps even if nobody waits for the future any more."""
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = command(engine)
                self._tell(engine)
            except Exception as error:
                self._post(loop, _set_exception, future, error)
            else:
                self._post(loop, _set_result, future, result)

        with self._wake:
            if self._stopping:
                future.set_exception(errors.Unavailable("the engine has stopped"))
                return future
            self._commands.append(run)
            self._wake.notify_all()
        return future

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` between steps and give its result. A cancelled caller does not undo it."""
        return await asyncio.shield(self.submit(command))

    def release(self, seq_id: str) -> asyncio.Future[None]:
        """Release a sequence; the step in progress does not go on for it alone, nor is it waited for where
        it has nothing of it."""

        def run(engine: Engine) -> None:
            engine.release(seq_id)

        if self._engine is not None and self._loop is not None and self._engine.try_release(seq_id):
            self._tell(self._engine)
            released: asyncio.Future[None] = self._loop.create_future()
            released.set_result(None)
            return released
        # First: a release that ran before would leave the name on the list of the unwanted.
        if self._engine is not None:
            self._engine.abandon(seq_id)
        return self.submit(run)

    def resume(self) -> None:
        """Step again after `on_step_error`; submit the releases of the failed sequences before."""

        def stand_no_more(engine: Engine) -> None:
            self._standing = False

        self.submit(stand_no_more)

    async def stop(self, *, timeout_s: float = 5.0) -> None:
        """End after the current step; commands that did not run fail as Unavailable."""
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        await asyncio.get_running_loop().run_in_executor(None, thread.join, timeout_s)
        if thread.is_alive():
            log.warning("the engine thread did not end within %.0f s", timeout_s)

    def _run(self, built: asyncio.Future[EngineInfo]) -> None:
        assert self._loop is not None
        try:
            engine = self._build()
        except BaseException as error:
            self._post(self._loop, _set_exception, built, error)
            return
        self._engine = engine
        self.ledger = engine.ledger()
        self._post(self._loop, _set_result, built, engine.info)
        try:
            while self._take_turn(engine):
                pass
        except BaseException as error:
            log.exception("the engine is broken")
            self._post(self._loop, self._listener.on_broken, error)
        finally:
            with self._wake:
                self._stopping = True  # `submit` refuses from here on; what is queued can only fail
                left = list(self._commands)
                self._commands.clear()
            for command in left:
                command(_STOPPED)

    def _take_turn(self, engine: Engine) -> bool:
        """Run what is queued, then one step if there is work. False: stop."""
        assert self._loop is not None
        self._run_commands(engine)
        if self._standing or not engine.has_work():
            with self._wake:
                while not self._commands and not self._stopping:
                    self._wake.wait()
                return not self._stopping
        drafts = self._drafter.drafts() if self._drafter is not None else _NO_DRAFTS
        # Commands that came in while waiting for drafts (aborts above all) take effect in this step.
        self._run_commands(engine)
        started = time.perf_counter()
        try:
            outputs = engine.step(drafts)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS_IN_ROW:
                raise
            log.exception("a step failed")
            self._standing = True
            self._post(self._loop, self._listener.on_step_error, error)
            return not self._stopping
        self._failed_steps = 0
        self._tell(engine)
        step = Step(outputs, (time.perf_counter() - started) * 1e3)
        if self._drafter is not None:
            self._drafter.stepped(outputs)
        self._post(self._loop, self._listener.on_step, step)
        return not self._stopping

    def _tell(self, engine: Engine) -> None:
        """What it holds now; from the engine's thread and from the event loop's."""
        assert self._loop is not None
        with self._telling:
            self.ledger = engine.ledger()
            if self.on_blocks is not None and (changes := engine.poll_block_changes()):
                self._post(self._loop, self.on_blocks, changes)
            more, self._room_pages = self.ledger.room_pages > self._room_pages, self.ledger.room_pages
        if more:
            self._post(self._loop, self._tell_room)

    def _tell_room(self) -> None:
        self.on_room()

    def _run_commands(self, engine: Engine) -> None:
        while self._commands:
            self._commands.popleft()(engine)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: the process ends
            log.debug("event loop closed before the engine thread ended")


class _Stopped:
    """Stands for the engine once it is gone: every use raises Unavailable."""

    def __getattr__(self, name: str) -> Any:
        raise errors.Unavailable("the engine has stopped")


_STOPPED: Any = _Stopped()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: a caller that was cancelled must not make asyncio complain
