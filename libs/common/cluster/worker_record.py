"""A worker's record in discovery, and the fleet that the records make up. Pure.

A record is a hint: a client that dials the endpoint checks the fingerprint and incarnation that it finds
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from libs.common.service_bounds import MAX_FLEET_RECORDS
from slipstream.rpc.audience import audience_of

WORKERS_PREFIX = "/slipstream/v1/workers/"
MAX_RECORD_BYTES = 16 << 10
# Fields of a record that are absent where they are empty.
_TEXTS = ("region", "session_digest", "admin", "admin_http")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TEXT = re.compile(r"[!-~]{0,512}")
# Ports that a process may lack; pages link to them, and Prometheus and operators' calls go there.
_ADMIN_PORTS = ("admin", "admin_http")
# Every router keeps the capacities of every process and shows them to operators.
_CAPACITY = re.compile(r"[a-z0-9_]{1,64}")
_MAX_CAPACITIES = 32
# Of one capacity. Sums and products of such numbers stay finite as floats.
_MAX_AMOUNT = 1 << 53


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

    `incarnation` identifies one run of the process (see worker_service.py). `fingerprint` is the digest of
    the model's fingerprint, b"" without a model. `capacity` has its unit in the name, e.g. {"kv_blocks":
    512}. KV is not transferred between `region`s. `session_digest` names the transport session
    (address_book.py). `admin_http` is the port of metrics and health, `admin` a router's gRPC port of
    operators; WorkerService of others is at `endpoint`.
    """

    role: Role
    instance: str
    endpoint: str
    incarnation: str
    fingerprint: bytes = b""
    capacity: Mapping[str, int] = field(default_factory=dict)
    region: str = ""
    session_digest: str = ""
    admin: str = ""
    admin_http: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.instance):
            raise ValueError(
                f"instance {self.instance[:128]!r} must be 1 to 128 letters, digits, '.', '_' or '-'"
            )
        if self.region and not _NAME.fullmatch(self.region):
            raise ValueError(
                f"region {self.region[:128]!r} must be 1 to 128 letters, digits, '.', '_' or '-'"
            )

    @property
    def key(self) -> str:
        """The key of the record in etcd."""
        return f"{WORKERS_PREFIX}{self.role}/{self.instance}"

    @property
    def max_context_tokens(self) -> int | None:
        """The longest prompt and answer that the worker takes; None where its record states none."""
        stated = self.capacity.get("max_context_tokens", 0)
        return stated if stated > 0 else None

    def takes(self, context_tokens: int) -> bool:
        """Whether a prompt and its answer with this many tokens fit there, as far as its record states."""
        most = self.max_context_tokens
        return most is None or context_tokens <= most


def encode_worker(worker: Worker, *, leaving: bool = False) -> bytes:
    """The record's value in etcd. With `leaving`, readers remove the worker at once."""
    record: dict[str, object] = {
        "endpoint": worker.endpoint,
        "incarnation": worker.incarnation,
        "fingerprint": worker.fingerprint.hex(),
        "capacity": dict(worker.capacity),
    }
    record.update({name: value for name in _TEXTS if (value := getattr(worker, name))})
    if leaving:
        record["leaving"] = True
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class DecodedRecord:
    """A decoded record: the worker, and whether it leaves the fleet."""

    worker: Worker
    leaving: bool


def decode_worker(key: str, value: bytes) -> DecodedRecord:
    """Inverse of `encode_worker`, with the record's key. Raises ValueError with the reason."""
    role, _, instance = key.removeprefix(WORKERS_PREFIX).partition("/")
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(value)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        record = json.loads(value)
        capacity = {str(name): int(amount) for name, amount in record["capacity"].items()}
        _check(record, capacity)
        worker = Worker(
            role=Role(role),
            instance=instance,
            endpoint=str(record["endpoint"]),
            incarnation=str(record["incarnation"]),
            fingerprint=bytes.fromhex(record["fingerprint"]),
            capacity=capacity,
            **{name: str(record.get(name, "")) for name in _TEXTS},
        )
        return DecodedRecord(worker, bool(record.get("leaving", False)))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a worker record: {error!r}") from None


def _check(record: Mapping[str, object], capacity: Mapping[str, int]) -> None:
    """Raise ValueError for a record that its readers could not dial, show or count with."""
    for name in ("endpoint", *_ADMIN_PORTS):
        address = str(record.get(name, ""))
        if not audience_of(address) and (address or name == "endpoint"):
            raise ValueError(f"the {name} is no host:port")
    for name in ("incarnation", *_TEXTS):
        if not _TEXT.fullmatch(str(record.get(name, ""))):
            raise ValueError(f"{name} must be at most 512 printable ASCII characters")
    if len(capacity) > _MAX_CAPACITIES:
        raise ValueError(f"{len(capacity)} capacities, more than {_MAX_CAPACITIES}")
    for name, amount in capacity.items():
        if not _CAPACITY.fullmatch(name):
            raise ValueError(f"{name[:64]!r} is no name of a capacity")
        if not (name == "block_tokens") <= amount <= _MAX_AMOUNT:
            raise ValueError(f"the capacity {name!r} is out of range")


def may_replace(existing: bytes, mine: bytes) -> bool:
    """Whether a worker that was announced before may overwrite the record under its key.

    It may overwrite its own record, one with `leaving`, and a malformed one; not the record of a later run.
    """
    try:
        theirs, ours = json.loads(existing), json.loads(mine)
        return bool(theirs.get("leaving")) or theirs["incarnation"] == ours["incarnation"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All workers at one moment, sorted by role and instance.

    `suspects` are keys of workers whose record expired without `leaving`. They stay in the fleet for a while,
    because they may still serve without a connection to etcd. `leaving` get no new work and are not in
    `workers`: they drain, or are drained and run on.
    """

    workers: tuple[Worker, ...] = ()
    suspects: frozenset[str] = frozenset()
    leaving: tuple[Worker, ...] = ()

    @classmethod
    def of(
        cls, workers: Iterable[Worker], suspects: Iterable[str] = (), leaving: Iterable[Worker] = ()
    ) -> FleetSnapshot:
        """Make a snapshot of workers in any order."""
        return cls(_sorted(workers), frozenset(suspects), _sorted(leaving))

    def with_role(self, role: Role) -> tuple[Worker, ...]:
        """The workers of one role, sorted by instance."""
        return tuple(worker for worker in self.workers if worker.role is role)


def _sorted(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    return tuple(sorted(workers, key=lambda worker: (worker.role, worker.instance)))


class FleetState:
    """Applies changes of records to the fleet. The current time is an argument.

    record with `leaving`      the worker is removed at once, and leaving until the record is deleted
    record deleted             suspect; removed `hold_s` later unless a record is set before
    record set                 present, not suspect
    snapshot without a worker  as if its record had been deleted
    """

    def __init__(self, *, hold_s: float) -> None:
        self._hold_s = hold_s
        self._workers: dict[str, Worker] = {}
        self._suspect_until: dict[str, float] = {}
        self._leaving: dict[str, Worker] = {}

    def put(self, key: str, value: bytes) -> None:
        """Apply a record. Raises ValueError for a malformed one, or one too many, which changes nothing."""
        record = decode_worker(key, value)
        old, new = (self._workers, self._leaving) if record.leaving else (self._leaving, self._workers)
        if key not in new and len(new) >= MAX_FLEET_RECORDS:
            raise ValueError(f"{MAX_FLEET_RECORDS} workers {'leave' if record.leaving else 'work'} already")
        self._suspect_until.pop(key, None)
        old.pop(key, None)
        new[key] = record.worker

    def mark_suspect(self, key: str, *, now_s: float) -> None:
        """Apply the deletion of a record."""
        self._leaving.pop(key, None)
        if key in self._workers:
            self._suspect_until.setdefault(key, now_s + self._hold_s)

    def expire(self, *, now_s: float) -> None:
        """Remove the suspects whose hold time has passed."""
        for key in [key for key, until_s in self._suspect_until.items() if until_s <= now_s]:
            del self._suspect_until[key]
            del self._workers[key]

    def known_keys(self) -> tuple[str, ...]:
        """Keys of all workers in the fleet, and of those that leave."""
        return (*self._workers, *self._leaving)

    def next_expiry_s(self) -> float | None:
        """The time of the next removal by `expire`, or None."""
        return min(self._suspect_until.values(), default=None)

    def snapshot(self) -> FleetSnapshot:
        """The fleet as it is now."""
        return FleetSnapshot.of(self._workers.values(), self._suspect_until, self._leaving.values())
