"""Which owners of jobs are silent, by this router's monotonic clock. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class OwnerWatch:
    """Remembers since when each heartbeat stands still."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, tuple[int, float]] = {}

    def silent(self, heartbeats: Mapping[str, int], now_s: float) -> list[tuple[str, int]]:
        """The owners, with their heartbeats, that have not moved for `lease_s` while this router watched."""
        self._seen = {owner: seen for owner, seen in self._seen.items() if owner in heartbeats}
        for owner, heartbeat in heartbeats.items():
            if owner not in self._seen or self._seen[owner][0] != heartbeat:
                self._seen[owner] = (heartbeat, now_s)
        return [
            (owner, heartbeat)
            for owner, (heartbeat, since_s) in self._seen.items()
            if now_s - since_s >= self._lease_s
        ]
