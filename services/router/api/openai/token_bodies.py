"""JSON bodies of `/tokenize` and `/detokenize`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.router.api.json_body import Flag, Text, decode_body
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.openai.messages import ChatMessage, parse_messages, parse_tools, partial_field
from services.router.api.openai.thinking import TemplateOptions, ThinkingSwitches, parse_thinking
from services.router.request.types import ChatInput, GenerationRequest, PromptInput
from slipstream import bounds


class _TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: Text = None
    prompt: Text = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    return_token_strs: Flag = None


class _DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: Text = None
    tokens: list[Any] | None = None


TOKEN_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/tokenize": _TokenizeBody,
    "/detokenize": _DetokenizeBody,
}
_TOKENIZE = msgspec.json.Decoder(_TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(_DetokenizeBody)


class Tokenize(msgspec.Struct, frozen=True):
    """The request to encode; `with_texts` asks for the text of each token."""

    request: GenerationRequest
    with_texts: bool
    ignored: IgnoredFields


class Detokenize(msgspec.Struct, frozen=True):
    """The ids to decode."""

    token_ids: list[int]
    model: str
    ignored: IgnoredFields


def parse_tokenize(data: bytes) -> Tokenize:
    """A body of /tokenize, with `prompt` or `messages`. Raises InvalidArgument."""
    ignored = IgnoredFields()
    body = decode_body(data, _TOKENIZE, ignored.add)
    source: ChatInput | PromptInput
    if body.messages is not None:
        thinking, keeps_reasoning = parse_thinking(ThinkingSwitches(body.chat_template_kwargs), ignored.add)
        source = ChatInput(
            messages=parse_messages(body.messages, ignored.add),
            tools=parse_tools(body.tools, ignored.add) if body.tools else (),
            thinking=thinking,
            keeps_reasoning=keeps_reasoning,
            partial=partial_field(
                body.messages,
                continue_final_message=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt,
            ),
        )
    elif body.prompt is not None:
        source = PromptInput(body.prompt)
    else:
        raise bounds.INPUT.refused("prompt")
    request = GenerationRequest(source, model=body.model or "")
    return Tokenize(request, body.return_token_strs is True, ignored)


def parse_detokenize(data: bytes) -> Detokenize:
    """A body of /detokenize. Raises InvalidArgument."""
    ignored = IgnoredFields()
    body = decode_body(data, _DETOKENIZE, ignored.add)
    if not body.tokens:
        raise bounds.INPUT.refused("tokens")
    for index, token in enumerate(body.tokens):
        if type(token) is not int:
            raise bounds.TYPE.refused(f"tokens[{index}]", expected="a token id")
    return Detokenize(body.tokens, body.model or "", ignored)
