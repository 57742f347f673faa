"""Events of a request -> OpenAI's response shapes: whole bodies and stream chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

import msgspec

from services.router.api.answers.answer_format import AnswerWriter, Json
from services.router.api.answers.logprob_rows import (
    CompletionRows,
    LogprobBudget,
    LogprobRows,
    row_object,
)
from services.router.api.answers.usage_cost import cost_fields
from services.router.api.openai.prompt_logprobs import PromptLogprobsWriter
from slipstream.enum_names import ANSWER_TIERS, TRANSPORTS
from slipstream.v1 import common_pb2, router_pb2

_FINISH: Mapping[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
DONE = b"data: [DONE]\n\n"
_AFTER_CONTENT = b'},"logprobs":null}'


class ResponseShape(msgspec.Struct, frozen=True, gc=False):
    """How an answer is written. `chat` False: the shape of /v1/completions, where reasoning is text.

    `echo` is the prompt's text, before the answer's. `prompt_alone`: the answer is that text alone, or empty.
    `echo_logprobs` and `prompt_logprobs`: see `ResponseOptions`.
    """

    chat: bool
    include_usage: bool = False
    continuous_usage: bool = False
    with_stats: bool = False
    echo: str = ""
    prompt_alone: bool = False
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None


class ResponseWriter(AnswerWriter):
    """One choice of an answer as it grows. `index` is the choice's."""

    def __init__(self, started: router_pb2.Started, shape: ResponseShape, *, index: int = 0) -> None:
        self._started = started
        self._shape = shape
        self._chat = shape.chat
        self._index = index
        self._text: list[str] = [shape.echo]
        self._reasoning: list[str] = []
        self._calls: list[Json] = []
        self.share_budget(LogprobBudget())
        self._echo_chars = len(shape.echo)
        self._prompt = PromptLogprobsWriter(echo_top=shape.echo_logprobs, top=shape.prompt_logprobs)
        self.keeps_prompt = False  # for the further choices of a stream
        self._prompt_is_whole = False  # another choice has brought the rows
        self._before = b"data: " + msgspec.json.encode(self._head(".chunk"))[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        before_content = b'{"index":%d,"finish_reason":null,"delta":{"content":' % index
        self._before_content = self._before + before_content

    def share_budget(self, budget: LogprobBudget) -> None:
        """Count the log probabilities of a whole answer with those of its other choices."""
        self._rows = LogprobRows(budget)
        self._completion_rows = CompletionRows(budget)

    def share_prompt(self, first: ResponseWriter) -> None:
        """Take the rows of the prompt from the first choice, which has them all."""
        self._prompt, self._prompt_is_whole = first._prompt, True

    # ---- streaming, in server-sent events

    def opening(self) -> bytes:
        """The event before all others; completions have none but that of an echoed prompt."""
        if self._chat:
            return self._event({"role": "assistant", "content": ""}, (), 0)
        if self._prompt_is_whole:
            return self._prompt_event(self._shape.echo, self._prompt.whole_logprobs(None), self._prompt.rows)
        return self._event({"text": self._shape.echo}, (), 0) if self._shape.echo else b""

    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        """One piece of the answer, or of the prompt's rows. Events of plain content differ in their text."""
        if delta.prompt_logprobs:
            items = delta.prompt_logprobs
            logprobs, rows = self._prompt.next_logprobs(items), self._prompt.next_rows(items)
            if self.keeps_prompt:
                self._prompt.keep(logprobs, rows)
            data = self._prompt_event("", logprobs, rows)
            if not delta.completion_tokens:
                return data
            rest = router_pb2.Delta()
            rest.CopyFrom(delta)
            rest.ClearField("prompt_logprobs")
            return data + self.delta_event(rest)
        if not self._chat:
            if self._shape.prompt_alone:
                return b""
            return self._event(
                {"text": delta.reasoning + delta.text}, delta.logprobs, delta.completion_tokens
            )
        is_plain = not (delta.reasoning or delta.tool_calls or delta.logprobs or self._shape.continuous_usage)
        if delta.text and is_plain:
            text = encode_basestring(delta.text).encode()
            return b"".join((self._before_content, text, _AFTER_CONTENT, self._after))
        return self._event(_piece(delta), delta.logprobs, delta.completion_tokens)

    def finish_event(self, finished: router_pb2.Finished, *, with_stats: bool) -> bytes:
        """The choice's finish reason, and the statistics where they stand in no event of the usage."""
        finish = finish_reason(finished)
        piece = '"delta":{}' if self._chat else '"text":""'
        last = f'{{"index":{self._index},"finish_reason":"{finish}",{piece},"logprobs":null}}'.encode()
        if with_stats:
            stats = msgspec.json.encode(stats_object(finished))
            return self._before + last + b'],"slipstream":' + stats + b"}\n\n"
        return self._before + last + self._after_of(finished.usage.completion_tokens)

    def usage_event(self, usage: router_pb2.Usage, stats: Json | None = None) -> bytes:
        """The event after those of all choices, where the usage was asked for."""
        said = b'],"usage":' + msgspec.json.encode(usage_object(usage))
        if stats is not None:
            said += b',"slipstream":' + msgspec.json.encode(stats)
        return self._before + said + b"}\n\n"

    def closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """The end of an answer of one choice: finish reason, usage, statistics, and the end mark."""
        stats, usage = self._shape.with_stats, self._shape.include_usage
        last = self.finish_event(finished, with_stats=stats and not usage)
        if usage:
            last += self.usage_event(finished.usage, stats_object(finished) if stats else None)
        yield last + DONE

    def answer_end(self, usage: router_pb2.Usage, first: router_pb2.Finished) -> bytes:
        """The end of an answer of several choices, whose first one ended with `first`."""
        last = b""
        if self._shape.include_usage:
            last = self.usage_event(usage)
        elif self._shape.with_stats:
            last = self.finish_event(first, with_stats=True)
        return last + DONE

    # ---- whole

    def add(self, delta: router_pb2.Delta) -> None:
        """Fold a piece into the whole answer."""
        if delta.prompt_logprobs:
            self._prompt.add(delta.prompt_logprobs)
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        if self._chat:
            self._rows.add(delta.logprobs)
        elif (logprobs := self._completion_logprobs(delta.logprobs)) is not None:
            self._completion_rows.add(logprobs)
        for piece in delta.tool_calls:
            while len(self._calls) <= piece.index:
                self._calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self._calls[piece.index]
            call["id"] = piece.id or call["id"]
            call["function"]["name"] = piece.name or call["function"]["name"]
            call["function"]["arguments"] += piece.arguments

    def choice(self, finished: router_pb2.Finished) -> Json:
        """The whole choice, after all pieces were added."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        choice: Json = {"index": self._index, "finish_reason": finish_reason(finished)}
        if not self._chat:
            if (rows := self._prompt.rows) is not None:
                choice["prompt_logprobs"] = rows
            if self._shape.prompt_alone:
                return choice | {"text": self._shape.echo, "logprobs": self._prompt.whole_logprobs(None)}
            logprobs = self._prompt.whole_logprobs(self._completion_rows.lists or None)
            return choice | {"text": reasoning + text, "logprobs": logprobs}
        # As OpenAI: an answer of tool calls alone has null content.
        message: Json = {"role": "assistant", "content": text or (None if self._calls else "")}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return choice | {
            "message": message,
            "logprobs": {"content": self._rows.json()} if self._rows else None,
        }

    def body(self, finished: router_pb2.Finished) -> Json:
        """The whole answer of one choice, after all pieces were added."""
        return self.body_of([self.choice(finished)], finished.usage, finished)

    def body_of(self, choices: Sequence[Json], usage: router_pb2.Usage, first: router_pb2.Finished) -> Json:
        """The whole answer of these choices. `first`: the end of the first one, for the statistics."""
        body = {**self._head(), "choices": choices, "usage": usage_object(usage)}
        if self._chat and (rows := self._prompt.rows) is not None:
            body["prompt_logprobs"] = rows
        if self._shape.with_stats:
            body["slipstream"] = stats_object(first)
        return body

    # ---- common

    def _head(self, kind: str = "") -> Json:
        """The first fields of a whole body and of each chunk of a stream. `kind`: ".chunk" for a chunk."""
        name, prefix = ("chat.completion" + kind, "chatcmpl") if self._chat else ("text_completion", "cmpl")
        started = self._started
        return {
            "id": f"{prefix}-{started.request_id}",
            "object": name,
            "created": int(started.created_unix_s),
            "model": started.model,
            "system_fingerprint": None,
        }

    def _event(self, piece: Json, logprobs: Any, completion_tokens: int) -> bytes:
        """A chunk with one choice between the text that all chunks share."""
        choice: Json = {"index": self._index, "finish_reason": None}
        if self._chat:
            choice |= {"delta": piece, "logprobs": _chat_logprobs(logprobs)}
        else:
            choice |= {**piece, "logprobs": self._completion_logprobs(logprobs)}
        return self._before + msgspec.json.encode(choice) + self._after_of(completion_tokens)

    def _prompt_event(self, text: str, logprobs: Json | None, rows: Sequence[Any] | None) -> bytes:
        """A chunk with rows of the prompt: in the choice, or as vLLM beside a chat's only prompt."""
        choice: Json = {"index": self._index, "finish_reason": None, "logprobs": logprobs}
        if self._chat:
            after = b'],"prompt_logprobs":' + msgspec.json.encode(rows) + self._after_of(0)[1:]
            return self._before + msgspec.json.encode(choice | {"delta": {}}) + after
        choice |= {"text": text} if rows is None else {"text": text, "prompt_logprobs": rows}
        return self._before + msgspec.json.encode(choice) + self._after_of(0)

    def _after_of(self, completion_tokens: int) -> bytes:
        """The end of a chunk, with the tokens so far where each chunk has them."""
        if not self._shape.continuous_usage:
            return self._after
        prompt_tokens = self._started.prompt_tokens
        usage = router_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return b'],"usage":' + msgspec.json.encode(usage_object(usage)) + b"}\n\n"

    def _completion_logprobs(self, items: Any) -> Json | None:
        """Log probabilities of the next tokens, with the offset of each in the choice's text."""
        if not items:
            return None
        return {
            "tokens": [item.token for item in items],
            "token_logprobs": [item.logprob for item in items],
            # Of tokens with equal text the most likely one stays.
            "top_logprobs": [{top.token: top.logprob for top in reversed(item.top)} for item in items],
            "text_offset": [self._echo_chars + item.text_offset for item in items],
        }


def _piece(delta: router_pb2.Delta) -> Json:
    piece: Json = {}
    if delta.reasoning:
        piece["reasoning_content"] = delta.reasoning
    if delta.text:
        piece["content"] = delta.text
    if delta.tool_calls:
        piece["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return piece


def finish_reason(finished: router_pb2.Finished) -> str:
    """Why an answer ended, in OpenAI's words."""
    return _FINISH.get(finished.finish_reason, "stop")


def sse(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def stats_object(finished: router_pb2.Finished) -> Json:
    """Where the request ran and what it took, by the field names of `RequestStats`."""
    stats = finished.stats
    values: Json = {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
    values["transport"] = TRANSPORTS.name(stats.transport)
    for name in ("ttft_ms", "decode_ms", "acceptance_length"):
        values[name] = round(values[name], 3)
    values["cached_tokens_by_tier"] = {
        ANSWER_TIERS.name(item.tier): item.tokens for item in finished.usage.cached
    }
    return values


def usage_object(usage: router_pb2.Usage) -> Json:
    """The tokens of an answer, and its cost."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **cost_fields(usage),
    }


def _call_piece(call: router_pb2.ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _chat_logprobs(items: Any) -> Json | None:
    if not items:
        return None
    return {"content": [row_object(item) for item in items]}
