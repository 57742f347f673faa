"""The bench of one placement: both forms decide the same, on a fleet whose loads change between decisions."""

from __future__ import annotations

import json

import pytest

from bench.placement.decision import Scene, main, measure
from bench.placement.idle_fleet import open_fleet


@pytest.mark.parametrize("changed", [0, 1, 5])
async def test_both_forms_decide_the_same_under_changing_loads(changed: int) -> None:
    async with open_fleet(5) as fleet:
        times = measure(Scene(fleet), decisions=40, changed=changed)
    assert [len(times[name]) for name in ("place", "reference", "dispatch")] == [40, 40, 40]


def test_the_bench_prints_both_forms_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "2", "--decisions", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ratio"] > 0 and row["dispatch_ms"] > 0
