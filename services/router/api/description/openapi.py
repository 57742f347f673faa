"""The description of the HTTP API as OpenAPI 3.1, made from the types of its bodies and answers. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.router.api.description.answers import RunEnvelope
from services.router.api.description.error_bodies import Error, MessagesError
from services.router.api.description.operations import OPERATIONS, REQUIRED, Operation
from slipstream import __version__

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)}")
_FORM = {
    "properties": {"purpose": {"type": "string"}, "file": {"type": "string"}},
    "required": ["file", "purpose"],
}


@functools.cache
def openapi_json() -> bytes:
    """The document."""
    kinds = dict.fromkeys(
        kind for each in OPERATIONS for kind in (each.body, each.answer, _error_of(each), *each.events)
    )
    types = [kind for kind in kinds if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    for kind, names in REQUIRED.items():
        components[schema_of[kind]["$ref"].rpartition("/")[2]]["required"] = list(names)
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _described(each, schema_of)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(_with_public_names(_open(document))).encode()


def _error_of(operation: Operation) -> type[msgspec.Struct]:
    """The shape of the API that the path belongs to."""
    if operation.path.startswith("/v1/messages"):
        return MessagesError
    is_run = operation.path.startswith("/client/") and (
        "/ai/v1/" not in operation.path or operation.path.endswith("/embeddings")
    )
    return RunEnvelope if is_run else Error


def _described(operation: Operation, schema_of: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": operation.summary}
    if operation.answer is not None:
        answer["content"] = {"application/json": {"schema": schema_of[operation.answer]}}
    if operation.events:
        event = {"anyOf": [schema_of[kind] for kind in operation.events]}
        answer.setdefault("content", {})["text/event-stream"] = {"schema": event}
    error = {"application/json": {"schema": schema_of[_error_of(operation)]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": answer, "default": {"description": "A failure", "content": error}},
    }
    if operation.is_open:
        described["security"] = []
    if names := _PARAMETER.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if (content := _content(operation, schema_of)) is not None:
        described["requestBody"] = {"required": True, "content": content}
    return described


def _content(operation: Operation, schema_of: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any] | None:
    if operation.has_form:
        return {"multipart/form-data": {"schema": _FORM}}
    if operation.body is not None:
        return {"application/json": {"schema": schema_of[operation.body]}}
    return {"application/json": {"schema": {"type": "object"}}} if operation.has_object else None


def _open(schema: Any) -> Any:
    """The schema without the bans of further fields, which the router ignores, and later answers may have."""
    if isinstance(schema, dict):
        kept = [item for item in schema.items() if item != ("additionalProperties", False)]
        return {name: _open(item) for name, item in kept}
    return [_open(item) for item in schema] if isinstance(schema, list) else schema


def _with_public_names(document: dict[str, Any]) -> Any:
    """The document whose components have no names of private classes: a body's own types may have such."""
    schemas = document["components"]["schemas"]
    public: dict[str, str] = {}
    for name in schemas:
        shown = name.lstrip("_")
        public[name] = f"{shown}Param" if shown != name and shown in schemas else shown
    schemas = {public[name]: {**schema, "title": public[name]} for name, schema in schemas.items()}
    references = {_REF.format(name=name): _REF.format(name=shown) for name, shown in public.items()}
    return _replaced({**document, "components": {**document["components"], "schemas": schemas}}, references)


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """The value with other texts, where it has one of these."""
    if isinstance(value, dict):
        return {name: _replaced(item, texts) for name, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value
