"""The routers of a client: it uses one until the connection is lost, then the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError, Unavailable
from slipstream.rpc.credential_fault import with_tls_hint
from slipstream.rpc.hosts import address_of

ChannelT = TypeVar("ChannelT")
StubT = TypeVar("StubT")


class Endpoints(Generic[ChannelT]):
    """Channels to the routers, opened when first used. Thread-safe.

    No channel is closed while its stub is made: gRPC then ends the process.
    """

    def __init__(self, endpoints: str | Sequence[str], dial: Callable[[str], ChannelT]) -> None:
        """`endpoints`: "host:port[,host:port..]" or a list of them; names of gRPC such as dns:///router:7000
        or unix:/socket pass as they are. Raises InvalidArgument for none, and for one without a port."""
        listed = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        self._names = [name.strip() for name in listed if name.strip()]
        if not self._names:
            raise InvalidArgument("endpoint", "at least one endpoint is needed")
        for name in self._names:
            _check(name)
        self._dial = dial
        self._channels: dict[str, ChannelT] = {}
        self._at = 0
        self._answered = False
        self._reached = False
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def current(self, make_stub: Callable[[ChannelT], StubT]) -> tuple[str, StubT]:
        """The router in use, and the stub of its channel. Raises FailedPrecondition after `close`."""
        with self._lock:
            self.check_open()
            return self._names[self._at], make_stub(self._open(self._names[self._at]))

    def answered(self) -> None:
        """Record that a router answered: the endpoints are right, so a later outage is worth waiting for."""
        self._answered = self._reached = True

    def reached(self) -> None:
        """Record that a router took a call."""
        self._reached = True

    def explained(self, error: SlipstreamError) -> SlipstreamError:
        """The error, with a hint where no router was ever reached and the cause may be TLS."""
        if self._reached or type(error) is not Unavailable:
            return error
        return Unavailable(with_tls_hint(error.message))

    def should_give_up(self, attempts: int) -> bool:
        """Whether to give up: the client is closed, or no router ever answered and all were tried, one of
        them twice, because a router may stop at that moment."""
        return self.closed or (not self._answered and attempts > len(self._names))

    @property
    def closed(self) -> bool:
        """Whether the client makes no more calls."""
        return self._closed.is_set()

    def check_open(self) -> None:
        """Raises FailedPrecondition after `close`."""
        if self.closed:
            raise FailedPrecondition("the client is closed") from None

    def pause(self, pause_s: float) -> None:
        """Wait, blocking the thread. `close` ends it."""
        self._closed.wait(pause_s)

    def lost(self, name: str) -> None:
        """Switch to the next router, unless another call has switched already."""
        with self._lock:
            if self._names[self._at] == name:
                self._at = (self._at + 1) % len(self._names)

    def all(self, make_stub: Callable[[ChannelT], StubT]) -> list[StubT]:
        """The stubs of all routers. Raises FailedPrecondition after `close`."""
        with self._lock:
            self.check_open()
            return [make_stub(self._open(name)) for name in self._names]

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Surrounds a call. One that another thread's `close` precedes raises FailedPrecondition."""
        try:
            yield
        except ValueError:  # gRPC's own, of a channel that is closed
            self.check_open()
            raise

    def close(self) -> list[ChannelT]:
        """Refuse further calls, and return the opened channels for the caller to close."""
        with self._lock:
            self._closed.set()
            return list(self._channels.values())

    def _open(self, name: str) -> ChannelT:
        if name not in self._channels:
            self._channels[name] = self._dial(name)
        return self._channels[name]


def _check(name: str) -> None:
    if "/" in name or name.startswith("unix:"):  # a name of gRPC with its scheme
        return
    try:
        address_of(name)
    except ValueError as error:
        raise InvalidArgument("endpoint", str(error)) from None
