"""Names of the contract's enums as people read them: FINISH_REASON_LENGTH is "length"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slipstream.v1 import common_pb2, router_pb2, worker_pb2
from slipstream.v1.common_pb2 import CacheTier

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

V = TypeVar("V", bound=int)


class EnumNames(Generic[V]):
    """A table of an enum's names. `values` has the value of each name."""

    def __init__(self, values: Mapping[str, V], *, unknown: str = "unknown") -> None:
        """`unknown` is the name of every value that the table lacks."""
        self.values = values
        self._names: Mapping[int, str] = {value: name for name, value in values.items()}
        self._unknown = unknown

    @classmethod
    def of(
        cls, kind: _EnumTypeWrapper[V], *, unspecified: str | None = "unspecified", unknown: str = "unknown"
    ) -> EnumNames[V]:
        """The names of an enum without their prefix. `unspecified` names the value 0; None leaves it out."""
        prefix = kind.Name(kind.values()[0]).removesuffix("UNSPECIFIED")
        values = {name.removeprefix(prefix).lower(): value for name, value in kind.items() if value}
        return cls(
            values if unspecified is None else {unspecified: kind.values()[0], **values}, unknown=unknown
        )

    def value(self, name: str) -> V:
        """The value of a name. Raises KeyError."""
        return self.values[name]

    def name(self, value: int) -> str:
        """The name of a value, also where a later contract added it."""
        return self._names.get(value, self._unknown)

    def find(self, value: int) -> str | None:
        """The name of a value that the table has; None for any other."""
        return self._names.get(value)


FINISH_REASONS = EnumNames.of(common_pb2.FinishReason)
CACHE_TIERS = EnumNames.of(CacheTier)
# In answers a value without a name is unknown, and so is the unspecified one.
ANSWER_FINISH_REASONS = EnumNames.of(common_pb2.FinishReason, unspecified=None)
ANSWER_TIERS = EnumNames.of(CacheTier, unspecified=None)
# The tiers of one kvstore, fastest first.
KVSTORE_TIERS = EnumNames(
    {
        "dram": CacheTier.CACHE_TIER_DRAM,
        "nvme": CacheTier.CACHE_TIER_NVME,
        "pool": CacheTier.CACHE_TIER_POOL,
    }
)
ROLES = EnumNames.of(common_pb2.WorkerRole)
KV_DTYPES = EnumNames.of(common_pb2.KvDtype)
# By the `kind` of a KvTransport; "none" for a process without one.
TRANSPORTS = EnumNames(
    {
        "none": common_pb2.TRANSPORT_UNSPECIFIED,
        "socket": common_pb2.TRANSPORT_SOCKET,
        "mooncake": common_pb2.TRANSPORT_MOONCAKE,
        "mooncake-rdma": common_pb2.TRANSPORT_MOONCAKE_RDMA,
    }
)
EVICTION_POLICIES = EnumNames(
    {
        "LRU": worker_pb2.EVICTION_POLICY_LRU,
        "ARC": worker_pb2.EVICTION_POLICY_ARC,
        "S3-FIFO": worker_pb2.EVICTION_POLICY_S3_FIFO,
        "hit density": worker_pb2.EVICTION_POLICY_HIT_DENSITY,
        "least expected reuse of a sample": worker_pb2.EVICTION_POLICY_EXPECTED_REUSE,
    }
)
# The names of gRPC's statuses, such as UNAVAILABLE.
FAILURE_CODES = EnumNames(
    {name.removeprefix("FAILURE_CODE_"): value for name, value in common_pb2.FailureCode.items() if value},
    unknown="INTERNAL",
)
# Enums of requests have no name for "unspecified": a client leaves the field out.
MESSAGE_ROLES = EnumNames.of(router_pb2.MessageRole, unspecified=None, unknown="")
TOOL_CHOICE_MODES = EnumNames.of(router_pb2.ToolChoiceMode, unspecified=None)
PRIORITIES = EnumNames.of(router_pb2.Priority, unspecified=None)


def value_name(kind: Any, value: int) -> str:
    """The name of an enum's value, such as in_progress; unknown for one of a later contract."""
    return _names(kind).name(value)


@cache
def _names(kind: Any) -> EnumNames[int]:
    return EnumNames.of(kind)


def tier_names(tiers: Iterable[CacheTier.ValueType]) -> str:
    """The different ones of them, such as "dram,nvme"."""
    return ",".join(sorted(map(CACHE_TIERS.name, set(tiers))))
