"""What a process was made of before it served is looked at by no collection; what requests leave is."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json
from libs.common.runtime import heap

kept = [[index] for index in range(200_000)]
heap.settle()
seen_after_settling = len(gc.get_objects())
settled = heap.figures()

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
    "seen": seen_after_settling, "settled": settled, "ended": Cycle.ended, "kept": len(kept),
    "full": heap.figures()["slipstream_full_collections_total"],
}))
"""


def test_a_settled_heap_is_left_alone_and_new_cycles_are_found() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, timeout=60)
    told = json.loads(ran.stdout)
    assert told["kept"] == 200_000
    assert told["settled"]["slipstream_heap_settled_objects"] > 200_000
    assert told["seen"] < 1000
    assert told["ended"] == 1000
    assert told["full"] == told["settled"]["slipstream_full_collections_total"] + 1
