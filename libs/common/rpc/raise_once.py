"""An error that is kept for whoever asks next, and raised to nobody else."""

from __future__ import annotations

from typing import Any, Protocol


class Fails(Protocol):
    """Something that waits to tell an error."""

    _error: Any  # an exception, or None


def raise_once(owner: Fails) -> None:
    """Raise the owner's error, if it has one, and let go of it: a raised error knows the frames that it
    passed, and they the owner, so that all of them would wait for the next look for cycles."""
    error, owner._error = owner._error, None
    try:
        if error is not None:
            raise error
    finally:
        del error
