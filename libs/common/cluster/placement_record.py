"""A session's placement, the location of its KV, as a record in etcd. Pure.

A placement is a hint: a wrong or missing one costs a cache miss and nothing else.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote, unquote

import msgspec

SESSIONS_PREFIX = "/slipstream/v1/sessions/"
MAX_RECORD_BYTES = 4 << 10
UNRECORDED = 0  # the epoch of a placement that is not in etcd yet
_NAMES = re.compile(r"[A-Za-z0-9._-]{0,128}")
_MAX_BLOCKS = (1 << 32) - 1  # of ListSessions
_MAX_HASH_BYTES = 64
_SHOWN_CHARS = 256


class SessionId(msgspec.Struct, frozen=True, gc=False):
    """A session of a tenant. Both are any text, which is escaped in keys."""

    tenant: str
    session: str

    @property
    def key(self) -> str:
        """The key of the placement in etcd."""
        return f"{SESSIONS_PREFIX}{quote(self.tenant, safe='')}/{quote(self.session, safe='')}"

    @classmethod
    def from_key(cls, key: str) -> SessionId:
        """Inverse of `key`. Raises ValueError for a key of another form."""
        parts = key.removeprefix(SESSIONS_PREFIX).split("/")
        if not key.startswith(SESSIONS_PREFIX) or len(parts) != 2 or len(key) > MAX_RECORD_BYTES:
            raise ValueError(f"{key[:_SHOWN_CHARS]!r} is not the key of a session")
        return cls(unquote(parts[0]), unquote(parts[1]))


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The instances that have the KV of a session's first `block_count` blocks; "" for none.

    `tail_hash` is the chain hash of the last of these blocks (b"" without blocks); a prompt with that hash
    continues them. `epoch` is the etcd revision of the last recorded change, which only grows.
    """

    kvstore: str = ""
    prefill: str = ""
    decode: str = ""
    block_count: int = 0
    tail_hash: bytes = b""
    epoch: int = UNRECORDED

    def same_place(self, other: Placement) -> bool:
        """Whether both are equal except for the epoch."""
        return self.at_epoch(other.epoch) == other

    def at_epoch(self, epoch: int) -> Placement:
        """A copy with another epoch."""
        return Placement(self.kvstore, self.prefill, self.decode, self.block_count, self.tail_hash, epoch)


def encode_placement(placement: Placement) -> bytes:
    """The record's value in etcd, without the epoch, which is the record's revision."""
    record = {
        "kvstore": placement.kvstore,
        "prefill": placement.prefill,
        "decode": placement.decode,
        "block_count": placement.block_count,
        "tail_hash": placement.tail_hash.hex(),
    }
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def decode_placement(value: bytes, *, epoch: int) -> Placement:
    """Inverse of `encode_placement`. Raises ValueError with the reason."""
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(value)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        record = json.loads(value)
        placement = Placement(
            kvstore=str(record["kvstore"]),
            prefill=str(record["prefill"]),
            decode=str(record["decode"]),
            block_count=int(record["block_count"]),
            tail_hash=bytes.fromhex(record["tail_hash"]),
            epoch=epoch,
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a placement: {error!r}") from None
    names = (placement.kvstore, placement.prefill, placement.decode)
    if not all(_NAMES.fullmatch(name) for name in names):
        raise ValueError("an instance must be at most 128 letters, digits, '.', '_' or '-'")
    if not 0 <= placement.block_count <= _MAX_BLOCKS or len(placement.tail_hash) > _MAX_HASH_BYTES:
        raise ValueError("block_count or tail_hash is out of range")
    return placement
