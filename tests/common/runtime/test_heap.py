"""Garbage collection skips the objects from before serving and finds later reference cycles."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json
from libs.common.runtime import heap

kept = [[index] for index in range(200_000)]
heap.freeze_heap()
seen_after_freezing = len(gc.get_objects())
frozen, before = gc.get_freeze_count(), heap.figures()

class Cycle:
    ended = 0
    def __init__(self):
        self.me = self
    def __del__(self):
        Cycle.ended += 1

for _ in range(1000):
    Cycle()
gc.collect()
print(json.dumps({
    "seen": seen_after_freezing, "frozen": frozen, "before": before, "ended": Cycle.ended, "kept": len(kept),
    "full": heap.figures()["slipstream_full_collections_total"],
}))
"""


def test_collections_skip_a_frozen_heap_and_new_cycles_are_found() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, timeout=60)
    report = json.loads(ran.stdout)
    assert report["kept"] == 200_000
    assert report["frozen"] > 200_000
    assert report["seen"] < 1000
    assert report["ended"] == 1000
    assert report["full"] == report["before"]["slipstream_full_collections_total"] + 1
