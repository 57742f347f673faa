"""EngineThread: the order of commands, failures of steps, and shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine, expected_tokens
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import Engine, PageChange, SamplingParams, SequenceSpec, StepOutput
from libs.worker.engine.engine_thread import MAX_FAILED_STEPS_IN_ROW, EngineThread, Step
from slipstream.errors import FailedPrecondition, Unavailable
from tests.engine.core.deferred_model import DeferredModel
from tests.worker.nodes import WAIT_S, eventually


class Listener:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.errors: list[Exception] = []
        self.broken: list[BaseException] = []
        self.thread: EngineThread | None = None
        self.failing: tuple[str, ...] = ()

    def on_step(self, step: Step) -> None:
        self.steps.append(step)

    def on_step_error(self, error: Exception) -> None:
        self.errors.append(error)
        assert self.thread is not None
        for seq_id in self.failing:
            self.thread.submit(lambda engine, seq_id=seq_id: engine.release(seq_id))  # type: ignore[misc]
        self.thread.resume()

    def on_blocks(self, changes: Sequence[PageChange]) -> None:
        return

    def on_broken(self, error: BaseException) -> None:
        self.broken.append(error)


def spec(seq_id: str, max_tokens: int = 4) -> SequenceSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return SequenceSpec(seq_id, np.arange(10, dtype=np.uint32), sampling)


def run(seq_id: str, max_tokens: int = 4) -> Any:
    def command(engine: Engine) -> None:
        engine.reserve(spec(seq_id, max_tokens))
        engine.start(seq_id)

    return command


async def test_commands_run_in_order_on_one_thread() -> None:
    thread = EngineThread(lambda: build_fake_engine(n_pages=8), Listener())
    info = await thread.start()
    assert info.n_pages == 8
    seen: list[tuple[int, int]] = []
    futures = [thread.submit(lambda _, i=i: seen.append((i, threading.get_ident()))) for i in range(50)]  # type: ignore[misc]
    await asyncio.gather(*futures)
    assert [i for i, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen} - {threading.get_ident()}) == 1
    await thread.stop()


async def test_an_error_of_a_command_reaches_only_its_caller() -> None:
    listener = Listener()
    thread = EngineThread(lambda: build_fake_engine(n_pages=8), listener)
    await thread.start()
    await thread.call(run("a"))
    with pytest.raises(FailedPrecondition):
        await thread.call(run("a"))
    await eventually(lambda: any(o.finish for step in listener.steps for o in step.outputs))
    assert not listener.errors
    await thread.stop()


async def test_an_error_while_building_the_engine_fails_the_start() -> None:
    def build() -> PagedEngine:
        raise FailedPrecondition("no such model")

    with pytest.raises(FailedPrecondition, match="no such model"):
        await EngineThread(build, Listener()).start()


async def test_cancelling_a_caller_does_not_undo_its_command() -> None:
    thread = EngineThread(lambda: build_fake_engine(n_pages=8), Listener())
    await thread.start()
    gate = threading.Event()
    thread.submit(lambda _: gate.wait(WAIT_S))
    task = asyncio.create_task(thread.call(lambda engine: engine.reserve(spec("a"))))
    await asyncio.sleep(0)
    task.cancel()
    gate.set()
    await asyncio.gather(task, return_exceptions=True)
    assert (await thread.call(lambda engine: engine.ledger())).sequences == 1
    await thread.call(lambda engine: engine.release("a"))
    assert thread.ledger.sequences == 0
    await thread.stop()


async def test_calls_after_stop_raise_unavailable() -> None:
    thread = EngineThread(lambda: build_fake_engine(n_pages=8), Listener())
    await thread.start()
    gate = threading.Event()
    thread.submit(lambda _: gate.wait(WAIT_S))
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await thread.call(run("a"))
    gate.set()
    await stopping


async def test_the_thread_closes_the_engine_after_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = build_fake_engine(n_pages=8), list[str]()
    monkeypatch.setattr(engine.model, "close", lambda: calls.append("close"), raising=True)
    thread = EngineThread(lambda: engine, Listener())
    await thread.start()
    await thread.call(lambda _: calls.append("command"))
    await thread.stop()
    assert calls == ["command", "close"]


class FlakyEngine(PagedEngine):
    """An engine whose steps fail a given number of times."""

    failures = 0

    def step(self, drafts: Mapping[str, Sequence[int]] = {}, *, features: bool = True) -> list[StepOutput]:
        if self.failures:
            self.failures -= 1
            raise ValueError("a kernel failed")
        return super().step(drafts, features=features)


def flaky_engine(failures: int) -> FlakyEngine:
    engine = FlakyEngine(build_fake_engine(n_pages=16).model)
    engine.failures = failures
    return engine


async def test_a_failed_step_fails_only_running_sequences() -> None:
    listener = Listener()
    thread = listener.thread = EngineThread(lambda: flaky_engine(1), listener)
    await thread.start()
    listener.failing = ("a",)
    await thread.call(run("a"))
    await eventually(lambda: len(listener.errors) == 1)
    await eventually(lambda: thread.ledger.sequences == 0)
    await thread.call(run("b"))
    await eventually(lambda: any(o.finish for step in listener.steps for o in step.outputs))
    assert not listener.broken
    await thread.stop()


async def test_an_engine_that_always_fails_is_broken() -> None:
    listener = Listener()
    thread = listener.thread = EngineThread(lambda: flaky_engine(100), listener)
    await thread.start()
    await thread.call(run("a"))
    await eventually(lambda: bool(listener.broken))
    assert len(listener.errors) == MAX_FAILED_STEPS_IN_ROW - 1
    with pytest.raises(Unavailable):
        await thread.call(run("b"))
    await thread.stop()


class EndlessModel(FakeModel):
    """A fake model that computes prompts of more than one row until the step is aborted."""

    def __init__(self, model: FakeModel) -> None:
        self.__dict__.update(model.__dict__)
        self.computing = threading.Event()

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        if any(r.n_rows > 1 and r.seq_id == "long" for r in rows):
            self.computing.set()
            gave_up_at = time.monotonic() + WAIT_S
            while not stop.is_set and time.monotonic() < gave_up_at:
                time.sleep(0.001)
        return super().run(batch, rows, stop)


async def test_a_release_does_not_wait_for_the_step_that_computes_the_sequence() -> None:
    fake = build_fake_engine(n_pages=16).model
    assert isinstance(fake, FakeModel)
    listener, model = Listener(), EndlessModel(fake)
    thread = EngineThread(lambda: PagedEngine(model), listener)
    await thread.start()
    await thread.call(run("long"))
    await eventually(model.computing.is_set)
    async with asyncio.timeout(WAIT_S / 2):
        await thread.release("long")
    assert thread.ledger.sequences == 0
    assert not any(step.outputs for step in listener.steps)
    model.computing.clear()
    await thread.call(run("b"))
    await eventually(lambda: any(o.finish for step in listener.steps for o in step.outputs))
    assert not listener.errors
    await thread.stop()


async def test_streams_of_an_engine_that_steps_ahead_are_whole_and_leave_no_page() -> None:
    """One stream is released while its next row is in flight; the others go on to their ends."""
    fake = build_fake_engine(feature_width=0, block_tokens=4).model
    assert isinstance(fake, FakeModel)
    model = DeferredModel(fake)
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold_once() -> None:
        if model.n_followed > 40 and not is_held.is_set():
            is_held.set()
            assert may_go_on.wait(WAIT_S)

    model.during_wait = hold_once
    engine = PagedEngine(model, steps_ahead=True)
    listener = Listener()
    thread = EngineThread(lambda: engine, listener)
    await thread.start()
    lengths = {"a": 40, "b": 200, "c": 30}
    await asyncio.gather(*(thread.call(run(seq_id, n)) for seq_id, n in lengths.items()))

    def tokens(seq_id: str) -> list[int]:
        outputs = (output for step in listener.steps for output in step.outputs)
        return [token for output in outputs if output.seq_id == seq_id for token in output.tokens]

    await eventually(is_held.is_set)
    released = thread.release("b")
    assert not released.done()
    may_go_on.set()
    await asyncio.wait_for(released, WAIT_S)
    await eventually(lambda: [len(tokens("a")), len(tokens("c"))] == [40, 30])
    await asyncio.gather(thread.release("a"), thread.release("c"))
    await eventually(lambda: thread.ledger.pages_held == 0)
    assert model.n_followed > 60
    assert len(tokens("b")) < 200
    for seq_id in lengths:
        wanted = expected_tokens(engine, range(10), spec(seq_id).sampling, n=lengths[seq_id])
        assert tokens(seq_id) == wanted[: len(tokens(seq_id))]
    await thread.stop()


@pytest.mark.parametrize("wanted", [True, False])
async def test_without_a_source_of_drafts_the_owner_says_whether_features_are_computed(wanted: bool) -> None:
    listener = Listener()
    thread = EngineThread(
        lambda: build_fake_engine(n_pages=8, feature_width=4), listener, wants_features=wanted
    )
    await thread.start()
    await thread.call(run("a"))
    await eventually(lambda: len(listener.steps) == 4)
    outputs = [output for step in listener.steps for output in step.outputs]
    assert {output.features is not None for output in outputs if output.tokens} == {wanted}
    await thread.stop()


class HeldScatter:
    """A `PageParts` whose pages arrive once `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def scatter(self, pages: Sequence[int]) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)


async def test_arrivals_that_wait_leave_threads_to_others() -> None:
    model, parts = build_fake_engine(n_pages=32).model, HeldScatter()
    assert isinstance(model, FakeModel)
    model.page_parts = parts  # type: ignore[assignment]
    thread, loop = EngineThread(lambda: PagedEngine(model), Listener()), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(4))
    await thread.start()
    names = [f"arriving{number}" for number in range(8)]
    for name in names:
        await thread.call(lambda engine, name=name: engine.reserve(spec(name)))  # type: ignore[misc]
    arrivals = [asyncio.create_task(thread.receive(name, 10)) for name in names]
    await eventually(parts.begun.is_set)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "another's work"), WAIT_S) == "another's work"
    assert not any(arrival.done() for arrival in arrivals)
    arrivals[-1].cancel()  # it waits for its turn, and gives it to none
    parts.go.set()
    *others, cancelled = await asyncio.gather(*arrivals, return_exceptions=True)
    assert others == [None] * 7 and isinstance(cancelled, asyncio.CancelledError)
    for name in names:
        await thread.release(name)
    assert thread.ledger.pages_held == 0
    await thread.stop()


async def test_pages_arrive_beside_steps_and_commands_of_the_thread() -> None:
    model, parts, listener = build_fake_engine(n_pages=8).model, HeldScatter(), Listener()
    assert isinstance(model, FakeModel)
    model.page_parts = parts  # type: ignore[assignment]
    thread = EngineThread(lambda: PagedEngine(model), listener)
    await thread.start()
    await thread.call(lambda engine: engine.reserve(spec("arriving")))
    arrival = asyncio.create_task(thread.receive("arriving", 10))
    await eventually(parts.begun.is_set)
    await thread.call(run("a"))
    await eventually(lambda: any(o.finish for step in listener.steps for o in step.outputs))
    await thread.release("a")
    arrival.cancel()
    await thread.release("arriving")
    assert thread.ledger.pages_held == 1, "the copy goes on"
    parts.go.set()
    await eventually(lambda: thread.ledger.pages_held == 0)
    await thread.stop()
