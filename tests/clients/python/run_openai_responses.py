"""openai (Python): the Responses API."""

from __future__ import annotations

import json

import openai
from harness import (
    ANSWER,
    BASE_URL,
    ETA,
    MODEL,
    ORDER,
    ORDER_QUESTION,
    ORDER_STATUS,
    QUESTION,
    SYSTEM,
    TOO_LONG,
    TOOL,
    Ticket,
    expect,
    expect_error,
    run,
)

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
responses = client.responses
FLAT_TOOL = {"type": "function", "strict": False, **TOOL["function"]}


def chat() -> None:
    answer = responses.create(
        model=MODEL, instructions=SYSTEM, input=QUESTION, temperature=0, max_output_tokens=60
    )
    expect(answer.status == "completed" and ANSWER in answer.output_text, answer)


def stream() -> None:
    with responses.stream(model=MODEL, instructions=SYSTEM, input=QUESTION, temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    expect(len(deltas) > 1 and "".join(deltas) == final.output_text, deltas)
    expect(ANSWER in final.output_text, final)


def tools() -> None:
    items: list[object] = [{"role": "user", "content": ORDER_QUESTION}]
    first = responses.create(
        model=MODEL, instructions=SYSTEM, input=items, tools=[FLAT_TOOL], temperature=0, store=False
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    expect(json.loads(call.arguments) == {"order_id": ORDER}, call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(ORDER_STATUS)}
    items += [*first.output, result]
    last = responses.create(
        model=MODEL, instructions=SYSTEM, input=items, tools=[FLAT_TOOL], temperature=0, store=False
    )
    expect(ETA in last.output_text, last)


def structured() -> None:
    answer = responses.parse(model=MODEL, input=QUESTION, text_format=Ticket, max_output_tokens=500)
    expect(isinstance(answer.output_parsed, Ticket), answer)


def errors() -> None:
    missing = expect_error(openai.NotFoundError, lambda: responses.create(model="gpt-4o", input=QUESTION))
    expect(missing.code == "model_not_found" and missing.request_id, missing)
    bad = expect_error(
        openai.BadRequestError, lambda: responses.create(model=MODEL, input=QUESTION, temperature=9)
    )
    expect(bad.param == "temperature", bad)
    over = expect_error(openai.BadRequestError, lambda: responses.create(model=MODEL, input=TOO_LONG))
    expect(over.code == "context_length_exceeded", over)


def usage() -> None:
    long = "Please read this. " * 60
    for _ in range(2):
        answer = responses.create(
            model=MODEL, input=long, max_output_tokens=16, prompt_cache_key="responses-usage", store=False
        )
    counted = answer.usage
    expect(counted.input_tokens > 64 and counted.output_tokens > 0, counted)
    expect(counted.total_tokens == counted.input_tokens + counted.output_tokens, counted)
    expect(counted.input_tokens_details.cached_tokens > 0, counted)


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
    name="openai (Python), Responses",
    path="/v1/responses",
)
