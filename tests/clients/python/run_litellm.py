"""litellm: the providers openai/ and hosted_vllm/."""

from __future__ import annotations

import json

import litellm
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

litellm.suppress_debug_info = True
PROVIDERS = ("openai", "hosted_vllm")


def complete(provider: str, messages: list[object], **options: object) -> object:
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=BASE_URL,
        api_key="none",
        messages=messages,
        num_retries=0,
        **options,
    )


def chat() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, MESSAGES, temperature=0, max_tokens=60)
        expect(ANSWER in answer.choices[0].message.content, answer)


def stream() -> None:
    for provider in PROVIDERS:
        chunks = list(complete(provider, MESSAGES, temperature=0, max_tokens=60, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        expect(len(chunks) > 1 and ANSWER in text, text)


def tools() -> None:
    """The assistant's message goes back as an object, and as a dictionary."""
    for provider in PROVIDERS:
        for dumped in (False, True):
            messages = [*ORDER_MESSAGES]
            options = {"tools": [TOOL], "temperature": 0, "max_tokens": 96}
            message = complete(provider, messages, **options).choices[0].message
            (call,) = message.tool_calls
            expect(json.loads(call.function.arguments) == {"order_id": ORDER}, call)
            messages += [
                message.model_dump() if dumped else message,
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(ORDER_STATUS)},
            ]
            last = complete(provider, messages, **options)
            expect(ETA in last.choices[0].message.content, last)


def structured() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, MESSAGES, response_format=Ticket, max_tokens=500)
        Ticket.model_validate_json(answer.choices[0].message.content)


def errors() -> None:
    for provider in PROVIDERS:
        expect_error(
            litellm.NotFoundError,
            lambda provider=provider: litellm.completion(
                model=f"{provider}/gpt-4o", api_base=BASE_URL, api_key="none", messages=MESSAGES
            ),
        )
        expect_error(
            litellm.BadRequestError, lambda provider=provider: complete(provider, MESSAGES, temperature=9)
        )
        long = [{"role": "user", "content": TOO_LONG}]
        expect_error(
            litellm.ContextWindowExceededError, lambda provider=provider, long=long: complete(provider, long)
        )


def usage() -> None:
    long = [{"role": "user", "content": "Please read this. " * 60}]
    for provider in PROVIDERS:
        for _ in range(2):
            answer = complete(
                provider, long, max_tokens=8, extra_headers={"x-session-affinity": f"litellm-{provider}"}
            )
        counted = answer.usage
        expect(counted.prompt_tokens > 64 and counted.completion_tokens > 0, counted)
        expect(counted.prompt_tokens_details.cached_tokens > 0, counted)


run(
    "litellm",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
)
