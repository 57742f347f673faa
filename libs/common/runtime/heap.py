"""Excludes the objects of a started process from garbage collection.

A full collection visits every object and stops all other work. The modules and the model of a worker are some
hundred thousand objects, which take 40 to 100 ms on an idle core. `freeze_heap` excludes them, so that a
collection visits only the objects of requests.
"""

from __future__ import annotations

import gc

# New objects between two collections. A request makes some thousand objects and hardly any cycle. With the
# interpreter's default, 700, collections cost 4 % of a router's CPU; a collection of this many takes 2 to 5
# ms.
YOUNG_OBJECTS = 10_000


def freeze_heap() -> None:
    """Exclude all present objects. A process calls this once, after loading and before it is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def figures() -> dict[str, float]:
    """The heap's metrics by name (libs/common/telemetry/metric_tables/table.py)."""
    return {"slipstream_full_collections_total": gc.get_stats()[2]["collections"]}
