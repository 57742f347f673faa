"""Decompresses bodies, to at most the bound of a body. Pure; runs off the event loop.

The HTTP server would decompress on the event loop, and a body that it refused to its very end.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from slipstream import bounds

_GZIP, _ZLIB, _RAW = 31, 15, -15  # window bits, by which zlib knows the format
_CM_DEFLATE = 8  # in the first byte of a zlib header; some clients send "deflate" without the header


class EncodedBody(NamedTuple):
    """A body as it was sent, with its Content-Encoding."""

    data: bytes
    encoding: str

    @property
    def n_bytes(self) -> int:
        """The size that counts for its tenant. A compressed body counts as the largest one."""
        return bounds.MAX_BODY_BYTES if self.encoding else len(self.data)

    def plain(self) -> bytes:
        """The body without its encoding. Raises as `decompress`."""
        return decompress(self.data, self.encoding)


def decompress(body: bytes, encoding: str) -> bytes:
    """The body that was sent as "gzip", "deflate", "identity" or "". Raises BodyTooLarge, InvalidArgument.

    `http/guard.py` refuses other encodings, with 415, before a body is read.
    """
    if encoding in ("", "identity"):
        return body
    has_header = encoding == "gzip" or (body[:1] and body[0] & 0xF == _CM_DEFLATE)
    stream = zlib.decompressobj(_GZIP if encoding == "gzip" else _ZLIB if has_header else _RAW)
    try:
        plain = stream.decompress(body, bounds.MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise bounds.BODY_FORMAT.refused() from error
    if len(plain) > bounds.MAX_BODY_BYTES:
        raise bounds.body_too_large()
    if not stream.eof or stream.unused_data:
        raise bounds.BODY_FORMAT.refused()
    return plain
