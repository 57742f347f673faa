"""Values of the protocol's enums as people read them: FINISH_REASON_LENGTH is "length"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from slipstream.v1 import common_pb2, router_pb2, worker_pb2

# Names of the requests' enums, which have no name for "unspecified".
MESSAGE_ROLES = {
    name.removeprefix("MESSAGE_ROLE_").lower(): value
    for name, value in router_pb2.MessageRole.items()
    if value
}
TOOL_CHOICE_MODES = {
    name.removeprefix("TOOL_CHOICE_MODE_").lower(): value
    for name, value in router_pb2.ToolChoiceMode.items()
    if value
}
PRIORITIES = {
    name.removeprefix("PRIORITY_").lower(): value for name, value in router_pb2.Priority.items() if value
}


def value_name(kind: Any, value: int) -> str:
    """The name of an enum's value, such as in_progress; unknown for one of a later contract."""
    return _value_names(kind).get(value, "unknown")


@cache
def _value_names(kind: Any) -> Mapping[int, str]:
    prefix = kind.Name(0).removesuffix("UNSPECIFIED")
    return {value: name.removeprefix(prefix).lower() for name, value in kind.items()}


@cache
def finish_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """stop, length, tool_calls, aborted, error, or unspecified; unknown for one of a later contract."""
    return value_name(common_pb2.FinishReason, reason)


@cache
def tier_name(tier: common_pb2.CacheTier.ValueType) -> str:
    """The name of a tier, such as dram, nvme, pool or peer; unknown for one of a later contract."""
    return value_name(common_pb2.CacheTier, tier)


def tier_names(tiers: Iterable[common_pb2.CacheTier.ValueType]) -> str:
    """The different ones of them, such as "dram,nvme"."""
    return ",".join(sorted(map(tier_name, set(tiers))))


_TRANSPORTS: Mapping[str, common_pb2.Transport.ValueType] = {
    "none": common_pb2.TRANSPORT_UNSPECIFIED,
    "socket": common_pb2.TRANSPORT_SOCKET,
    "mooncake": common_pb2.TRANSPORT_MOONCAKE,
    "mooncake-rdma": common_pb2.TRANSPORT_MOONCAKE_RDMA,
}
_TRANSPORT_NAMES = {value: name for name, value in _TRANSPORTS.items()}


def transport_value(kind: str) -> common_pb2.Transport.ValueType:
    """The enum's value for the `kind` of a KvTransport; "none" for a process without one."""
    return _TRANSPORTS[kind]


def transport_name(transport: common_pb2.Transport.ValueType) -> str:
    """none, socket, mooncake, mooncake-rdma; unknown for a value of a later contract."""
    return _TRANSPORT_NAMES.get(transport, "unknown")


def role_value(role: str) -> common_pb2.WorkerRole.ValueType:
    """The enum's value for router, prefill, decode, kvstore or drafter."""
    return common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}")


def role_name(role: common_pb2.WorkerRole.ValueType) -> str:
    """router, prefill, decode, kvstore or drafter; unknown for a value of a later contract."""
    return _ROLE_NAMES.get(role, "unknown")


_ROLE_NAMES = {
    value: name.removeprefix("WORKER_ROLE_").lower() for name, value in common_pb2.WorkerRole.items()
}


_EVICTION_POLICIES: Mapping[str, worker_pb2.EvictionPolicy.ValueType] = {
    "LRU": worker_pb2.EVICTION_POLICY_LRU,
    "ARC": worker_pb2.EVICTION_POLICY_ARC,
    "S3-FIFO": worker_pb2.EVICTION_POLICY_S3_FIFO,
    "hit density": worker_pb2.EVICTION_POLICY_HIT_DENSITY,
    "least expected reuse of a sample": worker_pb2.EVICTION_POLICY_EXPECTED_REUSE,
}
_EVICTION_POLICY_NAMES = {value: name for name, value in _EVICTION_POLICIES.items()}


def eviction_policy_value(name: str) -> worker_pb2.EvictionPolicy.ValueType:
    """The enum's value for the name that people read."""
    return _EVICTION_POLICIES[name]


def eviction_policy_name(policy: worker_pb2.EvictionPolicy.ValueType) -> str:
    """LRU, ARC, S3-FIFO, hit density or least expected reuse of a sample; unknown for any other value."""
    return _EVICTION_POLICY_NAMES.get(policy, "unknown")


def kv_dtype_value(name: str) -> common_pb2.KvDtype.ValueType:
    """The enum's value for float32 or bfloat16. Raises ValueError."""
    return common_pb2.KvDtype.Value(f"KV_DTYPE_{name.upper()}")


def failure_code_value(name: str) -> common_pb2.FailureCode.ValueType:
    """The enum's value for the name of a gRPC status, such as UNAVAILABLE."""
    return common_pb2.FailureCode.Value(f"FAILURE_CODE_{name}")


def failure_code_name(code: common_pb2.FailureCode.ValueType) -> str:
    """The name of a gRPC status; INTERNAL for the unspecified value and for one of a later contract."""
    return value_name(common_pb2.FailureCode, code).upper() if code in _FAILURE_CODES else "INTERNAL"


_FAILURE_CODES = frozenset(filter(None, common_pb2.FailureCode.values()))
