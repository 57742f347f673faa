"""The one line that a service prints when a package of its extra is not installed."""

from __future__ import annotations

_OWN = ("libs", "services", "slipstream", "supervisor")


def missing_package(error: ModuleNotFoundError, extra: str) -> str:
    """The message for a failed import. Raises the error again for a module of this repository."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OWN:
        raise error
    return f"the Python package {name!r} is not installed: pip install 'slipstream-server[{extra}]'"
