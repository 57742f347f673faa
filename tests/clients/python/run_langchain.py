"""langchain-openai: ChatOpenAI, and the completion class OpenAI."""

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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def model(**options: object) -> ChatOpenAI:
    settings = {"temperature": 0, "max_tokens": 500, "max_retries": 0, **options}
    return ChatOpenAI(model=settings.pop("model", MODEL), base_url=BASE_URL, api_key="none", **settings)


ASKED = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


def chat() -> None:
    expect(ANSWER in model().invoke(ASKED).content, "invoke")
    expect(all(ANSWER in answer.content for answer in model().batch([ASKED, ASKED])), "batch")
    completion = OpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=8, max_retries=0)
    expect(completion.invoke("Hello"), "a completion is empty")


def stream() -> None:
    pieces = [chunk.content for chunk in model().stream(ASKED)]
    expect(len(pieces) > 1 and ANSWER in "".join(pieces), pieces)


def tools() -> None:
    bound = model().bind_tools([TOOL])
    messages = [SystemMessage(SYSTEM), HumanMessage(ORDER_QUESTION)]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    expect(call["args"] == {"order_id": ORDER}, call)
    messages += [first, ToolMessage(json.dumps(ORDER_STATUS), tool_call_id=call["id"])]
    expect(ETA in bound.invoke(messages).content, "no result in the answer")


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = model().with_structured_output(Ticket, method=method).invoke(MESSAGES)
        expect(isinstance(made, Ticket), made)


def errors() -> None:
    expect_error(openai.NotFoundError, lambda: model(model="gpt-4o").invoke(ASKED))
    expect_error(openai.BadRequestError, lambda: model(temperature=9).invoke(ASKED))
    expect_error(ContextOverflowError, lambda: model().invoke([HumanMessage(TOO_LONG)]))


def usage() -> None:
    long = [HumanMessage("Please read this. " * 60)]
    caller = model(max_tokens=8, stream_usage=True, default_headers={"x-session-affinity": "langchain"})
    for _ in range(2):
        whole = None
        for chunk in caller.stream(long):
            whole = chunk if whole is None else whole + chunk
    counted = whole.usage_metadata
    expect(counted["input_tokens"] > 64 and counted["output_tokens"] > 0, counted)
    expect(counted["input_token_details"]["cache_read"] > 0, counted)


run(
    "langchain-openai",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
)
