"""Frames of HTTP/2 (RFC 9113, 4 and 6), as the client and the server of gRPC of the benchmarks use them."""

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

_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def wide_windows() -> bytes:
    """The frames that open a side's windows, of the connection and of each stream, as wide as can be."""
    settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, MOST_WINDOW)
    return frame(SETTINGS, 0, 0, settings) + frame(
        WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST_WINDOW - WINDOW)
    )


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
