"""The bench of one placement: both forms decide the same, on a fleet whose loads change between decisions."""

from __future__ import annotations

import json

import pytest

from bench.placement.decision import Scene, main, measure
from bench.placement.idle_fleet import open_fleet


@pytest.mark.parametrize("changed", [0, 1, 5])
async def test_columns_that_follow_the_loads_are_those_of_new_records(changed: int) -> None:
    async with open_fleet(5) as fleet:
        times = measure(Scene(fleet), decisions=40, changed=changed)
    assert len(times["arrays"]["dispatch"]) == len(times["records"]["place"]) == 40


def test_the_bench_prints_both_forms_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "2", "--decisions", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["dispatch"]["ratio"] > 0 and row["place"]["arrays_ms"] > 0
