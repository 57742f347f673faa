"""The routes of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from aiohttp import web

from libs.common.http.failure import ErrorShape
from services.router.api.answers.prompt_tokens import count_tokens
from services.router.api.anthropic.answer_format import MessagesFormat
from services.router.api.anthropic.errors import error_shape
from services.router.api.anthropic.request import parse_count_body
from services.router.api.http.generation import GenerationEndpoint
from services.router.api.http.ignored_header import count_ignored
from services.router.api.http.request_reader import RequestReader
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller

PATH = "/v1/messages"


class MessagesRoutes:
    """Serves /v1/messages, and counts the tokens of a body without running it."""

    def __init__(
        self, manager: RequestManager, reader: RequestReader, generation: GenerationEndpoint, card: ModelCard
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._generation = generation
        self._card = card
        self.format = MessagesFormat(card)

    def routes(self) -> Iterable[web.RouteDef]:
        """See RouteFamily."""
        generate = partial(self._generation.generate, path=PATH, answer_format=self.format)
        return [web.post(PATH, generate), web.post(f"{PATH}/count_tokens", self._count)]

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """See RouteFamily."""
        return {PATH: error_shape}

    async def _count(self, request: web.Request) -> web.Response:
        """The number of tokens of the prompt that a body makes."""
        caller = self._reader.caller(request, request.path)
        with limited_call(self._manager.context.metering, caller):
            n_tokens, ignored = await self._tokens_of(request, caller)
        headers = count_ignored(self._manager.context.counters, ignored)
        return web.json_response({"input_tokens": n_tokens}, headers=headers)

    async def _tokens_of(self, request: web.Request, caller: Caller) -> tuple[int, IgnoredFields]:
        sent = await self._reader.encoded_body(request, caller.tenant)
        body = await self._manager.read(caller, lambda: parse_count_body(sent.plain()), n_bytes=sent.n_bytes)
        body.paths.check(body.generation, self._card)
        n_tokens = await count_tokens(self._manager, body.generation, caller, n_bytes=sent.n_bytes)
        return n_tokens, body.ignored
