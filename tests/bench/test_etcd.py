"""The figures of bench.etcd."""

from __future__ import annotations

import pytest

from bench.etcd.__main__ import StorageSample, growth, most_in_window, writes_per_s


def sample(at_s: float, db_bytes: int) -> StorageSample:
    return StorageSample(at_s, db_bytes, db_bytes, keys=0, wal_bytes=0, snapshot_bytes=0, disk_bytes=db_bytes)


def test_growth_is_that_of_an_hour() -> None:
    grown = growth([sample(0.0, 0), sample(1800.0, 5_000_000), sample(3600.0, 10_000_000)])
    assert grown["db_mb"] == pytest.approx(10.0)
    assert grown["wal_mb"] == 0.0
    assert growth([sample(0.0, 1)]) == {}


def test_writes_of_a_session_are_counted_in_the_fullest_window() -> None:
    times = [0.0, 9.0, 9.5, 10.0, 30.0]
    assert most_in_window(times) == 3  # 0.0 is 10 s before 10.0
    assert most_in_window([0.0, 0.001]) == 2
    assert writes_per_s([0.0, 1.0, 4.0]) == 0.5
