"""What a worker says about itself in discovery, and the fleet made of it. Pure.

A record is a hint: whoever dials the endpoint checks the fingerprint and incarnation it finds there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WORKERS_PREFIX = "/slipstream/v1/workers/"
MAX_RECORD_BYTES = 16 << 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Role(StrEnum):
    """The five services."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of the cluster.

    `incarnation` names one run of the process (see worker_service.py); `fingerprint` is the digest of
    what it runs, b"" where it runs no model; `capacity` is by name with its unit, e.g. {"kv_blocks": 512}.
    `region` is where it stands: KV does not travel between regions.
    """

    role: Role
    instance: str
    endpoint: str
    incarnation: str
    fingerprint: bytes = b""
    capacity: Mapping[str, int] = field(default_factory=dict)
    region: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.instance):
            raise ValueError(f"instance {self.instance!r} must be 1 to 128 letters, digits, '.', '_' or '-'")
        if self.region and not _NAME.fullmatch(self.region):
            raise ValueError(f"region {self.region!r} must be 1 to 128 letters, digits, '.', '_' or '-'")

    @property
    def key(self) -> str:
        """Where the record lives in etcd."""
        return f"{WORKERS_PREFIX}{self.role}/{self.instance}"


def encode_worker(worker: Worker, *, leaving: bool = False) -> bytes:
    """The record's value in etcd. `leaving` says goodbye: the worker is gone as soon as this is read."""
    record: dict[str, object] = {
        "endpoint": worker.endpoint,
        "incarnation": worker.incarnation,
        "fingerprint": worker.fingerprint.hex(),
        "capacity": dict(worker.capacity),
    }
    if worker.region:
        record["region"] = worker.region
    if leaving:
        record["leaving"] = True
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class DecodedRecord:
    """A record as read: the worker, and whether it said goodbye."""

    worker: Worker
    leaving: bool


def decode_worker(key: str, value: bytes) -> DecodedRecord:
    """The record under `key`. ValueError, saying why, for anything that `encode_worker` did not write."""
    role, _, instance = key.removeprefix(WORKERS_PREFIX).partition("/")
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(value)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        record = json.loads(value)
        capacity = {str(name): int(amount) for name, amount in record["capacity"].items()}
        worker = Worker(
            role=Role(role),
            instance=instance,
            endpoint=str(record["endpoint"]),
            incarnation=str(record["incarnation"]),
            fingerprint=bytes.fromhex(record["fingerprint"]),
            capacity=capacity,
            region=str(record.get("region", "")),
        )
        return DecodedRecord(worker, bool(record.get("leaving", False)))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a worker record: {error!r}") from None


def may_replace(existing: bytes, mine: bytes) -> bool:
    """Whether a worker that was announced before may write over what is under its key now: its own record,
    one that said goodbye, or no record at all; not that of another run, which was announced later."""
    try:
        theirs, ours = json.loads(existing), json.loads(mine)
        return bool(theirs.get("leaving")) or theirs["incarnation"] == ours["incarnation"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All known workers at one moment, sorted by role and instance.

    `suspects` are keys of workers whose record went away without a goodbye: perhaps dead, perhaps
    only cut off from etcd. They are still listed, for a while, because they may well be serving.
    """

    workers: tuple[Worker, ...] = ()
    suspects: frozenset[str] = frozenset()

    @classmethod
    def of(cls, workers: Iterable[Worker], suspects: Iterable[str] = ()) -> FleetSnapshot:
        """A snapshot of `workers` in any order."""
        return cls(tuple(sorted(workers, key=lambda w: (w.role, w.instance))), frozenset(suspects))

    def with_role(self, role: Role) -> tuple[Worker, ...]:
        """The workers of one role, by instance."""
        return tuple(worker for worker in self.workers if worker.role is role)

    def find(self, role: Role, instance: str) -> Worker | None:
        """The worker of that name, or None."""
        return next((w for w in self.workers if w.role is role and w.instance == instance), None)


class FleetState:
    """Folds what becomes known of single workers into the fleet; time comes in as an argument.

    record with leaving        removed at once
    record deleted             suspect; removed `hold_s` later unless it comes back
    record set                 present, no longer suspect
    snapshot without a worker  as if it had been deleted
    """

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._workers: dict[str, Worker] = {}
        self._suspect_until: dict[str, float] = {}

    def put(self, key: str, value: bytes) -> None:
        """A record was set. ValueError if it cannot be read; what was known of the worker stays."""
        record = decode_worker(key, value)
        self._suspect_until.pop(key, None)
        if record.leaving:
            self._workers.pop(key, None)
        else:
            self._workers[key] = record.worker

    def lose(self, key: str, *, now_s: float) -> None:
        """A record is gone."""
        if key in self._workers:
            self._suspect_until.setdefault(key, now_s + self._hold_s)

    def expire(self, *, now_s: float) -> None:
        """Remove the suspects whose time is over."""
        for key in [key for key, until_s in self._suspect_until.items() if until_s <= now_s]:
            del self._suspect_until[key]
            del self._workers[key]

    def known_keys(self) -> tuple[str, ...]:
        """Keys of all workers in the fleet."""
        return tuple(self._workers)

    def next_expiry_s(self) -> float | None:
        """When `expire` has something to do next, or None."""
        return min(self._suspect_until.values(), default=None)

    def snapshot(self) -> FleetSnapshot:
        """The fleet as it is now."""
        return FleetSnapshot.of(self._workers.values(), self._suspect_until)
