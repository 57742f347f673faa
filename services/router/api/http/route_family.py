"""The routes of one API beside OpenAI's, which the HTTP server takes as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from aiohttp import web

from libs.common.http.failure import ErrorShape


class RouteFamily(Protocol):
    """Routes of one API, whose handlers run inside `RequestMiddleware`."""

    def routes(self) -> Iterable[web.RouteDef]:
        """The routes, each with its handler."""
        ...

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """The error shape of the paths that begin so. OpenAI's is the default."""
        ...
