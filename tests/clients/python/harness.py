"""What the scripts of all Python clients share: the cluster's address, the texts, the report.

A script runs one unmodified client library through the scenarios and prints one JSON object:
`{"client", "version", "endpoint", "results": {SCENARIO: {"status", "detail"}}}`.
The interpreter is that of .venv-clients, which has no package of the project.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

ADDRESS = os.environ.get("SLIPSTREAM_HTTP", "127.0.0.1:8000")
BASE_URL = f"http://{ADDRESS}/v1"
MODEL = "slipstream-mini"
SCENARIOS = ("chat", "stream", "tools", "structured", "errors", "usage")

SYSTEM = (
    "You answer the customers of Blue Harbor. Be warm and polite. The warranty lasts 12 months. "
    "Returns are possible within 30 days. The store is in Lisbon."
)
QUESTION = "How long is the warranty?"
ANSWER = "12 months"
ORDER = "482135"
ORDER_QUESTION = f"Where is my order {ORDER}?"
ORDER_STATUS = {"status": "shipped", "eta": "2026-12-04", "carrier": "DHL"}
ETA = "2026-12-04"
# Longer than the context of the shipped model, which has 16,384 tokens.
TOO_LONG = "overflow " * 40_000
TOOL = {
    "type": "function",
    "function": {
        "name": "get_order_status",
        "description": "Look up the status of an order.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string"}},
            "required": ["order_id"],
        },
    },
}
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
ORDER_MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ORDER_QUESTION}]


class Ticket(BaseModel):
    """A ticket of the help desk. Its values are short: the small model would write texts without end."""

    subject: Literal["order", "refund", "warranty"]
    urgent: bool
    days: Annotated[int, Field(ge=0, le=30)]


class NotOffered(Exception):
    """The client library has no such feature, or reaches it through another scenario's call only."""


def expect(condition: object, what: object) -> None:
    """Fail the scenario unless the condition holds. `what` says what arrived."""
    if not condition:
        raise AssertionError(str(what))


def expect_error(kind: type[BaseException], call: Callable[[], object]) -> Any:
    """The error of the kind that the call raises."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {answer!r}")


async def expect_async_error(kind: type[BaseException], call: Any) -> Any:
    """As `expect_error`, of an awaitable."""
    try:
        answer = await call
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {answer!r}")


def run(
    package: str,
    scenarios: Mapping[str, Callable[[], Any]],
    *,
    path: str = "/v1/chat/completions",
    name: str | None = None,
) -> None:
    """Run the scenarios in order and print the report. `path`: of the endpoint that the client calls."""
    served = _is_served(path)
    results = {}
    for scenario in SCENARIOS:
        if not served:
            results[scenario] = {"status": "not served", "detail": f"404 for {path}"}
        elif scenario in scenarios:
            results[scenario] = _outcome(scenarios[scenario])
        else:
            results[scenario] = {"status": "not offered", "detail": ""}
    report = {"client": name or package, "version": version(package), "endpoint": path, "results": results}
    print(json.dumps(report))


def _outcome(scenario: Callable[[], Any]) -> dict[str, str]:
    try:
        made = scenario()
        if inspect.isawaitable(made):
            asyncio.run(_awaited(made))
    except NotOffered as error:
        return {"status": "not offered", "detail": str(error)}
    except Exception as error:
        return {"status": "fails", "detail": f"{type(error).__name__}: {error}"[:600]}
    return {"status": "works", "detail": ""}


async def _awaited(made: Any) -> Any:
    return await made


def _is_served(path: str) -> bool:
    """Whether the router has the endpoint: an empty body is refused by it, and a missing path by its path."""
    request = urllib.request.Request(
        f"http://{ADDRESS}{path}", data=b"{}", headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60):
            return True
    except urllib.error.HTTPError as error:
        return not (error.code == 404 and b"unknown_url" in error.read())
