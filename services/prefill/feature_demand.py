"""Predicts which prompts need draft features: those whose decode workers wanted some of late.

A decode worker whose draft gate is closed, or which has no drafter, asks for no rows. The features of a
prompt cost 3 to 9 % of its prefill. The prediction holds until the reader of the prompt has asked.
"""

from __future__ import annotations

from collections import OrderedDict, deque

# After so many readers in turn that want no rows, prompts for their decode worker begin without features.
READERS = 8
MAX_WORKERS = 1024  # the one that has read nothing for the longest time is forgotten


class FeatureDemand:
    """What the newest readers of each decode worker wanted."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[str, deque[bool]] = OrderedDict()

    def record(self, decode_instance: str, draft_rows: int) -> None:
        """A reader asked for so many rows of features; 0 = none."""
        wanted = self._wanted.setdefault(decode_instance, deque(maxlen=READERS))
        wanted.append(draft_rows > 0)
        self._wanted.move_to_end(decode_instance)
        if len(self._wanted) > MAX_WORKERS:
            self._wanted.popitem(last=False)

    def predict(self, decode_instance: str) -> bool:
        """Whether the next reader of this worker probably wants features; true until READERS have asked."""
        wanted = self._wanted.get(decode_instance, ())
        return len(wanted) < READERS or any(wanted)
