"""The addresses and transport sessions that a process may dial: those that discovery announced.

Requests name endpoints and sessions of other workers. Nothing dials one because a message has it: a message
chooses among the announced ones. What was announced once stays valid, because a worker without a connection
to etcd goes on serving.

    book = await open_address_book(discovery, stack)
    await book.check_endpoint(ticket.control_endpoint)       # UnknownAddress for an unknown one
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from libs.common.cluster.discovery import Discovery, Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import FleetSnapshot
from slipstream.errors import UnknownAddress
from slipstream.rpc.hosts import host_of, is_loopback

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
# Other processes may learn of a new worker this much earlier.
_LAG_S = 1.0
_FIRST_SNAPSHOT_S = 2.0
_SHOWN_CHARS = 128


class AddressBook(Protocol):
    """Knows which endpoints and sessions belong to the cluster."""

    def knows_endpoint(self, endpoint: str) -> bool:
        """Whether "host:port" may be dialled now."""

    def knows_session(self, session_id: str) -> bool:
        """Whether a transport session may be read from now."""

    async def check_endpoint(self, endpoint: str) -> None:
        """Return when the endpoint may be dialled. Raises UnknownAddress if it is not announced soon."""

    async def check_session(self, session_id: str) -> None:
        """Return when the transport session may be read from. Raises UnknownAddress like `check_endpoint`."""


class LoopbackAddresses:
    """The book of a process without discovery: all endpoints and sessions on loopback addresses."""

    def knows_endpoint(self, endpoint: str) -> bool:
        return is_loopback(host_of(endpoint))

    def knows_session(self, session_id: str) -> bool:
        return self.knows_endpoint(session_id.partition("/")[0])

    async def check_endpoint(self, endpoint: str) -> None:
        if not self.knows_endpoint(endpoint):
            raise _refused("endpoint", endpoint, "without --etcd only loopback addresses are dialled")

    async def check_session(self, session_id: str) -> None:
        if not self.knows_session(session_id):
            raise _refused(
                "transport session", session_id, "without --etcd only loopback addresses are dialled"
            )


class AnnouncedAddresses:
    """Follows discovery through a Fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: FleetSnapshot | None = None
        self._known: OrderedDict[str, None] = OrderedDict()  # endpoints, and digests of sessions

    def knows_endpoint(self, endpoint: str) -> bool:
        return self._knows(endpoint)

    def knows_session(self, session_id: str) -> bool:
        return self._knows(session_digest(session_id))

    async def check_endpoint(self, endpoint: str) -> None:
        await self._wait(lambda: self._knows(endpoint), "endpoint", endpoint)

    async def check_session(self, session_id: str) -> None:
        await self._wait(
            lambda: self.knows_session(session_id), "transport session", session_id.partition("/")[0]
        )

    def _knows(self, entry: str) -> bool:
        if (snapshot := self._fleet.current) is not self._seen:
            self._seen = snapshot
            for worker in snapshot.workers:
                for address in (worker.endpoint, worker.session_digest):
                    self._known[address] = None
                    self._known.move_to_end(address)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return bool(entry) and entry in self._known

    async def _wait(self, is_known: Callable[[], bool], what: str, address: str) -> None:
        if is_known():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAG_S):
                while not is_known():
                    await self._fleet.wait_changed(self._fleet.current)
        if not is_known():
            raise _refused(what, address, "discovery does not announce it")


async def open_address_book(discovery: Discovery, stack: contextlib.AsyncExitStack) -> AddressBook:
    """The addresses of this discovery, once it answered or stays silent. The stack closes the book."""
    if isinstance(discovery, InMemoryDiscovery):
        return LoopbackAddresses()
    fleet = await stack.enter_async_context(Fleet(discovery))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_SNAPSHOT_S):
            await fleet.wait_snapshot()
    return AnnouncedAddresses(fleet)


def session_digest(session_id: str) -> str:
    """How a record names a transport session. The id itself is a secret of its readers."""
    return hashlib.sha256(b"slipstream session " + session_id.encode()).hexdigest()


def _refused(what: str, address: str, why: str) -> UnknownAddress:
    return UnknownAddress(f"{what} {address[:_SHOWN_CHARS]!r} is not dialled: {why}")
