"""Two routers, one etcd, any interleaving of changes, writes, lost responses, watches and expiry."""

from __future__ import annotations

import sys
import tracemalloc
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.write_behind import PlacementWriteBehind

SESSIONS = [SessionId("t", "a"), SessionId("t", "b")]
ROUTERS = st.integers(0, 1)


class TwoRouters(RuleBasedStateMachine):
    """`records` stands for etcd; each router has a state, writes in flight and undelivered events."""

    def __init__(self) -> None:
        super().__init__()
        self.revision = 0
        self.records: dict[SessionId, Placement] = {}
        self.write_behinds = [PlacementWriteBehind(max_dirty=100), PlacementWriteBehind(max_dirty=100)]
        self.taken: list[list[tuple[SessionId, Placement]]] = [[], []]
        self.events: list[list[tuple[SessionId, Placement | None]]] = [[], []]
        self.counter = 0
        self.epoch_seen: dict[int, int] = {}  # change -> epoch of the newest record that its router knew

    def _swap(self, session: SessionId, placement: Placement) -> bool:
        current = self.records.get(session)
        if (current.epoch if current else 0) != placement.epoch:
            return False
        if current is not None and current.decode != placement.decode:
            assert self.epoch_seen[placement.block_count] >= current.epoch, (
                "overwrote a record it had not seen"
            )
        self.revision += 1
        self._change(session, replace(placement, epoch=self.revision))
        return True

    def _change(self, session: SessionId, placement: Placement | None) -> None:
        if placement is None:
            del self.records[session]
        else:
            self.records[session] = placement
        for events in self.events:
            events.append((session, placement))

    @rule(router=ROUTERS, session=st.sampled_from(SESSIONS))
    def put(self, router: int, session: SessionId) -> None:
        self.counter += 1
        # The instance identifies the router whose change won.
        placement = Placement(decode=f"r{router}", block_count=self.counter)
        self.write_behinds[router].put(session, placement)
        known = self.write_behinds[router].get(session)
        assert known is not None
        assert known.same_place(placement)
        self.epoch_seen[self.counter] = known.epoch

    @rule(router=ROUTERS, limit=st.integers(1, 2))
    def take(self, router: int, limit: int) -> None:
        self.taken[router] += self.write_behinds[router].start_writes(limit, now_s=0.0)

    @rule(router=ROUTERS, fate=st.sampled_from(["answered", "response lost", "request lost", "not tried"]))
    def write(self, router: int, fate: str) -> None:
        if not self.taken[router]:
            return
        session, placement = self.taken[router].pop(0)
        write_behind = self.write_behinds[router]
        if fate == "not tried":
            write_behind.requeue(session)
            return
        if fate == "request lost":
            write_behind.mark_unknown(session)
            return
        succeeded = self._swap(session, placement)
        if fate == "response lost":
            write_behind.mark_unknown(session)
        elif succeeded:
            write_behind.confirm(session, self.revision)
        else:
            write_behind.reject(session, self.records.get(session))

    @rule(router=ROUTERS)
    def watch(self, router: int) -> None:
        if self.events[router]:
            self.write_behinds[router].observe(*self.events[router].pop(0))

    @rule(router=ROUTERS)
    def snapshot(self, router: int) -> None:
        self.events[router].clear()
        write_behind = self.write_behinds[router]
        before = write_behind.records()
        for session, placement in self.records.items():
            write_behind.observe(session, placement)
        for session, record in before:
            if session not in self.records:
                write_behind.expire(session, record)

    @rule(session=st.sampled_from(SESSIONS))
    def expire(self, session: SessionId) -> None:
        if session in self.records:
            self.revision += 1
            self._change(session, None)

    @invariant()
    def each_session_of_a_tenant_is_counted_while_it_is_known(self) -> None:
        for write_behind in self.write_behinds:
            names = [
                name for tenant in write_behind.names.tenants() for name in write_behind.names.of(tenant)
            ]
            assert len(names) == len(set(names)) == sum(map(write_behind.names.count, ("t", "u")))
            assert set(names) == set(write_behind.all())

    @invariant()
    def at_most_one_write_of_a_session_is_in_flight(self) -> None:
        for taken in self.taken:
            assert len({session for session, _ in taken}) == len(taken)

    def teardown(self) -> None:
        """After all writes and events, both routers have the same placements as etcd."""
        for _ in range(20):
            for router, write_behind in enumerate(self.write_behinds):
                self.taken[router] += write_behind.start_writes(10, now_s=0.0)
                while self.taken[router]:
                    self.write(router, "answered")
                while self.events[router]:
                    self.watch(router)
        for write_behind in self.write_behinds:
            assert write_behind.pending == 0
            assert write_behind.all() == self.records


TestTwoRouters = TwoRouters.TestCase
TestTwoRouters.settings = settings(stateful_step_count=30, deadline=None)


@given(st.lists(st.sampled_from(["put", "answered", "lost", "expired"]), max_size=40))
def test_a_single_router_never_conflicts_with_itself(steps: list[str]) -> None:
    """With any responses lost, etcd ends with the last change and the router drops no change."""
    session, write_behind = SESSIONS[0], PlacementWriteBehind(max_dirty=10)
    record: Placement | None = None
    revision, last = 0, None

    def write(lost: bool) -> None:
        nonlocal record, revision
        for _, placement in write_behind.start_writes(1, now_s=0.0):
            matches = (record.epoch if record else 0) == placement.epoch
            if matches:
                revision += 1
                record = replace(placement, epoch=revision)
            if lost:
                write_behind.mark_unknown(session)
            elif matches:
                write_behind.confirm(session, revision)
            else:
                write_behind.reject(session, record)

    for number, step in enumerate(steps):
        if step == "put":
            last = Placement(block_count=number)
            write_behind.put(session, last)
        elif step == "expired":
            record = None
        else:
            write(lost=step == "lost")
    was_pending = write_behind.pending
    while write_behind.pending:
        write(lost=False)
    assert write_behind.conflicts == 0
    if last is not None and was_pending:
        assert record is not None
        assert record.same_place(last)


def test_the_oldest_change_is_dropped_when_too_many_are_pending() -> None:
    write_behind = PlacementWriteBehind(max_dirty=2)
    for number in range(4):
        write_behind.put(SessionId("t", str(number)), Placement(block_count=number))
    assert write_behind.dropped == 2
    assert [session.session for session, _ in write_behind.start_writes(10, now_s=0.0)] == ["2", "3"]


def test_a_tenant_with_too_many_sessions_begins_no_further_one() -> None:
    """Names that a caller makes up fill no etcd, pending changes and records of other routers included."""
    write_behind = PlacementWriteBehind(max_dirty=100, max_tenant_sessions=3)
    names = [SessionId("t", str(number)) for number in range(9)]
    write_behind.observe(names[0], Placement(block_count=1, epoch=5))
    for session in names:
        write_behind.put(session, Placement(block_count=2))
    written = write_behind.start_writes(10, now_s=0.0)
    assert [session for session, _ in written] == names[:3]
    assert write_behind.dropped == 6 and write_behind.get(names[3]) is None
    for epoch, (session, _) in enumerate(written, start=6):
        write_behind.confirm(session, epoch)
    write_behind.put(names[0], Placement(block_count=3))  # a session that it has goes on
    write_behind.put(SessionId("u", "0"), Placement(block_count=1))  # another tenant has a separate share
    assert write_behind.dropped == 6
    write_behind.put(names[4], Placement(block_count=1))
    assert write_behind.dropped == 7
    write_behind.observe(names[1], None)  # it expired
    write_behind.put(names[4], Placement(block_count=1))
    assert write_behind.dropped == 7 and write_behind.get(names[4]) is not None


def test_a_session_is_written_at_most_once_in_the_interval() -> None:
    write_behind = PlacementWriteBehind(max_dirty=10, write_interval_s=1.0)
    written: list[float] = []
    for step in range(100):
        now_s = step / 10
        write_behind.put(SESSIONS[0], Placement(block_count=step))
        for session, _ in write_behind.start_writes(10, now_s=now_s):
            written.append(now_s)
            write_behind.confirm(session, epoch=step + 1)
    assert len(written) == 10
    assert min(later - earlier for earlier, later in pairwise(written)) >= 1.0
    write_behind.put(SESSIONS[1], Placement(block_count=1))  # another session does not wait
    assert [session for session, _ in write_behind.start_writes(10, now_s=9.95)] == [SESSIONS[1]]


def test_a_write_that_was_not_made_is_repeated_at_once_and_an_unknown_one_later() -> None:
    write_behind = PlacementWriteBehind(max_dirty=10, write_interval_s=1.0)
    session = SESSIONS[0]
    write_behind.put(session, Placement(block_count=1))
    assert write_behind.start_writes(10, now_s=0.0)
    write_behind.requeue(session)
    assert write_behind.start_writes(10, now_s=0.1)
    write_behind.mark_unknown(session)
    assert not write_behind.start_writes(10, now_s=0.9)
    assert write_behind.start_writes(10, now_s=1.1)


def test_writes_that_fail_copy_nothing_of_what_waits() -> None:
    """etcd is unavailable: one transaction of 64 fails again and again while 20,000 sessions wait."""
    write_behind = PlacementWriteBehind(max_dirty=30_000)
    for number in range(20_000):
        write_behind.put(SessionId("t", str(number)), Placement(block_count=number))
    table_bytes = sys.getsizeof(dict(write_behind.all()))
    tracemalloc.start()
    try:
        for attempt in range(3):
            written = write_behind.start_writes(64, now_s=float(attempt))
            for session, _ in reversed(written):
                write_behind.mark_unknown(session)
            assert write_behind.pending == 20_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(written) == 64 and written[0][0] == SessionId("t", "0")  # they stay in front
    assert peak_bytes < table_bytes / 4


def test_a_record_that_was_written_meanwhile_does_not_expire() -> None:
    write_behind = PlacementWriteBehind(max_dirty=10)
    session = SESSIONS[0]
    write_behind.observe(session, Placement(block_count=1, epoch=5))
    [(_, before)] = write_behind.records()
    write_behind.put(session, Placement(block_count=2))
    assert write_behind.start_writes(1, now_s=0.0)
    write_behind.confirm(session, 6)
    write_behind.expire(session, before)
    [(_, after)] = write_behind.records()
    assert after.epoch == 6
    write_behind.expire(session, after)
    assert write_behind.records() == [] == write_behind.names.tenants()
