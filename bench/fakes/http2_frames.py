"""Frames of HTTP/2 (RFC 9113, 4 and 6) and gRPC's messages in them, for the benchmarks' client and server."""

from __future__ import annotations

import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CONTINUATION = 9
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32
INITIAL_WINDOW_SIZE = 4  # the setting
WINDOW, MOST_WINDOW = 65_535, 2**31 - 1
FRAME_BYTES = 16_384  # what any peer takes

_PREFIX_BYTES = 5  # of a message: whether it is compressed, its length

_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream


def frame(kind: int, flags: int, stream_id: int, payload: bytes | memoryview) -> bytes:
    """One frame."""
    return _HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def wide_windows() -> bytes:
    """The frames that open a side's windows, of the connection and of each stream, as wide as can be."""
    settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, MOST_WINDOW)
    return frame(SETTINGS, 0, 0, settings) + frame(
        WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST_WINDOW - WINDOW)
    )


def unpadded(flags: int, payload: bytes) -> bytes:
    """Of a DATA or HEADERS frame, what is no padding."""
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload


def prefixed(message: bytes) -> bytes:
    """A message as DATA frames carry it."""
    return b"\x00" + struct.pack(">I", len(message)) + message


class FrameReader:
    """What comes on a connection, in frames."""

    def __init__(self) -> None:
        self._received = b""

    def whole(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each frame that is whole with `data`; what is not is kept."""
        data, at = self._received + data if self._received else data, 0
        while len(data) - at >= _HEAD.size:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + (high << 8 | low)
            if end > len(data):
                break
            yield kind, flags, stream_id, data[at + _HEAD.size : end]
            at = end
        self._received = data[at:]


class MessageReader:
    """What comes on a stream, in messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def whole(self, data: bytes) -> Iterator[bytes]:
        """Each message that is whole with `data`; what is not is kept. Raises ValueError when one is
        compressed: nobody was told that it may be."""
        kept = self._received
        if kept:
            kept += data
            if len(kept) >= _PREFIX_BYTES and len(kept) - _PREFIX_BYTES < int.from_bytes(kept[1:5], "big"):
                return
            data = bytes(kept)
            kept.clear()
        at = 0
        while len(data) - at >= _PREFIX_BYTES:
            end = at + _PREFIX_BYTES + int.from_bytes(data[at + 1 : at + _PREFIX_BYTES], "big")
            if data[at]:
                raise ValueError("a compressed message")
            if end > len(data):
                break
            yield data[at + _PREFIX_BYTES : end]
            at = end
        kept += data[at:]
