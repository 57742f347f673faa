"""Authenticates clients by API key: which key a request has, of which tenant, with which scope."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libs.common.runtime.followed_file import FollowedFile
from slipstream.credentials.api_key_file import KeyFile, KeyRecord, KeyScope, key_hash, read_key_file
from slipstream.errors import Unauthenticated
from slipstream.metering.rate_limits import NO_LIMITS, RateLimits
from slipstream.rpc.caller_class import CallerClass, CallerIdentity

DEFAULT_TENANT = "default"
KEY_HEADERS = ("x-api-key", "api-key")


@dataclass(frozen=True, slots=True)
class KeyIdentity:
    """The key of a request: its name in the file, its tenant and its scope."""

    name: str
    tenant: str
    scope: KeyScope


log = logging.getLogger(__name__)

_MISSING = "the API key is missing: "
_BY_HTTP = _MISSING + "send it as `Authorization: Bearer KEY`"
_BY_GRPC = (
    _MISSING + "`slipstream` takes --api-key or SLIPSTREAM_API_KEY, the clients of the SDK api_key=, "
    "and other clients send the metadata `authorization: Bearer KEY`"
)
_NOT_BEARER = _MISSING + "Authorization has another scheme than Bearer; send `Authorization: Bearer KEY`"

_NO_TENANTS: Mapping[str, RateLimits] = {}
_OPEN = KeyIdentity("", DEFAULT_TENANT, KeyScope.TENANT)


class ApiKeys:
    """The keys that count now, found by their hashes: the time of a look-up reveals nothing of other keys."""

    def __init__(
        self, records: Iterable[KeyRecord] | None = None, *, wall_clock_s: Callable[[], float] = time.time
    ) -> None:
        """With None as `records` requests need no key, and every client is the default tenant."""
        self._wall_clock_s = wall_clock_s
        self._records: dict[bytes, KeyRecord] | None = None
        self._names: dict[bytes, str] = {}  # also of revoked keys, whose requests may still end
        self._tenants: Mapping[str, RateLimits] = {}
        self._has_limits = False
        if records is not None:
            self.replace(records)

    @property
    def open(self) -> bool:
        """Whether no keys are configured."""
        return self._records is None

    def replace(self, records: Iterable[KeyRecord], tenants: Mapping[str, RateLimits] = _NO_TENANTS) -> None:
        """Let these keys count from now on, and no others. The router ends what runs of the others."""
        self._records = {record.sha256: record for record in records}
        self._names |= {sha256: record.name for sha256, record in self._records.items()}
        self._tenants = tenants
        limits = [*tenants.values(), *(record.limits for record in self._records.values())]
        self._has_limits = any([each != NO_LIMITS for each in limits])

    def identify(self, headers: Mapping[str, str], *, over_http: bool = False) -> KeyIdentity:
        """The key in the headers or metadata of a request. Raises Unauthenticated.

        `headers` finds names in lower case. `over_http`: the client sets headers, and no metadata.
        """
        if self._records is None:
            return _OPEN
        key = given_key(headers)
        if not key:
            if headers.get("authorization", "").strip().lower() not in ("", "bearer"):
                raise Unauthenticated(_NOT_BEARER)
            raise Unauthenticated(_BY_HTTP if over_http else _BY_GRPC)
        record = self._records.get(key_hash(key))
        if record is None or record.is_expired(self._wall_clock_s()):
            raise Unauthenticated("the API key is wrong: it is unknown, revoked or expired")
        return KeyIdentity(record.name, record.tenant, record.scope)

    def counts(self, sha256: bytes) -> bool:
        """Whether the key with this hash counts now. An empty hash is that of no key, and counts."""
        if self._records is None or not sha256:
            return True
        record = self._records.get(sha256)
        return record is not None and not record.is_expired(self._wall_clock_s())

    def key_name(self, sha256: bytes) -> str:
        """The name of the key with this hash, which may be revoked; empty without one."""
        return self._names.get(sha256, "")

    def limits_of(self, tenant: str, sha256: bytes) -> Sequence[tuple[str, RateLimits]]:
        """The limits of a key and its tenant, by names that routers share: `key:NAME`, `tenant:NAME`."""
        if not self._has_limits or self._records is None:
            return ()
        found: list[tuple[str, RateLimits]] = []
        record = self._records.get(sha256)
        if record is not None and record.limits != NO_LIMITS:
            found.append((f"key:{record.name}", record.limits))
        if tenant in self._tenants:
            found.append((f"tenant:{tenant}", self._tenants[tenant]))
        return found

    def hash_of(self, headers: Mapping[str, str]) -> bytes:
        """The hash of the key in the headers; empty without one, or where none is needed."""
        key = "" if self._records is None else given_key(headers)
        return key_hash(key) if key else b""

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request's key. Raises Unauthenticated."""
        return self.identify(headers).tenant

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers carry a key, right or wrong."""
        return bool(given_key(headers))

    def caller_of(self, headers: Mapping[str, str], *, over_http: bool = False) -> CallerIdentity:
        """The class, the name and the tenant of the key in the headers. Raises Unauthenticated."""
        identity = self.identify(headers, over_http=over_http)
        kind = CallerClass.OPERATOR if identity.scope is KeyScope.OPERATOR else CallerClass.TENANT
        return CallerIdentity(kind, identity.name, identity.tenant)


def follow_keys(
    path: Path, keys: ApiKeys, *, check: Callable[[KeyFile], None] = lambda _: None
) -> FollowedFile:
    """Let the keys of a file count, and those of its later contents. Raises ValueError, as `check` may."""

    def apply(file: KeyFile) -> None:
        try:
            check(file)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        keys.replace(file.keys, file.tenants)
        if not file.keys:
            log.warning("%s has no API keys: every call that needs one is refused", path)

    return FollowedFile(path, read_key_file, apply, noun="API keys")


def given_key(headers: Mapping[str, str]) -> str:
    """The key of `Authorization: Bearer KEY`, else of `x-api-key`, else of `api-key`; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (key := key.strip()):
        return key
    return next((found for name in KEY_HEADERS if (found := headers.get(name, "").strip())), "")
