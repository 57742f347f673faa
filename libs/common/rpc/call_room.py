"""A bound on the calls that run together, which never keeps a new call out. Pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator


class CallRoom:
    """Holds at most `most` calls. One more ends the oldest call of the connection that has the most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: dict[object, tuple[str, Callable[[], object]]] = {}  # oldest first

    @property
    def running(self) -> int:
        """The number of calls inside."""
        return len(self._calls)

    @contextlib.contextmanager
    def entered(self, connection: str, end: Callable[[], object]) -> Iterator[None]:
        """Be one of the calls inside. `end` ends this call; it runs while another call enters."""
        if len(self._calls) >= self._most:
            self._evict()
        key = object()
        self._calls[key] = (connection, end)
        try:
            yield
        finally:
            self._calls.pop(key, None)

    def _evict(self) -> None:
        counts = Counter(connection for connection, _ in self._calls.values())
        most = max(counts.values())
        key = next(key for key, (connection, _) in self._calls.items() if counts[connection] == most)
        _, end = self._calls.pop(key)
        end()
