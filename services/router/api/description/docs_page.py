"""A page of HTML that shows the OpenAPI document, without a script. Pure."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from services.router.api.description.openapi import openapi_json

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1b1f24;background:#fff}"
    "h2{font:600 1rem ui-monospace,monospace;margin:2rem 0 .25rem;"
    "border-top:1px solid #d0d7de;padding-top:1rem}"
    "code,td:first-child{font-family:ui-monospace,monospace}table{border-collapse:collapse}"
    "td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}a{color:#58a6ff}}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
# Nothing but the one style runs or loads: the page needs no script, image or connection.
PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@functools.cache
def docs_html() -> bytes:
    """The page of this router's API."""
    return render_page(json.loads(openapi_json()))


def render_page(document: Mapping[str, Any]) -> bytes:
    """A document of OpenAPI as a page: each operation, with the fields of its body and their types."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{escape(title)}</h1>',
        '<p>The same as JSON, for tools: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    schemas = document["components"]["schemas"]
    named: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{escape(method.upper())} {escape(path)}</h2>")
            parts.append(f"<p>{escape(operation['summary'])}</p>")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(_fields(_resolved(content["schema"], schemas), named))
            parts += [
                f"<p>{words}: {_type(schema, named)}</p>" for words, schema in _answers(operation) if schema
            ]
    for name in named:  # grows while it is read: an object inside of another one comes after it
        parts += [f'<h2 id="{escape(name)}">{escape(name)}</h2>', _fields(schemas[name], named)]
    return "\n".join(parts).encode()


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    resolved: Mapping[str, Any] = schemas[_name(schema)] if "$ref" in schema else schema
    return resolved


def _answers(operation: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What the answer, its events and a failure are called, and their schemas, as far as there are any."""
    responses = operation.get("responses", {})
    answer, error = [responses.get(status, {}).get("content", {}) for status in ("200", "default")]
    return [
        ("Answer", answer.get("application/json", {}).get("schema")),
        ("Events", answer.get("text/event-stream", {}).get("schema")),
        ("Error", error.get("application/json", {}).get("schema")),
    ]


def _fields(schema: Mapping[str, Any], named: list[str]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td>{escape(name)}<td>{_type(field, named)}{' (required)' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table><tr><th>Field<th>Type{''.join(rows)}</table>"


def _type(schema: Mapping[str, Any], named: list[str]) -> str:
    """The type in words; an object of the document becomes a link, and is added to `named`."""
    if "$ref" in schema:
        name = _name(schema)
        if name not in named:
            named.append(name)
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        words = dict.fromkeys(_type(item, named) for item in schema["anyOf"] if item.get("type") != "null")
        return " or ".join(word for word in words if not (word == "integer" and "number" in words))
    if schema.get("enum"):
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), named)}"
    return escape(str(schema.get("type", "any")))


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
