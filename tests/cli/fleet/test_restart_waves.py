"""Which processes a rolling restart takes together."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role
from slipstream.cli.fleet.restart_waves import restart_waves


@given(st.dictionaries(st.sampled_from(list(Role)), st.integers(0, 4)))
def test_every_service_restarts_once_and_no_tier_loses_two_at_a_time(counts: dict[Role, int]) -> None:
    services = [(role, f"{role}-{number}") for role, count in counts.items() for number in range(count)]
    waves = restart_waves(services)
    assert sorted(name for wave in waves for name in wave) == sorted(name for _, name in services)
    for wave in waves:
        tiers = Counter(name.rpartition("-")[0] for name in wave)
        assert max(tiers.values()) == 1
    assert len(waves) == max(counts.values(), default=0)
