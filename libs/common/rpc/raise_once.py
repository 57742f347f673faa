"""Raises an object's stored error once, without a reference cycle."""

from __future__ import annotations

from typing import Any, Protocol


class ErrorOwner(Protocol):
    """An object that stores an error until a caller reads from it."""

    _error: Any  # an exception, or None


def raise_once(owner: ErrorOwner) -> None:
    """Raise the owner's error, if it has one, and clear it.

    A raised error refers to the frames that it passed, and these refer to the owner. If the owner kept the
    error, only the garbage collector could free them.
    """
    error, owner._error = owner._error, None
    try:
        if error is not None:
            raise error
    finally:
        del error
