"""openai (Python): Chat Completions."""

from __future__ import annotations

import json

import openai
from harness import (
    ANSWER,
    BASE_URL,
    ETA,
    MESSAGES,
    MODEL,
    ORDER,
    ORDER_MESSAGES,
    ORDER_STATUS,
    TOO_LONG,
    TOOL,
    Ticket,
    expect,
    expect_error,
    run,
)

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
chats = client.chat.completions


def chat() -> None:
    answer = chats.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60)
    expect(ANSWER in answer.choices[0].message.content, answer)
    expect(client.models.retrieve(MODEL).id == MODEL, "models.retrieve")
    expect(MODEL in [model.id for model in client.models.list()], "models.list")


def stream() -> None:
    with chats.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    expect(len(deltas) > 1 and "".join(deltas) == final.choices[0].message.content, deltas)
    expect(ANSWER in "".join(deltas), deltas)


def tools() -> None:
    messages = [*ORDER_MESSAGES]
    first = chats.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0, max_tokens=96)
    (call,) = first.choices[0].message.tool_calls
    expect(json.loads(call.function.arguments) == {"order_id": ORDER}, call)
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(ORDER_STATUS)},
    ]
    last = chats.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0, max_tokens=96)
    expect(ETA in last.choices[0].message.content, last)


def structured() -> None:
    answer = chats.parse(model=MODEL, messages=MESSAGES, response_format=Ticket, max_tokens=500)
    expect(isinstance(answer.choices[0].message.parsed, Ticket), answer)


def errors() -> None:
    missing = expect_error(openai.NotFoundError, lambda: chats.create(model="gpt-4o", messages=MESSAGES))
    expect(missing.code == "model_not_found" and missing.request_id, missing.code)
    bad = expect_error(
        openai.BadRequestError, lambda: chats.create(model=MODEL, messages=MESSAGES, temperature=9)
    )
    expect(bad.param == "temperature", bad)
    long = [{"role": "user", "content": TOO_LONG}]
    over = expect_error(openai.BadRequestError, lambda: chats.create(model=MODEL, messages=long))
    expect(over.code == "context_length_exceeded", over)


def usage() -> None:
    extra = {"x-session-affinity": "openai-usage"}
    long = [{"role": "user", "content": "Please read this. " * 60}]
    for _ in range(2):
        chunks = list(
            chats.create(
                model=MODEL,
                messages=long,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=extra,
            )
        )
    counted = chunks[-1].usage
    expect(counted.prompt_tokens > 64 and counted.completion_tokens > 0, counted)
    expect(counted.total_tokens == counted.prompt_tokens + counted.completion_tokens, counted)
    expect(counted.prompt_tokens_details.cached_tokens > 0, counted)


run(
    "openai",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
    name="openai (Python)",
)
