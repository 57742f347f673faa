"""The time budget of restores, waiting within it, and the circuit breaker of KV sources."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.worker.requests.time_limit import MAX_EXTRA_S, wait_within
from libs.worker.restore.restore_budget import UNKNOWN_BLOCK_MS, UNKNOWN_RATE_MS, WAIT_PART, RestoreBudget
from libs.worker.restore.source_breaker import FIRST_SILENCE_S, FORGET_AFTER_S, MAX_SILENCE_S, SourceBreaker

FLOOR_MS = 40.0
# One source: (delay in ms, number of blocks) of each group of blocks that lands.
Landings = Sequence[tuple[float, int]]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_restore(budget: RestoreBudget, clock: FakeClock, sources: Sequence[Landings], n_blocks: int) -> int:
    """Restore like a worker, one source after the other within the budget; return the landed blocks."""
    n_came = 0
    for number, landings in enumerate(sources):
        if not budget.next_source(n_after=len(sources) - number - 1):
            break
        for after_ms, n in landings:
            left_ms = budget.left_ms
            clock.now += min(after_ms, left_ms)
            if after_ms > left_ms:
                break
            got = min(n, n_blocks - n_came)
            budget.add_restored(got)
            n_came += got
        else:
            if n_came < n_blocks:
                clock.now += budget.left_ms  # then the source hangs
    return n_came


@given(
    n_blocks=st.integers(1, 2000),
    block_ms=st.floats(0.01, 50.0),
    sources=st.lists(
        st.lists(st.tuples(st.floats(0.0, 3000.0), st.integers(0, 200)), max_size=12), min_size=1, max_size=3
    ),
)
def test_no_source_delays_a_prompt_by_more_than_the_bound(
    n_blocks: int, block_ms: float, sources: list[list[tuple[float, int]]]
) -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=n_blocks, block_ms=block_ms, clock_ms=clock, floor_ms=FLOOR_MS)
    compute_ms = n_blocks * block_ms
    n_came = run_restore(budget, clock, sources, n_blocks)
    in_all_ms = clock.now + (n_blocks - n_came) * block_ms
    assert in_all_ms <= max((1 + WAIT_PART) * compute_ms, compute_ms + FLOOR_MS) + 1e-6 * compute_ms + 1e-6
    assert budget.cost_ms <= budget.bound_ms + 1e-6 * compute_ms + 1e-6


@given(n_blocks=st.integers(1, 500), block_ms=st.floats(0.01, 20.0), speed=st.floats(1.01, 50.0))
def test_a_source_faster_than_computing_is_read_to_its_end(
    n_blocks: int, block_ms: float, speed: float
) -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=n_blocks, block_ms=block_ms, clock_ms=clock, floor_ms=2 * block_ms)
    assert run_restore(budget, clock, [[(block_ms / speed, 1)] * n_blocks], n_blocks) == n_blocks


def test_a_silent_source_leaves_time_for_the_next_one() -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=100, block_ms=10.0, clock_ms=clock, floor_ms=FLOOR_MS)
    assert run_restore(budget, clock, [[], [(50.0, 100)]], 100) == 100
    assert clock.now == pytest.approx(WAIT_PART * 1000 / 2 + 50.0)


def test_the_bound_is_fixed_before_the_first_measured_step() -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=100, block_ms=0.0, clock_ms=clock, floor_ms=FLOOR_MS)
    assert run_restore(budget, clock, [[], []], 100) == 0
    assert clock.now == UNKNOWN_RATE_MS


def test_a_steady_source_is_read_to_its_end_before_the_first_measured_step() -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=500, block_ms=0.0, clock_ms=clock, floor_ms=FLOOR_MS)
    assert run_restore(budget, clock, [[(0.9 * 10 * UNKNOWN_BLOCK_MS, 10)] * 50], 500) == 500


@given(n_blocks=st.integers(0, 1000), block_ms=st.floats(0.0, 100.0), spent_ms=st.floats(0.0, 1e5))
def test_the_disk_wait_of_a_kvstore_is_shorter_than_the_wait_for_the_kvstore(
    n_blocks: int, block_ms: float, spent_ms: float
) -> None:
    clock = FakeClock()
    budget = RestoreBudget(n_blocks=n_blocks, block_ms=block_ms, clock_ms=clock, floor_ms=400.0)
    clock.now = spent_ms
    assert budget.disk_wait_ms > 0
    if budget.left_ms > 200 and n_blocks * block_ms > 0:
        assert budget.disk_wait_ms <= 0.75 * budget.left_ms


# ---- waiting


async def test_a_wait_is_extended_while_its_budget_grows() -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked: list[float] = []
    lefts = [30.0, 20.0, 0.0, 0.0]

    def left_ms() -> float:
        asked.append(lefts[min(len(asked), len(lefts) - 1)])
        return asked[-1]

    async with asyncio.timeout(30):
        assert not await wait_within(work, left_ms)
    assert len(asked) >= 3 and not work.done() and not work.cancelled()
    work.set_result(None)
    assert await wait_within(work, lambda: 0.0)


async def test_a_stalled_process_polls_once_more_before_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    work: asyncio.Future[None] = loop.create_future()
    now_s, waits = [loop.time()], []

    async def wait(_: object, timeout: float) -> None:
        waits.append(timeout)
        if len(waits) == 1:
            now_s[0] += 5.0  # the process was stalled
        else:
            work.set_result(None)  # the result had arrived meanwhile

    monkeypatch.setattr(loop, "time", lambda: now_s[0])
    monkeypatch.setattr(asyncio, "wait", wait)
    end_s = now_s[0] + 0.05
    assert await wait_within(work, lambda: max(0.0, end_s - now_s[0]) * 1e3)
    assert waits == [pytest.approx(0.05), MAX_EXTRA_S]


# ---- the circuit breaker


class SourceMachine(RuleBasedStateMachine):
    """Any order of restores and probes of one source keeps the breaker's rules."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = SourceBreaker()
        self.now_s = 0.0
        self.n_restores = 0

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def start_restore(self) -> None:
        silent, before = "x" in self.breaker, self.n_restores
        self.n_restores += self.breaker.may_ask("x", now_s=self.now_s)
        assert silent or self.n_restores == before + 1

    @precondition(lambda self: self.n_restores)
    @rule(how=st.sampled_from(["record_success", "record_failure", "record_timeout", "end_trial"]))
    def end_restore(self, how: str) -> None:
        self.n_restores -= 1
        if how in ("record_failure", "record_timeout"):
            getattr(self.breaker, how)("x", now_s=self.now_s)
            assert "x" in self.breaker
        else:
            getattr(self.breaker, how)("x")
            assert how == "end_trial" or "x" not in self.breaker

    @rule(answers=st.booleans())
    def probe(self, answers: bool) -> None:
        at_s = self.breaker.next_probe_s("x", now_s=self.now_s)
        if at_s is not None and answers:
            assert self.now_s <= at_s <= self.now_s + MAX_SILENCE_S
            self.breaker.record_probe("x")

    @invariant()
    def an_unanswered_source_gets_no_restores(self) -> None:
        if self.breaker.next_probe_s("x", now_s=self.now_s) is not None:
            assert not self.breaker.may_ask("x", now_s=self.now_s)


TestSources = SourceMachine.TestCase
TestSources.settings = settings(stateful_step_count=30, deadline=None)


def test_a_source_that_answers_probes_but_fails_restores_is_tried_ever_less_often() -> None:
    breaker, now_s, tried = SourceBreaker(), 0.0, 0
    breaker.record_failure("x", now_s=now_s)
    for _ in range(600):
        now_s += 1.0
        breaker.record_probe("x")
        if breaker.may_ask("x", now_s=now_s):
            tried += 1
            assert not breaker.may_ask("x", now_s=now_s)  # one trial at a time
            breaker.record_failure("x", now_s=now_s)
    assert 600 / MAX_SILENCE_S <= tried <= 600 / MAX_SILENCE_S + 6
    now_s += MAX_SILENCE_S
    breaker.record_probe("x")
    assert breaker.may_ask("x", now_s=now_s)
    breaker.record_success("x")
    assert breaker.may_ask("x", now_s=now_s) and breaker.may_ask("x", now_s=now_s)


def test_a_source_that_is_too_slow_in_its_trial_is_probed_before_the_next_trial() -> None:
    breaker = SourceBreaker()
    breaker.record_failure("x", now_s=0.0)
    breaker.record_probe("x")
    assert breaker.may_ask("x", now_s=5.0)
    breaker.record_timeout("x", now_s=5.0)
    assert breaker.next_probe_s("x", now_s=5.0) == 5.0 + FIRST_SILENCE_S
    assert not breaker.may_ask("x", now_s=60.0)  # it may hang, and no prompt waits to find out
    assert breaker.next_probe_s("x", now_s=60.0) == 60.0
    breaker.record_probe("x")
    assert breaker.may_ask("x", now_s=60.0)


def test_a_failed_source_is_not_restored_by_its_first_answered_probe() -> None:
    breaker = SourceBreaker()
    breaker.record_timeout("x", now_s=10.0)  # of two restores, one timed out
    breaker.record_failure("x", now_s=10.0)  # and the other one failed
    breaker.record_probe("x")
    assert "x" in breaker and not breaker.may_ask("x", now_s=10.0)
    assert breaker.may_ask("x", now_s=10.0 + FIRST_SILENCE_S)


def test_a_slow_source_is_restored_by_one_answer_and_an_unused_one_is_removed() -> None:
    breaker = SourceBreaker()
    breaker.record_timeout("x", now_s=10.0)
    assert not breaker.may_ask("x", now_s=10.0) and breaker.next_probe_s("x", now_s=10.0) == 10.0
    breaker.record_probe("x")
    assert "x" not in breaker
    breaker.record_failure("x", now_s=20.0)
    assert breaker.next_probe_s("x", now_s=20.0 + FORGET_AFTER_S - 1) is not None
    assert breaker.next_probe_s("x", now_s=20.0 + FORGET_AFTER_S + 1) is None
    assert "x" not in breaker
