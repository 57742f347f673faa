"""Which fault comes when."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bench.chaos.schedule import PAUSE_S, STOP_S, Fault, schedule

WORKERS = ("router-0", "router-1", "prefill-0", "decode-0", "kvstore-0")


@given(st.integers(0, 1_000))
def test_a_schedule_has_every_fault_and_repeats_with_its_seed(seed: int) -> None:
    until_s = PAUSE_S[1] * len(Fault) + 1.0
    made = [
        schedule(random.Random(seed), workers=WORKERS, stores=("kvstore-0",), until_s=until_s) for _ in "ab"
    ]
    assert made[0] == made[1]
    assert {action.fault for action in made[0]} == set(Fault)
    assert all(0 < action.at_s < until_s for action in made[0])
    for action in made[0]:
        if action.fault is Fault.STOP:
            assert STOP_S[0] <= action.lasts_s <= STOP_S[1]
        if action.fault is Fault.KILL_PAIR:
            tiers = {name.rpartition("-")[0] for name in action.targets}
            assert len(tiers) == len(action.targets) == 2
        if action.fault is Fault.KILL_ALL:
            assert set(action.targets) == {*WORKERS, "etcd"}
