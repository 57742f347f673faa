"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from functools import partial

from aiohttp import web

from libs.common import api_bounds
from libs.common.http.failure import ErrorShape, failure_of
from services.router.api.answers.exchange import read_exchange
from services.router.api.answers.prompt_tokens import count_tokens
from services.router.api.content_encoding import decompress
from services.router.api.followers import Followers, while_allowed
from services.router.api.http.event_stream import EventStream
from services.router.api.http.generation import GenerationEndpoint
from services.router.api.http.ignored_header import ignored_header
from services.router.api.http.request_reader import RequestReader
from services.router.api.json_body import Json
from services.router.api.responses.answer_format import ResponsesBody, ResponsesFormat
from services.router.api.responses.errors import error_shape
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.stored.delivery import send_events
from services.router.api.responses.stored.items import PAGE_ITEMS, page_of
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller
from slipstream import bounds, errors

PATH = "/v1/responses"
_BACKGROUND_WORD = b"background"
_ONE = PATH + "/{response_id:[^/]+}"


class ResponsesRoutes:
    """Serves /v1/responses and what is stored of it. `store` None: nothing is stored."""

    def __init__(
        self,
        manager: RequestManager,
        reader: RequestReader,
        generation: GenerationEndpoint,
        card: ModelCard,
        operations: ResponseOperations,
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._generation = generation
        self._operations = operations
        self._followers = Followers("responses")
        self.delivery = generation.delivery
        new_key = partial(secrets.token_hex, 16)
        self.format = ResponsesFormat(manager, card, operations, new_key=new_key)

    def routes(self) -> Iterable[web.RouteDef]:
        """See RouteFamily."""
        return [
            web.post(PATH, self._create),
            web.post(f"{_ONE}/cancel", self._cancel),
            web.post(f"{PATH}/input_tokens", self._count),
            # An answer in pieces has a body whatever the method: a proxy would take it for the next answer.
            web.get(_ONE, self._show, allow_head=False),
            web.delete(_ONE, self._delete),
            web.get(f"{_ONE}/input_items", self._input_items, allow_head=False),
        ]

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """See RouteFamily."""
        return {PATH: error_shape}

    async def _create(self, request: web.Request) -> web.StreamResponse:
        """A response, in the background where the body asks for it; bodies with that word are read twice."""
        encoding = request.headers.get("Content-Encoding", "").lower()
        caller = self._reader.caller(request, PATH)
        data = await self._reader.body(request, caller.tenant)
        if encoding or _BACKGROUND_WORD in data:
            if encoding:
                unpack = partial(decompress, data, encoding)
                data = await self._manager.read(caller, unpack, n_bytes=bounds.MAX_BODY_BYTES)
            if _BACKGROUND_WORD in data:
                read = await read_exchange(self._manager, self.format, caller, data, request_id="")
                if isinstance(read.body, ResponsesBody) and read.body.is_background:
                    return await self._begin(request, caller, data, is_streamed=read.options.stream)
        return await self._generation.generate(request, path=PATH, answer_format=self.format)

    async def _begin(
        self, request: web.Request, caller: Caller, data: bytes, *, is_streamed: bool
    ) -> web.StreamResponse:
        background = self._operations.background
        submit = partial(background.submit, caller.tenant, data, key_sha256=caller.key_sha256)
        if is_streamed:
            # Before a job is queued whose client would not know it.
            with self._followers.following(caller.tenant):
                return await self._stream(request, caller.tenant, (await submit())["id"], after=-1)
        stall_s = self._generation.write_stall_s
        return await self.delivery.send_object(request, caller.tenant, await submit(), stall_s=stall_s)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        tenant, response_id = self._reader.tenant(request), request.match_info["response_id"]
        found = await self._operations.cancel(tenant, response_id)
        return await self._send(request, tenant, found)

    async def _stream(
        self, request: web.Request, tenant: str, response_id: str, *, after: int
    ) -> web.StreamResponse:
        """The events of a response in the background with numbers above `after`, until it ends."""
        stall_s, keep_alive_s = self._generation.write_stall_s, self._generation.keep_alive_s
        stream = EventStream(request, dict, write_stall_s=stall_s)
        changes = self._operations.background.follow(tenant, response_id)
        now_s = asyncio.get_running_loop().time
        sent_s = now_s()
        try:
            async with aclosing(while_allowed(changes, partial(self._reader.tenant, request))) as allowed:
                async for response in allowed:
                    if response is not None:
                        after = await send_events(self.delivery, stream, tenant, response, after=after)
                    elif now_s() - sent_s >= keep_alive_s:
                        await stream.keep_alive()
                    else:
                        continue
                    sent_s = now_s()
            await stream.send(b"", is_last=True)
            return stream.response
        except errors.SlipstreamError as error:
            if not stream.has_begun:
                raise
            await stream.fail(self.format.error_events(failure_of(error), None))
            return stream.response

    async def _count(self, request: web.Request) -> web.Response:
        """The number of tokens of the prompt that a body makes."""
        caller = self._reader.caller(request, request.path)
        with limited_call(self._manager.context.metering, caller):
            n_tokens, ignored = await self._tokens_of(request, caller)
        found = {"object": "response.input_tokens", "input_tokens": n_tokens}
        return web.json_response(found, headers=ignored_header(ignored))

    async def _tokens_of(self, request: web.Request, caller: Caller) -> tuple[int, str]:
        """The tokens of the prompt, and the names of fields without effect, which are counted."""
        data = await self._reader.body(request, caller.tenant)
        encoding = request.headers.get("Content-Encoding", "").lower()
        read = await read_exchange(self._manager, self.format, caller, data, request_id="", encoding=encoding)
        n_tokens = await count_tokens(self._manager, read.requests[0], caller, n_bytes=read.n_bytes)
        return n_tokens, read.options.ignored

    async def _show(self, request: web.Request) -> web.StreamResponse:
        tenant, response_id = self._reader.tenant(request), request.match_info["response_id"]
        is_streamed = request.query.get("stream", "false")
        if is_streamed not in ("true", "false"):
            raise bounds.TYPE.refused("stream", expected="true or false")
        given = request.query.get("starting_after")
        if given is not None and is_streamed == "false":
            raise api_bounds.STARTING_AFTER_STREAM.refused()
        if is_streamed == "true":
            after = -1 if given is None else api_bounds.STARTING_AFTER.parse(given)
            with self._followers.following(tenant):
                return await self._stream(request, tenant, response_id, after=after)
        return await self._send(request, tenant, await self._operations.find(tenant, response_id))

    async def _send(self, request: web.Request, tenant: str, found: Json | bytes) -> web.StreamResponse:
        stall_s = self._generation.write_stall_s
        if isinstance(found, bytes):
            return await self.delivery.send_json(request, tenant, found, stall_s=stall_s)
        return await self.delivery.send_object(request, tenant, found, stall_s=stall_s)

    async def _delete(self, request: web.Request) -> web.Response:
        tenant, response_id = self._reader.tenant(request), request.match_info["response_id"]
        await self._operations.delete(tenant, response_id)
        return web.json_response({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.StreamResponse:
        tenant, response_id = self._reader.tenant(request), request.match_info["response_id"]
        query = request.query
        page = page_of(
            await self._operations.input_items(tenant, response_id),
            after=query.get("after"),
            order=query.get("order", "desc"),
            limit=api_bounds.PAGE_LIMIT.parse(query.get("limit", str(PAGE_ITEMS))),
        )
        stall_s = self._generation.write_stall_s
        return await self.delivery.send_object(request, tenant, page, stall_s=stall_s)
