"""`GET /v1/usage`: what the caller's tenant has used, to an operator what all have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web

from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.request_reader import RequestReader
from services.router.metering.metering import Metering
from services.router.metering.usage_query import UsageQuery, parse_usage_query
from services.router.metering.usage_store import UsageSum
from slipstream import errors
from slipstream.metering.money import amount_text


class UsageEndpoint:
    """Answers with exact sums. Costs are text, because a JSON number has 15 digits."""

    def __init__(self, metering: Metering | None, reader: RequestReader, delivery: AnswerDelivery) -> None:
        self._metering = metering
        self._reader = reader
        self._delivery = delivery

    async def show(self, request: web.Request) -> web.StreamResponse:
        """`?from=2027-01-01&to=2027-01-31&group_by=day,model&tenant=anna`, each optional."""
        own_tenant = self._reader.tenant(request)
        if self._metering is None:
            raise errors.FailedPrecondition("this router meters nothing")
        given = request.query
        query = parse_usage_query(
            from_day=given.get("from", ""),
            to_day=given.get("to", ""),
            group_by=",".join(given.getall("group_by", [])).split(","),
            tenant=given.get("tenant", ""),
            own_tenant=own_tenant,
            is_operator=self._reader.sees_all_tenants(request),
            today=self._metering.today,
        )
        data = await self._metering.usage(query, partial(_body, query))
        return await self._delivery.send_json(request, own_tenant, data)


def _body(query: UsageQuery, sums: Sequence[UsageSum]) -> bytes:
    body = {
        "object": "list",
        "from": query.from_day.isoformat(),
        "to": query.to_day.isoformat(),
        "group_by": [column.value for column in query.group_by],
        "data": [
            {
                **each.group,
                "requests": each.counts.requests,
                "prompt_tokens": each.counts.prompt_tokens,
                "cached_tokens": each.counts.cached_tokens,
                "completion_tokens": each.counts.completion_tokens,
                "cost": amount_text(each.counts.cost_pico),
                "currency": each.currency,
            }
            for each in sums
        ],
    }
    return msgspec.json.encode(body)
