"""Who a kvstore charges for a block: a tag of the tenant's salt, which does not tell the salt. Pure."""

from __future__ import annotations

import hashlib

TAG_BYTES = 8


def tenant_tag(salt: bytes) -> bytes:
    """8 bytes, the same for the same salt; empty for no salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"slip-tenant").digest() if salt else b""
