"""Names of readers' pins, by which they end one without its answer, and lease times. Pure.

A reader that is cancelled between its Pin and the answer has no lease id. It ends the pin by the name that it
chose; the end may come after the pin, while the pin is being made, or before it. Memory is bounded: the last
names that were ended before their pin, and the last pins that were ended by their lease id, are recorded.
"""

from __future__ import annotations

from collections import OrderedDict

from slipstream.errors import InvalidArgument

MAX_NAME_CHARS = 64
REMEMBERED = 4096
# Pins that one Pin may end.
MAX_RELEASED = 16
DEFAULT_LEASE_MS = 10_000
MAX_LEASE_MS = 60_000


def bounded_lease_ms(requested_ms: int) -> int:
    """The lease time that a reader or writer gets: its request within bounds, or the default for 0."""
    return min(requested_ms, MAX_LEASE_MS) if requested_ms > 0 else DEFAULT_LEASE_MS


class PinNames:
    """The names of one lender. For a pin without a name all of it does nothing."""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._pinning: set[str] = set()
        self._leases: OrderedDict[str, str] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()  # before they had a lease

    def __len__(self) -> int:
        return len(self._pinning) + len(self._leases) + len(self._ended)

    def begin(self, name: str) -> bool:
        """A pin comes; `done` must follow if True. False: it was ended already and is to hold nothing.

        Raises InvalidArgument for a name that is too long or in use.
        """
        if len(name) > MAX_NAME_CHARS:
            raise InvalidArgument("name", f"must have at most {MAX_NAME_CHARS} characters")
        if name in self._pinning or name in self._leases:
            raise InvalidArgument("name", "is in use")
        if name in self._ended:
            del self._ended[name]
            return False
        if name:
            self._pinning.add(name)
        return True

    def done(self, name: str, lease_id: str) -> bool:
        """The pin was made, "" = it holds nothing. False: it was ended meanwhile, so end the lease now."""
        self._pinning.discard(name)
        if name in self._ended:
            del self._ended[name]
            return False
        if name and lease_id:
            _remember(self._leases, name, lease_id, self._remembered)
        return True

    def end(self, name_or_lease: str) -> str:
        """The lease to end. What is no name of a pin that was made is remembered."""
        lease_id = self._leases.pop(name_or_lease, None)
        if lease_id is not None:
            return lease_id
        if name_or_lease:
            _remember(self._ended, name_or_lease, "", self._remembered)
        return name_or_lease


def _remember(table: OrderedDict[str, str], name: str, lease_id: str, at_most: int) -> None:
    table[name] = lease_id
    table.move_to_end(name)
    while len(table) > at_most:
        table.popitem(last=False)
