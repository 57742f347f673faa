"""The usage of tenants, as `Client.usage` returns it.

with Client("127.0.0.1:7000", api_key=key) as client:
    for row in client.usage(group_by=["day", "model"]):
        print(row.day, row.model, row.completion_tokens, row.cost, row.currency)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from slipstream.enum_names import EnumNames
from slipstream.errors import InvalidArgument
from slipstream.v1 import router_pb2

USAGE_GROUPS = EnumNames.of(router_pb2.UsageGroup, unspecified=None)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """A sum over requests. The first five fields are empty unless rows are grouped by them."""

    day: str
    tenant: str
    key: str
    model: str
    endpoint: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: Decimal
    currency: str  # empty: had no price


def usage_request(
    *, from_day: str = "", to_day: str = "", group_by: Sequence[str] = (), tenant: str = ""
) -> router_pb2.GetUsageRequest:
    """The message of a question. Raises InvalidArgument."""
    for name in group_by:
        if name not in USAGE_GROUPS.values:
            raise InvalidArgument("group_by", f"must be of {', '.join(USAGE_GROUPS.values)}, not {name!r}")
    return router_pb2.GetUsageRequest(
        from_day=from_day,
        to_day=to_day,
        group_by=[USAGE_GROUPS.value(name) for name in group_by],
        tenant=tenant,
    )


def usage_records(response: router_pb2.GetUsageResponse) -> list[UsageRecord]:
    """The rows of an answer."""
    records = []
    for row in response.rows:
        fields: dict[str, Any] = {field.name: getattr(row, field.name) for field in row.DESCRIPTOR.fields}
        records.append(UsageRecord(**fields | {"cost": Decimal(row.cost)}))
    return records
