"""The queue of tenants whose grammars wait."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from libs.worker.requests.compile_queue import CompileQueue

TENANTS = st.sampled_from([b"a", b"b", b"c", b"d"])


def test_the_tenant_that_runs_the_fewest_goes_first_and_then_in_order() -> None:
    queue: CompileQueue[int] = CompileQueue(most_running=2)
    for number in range(4):
        queue.add(b"a", number)
    assert queue.begin() == (b"a", 0)
    queue.add(b"b", 10)
    queue.add(b"c", 20)
    queue.add(b"b", 11)
    assert [queue.begin() for _ in range(6)] == [
        (b"b", 10), (b"c", 20), (b"a", 1), (b"b", 11), None, None
    ]  # fmt: skip
    queue.end(b"a")
    assert queue.begin() == (b"a", 2)
    assert queue.clear() == [3]
    queue.end(b"a")
    assert queue.begin() is None, "nothing waits"


@given(st.lists(st.one_of(TENANTS, st.none()), max_size=60), st.integers(1, 3))
def test_each_tenant_has_its_order_and_its_bound(steps: list[bytes | None], most: int) -> None:
    """None: the oldest work ends."""
    queue: CompileQueue[int] = CompileQueue(most_running=most)
    added: dict[bytes, list[int]] = {}
    begun: dict[bytes, list[int]] = {}
    running: list[bytes] = []

    def begin_all() -> None:
        while (found := queue.begin()) is not None:
            tenant, work = found
            others = [each for each in added if len(begun.get(each, [])) < len(added[each])]
            assert all(running.count(tenant) <= running.count(each) for each in others)
            begun.setdefault(tenant, []).append(work)
            running.append(tenant)

    for number, tenant in enumerate(steps):
        if tenant is not None:
            queue.add(tenant, number)
            added.setdefault(tenant, []).append(number)
        elif running:
            queue.end(running.pop(0))
        begin_all()
        assert all(count <= most for count in Counter(running).values())
    while running:
        queue.end(running.pop(0))
        begin_all()
    assert begun == added and not queue._running
