"""Other defaults of a function's keyword arguments, for one test's time."""

from __future__ import annotations

from typing import Any

import pytest


def keyword_defaults(function: Any) -> dict[str, Any]:
    """By name; a change is what later calls see."""
    defaults: dict[str, Any] | None = function.__kwdefaults__
    assert defaults is not None
    return defaults


def set_default(monkeypatch: pytest.MonkeyPatch, function: Any, name: str, value: object) -> None:
    """Until the test ends."""
    defaults = keyword_defaults(function)
    assert name in defaults, f"{function.__qualname__} has no default for {name}"
    monkeypatch.setitem(defaults, name, value)
