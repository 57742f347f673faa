"""The signature of a thinking block, which clients send back with the block. Pure.

It names the text that the block shows. Where the client wants no text (`"display": "omitted"`), it carries
the text, so that the next turn of a tool loop has it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_CARRIED = "omitted."


def sign(thinking: str, *, is_shown: bool) -> str:
    """The signature of a block with this text."""
    data = thinking.encode()
    if is_shown:
        return base64.b64encode(hashlib.blake2b(data, digest_size=24).digest()).decode()
    return _CARRIED + base64.b64encode(data).decode()


def carried(signature: object) -> str:
    """The text that a signature carries; empty for any other, also of another server."""
    if not isinstance(signature, str) or not signature.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
