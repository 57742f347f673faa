"""Concurrent sequences compute a common prefix once, and followers wait only briefly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine, expected_tokens
from libs.engine.scheduling.prefix_sharing import PrefixWork, common_blocks, find_followers
from libs.engine.scheduling.scheduler import Limits, StepCandidate, schedule
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import SamplingParams
from tests.engine.support import check_accounting, drive, make_spec

BLOCK = 4
PREFIX = list(range(1, 41))  # ten blocks


class CountingModel(FakeModel):
    """A fake model that counts its computed rows by sequence."""

    def __init__(self, model: FakeModel) -> None:
        self.__dict__.update(model.__dict__)
        self.rows: dict[str, int] = {}

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        for r in rows:
            self.rows[r.seq_id] = self.rows.get(r.seq_id, 0) + r.n_rows
        return super().run(batch, rows, stop)


def counting_engine(*, share: bool = True, step_tokens: int = 16) -> tuple[PagedEngine, CountingModel]:
    engine = build_fake_engine(
        n_pages=256, block_tokens=BLOCK, vocab_size=90, max_context_tokens=128, max_batch=8
    )
    assert isinstance(engine.model, FakeModel)
    model = CountingModel(engine.model)
    return PagedEngine(model, step_tokens=step_tokens, share_running_prefixes=share), model


def sibling(number: int) -> list[int]:
    return [*PREFIX, 50 + number, 60, 61, 62, 63 + number]


def reserve_and_start(engine: PagedEngine, prompts: dict[str, list[int]]) -> None:
    """Reserve pages for all prompts before the first step, as for simultaneous requests."""
    for seq_id, prompt in prompts.items():
        engine.reserve(make_spec(seq_id, prompt, max_tokens=1))
    for seq_id in prompts:
        engine.start(seq_id)


@pytest.mark.parametrize("step_tokens", [16, 23, 512])
def test_siblings_compute_their_common_prefix_once(step_tokens: int) -> None:
    engine, model = counting_engine(step_tokens=step_tokens)
    prompts = {f"s{n}": sibling(n) for n in range(6)}
    reserve_and_start(engine, prompts)
    transcript = drive(engine)
    assert sum(model.rows.values()) == len(PREFIX) + 6 * 5
    params = SamplingParams(temperature=0)
    for seq_id, prompt in prompts.items():
        assert transcript.tokens[seq_id] == expected_tokens(engine, prompt, params, n=1)
    shared = sum(output.shared_tokens for output in transcript.outputs)
    assert shared == 5 * len(PREFIX)


def test_without_sharing_each_sibling_computes_the_prefix() -> None:
    """The reference: the counts of the test above without sharing."""
    engine, model = counting_engine(share=False)
    reserve_and_start(engine, {f"s{n}": sibling(n) for n in range(6)})
    drive(engine)
    assert sum(model.rows.values()) == 6 * (len(PREFIX) + 5)


def test_each_sibling_reports_the_shared_blocks() -> None:
    """Each sibling may store its blocks at a different node."""
    engine, _ = counting_engine()
    reserve_and_start(engine, {"a": sibling(0), "b": sibling(1)})
    transcript = drive(engine)
    assert [b.hash for b in transcript.blocks("a")][:10] == [b.hash for b in transcript.blocks("b")][:10]
    pages = {b.page for b in transcript.blocks("a")} & {b.page for b in transcript.blocks("b")}
    assert not pages, "siblings share a page, but peers know each page's address by sequence"


@pytest.mark.parametrize("after_steps", [0, 1, 2])
def test_a_follower_continues_the_work_of_a_released_leader(after_steps: int) -> None:
    engine, model = counting_engine(step_tokens=18)
    reserve_and_start(engine, {f"s{n}": sibling(n) for n in range(3)})
    for _ in range(after_steps):
        engine.step()
    before = model.rows.get("s0", 0)
    engine.release("s0")
    transcript = drive(engine)
    check_accounting(engine)
    # The leader's full blocks are kept; at most three tokens of a partial block are lost.
    assert sum(model.rows.values()) <= len(PREFIX) + 2 * 5 + 3
    assert model.rows.get("s0", 0) == before
    for n in (1, 2):
        expected = expected_tokens(engine, sibling(n), SamplingParams(temperature=0), n=1)
        assert transcript.tokens[f"s{n}"] == expected


def test_a_sequence_reserved_early_and_started_late_copies_computed_blocks() -> None:
    engine, model = counting_engine()
    for n in range(2):
        engine.reserve(make_spec(f"s{n}", sibling(n), max_tokens=1))
    engine.start("s0")
    drive(engine)
    engine.release("s0")
    engine.start("s1")
    drive(engine)
    assert model.rows["s1"] == 5


def test_nothing_is_shared_between_tenants() -> None:
    engine, model = counting_engine()
    for n, salt in enumerate((b"one", b"two")):
        engine.reserve(replace(make_spec(f"s{n}", sibling(n), max_tokens=1), salt=salt))
        engine.start(f"s{n}")
    drive(engine)
    assert sum(model.rows.values()) == 2 * (len(PREFIX) + 5)


# ---- finding followers


@st.composite
def forests(draw: st.DrawFn) -> list[PrefixWork]:
    """Draw prompts over a tiny alphabet of blocks, which fork often. Some have a partial block."""
    work = []
    for number in range(draw(st.integers(1, 12))):
        blocks = draw(st.lists(st.sampled_from("ab"), min_size=0, max_size=6))
        hashes = ["".join(blocks[: i + 1]).encode() for i in range(len(blocks))]
        done = draw(st.integers(0, len(blocks)))
        part = draw(st.integers(0, BLOCK - 1))
        work.append(PrefixWork(f"s{number}", number, done * BLOCK + part, hashes))
    return work


@given(forests())
def test_followers_wait_for_leaders_that_compute_what_they_need(work: list[PrefixWork]) -> None:
    by_id = {w.seq_id: w for w in work}
    followers = find_followers(work, block_tokens=BLOCK)
    leading = [w for w in work if w.seq_id not in followers]
    needed = [w.hashes[p] for w in leading if (p := w.n_computed // BLOCK) < len(w.hashes)]
    assert len(set(needed)) == len(needed), "a block is computed twice"
    for seq_id, following in followers.items():
        follower, leader = by_id[seq_id], by_id[following.leader]
        assert leader.seq_id not in followers
        assert leader.n_computed >= follower.n_computed
        common = common_blocks(leader.hashes, follower.hashes)
        assert list(leader.hashes[:common]) == list(follower.hashes[:common])
        assert following.n_tokens == common * BLOCK - leader.n_computed > 0


@given(forests(), st.integers(1, 40), st.integers(2, 6))
def test_a_follower_waits_no_longer_than_it_would_compute(
    work: list[PrefixWork], step_tokens: int, max_batch: int
) -> None:
    followers = find_followers(work, block_tokens=BLOCK)
    alone = [
        StepCandidate(w.seq_id, w.arrival, 0, len(w.hashes) * BLOCK + BLOCK - w.n_computed % BLOCK, False)
        for w in work
    ]
    sharing = [replace(c, following=followers.get(c.seq_id)) for c in alone]
    limits = Limits(step_tokens, max_batch)
    simple = {s.seq_id: s.n_tokens for s in schedule(alone, limits)}
    plan = {s.seq_id: s.n_tokens for s in schedule(sharing, limits)}
    assert sum(plan.values()) <= step_tokens
    assert len(plan) <= max_batch
    assert not plan.keys() & followers.keys()
    assert plan, "no sequence makes progress"
    for seq_id, following in followers.items():
        assert plan.get(following.leader, 0) >= min(simple.get(seq_id, 0), following.n_tokens)


def most_waits(work: list[PrefixWork]) -> int:
    """The most steps that a prompt waits. Steps have room for all prompts: each alone would need one."""
    known: set[bytes] = set()
    waits = dict.fromkeys((w.seq_id for w in work), 0)
    running = work
    while running:
        followers = find_followers(running, block_tokens=BLOCK)
        for w in running:
            if w.seq_id in followers:
                waits[w.seq_id] += 1
            else:
                known.update(w.hashes)
        running = [
            replace(w, n_computed=sum(h in known for h in w.hashes) * BLOCK)
            for w in running
            if w.seq_id in followers
        ]
    return max(waits.values())


@given(forests())
def test_the_number_of_waits_is_logarithmic_in_the_forks(work: list[PrefixWork]) -> None:
    assert most_waits([replace(w, n_computed=0) for w in work]) <= 1 + math.log2(len(work))


def test_pairs_that_fork_early_from_the_others_and_late_from_each_other_let_these_wait_once() -> None:
    chains = ["a" * n + "b" * 10 + end for n in range(1, 9) for end in "cd"]
    work = [
        PrefixWork(f"s{number}", number, 0, [chain[: i + 1].encode() for i in range(len(chain))])
        for number, chain in enumerate(chains)
    ]
    assert most_waits(work) == 2
