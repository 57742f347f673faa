"""GetUsage: what the caller's tenant has used, to an operator what all have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.router.api.rpc.callers import Callers, Context
from services.router.metering.metering import Metering
from services.router.metering.usage_query import UsageColumn, UsageQuery, parse_usage_query
from services.router.metering.usage_store import UsageSum
from slipstream import errors
from slipstream.metering.money import amount_text
from slipstream.v1 import router_pb2


class UsageMethod:
    """The method."""

    def __init__(self, metering: Metering | None, callers: Callers) -> None:
        self._metering = metering
        self._callers = callers

    async def get_usage(self, request: router_pb2.GetUsageRequest, context: Context) -> bytes:
        """GetUsage. Returns the GetUsageResponse as a thread has serialised it."""
        own_tenant = self._callers.tenant(context)
        if self._metering is None:
            raise errors.FailedPrecondition("this router meters nothing")
        query = parse_usage_query(
            from_day=request.from_day,
            to_day=request.to_day,
            group_by=[_NAMES.get(value, "unknown") for value in request.group_by],
            tenant=request.tenant,
            own_tenant=own_tenant,
            is_operator=self._callers.sees_all_tenants(),
            today=self._metering.today,
        )
        return await self._metering.usage(query, partial(_encode, query))


def _encode(query: UsageQuery, sums: Sequence[UsageSum]) -> bytes:
    response = router_pb2.GetUsageResponse(
        from_day=query.from_day.isoformat(), to_day=query.to_day.isoformat()
    )
    for each in sums:
        response.rows.add(
            **each.group,
            requests=each.counts.requests,
            prompt_tokens=each.counts.prompt_tokens,
            cached_tokens=each.counts.cached_tokens,
            completion_tokens=each.counts.completion_tokens,
            currency=each.currency,
            cost=amount_text(each.counts.cost_pico),
        )
    return response.SerializeToString()


_NAMES = {router_pb2.UsageGroup.Value(f"USAGE_GROUP_{name.upper()}"): name.value for name in UsageColumn}
