"""Encodes the prompts of requests, long ones off the event loop, those that run within the context."""

from __future__ import annotations

import asyncio
from functools import partial

from libs.common.block_hash import TokenArray
from libs.text.tool_declaration import cached_tools_text, tools_text
from services.router.execution.context import RouterContext
from services.router.request.conversations.chat_query import ChatQuery, count_messages
from services.router.request.prompt import Encoded, Prompt, PromptDraft, query_of
from services.router.request.prompt_encoder import PromptEncoder
from services.router.request.types import Caller, ChatInput, GenerationRequest
from slipstream import errors
from slipstream.sampling import OutputConstraint

# Longer texts, and more messages with their tool calls, are encoded off the event loop.
INLINE_CHARS = 16_384
INLINE_MESSAGES = 256


async def encode_prompt(
    context: RouterContext,
    request: GenerationRequest,
    *,
    tenant: str,
    request_id: str,
    constraint: OutputConstraint | None = None,
) -> Prompt:
    """Encode a valid request. Raises InvalidArgument when the prompt exceeds the context."""
    draft = await _make_draft(context, request, tenant)
    encoded = await _encode(context, draft, tenant)
    prompt = draft.finish(encoded, request_id=request_id, constraint=constraint)
    context.counters.add("slipstream_prompt_tokens_encoded_total", prompt.encoded_tokens)
    return prompt


async def encode_ids(context: RouterContext, request: GenerationRequest, caller: Caller) -> TokenArray:
    """The ids of a valid request that does not run, however long. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(caller.deadline_s):
            draft = await _make_draft(context, request, caller.tenant)
            encoded = await _encode(context, draft, caller.tenant, counts_all=True)
            if draft.fits(encoded):
                ids, n_encoded = draft.join(encoded)
            else:
                ids, n_encoded = await context.threads.run(caller.tenant, partial(draft.join, encoded))
    except TimeoutError:
        raise errors.DeadlineExceeded("the request's deadline passed") from None
    context.counters.add("slipstream_prompt_tokens_encoded_total", n_encoded)
    return ids


async def _make_draft(context: RouterContext, request: GenerationRequest, tenant: str) -> PromptDraft:
    query = (
        await _make_query(context, request.input, tenant) if isinstance(request.input, ChatInput) else None
    )
    return PromptDraft.of(request, context.card, context.token_cache, tenant=tenant, query=query)


async def _encode(
    context: RouterContext, draft: PromptDraft, tenant: str, *, counts_all: bool = False
) -> Encoded:
    """Encode a long text off the event loop, in steps between which other tenants have their turn.

    A request that ends meanwhile leaves at most one running step behind.
    """
    if draft.new_chars <= INLINE_CHARS and draft.new_messages <= INLINE_MESSAGES:
        return draft.encode()
    encoder, encoded = PromptEncoder(draft, counts_all=counts_all), None
    while encoded is None:
        encoded = await context.threads.run(tenant, encoder.step)
    return encoded


async def _make_query(context: RouterContext, chat: ChatInput, tenant: str) -> ChatQuery:
    """The conversation, with many messages that the cache lacks rendered off the event loop."""
    query = query_of(
        chat, context.card, tenant=tenant, declaration=await _declare_tools(context, chat, tenant)
    )
    if count_messages(query.messages) > INLINE_MESSAGES:
        first = context.token_cache.first_unknown(query)
        if count_messages(query.messages[first:]) > INLINE_MESSAGES:
            await context.threads.run(tenant, partial(query.render, first))
    return query


async def _declare_tools(context: RouterContext, chat: ChatInput, tenant: str) -> str | None:
    """The text of the request's tools. Agents repeat their tools, so it is mostly cached."""
    if not chat.tools:
        return None
    text = cached_tools_text(chat.tools)
    return text if text is not None else await context.threads.run(tenant, partial(tools_text, chat.tools))
