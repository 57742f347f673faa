"""Sends long answers in pieces, within their tenant's share of a router's memory.

A client that reads nothing holds what it asked for until it is cut off. So what one tenant's clients are
being sent is bounded. Answers of one piece do not count: the kernel has most of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager

import msgspec
from aiohttp import web

from libs.common import service_bounds
from services.router.admission.tenant_shares import TextShares
from services.router.api.http.piece_stream import PIECE_BYTES, each_piece, send_pieces
from services.router.api.json_body import Json

_JSON = {"Content-Type": "application/json; charset=utf-8"}


class AnswerDelivery:
    """Answers on their way to the clients of each tenant: whole answers, and stored responses.

    `sent` counts them, and what else its holders send.
    """

    def __init__(self, sent: TextShares) -> None:
        self._sent = sent

    async def send_object(
        self,
        request: web.Request,
        tenant: str,
        answer: Json,
        *,
        stall_s: float = service_bounds.WRITE_STALL_S,
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """Answer with an object. Raises Overloaded beyond the tenant's share."""
        data = await asyncio.to_thread(msgspec.json.encode, answer)
        return await self.send_json(request, tenant, data, stall_s=stall_s, headers=headers)

    async def send_json(
        self,
        request: web.Request,
        tenant: str,
        data: bytes,
        *,
        stall_s: float = service_bounds.WRITE_STALL_S,
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """Answer with JSON. Raises Overloaded beyond the tenant's share."""
        all_headers = {**_JSON, **(headers or {})}
        if len(data) <= PIECE_BYTES:
            return web.Response(body=data, headers=all_headers)
        with self.sending(tenant, len(data)):
            response = web.StreamResponse(headers=all_headers)
            response.content_length = len(data)
            return await send_pieces(request, response, each_piece([data]), stall_s=stall_s)

    def sending(self, tenant: str, n_bytes: int) -> AbstractContextManager[None]:
        """Send so many bytes inside. Raises Overloaded beyond the tenant's share."""
        return self._sent.holding(tenant, n_bytes)
