"""Log probabilities that wait for their delivery, by tenant.

They cost a hundred times as much as tokens, in time and in memory. Frames have those of all tenants, so
reading goes on while one tenant has more of them than its share of the event loop delivers. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from libs.common import service_bounds
from slipstream import errors
from slipstream.v1 import decode_pb2


class LateRows:
    """Counts the log probabilities of each tenant at one router: 1 + N for each token."""

    def __init__(self) -> None:
        self._rows: Counter[Hashable] = Counter()

    def add(self, tenant: Hashable, n_rows: int) -> None:
        """Count more of them. Raises Aborted when the tenant has too many."""
        most = service_bounds.MAX_TENANT_LATE_ROWS
        self._rows[tenant] += n_rows
        if self._rows[tenant] > most:
            raise errors.Aborted(f"{most} log probabilities of this tenant wait for their delivery")

    def remove(self, tenant: Hashable, n_rows: int) -> None:
        """Forget those that were delivered, or dropped."""
        self._rows[tenant] -= n_rows
        if not self._rows[tenant]:
            del self._rows[tenant]

    def __len__(self) -> int:
        return self._rows.total()


def rows_of(delta: decode_pb2.SequenceDelta | None) -> int:
    """How many log probabilities a delta has. All its tokens have the same number."""
    return len(delta.logprobs) * (1 + len(delta.logprobs[0].top)) if delta and delta.logprobs else 0
