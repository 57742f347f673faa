"""Anthropic's messages as a format of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.api.answers.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerOptions,
    AnswerWriter,
    ParsedBody,
)
from services.router.api.anthropic.errors import error_shape
from services.router.api.anthropic.request import parse_messages_body
from services.router.api.anthropic.writer import MessageShape, MessageWriter, sse
from services.router.request.model_card import ModelCard
from services.router.request.types import GenerationRequest
from slipstream.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class MessagesBody(ParsedBody):
    """A parsed body of /v1/messages."""

    requests: Sequence[GenerationRequest]
    options: AnswerOptions
    shape: MessageShape

    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> MessageWriter:
        return MessageWriter(started, self.shape)


class MessagesFormat(AnswerFormat):
    """The format of /v1/messages."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    def parse(self, data: bytes, request_id: str) -> MessagesBody:
        parsed = parse_messages_body(data, request_id)
        parsed.paths.check(parsed.generation, self._card)
        ignored, max_tokens = parsed.ignored, parsed.generation.sampling.max_tokens or 0
        options = AnswerOptions(
            parsed.stream,
            session=parsed.session,
            ignored=ignored.header() if ignored.count else "",
            n_ignored=ignored.count,
        )
        shape = MessageShape(max_tokens, shows_thinking=parsed.shows_thinking)
        return MessagesBody([parsed.generation], options, shape)

    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        return error_shape(failure)

    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        """The event `error`, after which no `message_stop` comes."""
        return [sse("error", error_shape(failure))]
