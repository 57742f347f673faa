"""The OpenAI-shaped HTTP API: a table of routes on an aiohttp application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common import service_bounds
from libs.common.http.admin_server import health_page
from libs.common.http.connection import HttpListener, MalformedMessages
from libs.common.http.guard import ANY, HttpGuard
from services.router.admission.tenant_shares import ReceiveSlots, TextShares
from services.router.api.access_log import AccessLog
from services.router.api.answers.answer_format import AnswerFormat
from services.router.api.anthropic import errors as anthropic_errors
from services.router.api.anthropic import models as anthropic
from services.router.api.api_keys import ApiKeys
from services.router.api.description.docs_page import PAGE_HEADERS, docs_html
from services.router.api.description.openapi import openapi_json
from services.router.api.formats import FORMATS
from services.router.api.http.generation import GenerationEndpoint
from services.router.api.http.middleware import RequestMiddleware
from services.router.api.http.request_reader import RequestReader
from services.router.api.http.route_family import RouteFamily
from services.router.api.http.tokens import TokenEndpoint
from services.router.api.http.usage import UsageEndpoint
from services.router.api.openai.answer_format import CHAT_COMPLETIONS
from services.router.api.readiness import readiness_of
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import price_of
from services.router.request.model_card import ModelCard
from services.router.workers.fleet import RouterFleet
from slipstream import __version__, bounds, errors
from slipstream.bound import shown
from slipstream.rpc.tls import TlsFiles

_MODELS = "/v1/models"


class HttpServer:
    """Routes of the public API. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self,
        manager: RequestManager,
        *,
        fleet: RouterFleet,
        card: ModelCard,
        keys: ApiKeys,
        guard: HttpGuard | None = None,
        access_log: AccessLog | None = None,
        received: ReceiveSlots,
        sent: TextShares,
        body_read_s: float = bounds.BODY_READ_S,
        write_stall_s: float = service_bounds.WRITE_STALL_S,
    ) -> None:
        self._manager = manager
        self._fleet = fleet
        self._card = card
        self._guard = guard or HttpGuard()
        self._access_log = access_log or AccessLog()
        self._clock = asyncio.get_running_loop().time
        self.reader = RequestReader(keys, received, body_read_s=body_read_s, clock=self._clock)
        self.generation = GenerationEndpoint(
            manager, self.reader, clock=self._clock, write_stall_s=write_stall_s, sent=sent
        )
        delivery = self.generation.delivery
        self._tokens = TokenEndpoint(manager, self.reader, card, delivery=delivery)
        self._usage = UsageEndpoint(manager.context.metering, self.reader, delivery)
        self._families: list[RouteFamily] = []

    def add(self, family: RouteFamily) -> None:
        """Serve the routes of another API, too. Before `listener`."""
        self._families.append(family)

    def listener(
        self,
        listening: socket.socket,
        *,
        tls: TlsFiles | None = None,
        keepalive_s: float = service_bounds.IDLE_CONNECTION_S,
    ) -> HttpListener:
        """The server of the routes on a socket. A client that disconnects ends its request."""
        middleware = RequestMiddleware(
            self._guard,
            self._access_log,
            is_draining=lambda: self._manager.draining,
            error_shapes={start: shape for f in self._families for start, shape in f.error_shapes().items()},
            anthropic_shapes={_MODELS: anthropic_errors.error_shape},
            metering=self._manager.context.metering,
        )
        application = web.Application(middlewares=[middleware.serve], client_max_size=bounds.MAX_BODY_BYTES)
        application.on_response_prepare.append(middleware.complete_headers)
        application.add_routes(self.routes())
        malformed = MalformedMessages(self._manager.context.counters, clock=self._clock)
        return HttpListener(
            application,
            listening,
            tls=tls,
            malformed=malformed,
            keepalive_s=keepalive_s,
            on_unexpected=middleware.note_unexpected,
        )

    def routes(self) -> list[web.RouteDef]:
        """All routes; `description/operations.py` has a row for each."""
        own = [
            *[self._generation(path, answer_format) for path, answer_format in FORMATS.items()],
            web.post("/tokenize", self._tokens.tokenize),
            web.post("/detokenize", self._tokens.detokenize),
            web.get("/tokenizer_info", self._tokens.info),
            web.get("/v1/usage", self._usage.show),
            web.get(_MODELS, self.models),
            web.get(_MODELS + "/{name:.*}", self._model),
            web.get("/healthz/ready", self._ready),
            web.get("/healthz/live", self._live),
            web.get("/health", self._ready),
            web.get("/ping", self._ready),
            web.get("/version", self._version),
            web.get("/openapi.json", self._openapi),
            web.get("/docs", self._docs),
        ]
        return [*own, *[route for family in self._families for route in family.routes()]]

    def admin_chat(self, path: str) -> Handler:
        """Chat completions for a route of the admin port, which has judged the page and its caller."""
        guard = HttpGuard(origins=frozenset({ANY}))
        middleware = RequestMiddleware(guard, self._access_log, is_draining=lambda: self._manager.draining)
        generate = partial(self.generation.generate, path=path, answer_format=CHAT_COMPLETIONS)

        async def chat(request: web.Request) -> web.StreamResponse:
            return await middleware.serve(request, generate)

        return chat

    # ---- generation

    def _generation(self, path: str, answer_format: AnswerFormat) -> web.RouteDef:
        return web.post(path, partial(self.generation.generate, path=path, answer_format=answer_format))

    # ---- the rest

    async def models(self, request: web.Request) -> web.Response:
        """The served model by each of its names."""
        self.reader.tenant(request)
        models = [self._model_object(name, request) for name in self._card.names]
        if anthropic.VERSION_HEADER in request.headers:
            return web.json_response(anthropic.model_page(models))
        return web.json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        self.reader.tenant(request)
        name = request.match_info["name"]
        if name not in self._card.names:
            reason = bounds.MODEL.refused(model=shown(name), served=", ".join(self._card.names))
            raise errors.NotFound(reason.message, field="model")
        return web.json_response(self._model_object(name, request))

    def _model_object(self, name: str, request: web.Request) -> Mapping[str, object]:
        """The context by the names that OpenRouter, vLLM and earlier clients of Slipstream read."""
        context = self._card.max_context_tokens
        if anthropic.VERSION_HEADER in request.headers:
            created = self._card.created_unix_s
            return anthropic.model_object(name, created_unix_s=created, max_context_tokens=context)
        price = price_of(self._manager.context.metering)
        return {
            "id": name,
            "object": "model",
            "created": self._card.created_unix_s,
            "owned_by": "slipstream",
            "root": self._card.name,
            "context_length": context,
            "max_model_len": context,
            "max_context_tokens": context,
            **({} if price is None else {"pricing": price.pricing()}),
        }

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        return health_page(readiness_of(self._manager, self._fleet))

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi_json(), content_type="application/json")

    async def _docs(self, request: web.Request) -> web.Response:
        return web.Response(body=docs_html(), content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)
