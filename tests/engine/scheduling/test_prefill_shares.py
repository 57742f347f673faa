"""Shares of a worker's prefill: no tenant waits for another one's backlog, and one alone has every row."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.core.fake import build_fake_engine
from libs.engine.scheduling.prefill_shares import PrefillShares
from libs.engine.scheduling.scheduler import Limits, StepCandidate, schedule
from tests.engine.support import make_spec
from tests.support.examples import examples

LIMITS = Limits(step_tokens=512, max_batch=64)


class _Worker:
    """Prompts of tenants that the scheduler serves, step by step."""

    def __init__(self) -> None:
        self.shares = PrefillShares()
        self.left: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        self.waited: dict[str, int] = {}
        self.served: dict[str, int] = {}

    def add(self, tenant: str, name: str, tokens: int) -> None:
        self.left[name], self.tenants[name] = tokens, tenant

    def step(self) -> dict[str, int]:
        """Run a step; returns the rows by prompt."""
        self.shares.observe([self.tenants[name] for name in self.left])
        order = list(self.tenants)
        candidates = [
            StepCandidate(
                name,
                order.index(name),
                last_slice=0,
                pending_tokens=tokens,
                decoding=False,
                waited_tokens=self.waited.get(name, 0),
                tenant_tag=self.shares.tag(self.tenants[name]),
            )
            for name, tokens in self.left.items()
        ]
        rows = {piece.seq_id: piece.n_tokens for piece in schedule(candidates, LIMITS)}
        for name in list(self.left):
            self.waited[name] = self.waited.get(name, 0) + sum(rows.values()) - rows.get(name, 0)
        for name, n_tokens in rows.items():
            tenant = self.tenants[name]
            self.shares.charge(tenant, n_tokens)
            self.served[tenant] = self.served.get(tenant, 0) + n_tokens
            self.left[name] -= n_tokens
            if not self.left[name]:
                del self.left[name]
        return rows


def test_a_prompt_does_not_wait_for_the_backlog_of_another_tenant() -> None:
    """Each of the backlog's prompts needs less, and came before."""
    worker = _Worker()
    for index in range(120):
        worker.add("heavy", f"h{index}", 1000)
    for _ in range(20):
        worker.step()
    worker.add("light", "l", 2000)
    steps = 0
    while "l" in worker.left:
        worker.step()
        steps += 1
    assert steps <= 12  # half of the rows, but for the quarter of the oldest overdue prompt


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_backlogged_tenants_get_equal_tokens_up_to_a_few_steps(seed: int, n_tenants: int) -> None:
    rng, worker = random.Random(seed), _Worker()
    tenants = [f"t{index}" for index in range(n_tenants)]
    for tenant in tenants:
        for index in range(rng.randint(20, 40)):
            worker.add(tenant, f"{tenant}.{index}", rng.randint(10, 3000))
    while all(any(worker.tenants[name] == tenant for name in worker.left) for tenant in tenants):
        rows = worker.step()
        assert sum(rows.values()) == min(LIMITS.step_tokens, sum(rows.values()) + sum(worker.left.values()))
    shares = [worker.served.get(tenant, 0) for tenant in tenants]
    # A quarter of the rows goes to the oldest overdue prompt, whose tenant it charges too.
    assert max(shares) - min(shares) <= 4 * LIMITS.step_tokens


@given(st.integers(0, 2**32))
def test_no_prompt_starves_and_tags_are_dropped(seed: int) -> None:
    rng, worker, n = random.Random(seed), _Worker(), 0
    for step in range(120):
        for _ in range(rng.randint(0, 3) if step < 60 else 0):
            n += 1
            worker.add(rng.choice("aaaabcd"), f"p{n}", rng.randint(1, 900))
        worker.step()
        assert len(worker.shares._tags) <= 4
    while worker.left:
        assert worker.step()  # rows go to some prompt as long as one waits
    worker.shares.observe([])
    assert not worker.shares._tags


def test_a_tenant_that_returns_has_no_credit() -> None:
    shares = PrefillShares()
    shares.observe(["a"])
    shares.charge("a", 10_000)
    shares.observe(["a", "b"])
    assert shares.tag("b") == shares.tag("a")


def test_a_tenant_begins_at_the_lowest_tag_of_those_that_stayed_and_keeps_its_debt() -> None:
    shares = PrefillShares()
    shares.observe("ab")
    shares.charge("a", 50)
    shares.charge("b", 100)
    shares.observe("abc")
    assert (shares.tag("a"), shares.tag("b"), shares.tag("c")) == (50, 100, 50)
    shares.observe("d")  # all others left: their lowest tag counts
    assert shares.tag("d") == 50 and shares._tags.keys() == set("bd")
    shares.observe("bd")
    assert shares.tag("b") == 100
    shares.observe("d")
    shares.charge("d", 450)
    shares.observe("de")  # b, with less, waits no more
    assert shares.tag("e") == 500 and shares._tags.keys() == set("de")


def test_the_rows_of_a_step_are_charged_to_the_tenants_of_its_prompts() -> None:
    """By need alone, the backlog of shorter prompts would go first."""
    engine = build_fake_engine(block_tokens=4, vocab_size=50, step_tokens=16, max_batch=16)
    for number in range(12):
        spec = make_spec(f"h{number}", [number + 1] * 24, max_tokens=1)
        engine.reserve(replace(spec, salt=b"heavy"))
        engine.start(spec.seq_id)
    engine.step()
    engine.reserve(replace(make_spec("l", [30] * 48, max_tokens=1), salt=b"light"))
    engine.start("l")
    (light,) = (each for each in engine.sequences() if each.spec.seq_id == "l")
    for _ in range(8):
        engine.step()
    assert light.n_output == 1
