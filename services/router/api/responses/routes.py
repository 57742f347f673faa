"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
from aiohttp import web

from libs.common import api_bounds
from libs.common.http.failure import ErrorShape
from services.router.api.answers.exchange import read_exchange
from services.router.api.http.generation import GenerationEndpoint
from services.router.api.http.request_reader import RequestReader
from services.router.api.responses.answer_format import ResponsesFormat
from services.router.api.responses.errors import error_shape
from services.router.api.responses.store import ResponseStore
from services.router.api.responses.stored_items import PAGE_ITEMS, page_of
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller
from slipstream import bounds

PATH = "/v1/responses"
_ONE = PATH + "/{response_id:[^/]+}"


class ResponsesRoutes:
    """Serves /v1/responses and what is stored of it. `store` None: nothing is stored."""

    def __init__(
        self,
        runs: RequestManager,
        reader: RequestReader,
        generation: GenerationEndpoint,
        card: ModelCard,
        *,
        store: ResponseStore | None,
    ) -> None:
        self._runs = runs
        self._reader = reader
        self._generation = generation
        self._store = store
        self.format = ResponsesFormat(runs, card, store=store, new_key=partial(secrets.token_hex, 16))

    def routes(self) -> Iterable[web.RouteDef]:
        """See RouteFamily."""
        generate = partial(self._generation.generate, path=PATH, answer_format=self.format)
        return [
            web.post(PATH, generate),
            web.post(f"{PATH}/input_tokens", self._count),
            web.get(_ONE, self._show),
            web.delete(_ONE, self._delete),
            web.get(f"{_ONE}/input_items", self._input_items),
        ]

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """See RouteFamily."""
        return {PATH: error_shape}

    async def _count(self, request: web.Request) -> web.Response:
        """The number of tokens of the prompt that a body makes."""
        caller = self._reader.caller(request, request.path)
        with limited_call(self._runs.context.metering, caller):
            n_tokens = await self._tokens_of(request, caller)
        return web.json_response({"object": "response.input_tokens", "input_tokens": n_tokens})

    async def _tokens_of(self, request: web.Request, caller: Caller) -> int:
        data = await self._reader.body(request, caller.tenant)
        encoding = request.headers.get("Content-Encoding", "").lower()
        read = await read_exchange(self._runs, self.format, caller, data, request_id="", encoding=encoding)
        prompt = await self._runs.encode(read.body.requests[0], caller, n_bytes=read.n_bytes)
        return len(prompt.token_ids)

    async def _show(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false") != "false":
            raise bounds.UNSUPPORTED.refused("stream")
        tenant = self._reader.tenant(request)
        body = await self._opened().find_body(tenant, request.match_info["response_id"])
        return web.Response(body=body, content_type="application/json")

    async def _delete(self, request: web.Request) -> web.Response:
        tenant, response_id = self._reader.tenant(request), request.match_info["response_id"]
        await self._opened().delete(tenant, response_id)
        return web.json_response({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.Response:
        tenant, query = self._reader.tenant(request), request.query
        page = page_of(
            await self._opened().find_items(tenant, request.match_info["response_id"]),
            after=query.get("after"),
            order=query.get("order", "desc"),
            limit=api_bounds.PAGE_LIMIT.parse(query.get("limit", str(PAGE_ITEMS))),
        )
        body = await asyncio.to_thread(msgspec.json.encode, page)
        return web.Response(body=body, content_type="application/json")

    def _opened(self) -> ResponseStore:
        if self._store is None:
            raise api_bounds.NO_STORE.refused("response_id")
        return self._store
