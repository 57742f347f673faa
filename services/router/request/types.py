"""The records of a client's request, which the HTTP and the gRPC parser make.

Messages and tools stay OpenAI-shaped mappings, the form that `libs.text` renders. A field that the client
left out is None; validation.py checks the others, prompt.py fills the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from libs.structured.answer_grammar import OutputFormat
from slipstream import bounds

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_CHARS_OF_TOKEN = 4


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """Whether the model may or must call tools; `function` is the one to call in mode "function".

    `allowed`: the names of the tools that may be called; empty = all.
    """

    mode: Literal["none", "auto", "required", "function"]
    function: str = ""
    allowed: Sequence[str] = ()


class ChatInput(msgspec.Struct, frozen=True, gc=False):
    """A conversation to answer. `thinking` None: as the model does by default.

    `keeps_reasoning`: the reasoning of all earlier answers stays in the prompt. `parallel_tool_calls` False
    allows at most one call in the answer. `partial`: the field of the client's request that asks the answer
    to continue the last message; empty: none does.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    thinking: bool | None = None
    keeps_reasoning: bool = False
    parallel_tool_calls: bool = True
    partial: str = ""


class PromptInput(msgspec.Struct, frozen=True, gc=False):
    """A text to continue without a chat template, or its token ids."""

    prompt: str = ""
    token_ids: Sequence[int] = ()


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling as the client states it. `top_logprobs` and `prompt_logprobs` None: no log probabilities.

    `given` holds the plain fields that the client stated, by the names of SAMPLING_RANGES.
    """

    given: Mapping[str, float] = msgspec.field(default_factory=dict)
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # the name of the field in the client's request
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, gc=False):
    """A request for one answer."""

    input: ChatInput | PromptInput
    model: str = ""  # empty: the model served
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    stop: Sequence[str] = ()
    output: OutputFormat | None = None  # the form of the answer's text
    request_id: str = ""  # empty: the router chooses one
    resume_after_tokens: int = 0
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    priority: str = ""  # admission class; empty: that of the Caller
    reject_if_busy: bool = False  # refuse the request if it would wait for capacity
    is_capped_by_context: bool = False  # a `max_tokens` beyond the context ends the answer there, unrefused
    # No token is asked for. The engine makes one to compute the prompt; no answer has it, and no counter.
    is_prompt_alone: bool = False

    @property
    def text_chars(self) -> int:
        """The approximate number of characters of the input, to estimate its tokens before encoding."""
        if isinstance(self.input, PromptInput):
            return len(self.input.prompt) or _CHARS_OF_TOKEN * len(self.input.token_ids)
        return sum([len(message.get("content") or "") for message in self.input.messages])


class Caller(msgspec.Struct, frozen=True, gc=False):
    """The client and its options from headers or metadata, never from the body.

    `deadline_s` is on the event loop's clock; None = no deadline. `requested_prefill` is an instance.
    `attempt` counts the tries of a client that can resume at another router; 0 = the client cannot.
    """

    tenant: str = "default"
    session: str | None = None
    deadline_s: float | None = None
    requested_prefill: str | None = None
    attempt: int = 0
    priority: str = ""
    reject_if_busy: bool = False
    key_sha256: bytes = b""  # of the API key; empty: none
    endpoint: str = ""  # the path or the RPC of the call
    submitted_unix_s: int = 0  # of a stored job, which has the lowest class; 0: a live request

    @property
    def is_job(self) -> bool:
        """Whether no client waits for the answer."""
        return bool(self.submitted_unix_s)

    def until(self, deadline_s: float) -> Caller:
        """A copy with this deadline."""
        return msgspec.structs.replace(self, deadline_s=deadline_s)

    def within_default(self, now_s: float) -> Caller:
        """The caller, with the default deadline where it has none."""
        return self.until(now_s + bounds.DEFAULT_DEADLINE_S) if self.deadline_s is None else self

    def of_session(self, session: str | None) -> Caller:
        """A copy with this session, unless the caller names one."""
        if session is None or self.session is not None:
            return self
        return msgspec.structs.replace(self, session=session)
