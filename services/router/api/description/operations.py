"""The operations of the HTTP API: one row for each route that the router serves to clients. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from services.router.api.anthropic.request import MESSAGES_BODIES
from services.router.api.batches.batch_body import CreateBatchBody
from services.router.api.description import answers, resources
from services.router.api.description.events import EVENTS
from services.router.api.openai.request import BODIES
from services.router.api.openai.token_bodies import TOKEN_BODIES
from services.router.api.responses.request import RESPONSE_BODIES

_RUNS = "/client/v4/accounts/{account}/ai"
_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_ONE = f"{_RESPONSES}/{{response_id}}"
_MESSAGES = "/v1/messages"
_COUNT = f"{_MESSAGES}/count_tokens"


@dataclass(frozen=True)
class Operation:
    """One row. `body` and `answer` None: the table has no type for it.

    `has_form`: the body is a form. `has_object`: it is an object of several shapes. `events`: the types of
    server-sent events that the answer may be. `is_open`: it needs no key.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    has_form: bool = False
    has_object: bool = False
    events: Sequence[type[msgspec.Struct]] = ()
    is_open: bool = False


def _generation(path: str, summary: str, like: str) -> Operation:
    kinds: Mapping[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
        _CHAT: (BODIES[_CHAT], answers.ChatCompletion),
        _COMPLETIONS: (BODIES[_COMPLETIONS], answers.Completion),
        _RESPONSES: (RESPONSE_BODIES[_RESPONSES], answers.Response),
        _MESSAGES: (MESSAGES_BODIES[_MESSAGES], answers.Message),
    }
    body, answer = kinds[like]
    return Operation("post", path, summary, body, answer, events=EVENTS[like])


# Fields that a body must have. The types have defaults, so that each missing one is refused by its name.
REQUIRED: Mapping[type[msgspec.Struct], Sequence[str]] = {
    BODIES[_CHAT]: ("messages",),
    BODIES[_COMPLETIONS]: ("prompt",),
    RESPONSE_BODIES[_RESPONSES]: ("input",),
    MESSAGES_BODIES[_MESSAGES]: ("max_tokens", "messages"),
    MESSAGES_BODIES[_COUNT]: ("messages",),
    TOKEN_BODIES["/detokenize"]: ("tokens",),
    CreateBatchBody: ("input_file_id",),
}

OPERATIONS: Sequence[Operation] = (
    _generation(_CHAT, "A chat completion", _CHAT),
    _generation(_COMPLETIONS, "Completions of texts or token ids", _COMPLETIONS),
    _generation(_RESPONSES, "A response of the Responses API", _RESPONSES),
    Operation(
        "post",
        f"{_RESPONSES}/input_tokens",
        "The tokens of the prompt that a body of /v1/responses makes",
        RESPONSE_BODIES[_RESPONSES],
        answers.InputTokens,
    ),
    Operation(
        "get",
        _ONE,
        "A stored response, or its events (stream=true)",
        answer=answers.Response,
        events=EVENTS[_RESPONSES],
    ),
    Operation("delete", _ONE, "Delete a stored response", answer=resources.Deleted),
    Operation(
        "post",
        f"{_ONE}/cancel",
        "End a response in the background",
        answer=answers.Response,
    ),
    Operation(
        "get",
        f"{_ONE}/input_items",
        "A page of the input of a stored response",
        answer=resources.InputItemPage,
    ),
    _generation(_MESSAGES, "A message of Anthropic's API", _MESSAGES),
    Operation(
        "post",
        _COUNT,
        "The tokens of the prompt that a body of /v1/messages makes",
        MESSAGES_BODIES[_COUNT],
        answers.MessageTokens,
    ),
    Operation(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation",
        TOKEN_BODIES["/tokenize"],
        answers.Tokens,
    ),
    Operation(
        "post", "/detokenize", "The text of token ids", TOKEN_BODIES["/detokenize"], answers.TokensText
    ),
    Operation(
        "get",
        "/tokenizer_info",
        "Class, special tokens and chat template of the tokenizer",
        answer=answers.TokenizerInfo,
    ),
    Operation("get", "/v1/models", "The served model by each of its names", answer=resources.ModelList),
    Operation("get", "/v1/models/{name}", "The served model by one of its names", answer=resources.Model),
    Operation(
        "get",
        "/v1/usage",
        "What the caller's tenant has used and what it costs, by day, key, model or endpoint",
        answer=resources.UsageList,
    ),
    Operation(
        "post", "/v1/files", "Upload a file of requests, one a line", answer=resources.File, has_form=True
    ),
    Operation("get", "/v1/files", "A page of files", answer=resources.FilePage),
    Operation("get", "/v1/files/{id}", "A file", answer=resources.File),
    Operation("delete", "/v1/files/{id}", "Delete a file", answer=resources.Deleted),
    Operation("get", "/v1/files/{id}/content", "The content of a file"),
    Operation(
        "post", "/v1/batches", "A batch of the requests in a file", CreateBatchBody, resources.BatchResource
    ),
    Operation("get", "/v1/batches", "A page of batches, newest first", answer=resources.BatchPage),
    Operation("get", "/v1/batches/{id}", "A batch", answer=resources.BatchResource),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", answer=resources.BatchResource),
    Operation(
        "post",
        f"{_RUNS}/run/{{model}}",
        "A run in Workers AI's form, several (requests), or the answer of queued ones (request_id)",
        answer=answers.RunEnvelope,
        has_object=True,
        events=EVENTS["/ai/run"],
    ),
    _generation(_RUNS + _CHAT, f"As {_CHAT}", _CHAT),
    _generation(_RUNS + _COMPLETIONS, f"As {_COMPLETIONS}", _COMPLETIONS),
    _generation(_RUNS + _RESPONSES, f"As {_RESPONSES}", _RESPONSES),
    Operation("post", f"{_RUNS}/v1/embeddings", "Refused: no model here has this task", has_object=True),
    Operation("get", f"{_RUNS}/v1/models", "As /v1/models", answer=resources.ModelList),
    Operation("get", "/healthz/ready", "200 while requests can run, else 503", is_open=True),
    Operation(
        "get", "/healthz/live", "200 while the process answers", answer=resources.Liveness, is_open=True
    ),
    Operation("get", "/health", "As /healthz/ready", is_open=True),
    Operation("get", "/ping", "As /healthz/ready", is_open=True),
    Operation("get", "/version", "The version of the router", answer=resources.Version, is_open=True),
    Operation("get", "/openapi.json", "This description", is_open=True),
    Operation("get", "/docs", "This description as a page", is_open=True),
)
