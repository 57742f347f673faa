"""Slipstream: a cluster that serves Kimi-K2.5-class models.

    from slipstream import Client, AsyncClient

`slipstream.client` shows their use, `slipstream.requests` the arguments, `slipstream.errors` the errors.
The clients load on first use, so that services which only need `slipstream.v1` stay light. Nothing here
imports `libs`, `services` or `supervisor`: this package is what clients install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.async_client import AsyncClient
    from slipstream.client import Client

__all__ = ["AsyncClient", "Client", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Client":
        from slipstream.client import Client

        return Client
    if name == "AsyncClient":
        from slipstream.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
