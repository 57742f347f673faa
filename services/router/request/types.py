"""What a client asks for, free of any face: both the HTTP and the gRPC parser make these.

Messages and tools stay OpenAI-shaped mappings, the form `libs.text` renders. A field the client left
out is None; validate.py checks what is there, prompt.py fills the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """How freely the model may call tools; `function` names the one to call with mode "function"."""

    mode: Literal["none", "auto", "required", "function"]
    function: str = ""


class ChatInput(msgspec.Struct, frozen=True, gc=False):
    """A conversation to answer. `parallel_tool_calls` False: at most one call an answer."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    thinking: bool = False
    parallel_tool_calls: bool = True


class PromptInput(msgspec.Struct, frozen=True, gc=False):
    """A text to continue, without a template."""

    prompt: str


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling as the client states it. `top_logprobs` None: no log probabilities.

    `given` holds the plain fields that the client stated, by the names of SAMPLING_RANGES.
    """

    given: Mapping[str, float] = msgspec.field(default_factory=dict)
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # the client's name for it
    top_logprobs: int | None = None
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, gc=False):
    """One request for one answer."""

    input: ChatInput | PromptInput
    model: str = ""  # empty: the model served
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    stop: Sequence[str] = ()
    request_id: str = ""  # empty: chosen by the router
    resume_after_tokens: int = 0
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    priority: str = ""  # class of admission; empty: the caller's
    reject_if_busy: bool = False  # rather be refused than wait for capacity

    @property
    def text_chars(self) -> int:
        """Characters of the input, about: what its size is estimated by before it is encoded."""
        if isinstance(self.input, PromptInput):
            return len(self.input.prompt)
        return sum([len(message.get("content") or "") for message in self.input.messages])


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks and on what terms: from headers or metadata, never from the body.

    `deadline_s` is on the event loop's clock; None = no deadline. `pinned_prefill` is an instance.
    `attempt`: the client can go on at another router, and this is its so-many-th try; 0 = it cannot.
    """

    tenant: str = "default"
    session: str | None = None
    deadline_s: float | None = None
    pinned_prefill: str | None = None
    attempt: int = 0
    priority: str = ""
    reject_if_busy: bool = False

    def until(self, deadline_s: float) -> Caller:
        """The same with this deadline."""
        return Caller(
            self.tenant,
            self.session,
            deadline_s,
            self.pinned_prefill,
            self.attempt,
            self.priority,
            self.reject_if_busy,
        )
