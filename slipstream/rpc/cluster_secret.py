"""The secret that all processes of a cluster share, and the keys derived from it.

No key is used for two purposes. Each use has a label, and `derive` gives it a key of 32 bytes (HMAC-SHA256 of
the label under the secret, as in HKDF's expand step, RFC 5869).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from slipstream.credentials.bounded_file import read_bounded

MIN_SECRET_BYTES = 16
KEY_BYTES = 32


class ClusterSecret:
    """The cluster's secret. Its text never appears in `repr`, so that no log line can show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for a secret that is too short to resist guessing."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the cluster secret must have at least {MIN_SECRET_BYTES} bytes")
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path) -> ClusterSecret:
        """Read the file's text without surrounding white space. Raises ValueError, naming the file."""
        try:
            return cls(read_bounded(path).strip())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def keep_in(cls, path: Path) -> ClusterSecret:
        """The secret in `path`; a new random one, readable by its owner only, where there is none.

        The file appears whole or not at all. Of two processes at a time, both get the secret of the first.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as writer:
                writer.write(secrets.token_hex(KEY_BYTES) + "\n")
                writer.flush()
                os.fsync(writer.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(writer.name, path)
        return cls.from_file(path)

    def derive(self, label: str) -> bytes:
        """The 32-byte key of one purpose."""
        return hmac.digest(self._secret, b"slipstream " + label.encode() + b"\x01", hashlib.sha256)

    def __repr__(self) -> str:
        return "ClusterSecret(...)"
