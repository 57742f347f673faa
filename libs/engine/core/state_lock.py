"""The lock over an engine's state (sequences, pages, pins): one thread at a time.

While a step computes, the engine's thread releases the lock. The step then reads only its own rows and pages,
so another thread may change the rest of the state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StateLock:
    """A re-entrant lock that a `locked` method may release for a while: `with state_lock.released()`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside the block. The caller holds it once before and after."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


class HasStateLock(Protocol):
    """An object with a `state_lock`."""

    state_lock: StateLock


HasStateLockT = TypeVar("HasStateLockT", bound=HasStateLock)


def locked(method: Callable[Concatenate[HasStateLockT, P], T]) -> Callable[Concatenate[HasStateLockT, P], T]:
    """Run a method under its object's `state_lock`."""

    @functools.wraps(method)
    def run(self: HasStateLockT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.state_lock.lock:
            return method(self, *args, **kwargs)

    return run
