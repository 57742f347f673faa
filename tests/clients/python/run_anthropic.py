"""anthropic: the Messages API."""

from __future__ import annotations

import json

import anthropic
from harness import (
    ADDRESS,
    ANSWER,
    ETA,
    MODEL,
    ORDER,
    ORDER_QUESTION,
    ORDER_STATUS,
    QUESTION,
    SYSTEM,
    TOO_LONG,
    TOOL,
    expect,
    expect_error,
    run,
)

client = anthropic.Anthropic(base_url=f"http://{ADDRESS}", api_key="none", max_retries=0)
messages = client.messages
FUNCTION = TOOL["function"]
FLAT_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
# This library has no argument for the temperature any more; other clients of the API send one.
COLD = {"temperature": 0}
ASKED = [{"role": "user", "content": QUESTION}]


def chat() -> None:
    answer = messages.create(model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=60, extra_body=COLD)
    expect(answer.stop_reason == "end_turn" and ANSWER in answer.content[0].text, answer)


def stream() -> None:
    with messages.stream(
        model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=60, extra_body=COLD
    ) as events:
        pieces = list(events.text_stream)
        final = events.get_final_message()
    expect(len(pieces) > 1 and "".join(pieces) == final.content[0].text, pieces)
    expect(ANSWER in "".join(pieces), pieces)


def tools() -> None:
    history: list[object] = [{"role": "user", "content": ORDER_QUESTION}]
    options = {"model": MODEL, "system": SYSTEM, "tools": [FLAT_TOOL], "max_tokens": 96, "extra_body": COLD}
    first = messages.create(messages=history, **options)
    expect(first.stop_reason == "tool_use", first)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    expect(call.input == {"order_id": ORDER}, call)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(ORDER_STATUS)}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = messages.create(messages=history, **options)
    expect(ETA in "".join(block.text for block in last.content if block.type == "text"), last)


def structured() -> None:
    """A forced tool: its input is held to the schema."""
    choice = {"type": "tool", "name": FUNCTION["name"]}
    answer = messages.create(
        model=MODEL, messages=ASKED, tools=[FLAT_TOOL], tool_choice=choice, max_tokens=500, extra_body=COLD
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    expect(list(call.input) == ["order_id"] and isinstance(call.input["order_id"], str), call)


def errors() -> None:
    expect_error(
        anthropic.NotFoundError,
        lambda: messages.create(model="claude", messages=ASKED, max_tokens=8),
    )
    bad = expect_error(
        anthropic.BadRequestError,
        lambda: messages.create(model=MODEL, messages=ASKED, max_tokens=8, extra_body={"temperature": 9}),
    )
    expect(bad.body["error"]["type"] == "invalid_request_error" and bad.request_id, bad.body)
    long = [{"role": "user", "content": TOO_LONG}]
    over = expect_error(
        anthropic.BadRequestError, lambda: messages.create(model=MODEL, messages=long, max_tokens=8)
    )
    expect("maximum context length" in str(over) or "prompt is too long" in str(over), over)


def usage() -> None:
    history = [{"role": "user", "content": "Please read this. " * 60}]
    headers = {"x-session-affinity": "anthropic-usage"}
    for _ in range(2):
        counted = messages.create(model=MODEL, messages=history, max_tokens=8, extra_headers=headers).usage
    expect(counted.output_tokens > 0 and counted.cache_read_input_tokens > 0, counted)
    expect(counted.input_tokens + counted.cache_read_input_tokens > 64, counted)


run(
    "anthropic",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
    path="/v1/messages",
)
