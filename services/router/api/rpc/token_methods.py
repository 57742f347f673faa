"""Tokenize and Detokenize. Long messages are parsed and converted off the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from libs.common.block_hash import TokenArray
from libs.common.rpc.serve import metadata_of
from services.router.api.answers.prompt_tokens import prompt_ids
from services.router.api.rpc.call_reader import CallReader
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.wire.message_reader import read_message
from services.router.execution.request_manager import RequestManager
from services.router.metering.metering import limited_call
from services.router.request.model_card import ModelCard
from services.router.request.token_ids import LISTED_TOGETHER, listed
from services.router.request.token_texts import TokenTexts
from services.router.request.types import Caller
from slipstream.v1 import router_pb2


class TokenMethods:
    """The methods take raw bytes, so that a malformed message gets a typed error."""

    def __init__(
        self, manager: RequestManager, callers: Callers, card: ModelCard, reader: CallReader
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._callers = callers
        self._card = card
        self._texts = TokenTexts(card, manager.context.threads)

    async def tokenize(self, data: bytes, context: Context) -> router_pb2.TokenizeResponse:
        """Tokenize."""
        caller = self._caller(context, endpoint="Tokenize")
        with limited_call(self._manager.context.metering, caller):
            request, n_bytes = await self._reader.tokenized(data, caller)
            async with self._manager.token_slots.serving(caller.tenant, n_bytes):
                ids = await prompt_ids(self._manager, request, caller, n_bytes=n_bytes)
                if len(ids) <= LISTED_TOGETHER:
                    return self._answer(ids)
                threads, answer = self._manager.context.threads, partial(self._answer, ids)
                return await threads.run_in_time(caller.tenant, answer, caller.deadline_s, admitted=True)

    def _caller(self, context: Context, *, endpoint: str) -> Caller:
        """The caller, with the deadline of the whole call."""
        caller = self._callers.caller(metadata_of(context), context, endpoint=endpoint)
        return caller.within_default(asyncio.get_running_loop().time())

    def _answer(self, ids: TokenArray) -> router_pb2.TokenizeResponse:
        answer = router_pb2.TokenizeResponse(max_context_tokens=self._card.max_context_tokens)
        for begin in range(0, len(ids), LISTED_TOGETHER):
            answer.token_ids.extend(ids[begin : begin + LISTED_TOGETHER].tolist())
        return answer

    async def detokenize(self, data: bytes, context: Context) -> router_pb2.DetokenizeResponse:
        """Detokenize."""
        caller = self._caller(context, endpoint="Detokenize")
        with limited_call(self._manager.context.metering, caller):
            token_ids = await self._manager.read(caller, partial(_token_ids, data), n_bytes=len(data))
            async with self._manager.token_slots.serving(caller.tenant, len(data)):
                text = await self._texts.text(token_ids, caller, field="token_ids")
                return router_pb2.DetokenizeResponse(text=text)


def _token_ids(data: bytes) -> list[int]:
    return listed(read_message(data, router_pb2.DetokenizeRequest).token_ids)
