"""Who may touch an engine's books, which say whose each page is: one thread at a time.

While a step computes, the engine's thread has put them down: it looks at nothing but the rows and pages of
that step, so another thread may do what concerns neither.
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
    """A lock; `with books.put_down()` lets go of it for a while inside of a `keeps_books` method."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    @contextmanager
    def put_down(self) -> Iterator[None]:
        """Others may take them. The caller holds them once, and does so again afterwards."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


class Keeper(Protocol):
    """Who has books."""

    books: StateLock


KeeperT = TypeVar("KeeperT", bound=Keeper)


def keeps_books(method: Callable[Concatenate[KeeperT, P], T]) -> Callable[Concatenate[KeeperT, P], T]:
    """The method runs with the books in hand."""

    @functools.wraps(method)
    def run(self: KeeperT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.books.lock:
            return method(self, *args, **kwargs)

    return run
