"""Marks of drained processes in the run directory.

.run/drained/NAME    the process NAME does not start again once it has ended (`slipstream drain`)
"""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import FailedPrecondition

_DRAINED = "drained"


def drained_by(run_dir: Path, instance: str) -> str:
    """The user who asked that the process stays down after its end; empty where no user did."""
    try:
        return (run_dir / _DRAINED / instance).read_text(errors="replace") or "a user"
    except FileNotFoundError:
        return ""
    except OSError:  # as of a mark that another user made
        return "a user"


def set_drained(run_dir: Path, instance: str, by: str) -> None:
    """Have the supervisor keep the process down after its end, or not: empty. Raises FailedPrecondition.

    `by`: the user who asks.
    """
    mark = run_dir / _DRAINED / instance
    try:
        if by:
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(by)
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"{mark} cannot be written: {error.strerror}") from None


def clear_drained(run_dir: Path) -> None:
    """A new cluster begins with all its processes."""
    for mark in (run_dir / _DRAINED).glob("*"):
        mark.unlink(missing_ok=True)
