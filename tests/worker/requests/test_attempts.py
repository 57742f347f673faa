"""AttemptRegistry: each attempt runs once, in ascending order, with bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.worker.requests.attempts import (
    MAX_REQUEST_ID_CHARS,
    AttemptKey,
    AttemptRegistry,
    client_request_id,
)
from slipstream.errors import Aborted, FailedPrecondition, InvalidArgument, SlipstreamError


def test_a_duplicate_attempt_is_refused_during_and_after_the_first() -> None:
    registry = AttemptRegistry()
    registry.admit("r", 1, 0)
    with pytest.raises(FailedPrecondition, match="started before"):
        registry.admit("r", 1, 0)
    registry.end(AttemptKey("r", 1))
    with pytest.raises(FailedPrecondition, match="started before"):
        registry.admit("r", 1, 0)


def test_a_newer_attempt_supersedes_the_running_one() -> None:
    registry = AttemptRegistry()
    registry.admit("r", 1, 0)
    assert registry.admit("r", 2, 0) == [AttemptKey("r", 1)]
    with pytest.raises(FailedPrecondition, match="older"):
        registry.admit("r", 1, 0)


def test_an_older_epoch_is_refused() -> None:
    registry = AttemptRegistry()
    registry.admit("r", 1, 7)
    with pytest.raises(FailedPrecondition, match="epoch 6"):
        registry.admit("r", 2, 6)
    registry.admit("r", 2, 7)


def test_an_abort_before_its_start_wins() -> None:
    registry = AttemptRegistry()
    assert registry.abort("r", 2) == []
    for attempt in (1, 2):
        with pytest.raises(Aborted):
            registry.admit("r", attempt, 0)
    assert registry.admit("r", 3, 0) == []
    assert registry.abort("r", 3) == [AttemptKey("r", 3)]
    assert registry.abort("r", 3) == [AttemptKey("r", 3)]


@pytest.mark.parametrize(("request_id", "attempt"), [("", 1), ("x" * 257, 1), ("r", 0)])
def test_malformed_attempt_names_are_refused(request_id: str, attempt: int) -> None:
    registry = AttemptRegistry()
    with pytest.raises(InvalidArgument) as caught:
        registry.admit(request_id, attempt, 0)
    assert caught.value.field == ("attempt.attempt" if request_id == "r" else "attempt.request_id")
    assert registry.abort(request_id, attempt) == []
    assert registry.running == 0 and not registry._known


def test_the_longest_id_and_the_first_attempt_are_taken() -> None:
    registry, longest = AttemptRegistry(), "x" * MAX_REQUEST_ID_CHARS
    assert registry.abort(longest, 1) == []
    with pytest.raises(Aborted):
        registry.admit(longest, 1, 0)
    assert registry.admit(longest, 2, 0) == []


def test_the_id_of_a_client_is_the_one_before_a_routers_digits() -> None:
    ids = ["a.b.012345678901", "a.b", ".012345678901", "a.0123456789012"]
    assert list(map(client_request_id, ids)) == ["a.b", *ids[1:]]


_ids = st.sampled_from(["a", "b", "c", "d", "e", "f"])
_operations = st.tuples(
    st.sampled_from(["admit", "abort", "end"]), _ids, st.integers(1, 4), st.integers(0, 2)
)


@given(st.lists(_operations, max_size=60))
def test_the_registry_equals_a_list_of_all_events(operations: list[tuple[str, str, int, int]]) -> None:
    """With enough memory an attempt is admitted if and only if no newer one was admitted or aborted."""
    registry = AttemptRegistry(max_requests=100)
    admitted: dict[str, list[tuple[int, int]]] = {}
    aborted: dict[str, int] = {}
    running: set[AttemptKey] = set()
    for operation, request_id, attempt, epoch in operations:
        key = AttemptKey(request_id, attempt)
        if operation == "end":
            registry.end(key)
            running.discard(key)
        elif operation == "abort":
            aborted[request_id] = max(aborted.get(request_id, 0), attempt)
            expected = sorted(
                (k for k in running if k.request_id == request_id and k.attempt <= attempt),
                key=lambda k: k.attempt,
            )
            assert registry.abort(request_id, attempt) == expected
        else:
            before = admitted.get(request_id, [])
            welcome = attempt > aborted.get(request_id, 0) and all(
                attempt > a and epoch >= e for a, e in before
            )
            try:
                superseded = registry.admit(request_id, attempt, epoch)
            except SlipstreamError:
                assert not welcome
            else:
                assert welcome
                assert set(superseded) == {k for k in running if k.request_id == request_id}
                admitted.setdefault(request_id, []).append((attempt, epoch))
                running.add(key)
        assert registry.running == len(running)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=200))
def test_the_registry_is_bounded_and_keeps_running_attempts(operations: list[tuple[int, bool]]) -> None:
    registry = AttemptRegistry(max_requests=5)
    running: set[str] = set()
    for number, ends in operations:
        request_id = str(number)
        try:
            registry.admit(request_id, 1, 0)
            assert request_id not in running
            running.add(request_id)
        except FailedPrecondition:
            pass
        if ends:
            registry.end(AttemptKey(request_id, 1))
            running.discard(request_id)
        assert len(registry._known) <= max(5, len(running) + 1)
    for request_id in running:
        with pytest.raises(FailedPrecondition):
            registry.admit(request_id, 1, 0)
