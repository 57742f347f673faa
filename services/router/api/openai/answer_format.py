"""OpenAI's chat completions and completions as formats of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """A parsed body. `chat` False: one of /v1/completions.

    `prompt_texts`: the prompts that choices echo, by the index of the first choice with the prompt.
    """

    requests: Sequence[GenerationRequest]
    options: ResponseOptions
    chat: bool
    prompt_texts: dict[int, str] = field(default_factory=dict)

    async def before_writer(self, context: AnswerContext, index: int = 0) -> None:
        if not self.options.echo or (leader := self._leader(index)) in self.prompt_texts:
            return
        source = self.requests[leader].input
        assert isinstance(source, PromptInput)
        self.prompt_texts[leader] = source.prompt or await context.text_of(source.token_ids)

    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> ResponseWriter:
        options = self.options
        shape = ResponseShape(
            chat=self.chat,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
            with_stats=context.with_stats,
            echo=self.prompt_texts[self._leader(index)] if options.echo else "",
            prompt_alone=self.requests[index].is_prompt_alone,
            echo_logprobs=options.echo_logprobs,
            prompt_logprobs=options.prompt_logprobs,
        )
        return ResponseWriter(started, shape, index=index)

    def choices_writer(self, context: AnswerContext) -> ChoiceWriters:
        return ChoiceWriters(self, context, is_chat=self.chat)

    def _leader(self, index: int) -> int:
        """The first choice with the same prompt."""
        source = self.requests[index].input
        return next(i for i, request in enumerate(self.requests) if request.input is source)


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

    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        """An error event, without [DONE]."""
        return [sse(self.error_body(failure))]


CHAT_COMPLETIONS = OpenAiFormat(parse_chat, chat=True)
COMPLETIONS = OpenAiFormat(parse_completion, chat=False)
