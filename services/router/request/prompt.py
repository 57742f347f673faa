"""Turns a valid request into token ids and complete sampling parameters. Pure; long text costs CPU.

Forced tool calls: with tool_choice `required` or a function, the prompt ends with the beginning of the
answer. In Kimi's format that is the part up to the call's id or its arguments. The response parser reads
these ids first; they count as prompt tokens.

Partial messages: the prompt ends within the last message instead of with the generation prompt. The token
cache holds the messages before it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from libs.common.block_hash import NOTHING_SHARED, HashChain, SharedPrefix, TokenArray, as_tokens
from libs.text.chat_template import (
    Segment,
    encode_chat,
    reasoning_kept_from,
    render_chat,
    render_partial,
    tools_header,
)
from libs.text.response_parser import ResponseParser, ToolCallForm
from libs.text.special_tokens import (
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    TOOL_CALL_TOKENS,
    TOOL_CALLS_SECTION_BEGIN,
)
from libs.text.tokenizer import Tokenizer
from libs.text.tool_declaration import tools_text
from services.router.request.conversations.chat_query import ChatQuery, count_messages
from services.router.request.conversations.message_node import ID_BYTES, NewMessage
from services.router.request.conversations.token_cache import (
    CachedChat,
    Conversation,
    TokenCache,
    count_new,
    encode,
    encode_segments,
    join_ids,
    pack_ids,
    run_to_end,
    unpack_ids,
)
from services.router.request.model_card import ModelCard
from services.router.request.types import ChatInput, GenerationRequest, PromptInput
from services.router.request.validation import check_context, check_prompt_rows
from slipstream.sampling import OutputConstraint
from slipstream.v1 import common_pb2

# The messages that the cache lacks, and the packed ids of what follows them.
Encoded: TypeAlias = tuple[list[NewMessage], bytes]

_MIN_TOP_P = 1e-6


class Prompt(msgspec.Struct, frozen=True):
    """The token ids of a request. `forced` are the last of `token_ids`: the given beginning of the answer.

    The tokenizer encoded `encoded_tokens` of the ids; the others came from the token cache.
    """

    token_ids: TokenArray
    encoded_tokens: int
    forced: tuple[int, ...]
    thinking: bool
    call_form: ToolCallForm
    store_generated: bool  # whether the next turn's template keeps the generated tokens
    sampling: common_pb2.SamplingParams
    _chat: CachedChat | None

    def parser(self, request: GenerationRequest, card: ModelCard) -> ResponseParser:
        """A new parser for the answer."""
        tools = request.input.tools if isinstance(request.input, ChatInput) else ()
        return ResponseParser(
            card.tokenizer,
            thinking=self.thinking,
            call_form=self.call_form,
            stop=request.stop,
            tools=tools,
        )

    def chain(
        self, *, root: bytes, salt: bytes, block_tokens: int, shared: SharedPrefix = NOTHING_SHARED
    ) -> tuple[HashChain, int]:
        """The hash chain of the prompt, which can be extended, and how many tokens were hashed for it."""
        if self._chat is None:
            chain = HashChain(root=root, salt=salt, block_tokens=block_tokens)
            chain.extend(self.token_ids, shared=shared)
            return chain, len(self.token_ids)
        hashes, state, n_hashed = self._chat.hashes(
            root=root, salt=salt, block_tokens=block_tokens, more=self.forced, shared=shared
        )
        chain = HashChain(root=root, salt=salt, block_tokens=block_tokens, hashes=hashes, after=state)
        return chain, n_hashed


class PromptDraft(msgspec.Struct, frozen=True):
    """A rendered request with the ids that the token cache has; `encode_pieces` makes the others.

    `thinking`: whether the model reasons. `partial`: the last message, if the answer continues it.
    """

    request: GenerationRequest
    card: ModelCard
    memory: TokenCache
    conversation: Conversation | None  # None: plain text
    thinking: bool
    partial: Sequence[Segment] = ()

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        card: ModelCard,
        memory: TokenCache,
        *,
        tenant: str,
        query: ChatQuery | None = None,
    ) -> PromptDraft:
        """Render a request. `query`: its `query_of`, if the caller made it.

        Raises InvalidArgument naming the field.
        """
        if not isinstance(request.input, ChatInput):
            return cls(request, card, memory, None, thinking=False)
        chat = request.input
        thinking = _reasons(chat, card)
        conversation = memory.look_up(query or query_of(chat, card, tenant=tenant))
        partial = render_partial(chat.messages, thinking=thinking) if chat.partial else ()
        return cls(request, card, memory, conversation, thinking, partial)

    @property
    def new_chars(self) -> int:
        """The number of characters to encode."""
        if self.conversation is not None:
            return self.conversation.missing_chars + sum([len(segment.text) for segment in self.partial])
        return 0 if isinstance(self.request.input, ChatInput) else len(self.request.input.prompt)

    @property
    def new_messages(self) -> int:
        """The number of messages to encode, and of their tool calls."""
        if self.conversation is None:
            return 0
        return count_messages(self.conversation.query.messages[self.conversation.first :])

    @property
    def known_tokens(self) -> int:
        """The number of tokens that the cache has."""
        return self.conversation.known_tokens if self.conversation is not None else 0

    def encode_pieces(self) -> Generator[int, None, Encoded]:
        """Encode the text piece by piece; yields the number of new tokens so far. May run on any thread."""
        tokenizer = self.card.tokenizer
        special_id = tokenizer.special_ids.__getitem__
        if self.conversation is not None:
            messages = yield from encode(self.conversation, tokenizer.encode_pieces, special_id)
            if not self.partial:
                return messages, _generation_prompt(tokenizer, self.thinking)
            n_before = sum([len(message.ids) for message in messages]) // ID_BYTES
            segments = [(segment.control, segment.text) for segment in self.partial]
            tail = yield from encode_segments(
                segments, tokenizer.encode_pieces, special_id, n_before=n_before
            )
            return messages, tail
        assert not isinstance(self.request.input, ChatInput)
        if self.request.input.token_ids:
            return [], pack_ids(self.request.input.token_ids)
        text = [(False, self.request.input.prompt)]
        return [], (yield from encode_segments(text, tokenizer.encode_pieces, special_id, n_before=0))

    def encode(self) -> Encoded:
        """Encode all of it at once."""
        return run_to_end(self.encode_pieces())

    def fits(self, encoded: Encoded) -> bool:
        """Whether the context has room for all ids."""
        return self.known_tokens + count_new(*encoded) <= self.card.max_context_tokens

    def join(self, encoded: Encoded) -> tuple[TokenArray, int]:
        """All ids of a prompt that does not run, of any length, and how many were encoded for it.

        A conversation that fits the context is cached. Others may be joined on any thread.
        """
        if self.conversation is None:
            ids = unpack_ids(encoded[1])
        elif self.fits(encoded):
            ids = self.memory.finish(self.conversation, *encoded).ids
        else:
            ids = join_ids(self.conversation, *encoded)
        return _joined(ids, self._forced()), count_new(*encoded)

    def _forced(self) -> tuple[int, ...]:
        chat = self.request.input
        return _forced_prefix(chat, self.card) if isinstance(chat, ChatInput) else ()

    def finish(
        self, encoded: Encoded, *, request_id: str, constraint: OutputConstraint | None = None
    ) -> Prompt:
        """The prompt from what was encoded. Raises InvalidArgument if it exceeds the context."""
        request, card, chat = self.request, self.card, self.request.input
        cached: CachedChat | None = None
        if self.conversation is not None:
            cached = self.memory.finish(self.conversation, *encoded)
        forced = self._forced()
        ids = _joined(unpack_ids(encoded[1]) if cached is None else cached.ids, forced)
        max_tokens = check_context(
            request, prompt_tokens=len(ids), max_context_tokens=card.max_context_tokens
        )
        check_prompt_rows(request.sampling.prompt_logprobs, prompt_tokens=len(ids))
        sampling = _sampling(request, card, max_tokens=max_tokens, request_id=request_id)
        if constraint is not None:
            _write_constraint(sampling.constraint, constraint, forced)
        return Prompt(
            token_ids=ids,
            encoded_tokens=count_new(*encoded),
            forced=forced,
            thinking=self.thinking and not self.partial,
            call_form=_call_form(chat),
            # K2.5's template drops the reasoning of earlier answers, so no later prompt has those blocks.
            store_generated=not self.thinking or (isinstance(chat, ChatInput) and chat.keeps_reasoning),
            sampling=sampling,
            _chat=cached,
        )


def query_of(chat: ChatInput, card: ModelCard, *, tenant: str, declaration: str | None = None) -> ChatQuery:
    """The conversation of a request. `declaration`: the `tools_text` of its tools, if the caller made it."""
    thinking = _reasons(chat, card)
    messages = chat.messages[:-1] if chat.partial else chat.messages
    kept_from = reasoning_kept_from(messages, thinking=thinking, keeps_all=chat.keeps_reasoning)
    if declaration is None and chat.tools:
        declaration = tools_text(chat.tools)
    return ChatQuery(
        tenant,
        messages,
        # Only messages that the cache does not have are rendered.
        lambda first, end: render_chat(
            messages,
            thinking=thinking,
            first=first,
            end=end,
            kept_from=kept_from,
            add_generation_prompt=False,
        ),
        header=tools_header(declaration) if declaration is not None else (),
        kept_from=kept_from,
    )


def default_seed(request_id: str) -> int:
    """The seed of a request that states none: a function of its id, so that a resumed request has it too."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"slipstream-seed").digest()
    return int.from_bytes(digest, "little")


@functools.lru_cache(8)
def _generation_prompt(tokenizer: Tokenizer, thinking: bool) -> bytes:
    """The packed ids that follow the last message of every conversation."""
    return pack_ids(encode_chat(tokenizer, (), thinking=thinking).token_ids)


def thinks(chat: ChatInput, card: ModelCard) -> bool:
    """Whether the answer begins with reasoning. That of a partial message is over."""
    return _reasons(chat, card) and not chat.partial


def _reasons(chat: ChatInput, card: ModelCard) -> bool:
    """Whether the model reasons in this conversation. A forced call leaves no room for that."""
    return (card.thinks if chat.thinking is None else chat.thinking) and _mode(chat) not in (
        "required",
        "function",
    )


def _mode(chat: ChatInput) -> str:
    return chat.tool_choice.mode if chat.tool_choice is not None else "auto"


def _forced_prefix(chat: ChatInput, card: ModelCard) -> tuple[int, ...]:
    mode = _mode(chat)
    if mode not in ("required", "function"):
        return ()
    special = card.tokenizer.special_id
    ids = [special(TOOL_CALLS_SECTION_BEGIN), special(TOOL_CALL_BEGIN)]
    if mode == "required":
        # "functions." is left out: the first token of the name may include the dot.
        return tuple(ids)
    assert chat.tool_choice is not None
    # The index counts all calls of the conversation, as in Kimi's format.
    index = sum(len(message.get("tool_calls") or ()) for message in chat.messages)
    ids += card.tokenizer.encode_text(f"functions.{chat.tool_choice.function}:{index}")
    return (*ids, special(TOOL_CALL_ARGUMENT_BEGIN))


def _call_form(given: ChatInput | PromptInput) -> ToolCallForm:
    if isinstance(given, PromptInput):
        return ToolCallForm.TEXT
    is_allowed = bool(given.tools) and _mode(given) != "none"
    return ToolCallForm.PARSED if is_allowed else ToolCallForm.DROPPED


def _joined(ids: TokenArray, forced: Sequence[int]) -> TokenArray:
    return np.concatenate([ids, as_tokens(forced)]) if forced else ids


def _write_constraint(
    into: common_pb2.OutputConstraint, constraint: OutputConstraint, forced: Sequence[int]
) -> None:
    into.grammar = constraint.grammar
    into.awaits_calls, into.thinking = constraint.awaits_calls, constraint.thinking
    into.forced.extend(forced)
    into.field = constraint.field


def _sampling(
    request: GenerationRequest, card: ModelCard, *, max_tokens: int, request_id: str
) -> common_pb2.SamplingParams:
    sampling = request.sampling
    stops: Sequence[int] = (*card.stop_token_ids, *sampling.stop_token_ids)
    banned: Sequence[int] = ()
    if isinstance(request.input, ChatInput):
        chat, mode = request.input, _mode(request.input)
        if mode == "function" or (chat.tools and not chat.parallel_tool_calls):
            stops = (*stops, card.tokenizer.special_id(TOOL_CALL_END))
        if not chat.tools or mode == "none":
            # The tools of mode none stay in the prompt, because the conversation's cached KV includes them.
            banned = [card.tokenizer.special_id(name) for name in TOOL_CALL_TOKENS]
    seed = sampling.seed if sampling.seed is not None else default_seed(request_id)
    plain: dict[str, Any] = {**card.sampling_defaults, **sampling.given}
    plain["top_p"] = max(plain["top_p"], _MIN_TOP_P)
    return common_pb2.SamplingParams(
        **plain,
        logit_bias=sampling.logit_bias
        or None,  # filling a map, even with nothing, takes longer than all other fields
        seed=seed % (1 << 64),
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=stops,
        ignore_eos=sampling.ignore_eos,
        banned_token_ids=banned,
        top_logprobs=sampling.top_logprobs,
        # A client that has tokens of the answer has the whole prompt.
        prompt_logprobs=None if request.resume_after_tokens else sampling.prompt_logprobs,
    )
