"""`/tokenize` and `/detokenize`, in vLLM's shapes: what a prompt is to the model, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from services.router.api.http.content_encoding import decompress
from services.router.api.http.request_reader import RequestReader
from services.router.api.openai.token_bodies import (
    parse_detokenize,
    parse_tokenize,
)
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.token_texts import TokenTexts
from services.router.request.types import Caller
from services.router.request.validation import check_model
from slipstream import bounds

T = TypeVar("T")


class TokenEndpoint:
    """Counts and names tokens. A request takes the router's time alone, and no admission.

    It counts as a request where its key has limits."""

    def __init__(self, manager: RequestManager, reader: RequestReader, card: ModelCard) -> None:
        self._manager = manager
        self._reader = reader
        self._card = card
        self._texts = TokenTexts(card, manager.context.threads)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The ids of a text, or of a conversation as the chat template renders it."""
        caller = self._reader.caller(request, request.path)
        with limited_call(self._manager.context.metering, caller):
            return web.json_response(await self._tokens(request, caller))

    async def _tokens(self, request: web.Request, caller: Caller) -> dict[str, object]:
        body, n_bytes = await self._read(request, caller, parse_tokenize)
        ids = (await self._manager.encode(body.request, caller, n_bytes=n_bytes)).token_ids.tolist()
        return {
            "count": len(ids),
            "max_model_len": self._card.max_context_tokens,
            "tokens": ids,
            "token_strs": await self._texts.each(ids, tenant=caller.tenant) if body.with_texts else None,
        }

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids, with the names of control tokens."""
        caller = self._reader.caller(request, request.path)
        with limited_call(self._manager.context.metering, caller):
            return web.json_response({"prompt": await self._text(request, caller)})

    async def _text(self, request: web.Request, caller: Caller) -> str:
        body, _ = await self._read(request, caller, parse_detokenize)
        check_model(body.model, self._card.names)
        return await self._texts.text(body.token_ids, tenant=caller.tenant, field="tokens")

    async def _read(self, request: web.Request, caller: Caller, parse: Callable[[bytes], T]) -> tuple[T, int]:
        data = await self._reader.body(request, caller.tenant)
        encoding = request.headers.get("Content-Encoding", "").lower()
        n_bytes = bounds.MAX_BODY_BYTES if encoding else len(data)
        body = await self._manager.read(caller, lambda: parse(decompress(data, encoding)), n_bytes=n_bytes)
        return body, n_bytes
