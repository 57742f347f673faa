"""Changes the defaults of a function's keyword arguments for the time of a test."""

from __future__ import annotations

from typing import Any

import pytest


def keyword_defaults(function: Any) -> dict[str, Any]:
    """The defaults by name; later calls use a changed value."""
    defaults: dict[str, Any] | None = function.__kwdefaults__
    assert defaults is not None
    return defaults


def set_default(monkeypatch: pytest.MonkeyPatch, function: Any, name: str, value: object) -> None:
    """Change the default until the test ends."""
    defaults = keyword_defaults(function)
    assert name in defaults, f"{function.__qualname__} has no default for {name}"
    monkeypatch.setitem(defaults, name, value)
