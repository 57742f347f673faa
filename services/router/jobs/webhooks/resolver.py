"""The names of webhooks' hosts -> addresses that are allowed, in separate threads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from services.router.jobs.webhooks.policy import Target, WebhookHosts, first_allowed

# A name server that does not answer holds a thread for as long as the resolver of the machine waits.
_LOOKUPS_AT_ONCE = 16
_Found = Sequence[tuple[Any, ...]]


class AllowedResolver:
    """Resolves names to allowed addresses only; the connection goes to what was checked.

    Each target has one lookup at a time, which all its deliveries share. The threads of the event loop's
    other work are not used: a host whose name hangs would take all of them.
    """

    def __init__(self, hosts: WebhookHosts) -> None:
        self._hosts = hosts
        self._threads = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="webhook-names")
        self._lookups: dict[Target, asyncio.Future[_Found]] = {}

    async def resolve(self, host: str, port: int) -> str:
        """The address to dial. Raises OSError where one of the name's addresses is not allowed."""
        found = await self._look_up((host, port))
        address = first_allowed(self._hosts, (host, port), [str(each[4][0]) for each in found])
        if not address:
            raise OSError("the host resolves to an address that is not allowed")
        return address

    def close(self) -> None:
        """Begin no further lookup."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, target: Target) -> _Found:
        lookup = self._lookups.get(target)
        if lookup is None:
            look = partial(socket.getaddrinfo, *target, type=socket.SOCK_STREAM)
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, look)
            self._lookups[target] = lookup
            lookup.add_done_callback(partial(self._ended, target))
        return await asyncio.shield(lookup)  # a delivery that gives up leaves it to the others

    def _ended(self, target: Target, lookup: asyncio.Future[_Found]) -> None:
        del self._lookups[target]
        if not lookup.cancelled():
            lookup.exception()  # all its deliveries may have given up
