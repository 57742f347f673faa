"""HandoffTable: a state machine against a model, and the rules that peers rely on."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.worker.requests.attempts import AttemptKey
from services.prefill.handoff_state import DEFAULT_LEASE_MS, MAX_LEASE_MS, HandoffState, HandoffTable
from slipstream.errors import Aborted, DataCorrupt, Internal, NotFound, SlipstreamError, Unavailable

KEY = AttemptKey("r", 1)


def table_with(n_blocks: int = 3, lease_ms: int = 1000) -> HandoffTable[str]:
    table: HandoffTable[str] = HandoffTable()
    table.open("h", KEY, n_blocks=n_blocks, lease_ms=lease_ms, now_ms=0)
    return table


def test_states_in_order() -> None:
    table = table_with(2)
    assert table.get("h").state is HandoffState.RESERVED
    table.publish("h", [b"a"])
    assert table.get("h").state is HandoffState.STREAMING
    with pytest.raises(Internal):
        table.complete("h", "token")
    table.publish("h", [b"b"])
    table.complete("h", "token")
    assert table.get("h").state is HandoffState.COMPLETE
    assert [h.handoff_id for h in table.release("h")] == ["h"]
    assert table.get("h").state is HandoffState.RELEASED
    assert table.live == 0


@pytest.mark.parametrize("needs_blocks", [True, False])
def test_an_ended_handoff_keeps_only_what_a_late_watcher_may_see(needs_blocks: bool) -> None:
    table = table_with(1)
    table.publish("h", [b"checksum"])
    table.complete("h", "result with draft state", needs_blocks=needs_blocks)
    assert table.get("h").result
    table.release("h")
    ended = table.get("h")
    assert not ended.checksums
    assert ended.result == (None if needs_blocks else "result with draft state")


def test_no_more_blocks_than_there_are() -> None:
    table = table_with(1)
    with pytest.raises(Internal):
        table.publish("h", [b"a", b"b"])


def test_every_end_is_one_end() -> None:
    table = table_with()
    assert table.fail("h", DataCorrupt("bad block"))
    assert not table.release("h")
    assert not table.cancel(KEY)
    assert not table.expire(1e9)
    assert isinstance(table.get("h").error, DataCorrupt)
    with pytest.raises(DataCorrupt):
        table.publish("h", [b"a"])
    with pytest.raises(NotFound):
        table.renew("h", 1000, 0)


def test_cancel_names_the_attempt() -> None:
    table = table_with()
    assert not table.cancel(AttemptKey("r", 2))
    assert table.cancel(KEY)
    assert isinstance(table.get("h").error, Aborted)


def test_lease_runs_out_at_its_end_and_not_before() -> None:
    table = table_with(lease_ms=1000)
    assert not table.expire(999.9)
    table.renew("h", 500, 900)
    assert table.next_expiry_ms() == 1400
    assert not table.expire(1399)
    # Over by the clock, though the table was not swept yet.
    with pytest.raises(NotFound):
        table.renew("h", 500, 1400)
    assert table.expire(1400)
    assert isinstance(table.get("h").error, Unavailable)


def test_held_handoffs_do_not_expire_and_the_lease_starts_again_after() -> None:
    table = table_with(lease_ms=1000)
    table.hold("h", 10)
    table.hold("h", 20)
    table.unhold("h", 5000)
    assert table.next_expiry_ms() is None
    assert not table.expire(60_000)
    table.unhold("h", 60_000)
    assert not table.expire(60_999)
    assert table.expire(61_000)


@pytest.mark.parametrize(("asked", "granted"), [(0, DEFAULT_LEASE_MS), (10, 10), (10**9, MAX_LEASE_MS)])
def test_granted_lease(asked: int, granted: int) -> None:
    assert table_with(lease_ms=asked).get("h").lease_ms == granted


class TableMachine(RuleBasedStateMachine):
    """Random calls, also senseless ones; a plain model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.table: HandoffTable[str] = HandoffTable(remembered=1000)
        self.now = 0.0
        self.n_opened = 0
        self.live: dict[str, float] = {}  # id -> expiry
        self.lease: dict[str, int] = {}
        self.holders: dict[str, int] = {}
        self.published: dict[str, int] = {}
        self.ended: set[str] = set()

    def pick(self, number: int) -> str:
        return f"h{number % self.n_opened}"

    def end(self, ids: list[str], got: list[str]) -> None:
        assert sorted(ids) == sorted(got)
        for handoff_id in ids:
            del self.live[handoff_id]
            self.ended.add(handoff_id)

    @rule(lease_ms=st.integers(1, 1000))
    def open(self, lease_ms: int) -> None:
        handoff_id = f"h{self.n_opened}"
        key = AttemptKey(f"r{self.n_opened % 3}", 1)
        self.n_opened += 1
        self.table.open(handoff_id, key, n_blocks=4, lease_ms=lease_ms, now_ms=self.now)
        self.live[handoff_id] = self.now + lease_ms
        self.lease[handoff_id] = lease_ms
        self.holders[handoff_id] = self.published[handoff_id] = 0

    @rule(ms=st.integers(0, 700))
    def pass_time(self, ms: int) -> None:
        self.now += ms

    @rule()
    def expire(self) -> None:
        due = [i for i, at in self.live.items() if self.now >= at and not self.holders[i]]
        self.end(due, [h.handoff_id for h in self.table.expire(self.now)])

    @precondition(lambda self: self.n_opened)
    @rule(number=st.integers(0, 30))
    def release(self, number: int) -> None:
        handoff_id = self.pick(number)
        ids = [handoff_id] if handoff_id in self.live else []
        self.end(ids, [h.handoff_id for h in self.table.release(handoff_id)])

    @rule(number=st.integers(0, 2))
    def cancel(self, number: int) -> None:
        ids = [i for i in self.live if int(i[1:]) % 3 == number]
        self.end(ids, [h.handoff_id for h in self.table.cancel(AttemptKey(f"r{number}", 1))])

    @precondition(lambda self: self.n_opened)
    @rule(number=st.integers(0, 30), blocks=st.integers(1, 2))
    def publish(self, number: int, blocks: int) -> None:
        handoff_id = self.pick(number)
        fits = self.published[handoff_id] + blocks <= 4
        try:
            self.table.publish(handoff_id, [b"x"] * blocks)
        except SlipstreamError:
            assert handoff_id in self.ended or not fits
        else:
            assert handoff_id in self.live
            assert fits
            self.published[handoff_id] += blocks

    @precondition(lambda self: self.n_opened)
    @rule(number=st.integers(0, 30))
    def hold(self, number: int) -> None:
        handoff_id = self.pick(number)
        if handoff_id in self.live:
            self.table.hold(handoff_id, self.now)
            self.holders[handoff_id] += 1
            self.live[handoff_id] = max(self.live[handoff_id], self.now + self.lease[handoff_id])

    @precondition(lambda self: any(self.holders.values()))
    @rule(number=st.integers(0, 30))
    def unhold(self, number: int) -> None:
        held = [i for i, n in self.holders.items() if n]
        handoff_id = held[number % len(held)]
        self.table.unhold(handoff_id, self.now)
        self.holders[handoff_id] -= 1
        if handoff_id in self.live:
            self.live[handoff_id] = max(self.live[handoff_id], self.now + self.lease[handoff_id])

    @precondition(lambda self: self.n_opened)
    @rule(number=st.integers(0, 30), lease_ms=st.integers(1, 1000))
    def renew(self, number: int, lease_ms: int) -> None:
        handoff_id = self.pick(number)
        over = handoff_id in self.ended or (
            self.now >= self.live[handoff_id] and not self.holders[handoff_id]
        )
        try:
            self.table.renew(handoff_id, lease_ms, self.now)
        except NotFound:
            assert over
        else:
            assert not over
            self.lease[handoff_id] = lease_ms
            self.live[handoff_id] = max(self.live[handoff_id], self.now + lease_ms)

    @invariant()
    def live_ones_are_known(self) -> None:
        assert self.table.live == len(self.live)
        for handoff_id in self.live:
            assert self.table.get(handoff_id).state.live
        for handoff_id in self.ended:
            assert not self.table.get(handoff_id).state.live
        unwatched = [at for i, at in self.live.items() if not self.holders[i]]
        assert self.table.next_expiry_ms() == min(unwatched, default=None)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(stateful_step_count=30, deadline=None)
