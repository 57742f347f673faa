"""OpenAI's chat completions and completions as formats of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.api.answers.answer_format import AnswerContext, AnswerFormat, AnswerWriter, ParsedBody
from services.router.api.openai.choice_writers import ChoiceWriters
from services.router.api.openai.request import Parser, ResponseOptions, parse_chat, parse_completion
from services.router.api.openai.response import ResponseShape, ResponseWriter, sse
from services.router.request.types import GenerationRequest, PromptInput
from slipstream.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class OpenAiBody(ParsedBody):
    """A parsed body. `chat` False: one of /v1/completions."""

    requests: Sequence[GenerationRequest]
    options: ResponseOptions
    chat: bool

    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> ResponseWriter:
        options = self.options
        shape = ResponseShape(
            chat=self.chat,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
            with_stats=context.with_stats,
            echo=self._prompt_text(context, index) if options.echo else "",
            prompt_alone=options.prompt_alone,
            echo_logprobs=options.echo_logprobs,
            prompt_logprobs=options.prompt_logprobs,
        )
        return ResponseWriter(started, shape, index=index)

    def choices_writer(self, context: AnswerContext) -> ChoiceWriters:
        return ChoiceWriters(self, context, is_chat=self.chat)

    def _prompt_text(self, context: AnswerContext, index: int) -> str:
        source = self.requests[index].input
        assert isinstance(source, PromptInput)
        return source.prompt or context.text_of(source.token_ids)


class OpenAiFormat(AnswerFormat):
    """The format of one of OpenAI's endpoints."""

    def __init__(self, parse: Parser, *, chat: bool) -> None:
        self._parse = parse
        self._chat = chat

    def parse(self, data: bytes, request_id: str) -> OpenAiBody:
        requests, options = self._parse(data, request_id)
        return OpenAiBody(requests, options, self._chat)

    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        return failure.openai_body()

    def error_event(self, failure: HttpFailure, writer: AnswerWriter | None) -> bytes:
        """An error event, without [DONE]."""
        return sse(self.error_body(failure))


CHAT_COMPLETIONS = OpenAiFormat(parse_chat, chat=True)
COMPLETIONS = OpenAiFormat(parse_completion, chat=False)
