"""The one thread that touches an engine: it steps while there is work and runs commands between steps.

    thread = EngineThread(build, listener)   # build() runs on the thread: it loads the model there
    info = await thread.start()
    reservation = await thread.call(lambda engine: engine.reserve(spec))
    await thread.stop()

Commands run in the order of their submission, before the next step. Only `release` does not wait for the
step in progress. A sequence without rows in that step is released at once, ahead of waiting commands. If most
rows of the step belong to released sequences, the step is aborted. The listener's `on_step` runs on the event
loop after each step, so a sequence may be released before its last output arrives there. The owner must drop
such outputs.

A step that raises fails all running sequences: the thread pauses until the owner has released them and called
`resume`. MAX_FAILED_STEPS_IN_ROW failures in a row mean that the engine is broken.
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
from libs.worker.engine.model_thread import ModelThread
from slipstream import errors

log = logging.getLogger(__name__)

T = TypeVar("T")

Drafts = Mapping[str, Sequence[int]]
_NO_DRAFTS: Drafts = {}

MAX_FAILED_STEPS_IN_ROW = 3
# Arrivals that hold a thread of the loop's pool. Copies take turns with steps, so more are no faster; a
# second one lets short arrivals pass a long one.
_ARRIVALS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of one step and its duration, without `draft_wait_ms`; that is None without drafts."""

    outputs: Sequence[StepOutput]
    step_ms: float
    draft_wait_ms: float | None = None


class DraftSource(Protocol):
    """Where drafts come from; called on the engine's thread."""

    def drafts(self) -> Drafts:
        """Drafts for the next step; may wait for them within its budget."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether the next step computes features; asked after `drafts`."""
        ...

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """Receive the outputs of the last step."""
        ...


class EngineListener(Protocol):
    """Receives the engine's events on the event loop."""

    def on_step(self, step: Step) -> None:
        """A step is complete."""
        ...

    def on_step_error(self, error: Exception) -> None:
        """A step raised: end all sequences that were started, then `resume`."""
        ...

    def on_blocks(self, changes: Sequence[PageChange]) -> None:
        """The engine's cached blocks changed."""
        ...

    def on_broken(self, error: BaseException) -> None:
        """The engine cannot continue; the process should end."""
        ...


class EngineThread:
    """Owns an engine and the thread that runs it."""

    def __init__(
        self,
        build: Callable[[], Engine],
        listener: EngineListener,
        *,
        draft_source: DraftSource | None = None,
        wants_features: bool = True,
    ) -> None:
        """`wants_features`: whether steps may compute features where no source of drafts decides it."""
        self._build = build
        self._listener = listener
        self._draft_source = draft_source
        self._wants_features = wants_features
        # Called on the event loop when more pages are free, for sequences that wait for pages.
        self.on_room: Callable[[], None] = lambda: None
        self._engine: Engine | None = None  # once it is built
        self._publishing = threading.Lock()  # keeps reports of the engine's state in order
        self._room_pages = 0
        self._is_paused = False
        self._failed_steps = 0
        # The engine's ledger after the latest command or step; any thread may read it.
        self.ledger = EngineLedger(0, 0, 0)
        self._commands: collections.deque[Callable[[Engine], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: ModelThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrivals = asyncio.Semaphore(_ARRIVALS_AT_ONCE)

    async def start(self) -> EngineInfo:
        """Build the engine on the thread. Raises the errors of `build`."""
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = ModelThread(self._run, built, name="engine")
        self._thread.start()
        return await built

    def submit(self, command: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queue `command`; it runs between steps even if the future is cancelled."""
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = command(engine)
                self._publish(engine)
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
        """Run `command` between steps and return its result. A cancel of the caller does not undo it."""
        return await asyncio.shield(self.submit(command))

    def pin(self, pages: Sequence[int]) -> asyncio.Future[None]:
        """Pin pages between steps."""
        return self.submit(lambda engine: engine.pin(pages))

    def unpin(self, pages: Sequence[int], *, evict_first: bool = False) -> asyncio.Future[None]:
        """Unpin pages between steps. `evict_first`: the engine takes them before all others."""
        return self.submit(lambda engine: engine.unpin(pages, evict_first=evict_first))

    async def receive(self, seq_id: str, n_tokens: int) -> None:
        """See `Engine.receive`; it runs beside steps. A cancel of the caller does not end what has begun."""
        engine, loop = self._engine, self._loop
        assert engine is not None and loop is not None
        if engine.page_parts is None:
            return

        def run() -> None:
            try:
                engine.receive(seq_id, n_tokens)
            finally:
                self._publish(engine)  # pages of a sequence that was released meanwhile are free now

        await self._arrivals.acquire()
        try:
            copying = loop.run_in_executor(None, run)
        except BaseException:  # the pool has ended
            self._arrivals.release()
            raise
        copying.add_done_callback(lambda _: self._arrivals.release())
        await asyncio.shield(copying)

    def want_features(self, seq_id: str, *, wanted: bool) -> None:
        """See `Engine.want_features`. Counts from the next step on."""
        assert self._engine is not None
        self._engine.want_features(seq_id, wanted=wanted)

    def release(self, seq_id: str) -> asyncio.Future[None]:
        """Release a sequence: at once when the step in progress has no row of it, else after that step.

        A step whose rows mostly belong to released sequences is aborted.
        """

        def run(engine: Engine) -> None:
            engine.release(seq_id)

        if self._engine is not None and self._loop is not None and self._engine.try_release(seq_id):
            self._publish(self._engine)
            released: asyncio.Future[None] = self._loop.create_future()
            released.set_result(None)
            return released
        # `abandon` comes before `release`: the other order would leave the id marked as cancelled.
        if self._engine is not None:
            self._engine.abandon(seq_id)
        return self.submit(run)

    def resume(self) -> None:
        """Step again after `on_step_error`; submit the releases of the failed sequences first."""

        def unpause(engine: Engine) -> None:
            self._is_paused = False

        self.submit(unpause)

    async def stop(self) -> None:
        """End after the current step; commands that did not run fail as Unavailable."""
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        await thread.ended()

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
            while self._run_iteration(engine):
                pass
            engine.close()
        except BaseException as error:
            log.exception("the engine is broken")
            self._post(self._loop, self._listener.on_broken, error)
        finally:
            with self._wake:
                self._stopping = True  # `submit` refuses from now on, and the queued commands fail
                left = list(self._commands)
                self._commands.clear()
            for command in left:
                command(_STOPPED)

    def _run_iteration(self, engine: Engine) -> bool:
        """Run queued commands, then one step if there is work. False: stop."""
        assert self._loop is not None
        self._run_commands(engine)
        if self._is_paused or not engine.has_work():
            with self._wake:
                while not self._commands and not self._stopping:
                    self._wake.wait()
                return not self._stopping
        began = time.perf_counter()
        drafts = self._draft_source.drafts() if self._draft_source is not None else _NO_DRAFTS
        waited_ms = (time.perf_counter() - began) * 1e3 if self._draft_source is not None else None
        # Commands that arrived while the thread waited for drafts, mainly aborts, take effect in this step.
        self._run_commands(engine)
        started = time.perf_counter()
        try:
            source = self._draft_source
            wants_features = self._wants_features if source is None else source.wants_features
            outputs = engine.step(drafts, features=wants_features)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS_IN_ROW:
                raise
            log.exception("a step failed")
            self._is_paused = True
            self._post(self._loop, self._listener.on_step_error, error)
            return not self._stopping
        self._failed_steps = 0
        self._publish(engine)
        step = Step(outputs, (time.perf_counter() - started) * 1e3, waited_ms)
        if self._draft_source is not None:
            self._draft_source.stepped(outputs)
        self._post(self._loop, self._listener.on_step, step)
        return not self._stopping

    def _publish(self, engine: Engine) -> None:
        """Update the ledger and report changes. Any thread may call it."""
        assert self._loop is not None
        with self._publishing:
            self.ledger = engine.ledger()
            if changes := engine.poll_block_changes():
                self._post(self._loop, self._listener.on_blocks, changes)
            more, self._room_pages = self.ledger.room_pages > self._room_pages, self.ledger.room_pages
        if more:
            self._post(self._loop, self._report_room)

    def _report_room(self) -> None:
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
    """Replaces the engine after its end: every use raises Unavailable."""

    def __getattr__(self, name: str) -> Any:
        raise errors.Unavailable("the engine has stopped")


_STOPPED: Any = _Stopped()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved, so that asyncio does not log it for a cancelled caller
