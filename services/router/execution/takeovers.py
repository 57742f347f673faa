"""Ids that takeovers wait for: the newest one gets the id, and no other request takes it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.execution.running_request import RunningRequest
from slipstream import bounds, errors

RequestKey = tuple[str, str]  # the tenant and the id


class Takeovers:
    """The takeovers of one router. `runs`: the requests that have their ids now."""

    def __init__(self, runs: Mapping[RequestKey, RunningRequest]) -> None:
        self._runs = runs
        self._newest: dict[RequestKey, object] = {}

    def check_free(self, key: RequestKey) -> None:
        """Raises InvalidArgument for an id that a request has, or a takeover waits for."""
        if key in self._runs or key in self._newest:
            raise bounds.REQUEST_ID_IN_USE.refused()

    async def take(self, key: RequestKey) -> None:
        """End the request with this id, and wait until its workers have released it.

        The client lost its connection before the router noticed. A newer takeover of the id ends this one,
        like the request itself: raises Aborted.
        """
        this = self._newest[key] = object()
        try:
            while (running := self._runs.get(key)) is not None:
                running.end()
                await running.released.wait()
                if self._newest.get(key) is not this:
                    raise errors.Aborted("a newer attempt of the request replaced this one")
        finally:
            if self._newest.get(key) is this:
                del self._newest[key]
