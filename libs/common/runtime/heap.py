"""What a process is made of once it serves is kept out of the search for cyclic garbage.

The interpreter's full collection looks at every object of the process while everything else stands still:
the modules and the model of a worker are some hundred thousand, 40 to 100 ms on an idle core, in which no
cancel is heard. `settle` sets them aside for good; from then on a collection looks at what requests left.
"""

from __future__ import annotations

import gc

# A request makes some thousand objects and hardly a cycle: looking for cycles every 700 objects, the
# interpreter's default, costs 4 % of a router's CPU. Looking through this many takes 2 to 5 milliseconds.
YOUNG_OBJECTS = 10_000

# Counted once: the count walks through all of them.
_settled_objects = 0


def settle() -> None:
    """Call once, when the process has loaded all it needs and before it is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    global _settled_objects
    _settled_objects = gc.get_freeze_count()


def figures() -> dict[str, float]:
    """For the table of metrics."""
    return {
        "slipstream_heap_settled_objects": float(_settled_objects),
        "slipstream_full_collections_total": float(gc.get_stats()[2]["collections"]),
    }
