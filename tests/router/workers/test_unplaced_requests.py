"""Requests that found no worker."""

from __future__ import annotations

import pytest

from services.router.workers.unplaced_requests import REMEMBERED_S, UnplacedRequests


def test_requests_count_while_they_wait_and_for_a_while_after_they_gave_up() -> None:
    now_s = 100.0
    unplaced = UnplacedRequests(lambda: now_s)
    with unplaced.waiting():
        assert unplaced.count == 1
    assert unplaced.count == 0, "it found a worker"
    with pytest.raises(TimeoutError), unplaced.waiting():
        raise TimeoutError
    now_s += REMEMBERED_S
    assert unplaced.count == 1
    now_s += 0.1
    assert unplaced.count == 0
