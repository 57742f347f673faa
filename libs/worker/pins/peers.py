"""Channels to peers this process calls, one for each endpoint, kept open while in use lately.

Endpoints come from messages: the address book says which of them are dialled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from libs.common.cluster.address_book import AddressBook, LoopbackAddresses
from slipstream.errors import UnknownAddress
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.rpc.names import is_name

MAX_CHANNELS = 64
_GRACE_S = 30.0  # for calls on a channel that fell out of the pool


class Peers:
    """A bounded pool; with too many, the least recently used channel is closed after a grace time."""

    def __init__(
        self,
        *,
        dial: Dial = PLAIN_DIAL,
        addresses: AddressBook | None = None,
    ) -> None:
        """All channels are dialled again when the files of `dial` change."""
        self._dial = dial
        self.addresses: AddressBook = addresses or LoopbackAddresses()
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._files_version = dial.files_version()
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to "host:port"; it connects with the first call. Do not close it.

        Raises UnknownAddress for an endpoint that the address book does not know.
        """
        self._drop_old_certificates()
        self._drop_unresolved(endpoint)
        channel = self._channels.get(endpoint)
        if channel is None:
            if not self.addresses.knows_endpoint(endpoint):
                raise UnknownAddress(
                    f"endpoint {endpoint[:128]!r} is not dialled: no worker is announced there"
                )
            channel = self._channels[endpoint] = self._dial(endpoint)
            if len(self._channels) > MAX_CHANNELS:
                self._close_late(self._channels.popitem(last=False)[1])
        self._channels.move_to_end(endpoint)
        return channel

    def _drop_old_certificates(self) -> None:
        """Replace all channels when the files of our certificate changed."""
        version = self._dial.files_version()
        if version is not None and version != self._files_version:
            self._files_version = version
            while self._channels:
                self._close_late(self._channels.popitem()[1])

    def _drop_unresolved(self, endpoint: str) -> None:
        """Dial a failing name again with the next call: gRPC's own pauses for names grow to two minutes."""
        channel = self._channels.get(endpoint)
        if channel is None or not is_name(endpoint):
            return
        if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._close_late(self._channels.pop(endpoint), grace_s=None)

    def _close_late(self, channel: grpc.aio.Channel, *, grace_s: float | None = _GRACE_S) -> None:
        task = asyncio.create_task(channel.close(grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels; calls on them are cancelled."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
