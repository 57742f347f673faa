"""The description of the HTTP API as OpenAPI 3.1, made from the types of its bodies. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.router.api.anthropic.request import MESSAGES_BODIES
from services.router.api.batches.batch_body import CreateBatchBody
from services.router.api.openai.request import BODIES
from services.router.api.openai.token_bodies import TOKEN_BODIES
from services.router.api.responses.request import RESPONSE_BODIES
from slipstream import __version__

_REF = "#/components/schemas/{name}"
_RUNS = "/client/v4/accounts/{account}/ai"
_GETS: Mapping[str, str] = {
    "/v1/models": "The served model by each of its names",
    "/v1/usage": "What the caller's tenant has used and what it costs, by day, key, model or endpoint",
    "/health": "200 while requests can run, else 503",
    "/version": "The version of the router",
    "/v1/files": "A page of files",
    "/v1/files/{id}": "A file",
    "/v1/files/{id}/content": "The content of a file",
    "/v1/batches": "A page of batches, newest first",
    "/v1/batches/{id}": "A batch",
    f"{_RUNS}/v1/models": "As /v1/models",
}
_POSTS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("A chat completion", BODIES["/v1/chat/completions"]),
    "/v1/completions": ("Completions of texts or token ids", BODIES["/v1/completions"]),
    "/v1/responses": ("A response of the Responses API", RESPONSE_BODIES["/v1/responses"]),
    "/v1/responses/input_tokens": ("Its tokens", RESPONSE_BODIES["/v1/responses"]),
    "/v1/messages": ("A message of Anthropic's API", MESSAGES_BODIES["/v1/messages"]),
    "/v1/messages/count_tokens": ("Its tokens", MESSAGES_BODIES["/v1/messages/count_tokens"]),
    "/tokenize": ("Token ids of a text or a conversation", TOKEN_BODIES["/tokenize"]),
    "/detokenize": ("The text of token ids", TOKEN_BODIES["/detokenize"]),
    "/v1/batches": ("A batch of the requests in a file", CreateBatchBody),
    f"{_RUNS}/v1/chat/completions": ("As /v1/chat/completions", BODIES["/v1/chat/completions"]),
    f"{_RUNS}/v1/completions": ("As /v1/completions", BODIES["/v1/completions"]),
}
_FORM = {
    "properties": {"purpose": {"type": "string"}, "file": {"type": "string"}},
    "required": ["file", "purpose"],
}
# Operations whose bodies have no type here: the method, the path, a summary, and the body.
_OTHERS: tuple[tuple[str, str, str, Mapping[str, Any] | None], ...] = (
    (
        "post",
        "/v1/files",
        "Upload a file of requests, one a line",
        {"multipart/form-data": {"schema": _FORM}},
    ),
    ("delete", "/v1/files/{id}", "Delete a file", None),
    ("post", "/v1/batches/{id}/cancel", "Cancel a batch", None),
    (
        "post",
        f"{_RUNS}/run/{{model}}",
        "A run in Workers AI's form, several (requests), or the answer of queued ones (request_id)",
        {"application/json": {"schema": {"type": "object"}}},
    ),
)
_PARAMETER = re.compile(r"{(\w+)}")


@functools.cache
def openapi_json() -> bytes:
    """The document. Answers are those of the APIs that the paths name, and have no schema here."""
    bodies = [body for _, body in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    paths: dict[str, Any] = {path: {"get": _operation(path, text)} for path, text in _GETS.items()}
    for (path, (text, _)), schema in zip(_POSTS.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths.setdefault(path, {})["post"] = _operation(path, text, content)
    for method, path, text, other in _OTHERS:
        paths.setdefault(path, {})[method] = _operation(path, text, other)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": _open(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(document).encode()


def _operation(path: str, text: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    names = _PARAMETER.findall(path)
    operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": text}}}
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if content is not None:
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _open(schema: Any) -> Any:
    """The schema without the bans of further fields, which the router ignores."""
    if isinstance(schema, dict):
        kept = [item for item in schema.items() if item != ("additionalProperties", False)]
        return {name: _open(item) for name, item in kept}
    return [_open(item) for item in schema] if isinstance(schema, list) else schema
