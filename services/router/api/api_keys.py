"""Maps API keys to tenants. A request finds only the KV of its own tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import Unauthenticated

DEFAULT_TENANT = "default"


class ApiKeys:
    """Keeps keys as digests, so that the time of a look-up reveals nothing of other keys."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """`keys` maps API keys to tenants; with None every client is the default tenant."""
        self._tenants = None if keys is None else {_digest(key): tenant for key, tenant in keys.items()}

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Read lines of `key tenant`; blank lines and comments (#) are skipped. Raises ValueError."""
        keys: dict[str, str] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            parts = line.split()
            if len(parts) != 2:
                # The message leaves out the line, which holds a secret.
                raise ValueError(f"{path}:{number}: expected a key and a tenant")
            keys[parts[0]] = parts[1]
        return cls(keys)

    @property
    def open(self) -> bool:
        """Whether no keys are configured."""
        return self._tenants is None

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an Authorization value, `Bearer KEY`. Raises Unauthenticated."""
        if self._tenants is None:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._tenants.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
