"""Two concurrent attempts: the first that delivers continues, and each is released exactly once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import INVALID_SPAN

from libs.common.block_hash import as_tokens
from libs.common.cluster.worker_record import Role
from services.router.execution.attempt_types import AttemptSpec, TokenBatch, WorkerFailed
from services.router.execution.attempts.attempt import WorkerAttempt
from services.router.execution.attempts.hedging import AttemptEnd, HedgedAttempt
from services.router.execution.dispatcher import Assignment
from services.router.execution.policies.context_room import ContextRoom
from services.router.placement.types import PlacementDecision
from services.router.recording.recorder import RequestRecorder
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.v1 import common_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH
DECISIONS = {
    name: PlacementDecision(prefill=name, decode="decode", kvstore="", source="", reason="")
    for name in ("first", "hedge")
}


class FakeAttempt:
    """An attempt driven by the test."""

    span = INVALID_SPAN
    is_over = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 1 if name == "first" else 2
        self.released = 0
        self.spec = SimpleNamespace(sampling=SimpleNamespace(max_tokens=9))

    def begin(self) -> None: ...

    def release(self) -> None:
        self.released += 1


class HedgedRig(HedgedAttempt):
    """A hedged attempt with parts named "first" and "hedge", on workers of the same names."""

    def __init__(self) -> None:
        self.attempts = {name: FakeAttempt(name) for name in ("first", "hedge")}
        self.shown: list[int] = []
        self.lost: list[tuple[set[str], str | None]] = []
        recorder = RequestRecorder(clock=lambda: 1.0, wall_clock_s=lambda: 2.0)
        self.timeline = recorder.begin(
            "r", began_s=0.0, tenant="t", session=None, model="m", endpoint="Generate"
        )
        quarantine: Any = SimpleNamespace(
            add_workers=lambda suspect, keys: None,
            leave_workers=lambda suspect, keys, crashed: self.lost.append((keys, crashed)),
        )
        policy: Any = SimpleNamespace(has_budget=True, spend=lambda: True, wait_ms=lambda **_: 0.0)
        context: Any = SimpleNamespace(
            clock=asyncio.get_running_loop().time,
            counters=SimpleNamespace(add=lambda name: None),
            failover=SimpleNamespace(
                quarantine=quarantine, hedge_policy=policy, report_crash=lambda crashed: None
            ),
            fleet=SimpleNamespace(has_substitute=lambda link, context_tokens: True),
        )
        state: Any = SimpleNamespace(
            context=context,
            suspect=SimpleNamespace(strikes=0, workers=()),
            retry_policy=SimpleNamespace(avoid=set()),
            stats=SimpleNamespace(
                attempts=1, ttft_ms=1.0, observe=lambda batch, **_: None, placed=lambda *_, **__: None
            ),
            sink=SimpleNamespace(ttft_ms=0.0),
            caller=SimpleNamespace(requested_prefill=None),
            spec=SimpleNamespace(prompt=[1, 2, 3], sampling=SimpleNamespace(max_tokens=9)),
            output=SimpleNamespace(tokens=[], stopped=False),
            deliver=lambda tokens, logprobs, is_last: self.shown.extend(tokens),
            end_move=lambda: None,
            show_started=lambda: None,
            decision=None,
            timeline=self.timeline,
            source=None,
            is_closed=False,
            rooms=[ContextRoom(5, 12)],
            max_tokens=9,
        )
        self.state = state
        super().__init__(state, assignment("first"))
        self.began = asyncio.Event()

    def _make_attempt(self, assignment: Assignment, *, is_hedge: bool) -> WorkerAttempt:
        if is_hedge:
            self.began.set()
        return cast(WorkerAttempt, self.attempts["hedge" if is_hedge else "first"])

    def deliver(self, name: str, token: int, finish: Any = 0, *, is_closing: bool = False) -> None:
        batch = TokenBatch([token], finish=finish, is_closing=is_closing)
        self.on_batch(cast(WorkerAttempt, self.attempts[name]), batch)

    def fail(self, name: str, *, crashed: bool = False) -> None:
        failure = WorkerFailed(errors.Unavailable(name), name, is_crash=crashed)
        self.on_attempt_failed(cast(WorkerAttempt, self.attempts[name]), failure)


def assignment(name: str) -> Any:
    workers = SimpleNamespace(
        keys=[name, "decode"],
        prefill=SimpleNamespace(key=name, worker=SimpleNamespace(role=Role.PREFILL)),
        decode=SimpleNamespace(transport=""),
        uncached_tokens=3,
    )
    return SimpleNamespace(
        workers=workers, decision=DECISIONS[name], note_begun=lambda: None, observe=lambda batch: None
    )


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(state: Any, avoid: set[str], *, may_skip_prefill: bool) -> Any:
        assert avoid == {"first"} and not may_skip_prefill
        state.decision = DECISIONS["hedge"]
        return assignment("hedge")

    monkeypatch.setattr("services.router.execution.attempts.hedging.choose_workers", choose)


async def begin() -> tuple[HedgedRig, asyncio.Task[Any]]:
    hedged = HedgedRig()
    task = asyncio.create_task(hedged.run())
    await asyncio.wait_for(hedged.began.wait(), 30)
    return hedged, task


@pytest.mark.parametrize("winner", ["first", "hedge"])
async def test_the_winner_continues_and_the_loser_is_released_at_once(winner: str) -> None:
    hedged, task = await begin()
    loser = "hedge" if winner == "first" else "first"
    hedged.deliver(winner, 7)
    assert hedged.attempts[loser].released == 1
    assert hedged.lost == [({loser}, None)]
    assert hedged.state.delivering is hedged.attempts[winner]
    assert hedged.state.decision.prefill == hedged.timeline.prefill == winner
    assert [entry.kind for entry in hedged.timeline.entries] == ["received", "placed", "hedged", "dropped"]
    hedged.deliver(loser, 8)  # too late
    hedged.fail(loser)
    hedged.deliver(winner, 9, LENGTH)
    end = await task
    assert isinstance(end, AttemptEnd)
    assert (end.assignment.decision.prefill, end.finish) == (winner, LENGTH)
    assert hedged.shown == [7, 9]
    assert [attempt.released for attempt in hedged.attempts.values()] == [1, 1]


@pytest.mark.parametrize("delivered", [None, "first", "hedge"])
async def test_a_cancel_releases_both_attempts(delivered: str | None) -> None:
    hedged, task = await begin()
    if delivered is not None:
        hedged.deliver(delivered, 7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [attempt.released for attempt in hedged.attempts.values()] == [1, 1]


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize(
    ("failing", "then", "lost"),
    [
        ("hedge", "cancelled", "hedge"),
        ("hedge", "first wins", "hedge"),
        ("hedge", "first fails", "hedge"),
        ("first", "cancelled", ""),  # the failed attempt counts as placed until the other one decides
        ("first", "hedge wins", "first"),
        ("first", "hedge fails", "hedge"),
    ],
)
async def test_a_failed_attempt_is_released_exactly_once(
    failing: str, then: str, lost: str, crashed: bool
) -> None:
    hedged, task = await begin()
    hedged.fail(failing, crashed=crashed)
    other = "first" if failing == "hedge" else "hedge"
    if then == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif then.endswith("wins"):
        hedged.deliver(other, 7, LENGTH)
        assert isinstance(await task, AttemptEnd)
        assert hedged.shown == [7]
    else:
        hedged.fail(other, crashed=crashed)
        failure = await task
        assert isinstance(failure, WorkerFailed)
        assert failure.worker == "first"
    assert hedged.lost == [({name}, name if crashed else None) for name in lost.split()]
    assert [attempt.released for attempt in hedged.attempts.values()] == [1, 1]


async def test_a_cancelled_request_emits_nothing_more() -> None:
    hedged, task = await begin()
    hedged.state.is_closed = True
    hedged.deliver("first", 7)
    assert hedged.shown == []
    task.cancel()
    await asyncio.wait([task])


async def test_an_error_while_handling_a_batch_fails_only_its_request() -> None:
    hedged, task = await begin()
    hedged.on_listener_error(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await task
    assert [attempt.released for attempt in hedged.attempts.values()] == [1, 1]


async def test_no_hedge_starts_if_the_first_attempt_delivers_soon() -> None:
    hedged = HedgedRig()
    hedged.state.context.failover.hedge_policy.wait_ms = lambda **_: 60_000.0
    task = asyncio.create_task(hedged.run())
    await asyncio.sleep(0)
    hedged.deliver("first", 7)
    hedged._hedge()
    assert not hedged.began.is_set()
    hedged.fail("first")
    assert isinstance(await task, WorkerFailed)
    assert [attempt.released for attempt in hedged.attempts.values()] == [1, 0]


@pytest.mark.parametrize("has_form", [True, False])
async def test_later_attempts_know_that_the_limit_has_changed_a_token(has_form: bool) -> None:
    rig, task = await begin()
    constraint = common_pb2.OutputConstraint(grammar="{}") if has_form else None
    rig.state.spec = AttemptSpec(
        request_id="r",
        epoch=1,
        fingerprint=common_pb2.Fingerprint(),
        prompt=OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16),
        sampling=common_pb2.SamplingParams(max_tokens=9, constraint=constraint),
        store_generated=False,
        deadline_s=None,
    )
    first = rig.state.spec.sampling
    rig.deliver("first", 5)
    assert rig.state.spec.sampling is first
    rig.deliver("first", 6, is_closing=True)
    assert rig.state.spec.sampling.constraint.is_closing == has_form
    assert rig.state.spec.sampling.HasField("constraint") == has_form  # a false worker adds none
    assert not first.constraint.is_closing
    rig.deliver("first", 7, finish=LENGTH)
    await task
