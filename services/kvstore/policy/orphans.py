"""Blocks in memory that the policy's leader does not count and that nobody can use: those before them in
their chain are gone. Pure.

They are left when the other expert begins to lead (`policy/eviction.py`): what the old one kept goes as room
is needed, and the start of a chain may go before its end. They would be evicted some time, but until then
they take room, and who was told of them believes that the chain is held. So all runs are looked at in turn, a
few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.kvstore.policy.eviction import EvictionPolicy
from services.kvstore.policy.runs import Run


class OrphanSweep:
    """The orphans of one policy. `is_present`: a block is in this tier; `is_held`: in any of this node."""

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        is_present: Callable[[bytes], bool],
        is_held: Callable[[bytes], bool],
    ) -> None:
        self._policy = policy
        self._is_present = is_present
        self._is_held = is_held
        self._runs: Iterator[Run] = iter(())
        self._counted = 0
        self.blocks = 0  # found by the last whole round

    def look(self, n_runs: int) -> list[bytes]:
        """Orphans among the next runs, those at the end of their chains first."""
        found: list[bytes] = []
        for _ in range(n_runs):
            run = next(self._runs, None)
            if run is None:
                self.blocks, self._counted = self._counted, 0
                self._runs = iter(list(self._policy.tree.oldest()))
                break
            if not run.gone:
                orphans = self._of(run)
                self._counted += len(orphans)
                found += orphans
        return found

    def _of(self, run: Run) -> list[bytes]:
        orphans: list[bytes] = []
        for at in range(self._policy.leader.count(run), len(run.keys)):
            key = run.keys[at]
            if not self._is_present(key):
                continue
            before = run.keys[at - 1] if at else run.parent.keys[-1] if run.parent is not None else None
            if before is None:
                continue
            if (orphans and before == orphans[-1]) or not self._is_held(before):
                orphans.append(key)
        return orphans[::-1]
