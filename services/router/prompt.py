"""A valid request -> the ids to run and the complete sampling parameters. Pure; costs CPU for long text.

Forced tool calls: for tool_choice `required` or a function the answer's beginning is appended to the
prompt, in Kimi's format up to the call's id or up to the arguments, and read by the answer's parser
first. These ids count as prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from libs.text.chat_template import encode_chat
from libs.text.response_parser import ResponseParser
from libs.text.special_tokens import (
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    TOOL_CALLS_SECTION_BEGIN,
)
from services.router.model_card import ModelCard
from services.router.request import ChatInput, Generation
from services.router.validate import check_context
from slipstream.v1 import common_pb2

_BANNED = -100.0  # as OpenAI's: a logit this much lower is never sampled
_MIN_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request comes to. `forced` are the last ids of `token_ids`: the answer's given beginning."""

    token_ids: list[int]
    forced: tuple[int, ...]
    thinking: bool
    tools_allowed: bool
    store_generated: bool  # whether the next turn's template keeps the generated tokens
    sampling: common_pb2.SamplingParams

    def parser(self, request: Generation, card: ModelCard) -> ResponseParser:
        """A parser for the answer, with no id pushed yet."""
        tools = request.input.tools if isinstance(request.input, ChatInput) else ()
        return ResponseParser(
            card.tokenizer,
            thinking=self.thinking,
            tools_allowed=self.tools_allowed,
            stop=request.stop,
            tools=tools,
        )


def build_prompt(request: Generation, card: ModelCard, *, request_id: str) -> Prompt:
    """Encode the request. Raises InvalidArgument when it does not fit the context."""
    forced: tuple[int, ...] = ()
    thinking = tools_allowed = False
    if isinstance(request.input, ChatInput):
        chat = request.input
        forced = _forced_prefix(chat, card)
        # A forced call leaves no place to reason in.
        thinking = chat.thinking and not forced
        tools_allowed = bool(chat.tools) and _mode(chat) != "none"
        ids = encode_chat(card.tokenizer, chat.messages, chat.tools, thinking=thinking).token_ids
        token_ids = [*ids, *forced]
    else:
        token_ids = card.tokenizer.encode_text(request.input.prompt)
    max_tokens = check_context(
        request, prompt_tokens=len(token_ids), max_context_tokens=card.max_context_tokens
    )
    return Prompt(
        token_ids=token_ids,
        forced=forced,
        thinking=thinking,
        tools_allowed=tools_allowed,
        # K2.5's template drops the reasoning of answered turns, so those blocks would never be found.
        store_generated=not thinking,
        sampling=_sampling(request, card, max_tokens=max_tokens, request_id=request_id),
    )


def default_seed(request_id: str) -> int:
    """The seed of a request without one: a function of its id, so that resuming by id repeats it."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"slipstream-seed").digest()
    return int.from_bytes(digest, "little")


def _mode(chat: ChatInput) -> str:
    return chat.tool_choice.mode if chat.tool_choice is not None else "auto"


def _forced_prefix(chat: ChatInput, card: ModelCard) -> tuple[int, ...]:
    mode = _mode(chat)
    if mode not in ("required", "function"):
        return ()
    special = card.tokenizer.special_id
    ids = [special(TOOL_CALLS_SECTION_BEGIN), special(TOOL_CALL_BEGIN)]
    if mode == "required":
        # Not "functions." as well: the name's first token may take in the dot.
        return tuple(ids)
    assert chat.tool_choice is not None
    # The index counts all calls of the conversation, as in Kimi's format.
    index = sum(len(message.get("tool_calls") or ()) for message in chat.messages)
    ids += card.tokenizer.encode_text(f"functions.{chat.tool_choice.function}:{index}")
    return (*ids, special(TOOL_CALL_ARGUMENT_BEGIN))


def _sampling(
    request: Generation, card: ModelCard, *, max_tokens: int, request_id: str
) -> common_pb2.SamplingParams:
    wish = request.sampling
    stops: Sequence[int] = card.stop_token_ids
    bias = dict(wish.logit_bias)
    if isinstance(request.input, ChatInput):
        chat = request.input
        if _mode(chat) == "function" or (chat.tools and not chat.parallel_tool_calls):
            stops = (*stops, card.tokenizer.special_id(TOOL_CALL_END))
        if chat.tools and _mode(chat) == "none":
            # The tools stay in the prompt, where the conversation's KV has them.
            for name in (TOOL_CALLS_SECTION_BEGIN, TOOL_CALL_BEGIN):
                bias[card.tokenizer.special_id(name)] = _BANNED
    seed = wish.seed if wish.seed is not None else default_seed(request_id)
    top_p = card.top_p if wish.top_p is None else wish.top_p
    return common_pb2.SamplingParams(
        temperature=card.temperature if wish.temperature is None else wish.temperature,
        top_p=max(top_p, _MIN_TOP_P),
        top_k=card.top_k if wish.top_k is None else wish.top_k,
        min_p=wish.min_p or 0.0,
        presence_penalty=wish.presence_penalty or 0.0,
        frequency_penalty=wish.frequency_penalty or 0.0,
        repetition_penalty=wish.repetition_penalty or 1.0,
        logit_bias=bias,
        seed=seed % (1 << 64),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        ignore_eos=wish.ignore_eos,
        top_logprobs=wish.top_logprobs,
    )
