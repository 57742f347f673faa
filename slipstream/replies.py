"""The answer to a request: events while it streams, one `Reply` at its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from slipstream.enum_names import ANSWER_FINISH_REASONS, ANSWER_TIERS, TRANSPORTS
from slipstream.errors import AnswerMismatch
from slipstream.typed.type_value import KindT, parse_json
from slipstream.v1 import router_pb2


@dataclass(slots=True)
class ToolCall:
    """One call the model makes. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """The call as it goes back into the messages of the next turn."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. Those of the prompt include the cached ones, and completion those of reasoning.

    `cached_by_tier` sums to `cached_tokens`. `cost` is exact, and None where the router has no prices. Of
    several choices the first pays the prompt. Stored responses and batches have neither tiers nor cost.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    cost: Decimal | None = None
    currency: str = ""  # of `cost`, as "USD"
    reasoning_tokens: int = 0


class PromptTokens(list[int]):
    """The token ids of a prompt as the model reads it, and the size of the model's context."""

    def __init__(self, token_ids: Iterable[int], max_context_tokens: int) -> None:
        super().__init__(token_ids)
        self.max_context_tokens = max_context_tokens


@dataclass(frozen=True, slots=True)
class ModelPricing:
    """The exact price of one token of each kind, in the currency."""

    currency: str  # as "USD"
    input: Decimal
    cached_input: Decimal
    output: Decimal


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by one of its names. `pricing` is None where the router has no prices."""

    id: str
    max_context_tokens: int
    created_unix_s: float
    pricing: ModelPricing | None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Where the request ran and what it took."""

    prefill_worker: str
    decode_worker: str
    kvstore: str
    ttft_ms: float
    decode_ms: float
    kv_bytes_pulled: int
    transport: str
    decode_steps: int
    proposed_drafts: int
    accepted_drafts: int
    acceptance_length: float
    attempts: int
    reason: str
    drafted_steps: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one emitted token, and of the most likely ones at its position.

    Those of a prompt have a rank, 1 for the most likely token. The prompt's first token has rank 0 and no log
    probability.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[Logprob, ...] = ()
    token_id: int = 0  # with a rank
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of a streaming reply; any field may be empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # pieces: `arguments` holds the next part of the JSON text
    logprobs: tuple[Logprob, ...] = ()
    completion_tokens: int = 0  # emitted so far, this piece included
    index: int = 0  # of the choice, below `n`
    prompt_logprobs: tuple[Logprob, ...] = ()  # of the next prompt tokens, before the answer


@dataclass(slots=True)
class Reply:
    """A whole reply. `finish_reason`: stop | length | tool_calls | aborted | error."""

    request_id: str = ""
    model: str = ""
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    stats: RequestStats | None = None
    others: list[Reply] = field(default_factory=list)  # the further choices, where `n` is above 1
    response_id: str = ""  # of an answer that is stored, once it has ended

    @property
    def choices(self) -> list[Reply]:
        """All `n` replies; this one is the first."""
        return [self, *self.others]

    def parse(self, kind: type[KindT]) -> KindT:
        """The text as an instance of the type that `response_format` named. Raises AnswerMismatch.

        An answer that reaches `max_tokens` is closed where its form allows that: strings may be cut short.
        """
        early = AnswerMismatch(f"the answer ended before its form did: finish_reason {self.finish_reason}")
        if self.finish_reason in ("tool_calls", "aborted", "error"):
            raise early
        try:
            return parse_json(kind, self.text)
        except AnswerMismatch:
            if self.finish_reason == "length":
                raise early from None
            raise

    def as_message(self) -> dict[str, Any]:
        """The reply as the assistant message of the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_openai() for call in self.tool_calls]
        return message


class ReplyBuilder:
    """Folds the events of one Generate call into reader events and the final `Reply`."""

    def __init__(self) -> None:
        self.reply = Reply()

    def feed(self, event: router_pb2.GenerateEvent) -> Event | None:
        """Process one event of the router. Returns the reader's event, None for `started` and `finished`."""
        kind = event.WhichOneof("kind")
        if kind == "started":
            reply = self._choice(event.started.index)
            reply.request_id = event.started.request_id
            reply.model = event.started.model
            reply.response_id = event.started.response_id
        elif kind == "delta":
            return _add_delta(self._choice(event.delta.index), event.delta)
        elif kind == "finished":
            _finish(self._choice(event.finished.index), event.finished)
        return None

    def _choice(self, index: int) -> Reply:
        while len(self.reply.others) < index:
            self.reply.others.append(Reply())
        return self.reply.others[index - 1] if index else self.reply


def _add_delta(reply: Reply, delta: router_pb2.Delta) -> Event:
    calls = []
    for piece in delta.tool_calls:
        while len(reply.tool_calls) <= piece.index:
            reply.tool_calls.append(ToolCall(id="", name=""))
        whole = reply.tool_calls[piece.index]
        whole.id = piece.id or whole.id
        whole.name = piece.name or whole.name
        whole.arguments += piece.arguments
        calls.append(ToolCall(id=whole.id, name=whole.name, arguments=piece.arguments))
    reply.text += delta.text
    reply.reasoning += delta.reasoning
    logprobs = tuple(_logprob(item) for item in delta.logprobs)
    reply.logprobs.extend(logprobs)
    prompt = tuple(_logprob(item) for item in delta.prompt_logprobs)
    reply.prompt_logprobs.extend(prompt)
    return Event(
        delta.text, delta.reasoning, tuple(calls), logprobs, delta.completion_tokens, delta.index, prompt
    )


def _finish(reply: Reply, finished: router_pb2.Finished) -> None:
    stats = finished.stats
    reply.finish_reason = ANSWER_FINISH_REASONS.name(finished.finish_reason)
    reply.usage = usage_of(finished.usage)
    values = {name: getattr(stats, name) for name in RequestStats.__slots__}
    reply.stats = RequestStats(**values | {"transport": TRANSPORTS.name(stats.transport)})


def served_models(response: router_pb2.ListModelsResponse) -> list[ServedModel]:
    """The models of an answer."""
    return [
        ServedModel(
            model.id,
            model.max_context_tokens,
            model.created_unix_s,
            _pricing(model.price) if model.HasField("price") else None,
        )
        for model in response.models
    ]


def _pricing(price: router_pb2.ModelPrice) -> ModelPricing:
    pico = (price.input_pico, price.cached_input_pico, price.output_pico)
    return ModelPricing(price.currency, *(_amount(each) for each in pico))


def _amount(pico: int) -> Decimal:
    return Decimal(pico).scaleb(-12)


def usage_of(usage: router_pb2.Usage) -> Usage:
    """The token counts of a message."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cached_by_tier={ANSWER_TIERS.name(item.tier): item.tokens for item in usage.cached},
        cost=_amount(usage.cost.amount_pico) if usage.HasField("cost") else None,
        currency=usage.cost.currency,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _logprob(item: router_pb2.TextLogprob) -> Logprob:
    top = tuple(_logprob(each) for each in item.top)
    return Logprob(item.token, item.token_bytes, item.logprob, top, item.token_id, item.rank)
