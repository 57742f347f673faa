"""The tag by which a kvstore accounts blocks to a tenant: a one-way hash of the tenant's salt. Pure."""

from __future__ import annotations

import hashlib

TAG_BYTES = 8


def tenant_tag(salt: bytes) -> bytes:
    """8 bytes that depend only on the salt; empty without a salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"slip-tenant").digest() if salt else b""
