"""The order of tenants' prompts: tenants share a worker's prefill by tokens. Pure.

The tenant with the lowest tag goes first, and the rows of a step move the tags of their tenants on. A tenant
that returns begins at the lowest tag of those that wait: it has no credit and no debt. So tenants whose
prompts wait differ by a few steps at most, and one alone has every row.

The names are tenants' salts. A cluster without API keys has one tenant, whose prompts keep the order of their
needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from libs.engine.kv.sequence import EngineSequence
from libs.engine.step.step_model import SequenceRows


class PrefillShares:
    """The tags of tenants whose prompts wait, and of those that have had more than those."""

    def __init__(self) -> None:
        self._tags: dict[Hashable, float] = {}
        self._present: frozenset[Hashable] = frozenset()

    def tag(self, tenant: Hashable) -> float:
        """The sort key of a tenant of the last `observe`."""
        return self._tags[tenant]

    def observe(self, tenants: Iterable[Hashable]) -> None:
        """Note whose prompts wait now. Tags that no later tenant could be behind are dropped."""
        present = frozenset(tenants)
        if not present:
            self._tags, self._present = {}, present
            return
        stayed = present & self._present
        lowest = min([self._tags[tenant] for tenant in stayed or self._tags], default=0.0)
        for tenant in present - stayed:
            self._tags[tenant] = max(self._tags.get(tenant, lowest), lowest)
        self._tags = {t: tag for t, tag in self._tags.items() if t in present or tag > lowest}
        self._present = present

    def charge(self, tenant: Hashable, tokens: int) -> None:
        """Count rows of a tenant of the last `observe`."""
        self._tags[tenant] += tokens


def charge_rows(
    shares: PrefillShares, prefilling: Sequence[EngineSequence], rows: Sequence[SequenceRows]
) -> None:
    """Charge the rows of a step to the tenants of its prompts."""
    salts = {sequence.spec.seq_id: sequence.spec.salt for sequence in prefilling}
    for part in rows:
        if part.seq_id in salts:
            shares.charge(salts[part.seq_id], part.n_rows)
