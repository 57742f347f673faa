"""Values of the protocol's enums as people read them: FINISH_REASON_LENGTH is "length"."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.v1 import common_pb2


def finish_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """stop, length, tool_calls, aborted, error, or unspecified."""
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def tier_name(tier: common_pb2.CacheTier.ValueType) -> str:
    """Such as dram, nvme, pool or peer."""
    return common_pb2.CacheTier.Name(tier).removeprefix("CACHE_TIER_").lower()


def tier_names(tiers: Iterable[common_pb2.CacheTier.ValueType]) -> str:
    """The different ones of them, such as "dram,nvme"."""
    return ",".join(sorted(map(tier_name, set(tiers))))
