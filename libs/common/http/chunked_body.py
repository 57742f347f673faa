"""Bounds what the chunks of an HTTP body may add to it.

A chunk of one byte takes six on the wire, and as much processor time as one of many. A client that sends
megabytes of them would hold the event loop for seconds.
"""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader
from aiohttp.web_protocol import RequestPayloadError

# As much as a TLS record and what is around it. asyncio would read 256 KiB at once: 43,000 chunks of a byte.
READ_BYTES = 32 << 10
# A body may have so many bytes that are none of its content, and an eighth of its content more. Chunks of 64
# bytes and more fit however long it is.
_MAX_OVERHEAD_BYTES = 32 << 10
_OVERHEAD_SHARE = 8


def read_plain_in_small_pieces(transport: asyncio.BaseTransport) -> None:
    """Bound the bytes of one callback of a connection without TLS."""
    transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports of sockets


class ArrivingBody:
    """The body that a connection is receiving."""

    __slots__ = ("_begin_bytes", "_content", "_raw_bytes")

    def __init__(self, content: StreamReader) -> None:
        """`content`: what has arrived of it. The bytes so far, some of them headers, are not counted."""
        self._content = content
        self._begin_bytes = content.total_bytes
        self._raw_bytes = 0

    def is_refused(self, n_bytes: int) -> bool:
        """Count bytes that arrived. Returns whether the body ends here, because its chunks are too small."""
        self._raw_bytes += n_bytes
        content_bytes = self._content.total_bytes - self._begin_bytes
        most = _MAX_OVERHEAD_BYTES + content_bytes // _OVERHEAD_SHARE
        if self._content.is_eof() or self._raw_bytes - content_bytes <= most:
            return False
        self._content.set_exception(RequestPayloadError("the chunks of the body are too small"))
        return True
