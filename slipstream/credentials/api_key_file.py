"""The file of API keys: names, tenants, scopes and hashes. It never holds a key.

    [[key]]
    name = "anna-laptop"
    tenant = "anna"
    scope = "tenant"                  # or "operator"; left out: "tenant"
    sha256 = "9f86d081..."            # of the key, 64 hex digits
    expires = 2027-01-31T00:00:00Z    # optional
    requests_per_minute = 60          # optional limits: metering/rate_limits.py

    [[tenant]]                        # optional: limits of all keys of a tenant together
    name = "anna"
    spend_per_month = 100

A key has 256 random bits, which no search finds, so a slow hash would protect nothing.
Messages of errors name the file and a line, and never show a value: it could be a key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.bounds import MAX_KEY_FILE_BYTES
from slipstream.credentials.bounded_file import read_bounded_text
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.metering.rate_limits import LIMIT_FIELDS, NO_LIMITS, RateLimits, parse_limits

KEY_PREFIX = "sk-slipstream-"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "tenant", "scope", "sha256", "expires", *LIMIT_FIELDS)
_TENANT_FIELDS = ("name", *LIMIT_FIELDS)
_TABLE = re.compile(r"\s*\[\[\s*(key|tenant)\s*\]\]")
_NO_TENANTS: Mapping[str, RateLimits] = {}
_HEADER = "# API keys by their hashes. `slipstream keys` writes this file.\n"


class KeyScope(StrEnum):
    """The rights of a key. An operator's key may do all that a tenant's may."""

    TENANT = "tenant"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key of the file. `sha256` is its hash; `expires_s` a Unix time, None = never."""

    name: str
    tenant: str
    scope: KeyScope
    sha256: bytes
    expires_s: float | None = None
    limits: RateLimits = NO_LIMITS

    def is_expired(self, now_s: float) -> bool:
        """Whether the key has expired at the Unix time `now_s`."""
        return self.expires_s is not None and now_s >= self.expires_s


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A whole file: its keys, and the limits of tenants by name."""

    keys: tuple[KeyRecord, ...] = ()
    tenants: Mapping[str, RateLimits] = dataclasses.field(default_factory=dict)


def key_hash(key: str) -> bytes:
    """The hash by which the file names a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_key_file(text: str, *, source: str) -> KeyFile:
    """Parse the text of a file. Raises ValueError that begins with `source:line`."""
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError, ArithmeticError) as error:
        found = re.search(r"at line (\d+)", str(error))
        line = found.group(1) if found else str(text.count("\n") + 1)
        raise ValueError(f"{source}:{line}: is not TOML; keys are tables [[key]]") from None
    tables = {kind: document.get(kind, []) for kind in ("key", "tenant")}
    if set(document) - set(tables) or not all(isinstance(found, list) for found in tables.values()):
        raise ValueError(f"{source}:1: holds something else than tables [[key]] and [[tenant]]")
    records: dict[str, KeyRecord] = {}
    hashes: set[bytes] = set()
    tenants: dict[str, RateLimits] = {}
    for where, kind, table in _placed(text, tables, source):
        try:
            if kind == "tenant":
                name, limits = _tenant(table)
                if name in tenants:
                    raise ValueError("repeats the name of an earlier tenant")
                tenants[name] = limits
                continue
            record = _record(table)
            if record.name in records or record.sha256 in hashes:
                raise ValueError("repeats the name or the hash of an earlier key")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        records[record.name] = record
        hashes.add(record.sha256)
    return KeyFile(tuple(records.values()), tenants)


def _placed(text: str, tables: Mapping[str, Sequence[Any]], source: str) -> Iterator[tuple[str, str, Any]]:
    """The tables with their kind and their place, `source:line`."""
    lines: dict[str, list[int]] = {kind: [] for kind in tables}
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            lines[found.group(1)].append(number)
    for kind, found_tables in tables.items():
        for index, table in enumerate(found_tables):
            line_number = lines[kind][index] if index < len(lines[kind]) else 1
            yield f"{source}:{line_number}", kind, table


def format_keys(records: Sequence[KeyRecord], tenants: Mapping[str, RateLimits] = _NO_TENANTS) -> str:
    """The text of a file with these keys, and these limits of tenants."""
    parts = [_HEADER]
    for record in records:
        lines = [
            "[[key]]",
            f'name = "{record.name}"',
            f'tenant = "{record.tenant}"',
            f'scope = "{record.scope}"',
            f'sha256 = "{record.sha256.hex()}"',
        ]
        if record.expires_s is not None:
            expires = datetime.fromtimestamp(record.expires_s, UTC)
            lines.append(f"expires = {expires.strftime('%Y-%m-%dT%H:%M:%SZ')}")
        parts.append("\n".join([*lines, *record.limits.lines()]) + "\n")
    for name, limits in tenants.items():
        parts.append("\n".join(["[[tenant]]", f'name = "{name}"', *limits.lines()]) + "\n")
    return "\n".join(parts)


def read_key_file(path: Path) -> KeyFile:
    """Read and parse a file. Raises ValueError that names the file and the line."""
    return parse_key_file(read_bounded_text(path, max_bytes=MAX_KEY_FILE_BYTES), source=str(path))


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The keys of a file. Raises ValueError that names the file and the line."""
    return read_key_file(path).keys


def new_key() -> str:
    """A random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def add_key(
    path: Path,
    *,
    name: str,
    tenant: str,
    scope: KeyScope = KeyScope.TENANT,
    expires_s: float | None = None,
    limits: RateLimits = NO_LIMITS,
    key: str = "",
) -> str:
    """Add a key, by default a new random one, and return it; only its hash is kept.

    Raises InvalidArgument for a name that is taken or malformed, FailedPrecondition for a broken file.
    """
    for field, value, allowed in (("--name", name, _NAME), ("--tenant", tenant, _TENANT)):
        if not allowed.fullmatch(value):
            raise InvalidArgument(field, f"must match {allowed.pattern}")
    key = key or new_key()
    with _changing(path) as records:
        if name in records:
            raise InvalidArgument("--name", f"{name!r} is the name of another key")
        records[name] = KeyRecord(name, tenant, scope, key_hash(key), expires_s, limits)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove a key. Raises NotFound, or FailedPrecondition for a broken file."""
    with _changing(path) as records:
        if name not in records:
            raise NotFound(f"{path} has no key {name!r}")
        del records[name]


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[dict[str, KeyRecord]]:
    """The records of the file by name; what the block leaves of them replaces the file, if it succeeds."""
    try:
        path = path.resolve()  # a link stays a link
    except RuntimeError:
        raise FailedPrecondition(f"{path} cannot hold the keys: it is a link without an end") from None
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise FailedPrecondition(f"{path.parent} cannot hold the keys: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of two changes at a time, none is lost
        try:
            file = read_key_file(path) if path.exists() else KeyFile()
        except ValueError as error:
            raise FailedPrecondition(str(error)) from None
        records = {record.name: record for record in file.keys}
        yield records
        try:
            _replace(path, format_keys(list(records.values()), file.tenants))
        except OSError as error:
            raise FailedPrecondition(f"{path} cannot be written: {error.strerror}") from None
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    """Readers see the old file or the new one, whole. Only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as writer:
            writer.write(text)
            writer.flush()
            os.fsync(writer.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _record(table: Any) -> KeyRecord:
    """The record of one table. Raises ValueError without a value of the table."""
    if not isinstance(table, Mapping):
        raise ValueError("key must be a table: [[key]]")
    if set(table) - set(_FIELDS):  # the name of an unknown field may be a key
        raise ValueError(f"has an unknown field; fields are {', '.join(_FIELDS)}")
    name, tenant, sha256 = (table.get(field) for field in ("name", "tenant", "sha256"))
    for field, value, allowed in (("name", name, _NAME), ("tenant", tenant, _TENANT)):
        if not isinstance(value, str) or not allowed.fullmatch(value):
            raise ValueError(f"{field} must be text that matches {allowed.pattern}")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError("sha256 must be 64 lower-case hex digits")
    try:
        scope = KeyScope(table.get("scope", KeyScope.TENANT))
    except ValueError:
        raise ValueError(f"scope must be one of {', '.join(KeyScope)}") from None
    expires = table.get("expires")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise ValueError("expires must be a date and time with an offset, as 2027-01-31T00:00:00Z")
    expires_s = None if expires is None else expires.timestamp()
    return KeyRecord(str(name), str(tenant), scope, bytes.fromhex(sha256), expires_s, parse_limits(table))


def _tenant(table: Any) -> tuple[str, RateLimits]:
    """The name and the limits of a tenant's table. Raises ValueError without a value of the table."""
    if not isinstance(table, Mapping):
        raise ValueError("tenant must be a table: [[tenant]]")
    if set(table) - set(_TENANT_FIELDS):
        raise ValueError(f"has an unknown field; fields are {', '.join(_TENANT_FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not _TENANT.fullmatch(name):
        raise ValueError(f"name must be text that matches {_TENANT.pattern}")
    return name, parse_limits(table)
