"""The checksum of every KV block, on the wire and on disk: xxh3-128 of memory by address.

16 bytes, big-endian (xxHash's canonical form). With a key, xxh3 runs under a secret of 192 bytes that is
derived from the key. A process without the key cannot compute a block's checksum. docs/security.md states
which attackers that stops. Without a key the checksum detects damage, but no deliberate forgery.
"""

from __future__ import annotations

import ctypes
import hashlib

import xxhash

from libs.common.xxhash_library import SECRET_BYTES, Xxh3, xxh3
from slipstream.errors import FailedPrecondition
from slipstream.rpc.cluster_secret import ClusterSecret

CHECKSUM_BYTES = 16
SECRET_LABEL = "kv-checksum"


class KvChecksum:
    """The checksum function of one cluster. Thread-safe."""

    def __init__(self, key: bytes = b"") -> None:
        """Plain xxh3-128 without `key`. Raises FailedPrecondition if the installed xxhash takes no secret."""
        self._key = key
        self.secret = hashlib.shake_256(key).digest(SECRET_BYTES) if key else b""
        self._calls = _calls() if key else None

    @classmethod
    def of_cluster(cls, secret: ClusterSecret | None) -> KvChecksum:
        """The checksum under the cluster's secret; UNKEYED without one."""
        return cls(secret.derive(SECRET_LABEL)) if secret is not None else UNKEYED

    def at(self, address: int, n_bytes: int) -> bytes:
        """The checksum of `n_bytes` at `address`. The memory must be mapped and unchanging."""
        if self._calls is None:
            return xxhash.xxh3_128_digest(memory_at(address, n_bytes))
        found = self._calls.whole(address, n_bytes, self.secret, len(self.secret))
        return bytes(found.canonical())

    def of(self, data: bytes | bytearray | memoryview) -> bytes:
        """The checksum of `data`."""
        if self._calls is None:
            return xxhash.xxh3_128_digest(data)
        stream = self.stream()
        stream.update(data)
        return stream.digest()

    def stream(self) -> ChecksumStream:
        """The checksum of data that arrives in pieces."""
        return ChecksumStream(self._calls, self.secret)

    def seal(self, fields: bytes, checksum: bytes) -> bytes:
        """Bind `fields` to a block's `checksum`, for memory that others may write.

        BLAKE2b-128 under the key: unlike the checksum, a reader of that memory may see it.
        """
        return hashlib.blake2b(fields + checksum, key=self._key, digest_size=CHECKSUM_BYTES).digest()

    def __repr__(self) -> str:
        return "KvChecksum(keyed)" if self._key else "KvChecksum()"


class ChecksumStream:
    """One checksum in pieces."""

    def __init__(self, calls: Xxh3 | None, secret: bytes) -> None:
        self._calls = calls
        self._secret = secret  # the state refers to it
        self._plain = xxhash.xxh3_128() if calls is None else None
        self._state = None if calls is None else calls.create()
        if calls is not None:
            calls.reset(self._state, secret, len(secret))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        if self._calls is None:
            assert self._plain is not None
            self._plain.update(data)
            return
        view = memoryview(data).cast("B")
        if len(view):
            held = bytes(view) if view.readonly else ctypes.c_char.from_buffer(view)
            self._calls.update(
                self._state, held if isinstance(held, bytes) else ctypes.addressof(held), len(view)
            )

    def digest(self) -> bytes:
        """The checksum of all data so far."""
        if self._calls is None:
            assert self._plain is not None
            return self._plain.digest()
        return bytes(self._calls.digest(self._state).canonical())

    def __del__(self) -> None:
        if getattr(self, "_state", None) and self._calls is not None:
            self._calls.free(self._state)


def _calls() -> Xxh3:
    try:
        return xxh3()
    except (OSError, AttributeError) as error:
        raise FailedPrecondition(
            f"the cluster secret needs xxhash's C functions, and the installed xxhash lacks them ({error}): "
            "install the wheel of xxhash, or start without the secret"
        ) from None


def memory_at(address: int, n_bytes: int) -> memoryview:
    """A view of raw memory. The caller keeps the memory alive while it uses the view."""
    return memoryview((ctypes.c_char * n_bytes).from_address(address)).cast("B")


UNKEYED = KvChecksum()
checksum, checksum_at = UNKEYED.of, UNKEYED.at
