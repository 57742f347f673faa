"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: what a prompt is to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from libs.common.block_hash import TokenArray
from services.router.api.answers.prompt_tokens import prompt_ids
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.ignored_header import count_ignored
from services.router.api.http.request_reader import RequestReader
from services.router.api.openai.token_bodies import (
    Detokenize,
    Tokenize,
    parse_detokenize,
    parse_tokenize,
)
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.token_ids import LISTED_TOGETHER
from services.router.request.token_texts import TokenTexts, check_count
from services.router.request.types import Caller, GenerationRequest, PromptInput
from services.router.request.validation import check_model

T = TypeVar("T")


class TokenEndpoint:
    """Counts and names tokens. A request takes the router's time alone, and no admission.

    It counts as a request where its key has limits."""

    def __init__(
        self, manager: RequestManager, reader: RequestReader, card: ModelCard, *, delivery: AnswerDelivery
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._card = card
        self._delivery = delivery
        self._texts = TokenTexts(card, manager.context.threads)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """The ids of a text, or of a conversation as the chat template renders it."""
        caller = self._caller(request)
        with limited_call(self._manager.context.metering, caller):
            body, n_bytes = await self._read(request, caller, parse_tokenize)
            found = await self._tokens(body, caller, n_bytes)
        headers = count_ignored(self._manager.context.counters, body.ignored)
        return await self._delivery.send_object(request, caller.tenant, found, headers=headers)

    def _caller(self, request: web.Request) -> Caller:
        """The caller, with the deadline of the whole call."""
        caller = self._reader.caller(request, request.path)
        return caller.within_default(asyncio.get_running_loop().time())

    async def _tokens(self, body: Tokenize, caller: Caller, n_bytes: int) -> dict[str, object]:
        async with self._manager.token_slots.serving(caller.tenant, n_bytes):
            ids = await prompt_ids(self._manager, self._with_edge(body.request), caller, n_bytes=n_bytes)
            if body.with_texts:
                check_count(ids, "return_token_strs")
                texts = await self._texts.each(ids.tolist(), caller)
            return {
                "count": len(ids),
                "max_model_len": self._card.max_context_tokens,
                "tokens": await self._listed(ids, caller),
                "token_strs": texts if body.with_texts else None,
            }

    async def _listed(self, ids: TokenArray, caller: Caller) -> msgspec.Raw:
        """The ids as JSON. Many are listed off the event loop, and part by part."""
        if len(ids) <= LISTED_TOGETHER:
            return listed_json(ids)
        threads, listing = self._manager.context.threads, partial(listed_json, ids)
        return await threads.run_in_time(caller.tenant, listing, caller.deadline_s, admitted=True)

    def _with_edge(self, request: GenerationRequest) -> GenerationRequest:
        """The request, where the prompt `[BOS]` alone is that token: so evals ask for its id.

        A prompt that runs is text, whatever it says.
        """
        source = request.input
        edge = self._card.edge_token(source.prompt) if isinstance(source, PromptInput) else None
        return (
            request
            if edge is None
            else msgspec.structs.replace(request, input=PromptInput(token_ids=(edge,)))
        )

    async def info(self, request: web.Request) -> web.Response:
        """What the checkpoint states of its tokenizer, and the context that is served."""
        self._reader.tenant(request)
        facts = {**self._card.tokenizer_config, "model_max_length": self._card.max_context_tokens}
        return web.json_response(facts)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """The text of token ids, with the names of control tokens."""
        caller = self._caller(request)
        with limited_call(self._manager.context.metering, caller):
            body, n_bytes = await self._read(request, caller, parse_detokenize)
            found = {"prompt": await self._text(body, caller, n_bytes)}
        headers = count_ignored(self._manager.context.counters, body.ignored)
        return await self._delivery.send_object(request, caller.tenant, found, headers=headers)

    async def _text(self, body: Detokenize, caller: Caller, n_bytes: int) -> str:
        check_model(body.model, self._card.names)
        async with self._manager.token_slots.serving(caller.tenant, n_bytes):
            return await self._texts.text(body.token_ids, caller, field="tokens")

    async def _read(self, request: web.Request, caller: Caller, parse: Callable[[bytes], T]) -> tuple[T, int]:
        sent = await self._reader.encoded_body(request, caller.tenant)
        body = await self._manager.read(caller, lambda: parse(sent.plain()), n_bytes=sent.n_bytes)
        return body, sent.n_bytes


def listed_json(ids: TokenArray) -> msgspec.Raw:
    """The JSON list of the ids, made part by part."""
    parts = [ids[begin : begin + LISTED_TOGETHER] for begin in range(0, len(ids), LISTED_TOGETHER)]
    return msgspec.Raw(b"[" + b",".join([msgspec.json.encode(part.tolist())[1:-1] for part in parts]) + b"]")
