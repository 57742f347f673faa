"""Servicers that implement only some calls of their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def partial_servicer(make: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """An instance of the servicer class `make`, although type checkers regard it as abstract.

    gRPC answers UNIMPLEMENTED to the calls that the class omits."""
    return make(*arguments, **named)
