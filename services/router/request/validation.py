"""Checks the values of a request against the table of bounds, for HTTP and gRPC alike. Pure.

Errors name fields by their paths in the HTTP body: `messages[1].role`, `tools[0].function.name`.

Nearly all bounds of slipstream/bounds.py are checked at these places (files below services/router/):

    bytes     HTTP: RequestReader.body (api/http/request_reader.py), then check_structure before a parser;
              gRPC: the port's message bound (ports.py), then read_message (api/rpc/wire/message_reader.py)
    types     the parser of each API, which makes a GenerationRequest (types.py)
    values    RequestManager.begin -> check_caller, check_values; those of a job before it is stored:
              AnswerExecutor.check (api/jobs/executor.py) -> check_values
    context   encode_prompt -> PromptDraft.finish -> check_context, once the prompt is encoded;
              what the workers that are there take: select_workers (execution/attempts/worker_selection.py)
    workers   parse_prompt, parse_sampling (libs/worker/requests/request_spec.py): they trust no router
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from libs.structured.answer_grammar import OutputFormat
from libs.structured.schema.schema_walk import is_shallow
from libs.text.tool_schema import validate_tools
from services.router.admission.types import PRIORITIES
from services.router.request.model_card import ModelCard
from services.router.request.token_ids import are_below
from services.router.request.types import Caller, ChatInput, GenerationRequest, Message, PromptInput, Sampling
from slipstream import bounds
from slipstream.bound import shown, shown_name
from slipstream.credentials.api_key_file import KEY_PREFIX
from slipstream.errors import NotFound
from slipstream.sampling import SAMPLING_RANGES

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# A message of these roles that has a text and nothing else is valid.
_TALKING_ROLES = ROLES - {"tool"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Without control characters and lone surrogates, which UTF-8 cannot encode.
_SESSION = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_SESSION_BYTES = 256


def is_request_id(text: str) -> bool:
    """Whether a client may name its request so. An API key by mistake would get into the logs."""
    return _REQUEST_ID.fullmatch(text) is not None and not text.startswith(KEY_PREFIX)


def validate(
    request: GenerationRequest, *, models: Sequence[str], vocab_size: int, max_context_tokens: int
) -> None:
    """Raises InvalidArgument naming the first field out of bounds, NotFound for an unknown model."""
    check_model(request.model, models)
    if request.request_id and not is_request_id(request.request_id):
        raise bounds.REQUEST_ID.refused()
    if request.priority and request.priority not in PRIORITIES:
        raise bounds.PRIORITY.refused()
    if request.metadata:
        _check_metadata(request.metadata)
    bounds.RESUME.check(request.resume_after_tokens)
    if isinstance(request.input, PromptInput):
        _check_prompt(request.input, vocab_size=vocab_size)
    else:
        _check_chat(request.input)
    longest = sys.maxsize if request.is_capped_by_context else max_context_tokens
    _check_sampling(request.sampling, vocab_size=vocab_size, max_context_tokens=longest)
    if request.stop:
        _check_stop(request.stop)
    if request.output is not None:
        _check_output(request.output)
        if isinstance(request.input, ChatInput) and request.input.partial:
            raise bounds.PARTIAL_OUTPUT.refused(request.output.field)


def check_values(request: GenerationRequest, card: ModelCard) -> None:
    """Validate like `validate`, by the limits of the served model."""
    validate(
        request,
        models=card.names,
        vocab_size=card.vocab_size,
        max_context_tokens=card.max_context_tokens,
    )


def check_model(model: str, models: Sequence[str]) -> None:
    """Raises NotFound for a model that is not among `models`. No name stands for the served one."""
    if model and model not in models:
        reason = bounds.MODEL.refused(model=shown(model), served=", ".join(models))
        raise NotFound(reason.message, field="model")


def is_session(text: str) -> bool:
    """Whether a client may name a session so."""
    return _SESSION.fullmatch(text) is not None and len(text.encode()) <= _SESSION_BYTES


def check_caller(caller: Caller, *, allow_requested_prefill: bool) -> None:
    """Check the headers. Raises InvalidArgument naming the first one out of bounds."""
    session = caller.session
    if session is not None and not is_session(session):
        raise bounds.SESSION.refused()
    if caller.priority and caller.priority not in PRIORITIES:
        raise bounds.PRIORITY.refused("x-slipstream-priority")
    if caller.requested_prefill is not None and not allow_requested_prefill:
        raise bounds.PINNING.refused()


def prompt_field(request: GenerationRequest) -> str:
    """The field of the request that holds its text."""
    return "prompt" if isinstance(request.input, PromptInput) else "messages"


def check_context(request: GenerationRequest, *, prompt_tokens: int, max_context_tokens: int) -> int:
    """The largest number of tokens to generate. Raises InvalidArgument if the context has no room for it."""
    room = max_context_tokens - prompt_tokens
    if room < 1:
        raise bounds.PROMPT_TOKENS.refused(
            prompt_field(request), prompt_tokens=prompt_tokens, max_context_tokens=max_context_tokens
        )
    wanted = request.sampling.max_tokens
    if wanted is None or (wanted > room and request.is_capped_by_context):
        return room
    if wanted > room:
        raise bounds.CONTEXT.refused(
            request.sampling.max_tokens_field,
            max_tokens=wanted,
            prompt_tokens=prompt_tokens,
            total=prompt_tokens + wanted,
            max_context_tokens=max_context_tokens,
        )
    return wanted


def check_prompt_rows(prompt_logprobs: int | None, *, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the log probabilities of the prompts of an answer are too many."""
    if prompt_logprobs is not None:
        bounds.PROMPT_ROWS.check(prompt_tokens * (1 + prompt_logprobs))


def _check_prompt(source: PromptInput, *, vocab_size: int) -> None:
    if not source.token_ids:
        bounds.PROMPT.check(len(source.prompt.encode()))
    elif not are_below(source.token_ids, vocab_size):
        raise bounds.PROMPT_IDS.refused(last=vocab_size - 1)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    bounds.METADATA.check(len(metadata))
    for key, value in metadata.items():
        path = f"metadata.{shown_name(key)}"
        bounds.METADATA_KEY.check(len(key), path)
        bounds.METADATA_VALUE.check(len(value), path)


def _check_stop(stop: Sequence[str]) -> None:
    bounds.STOP.check(len(stop))
    for index, text in enumerate(stop):
        bounds.STOP_STRING.check(len(text.encode()), f"stop[{index}]")


def _check_output(output: OutputFormat) -> None:
    content, field = output.content, output.field
    if output.kind in ("regex", "lark"):
        bounds.OUTPUT_TEXT.check(len(content.encode("utf-8", "replace")), field)
    elif output.kind == "choice":
        if not isinstance(content, list) or not all(isinstance(text, str) and text for text in content):
            raise bounds.TYPE.refused(field, expected="a list of strings that are not empty")
        bounds.OUTPUT_CHOICES.check(len(content), field)
        bounds.OUTPUT_TEXT.check(sum(len(text.encode("utf-8", "replace")) for text in content), field)
    elif output.kind == "json_schema":
        if not isinstance(content, Mapping | bool):
            raise bounds.OUTPUT_SCHEMA.refused(field)
        if not is_shallow(content, bounds.MAX_OUTPUT_DEPTH):
            raise bounds.OUTPUT_SCHEMA_DEPTH.refused(field)
        bounds.OUTPUT_SCHEMA_BYTES.check(len(json.dumps(content)), field)


def _check_sampling(sampling: Sampling, *, vocab_size: int, max_context_tokens: int) -> None:
    for name, value in sampling.given.items():
        SAMPLING_RANGES[name].check(value)
    if sampling.seed is not None:
        bounds.SEED.check(sampling.seed)
    if sampling.top_logprobs is not None:
        bounds.TOP_LOGPROBS.check(sampling.top_logprobs)
    if sampling.prompt_logprobs is not None:
        bounds.PROMPT_LOGPROBS.check(sampling.prompt_logprobs)
    limit = sampling.max_tokens
    if limit is not None and not 1 <= limit <= max_context_tokens:
        row = bounds.MAX_TOKENS if limit < 1 else bounds.COMPLETION
        details = {"max_context_tokens": max_context_tokens, "value": shown(limit)}
        raise row.refused(sampling.max_tokens_field, **details)
    if not 0 <= sampling.min_tokens <= (max_context_tokens if limit is None else limit):
        raise bounds.MIN_TOKENS.refused(value=shown(sampling.min_tokens))
    bounds.STOP_TOKENS.check(len(sampling.stop_token_ids))
    for index, token in enumerate(sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise bounds.STOP_TOKEN.refused(f"stop_token_ids[{index}]", last=vocab_size - 1)
    if sampling.logit_bias:
        _check_logit_bias(sampling.logit_bias, vocab_size=vocab_size)


def _check_logit_bias(biases: Mapping[int, float], *, vocab_size: int) -> None:
    bounds.LOGIT_BIAS.check(len(biases))
    for token, bias in biases.items():
        path = f"logit_bias.{token}"
        if not 0 <= token < vocab_size:
            raise bounds.LOGIT_BIAS_TOKEN.refused(path, last=vocab_size - 1)
        bounds.LOGIT_BIAS_VALUE.check(bias, path)


def _check_chat(chat: ChatInput) -> None:
    bounds.MESSAGES.check(len(chat.messages))
    _check_calls_together(chat.messages)
    calls: set[str] = set()
    for index, message in enumerate(chat.messages):
        if len(message) != 2 or not message.get("content") or message.get("role") not in _TALKING_ROLES:
            _check_message(message, f"messages[{index}]", calls)
    if chat.partial:
        _check_partial(chat)
    names = validate_tools(chat.tools) if chat.tools else ()
    _check_strict(chat.tools)
    choice = chat.tool_choice
    if choice is None or (choice.mode in ("none", "auto") and not choice.allowed):
        return
    if not names:
        raise bounds.TOOL_CHOICE_TOOLS.refused()
    for name in (choice.function,) if choice.mode == "function" else choice.allowed:
        if name not in names:
            raise bounds.TOOL_CHOICE_FUNCTION.refused(name=shown(name))


def _check_partial(chat: ChatInput) -> None:
    last = chat.messages[-1]
    if last.get("role") != "assistant":
        raise bounds.PARTIAL.refused(chat.partial)
    if last.get("tool_calls"):
        raise bounds.PARTIAL_CALLS.refused(f"messages[{len(chat.messages) - 1}].tool_calls")
    if chat.tool_choice is not None and chat.tool_choice.mode not in ("none", "auto"):
        raise bounds.PARTIAL_TOOL_CHOICE.refused()


def _check_strict(tools: Sequence[Mapping[str, Any]]) -> None:
    for index, tool in enumerate(tools):
        if not isinstance(tool["function"].get("strict"), bool | None):
            raise bounds.TOOL_STRICT.refused(f"tools[{index}].function.strict")


def _check_calls_together(messages: Sequence[Message]) -> None:
    bounds.TOOL_CALLS_TOGETHER.check(sum([len(message.get("tool_calls") or ()) for message in messages]))


def _check_message(message: Message, path: str, calls: set[str]) -> None:
    """Check one message. `calls` holds the ids of all tool calls so far; this message's are added."""
    role = message.get("role")
    if role not in ROLES:
        raise bounds.ROLE.refused(f"{path}.role")
    name = message.get("name")
    if name is not None:
        bounds.NAME.check(len(name.encode()), f"{path}.name")
    for field in ("tool_calls", "reasoning_content"):
        if message.get(field) and role != "assistant":
            raise bounds.ASSISTANT_ONLY.refused(f"{path}.{field}")
    call_id = message.get("tool_call_id")
    if role == "tool":
        bounds.TOOL_CALL_ID.check(len((call_id or "").encode()), f"{path}.tool_call_id")
        if call_id not in calls:
            raise bounds.TOOL_RESULT.refused(f"{path}.tool_call_id")
    elif call_id:
        raise bounds.TOOL_ONLY.refused(f"{path}.tool_call_id")
    tool_calls = message.get("tool_calls") or ()
    bounds.TOOL_CALLS.check(len(tool_calls), f"{path}.tool_calls")
    for index, call in enumerate(tool_calls):
        _check_tool_call(call, f"{path}.tool_calls[{index}]")
        calls.add(call["id"])


def _check_tool_call(call: Mapping[str, Any], path: str) -> None:
    """The name and the arguments are what some model wrote, and may be anything within their bounds."""
    bounds.TOOL_CALL_ID.check(len(call["id"].encode()), f"{path}.id")
    bounds.TOOL_CALL_NAME.check(len(call["function"]["name"].encode()), f"{path}.function.name")
