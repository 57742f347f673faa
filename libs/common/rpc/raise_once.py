"""Raises an object's stored error once, without a reference cycle."""

from __future__ import annotations

from typing import Any, Protocol


class ErrorSource(Protocol):
    """An object that stores an error until a caller reads from it."""

    _error: Any  # an exception, or None


def raise_once(source: ErrorSource) -> None:
    """Raise the source's error, if it has one, and clear it.

    A raised error refers to the frames that it passed, and these refer to the source. If the source kept the
    error, only the garbage collector could free them.
    """
    error, source._error = source._error, None
    try:
        if error is not None:
            raise error
    finally:
        del error
