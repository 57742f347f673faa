"""pydantic-ai: OpenAIChatModel."""

from __future__ import annotations

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
    Ticket,
    expect,
    expect_async_error,
    run,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 500}


def agent(name: str = MODEL, **options: object) -> Agent:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
    return Agent(model, system_prompt=SYSTEM, retries=0, **options)


async def chat() -> None:
    answer = await agent().run(QUESTION, model_settings=SETTINGS)
    expect(ANSWER in answer.output, answer)


async def stream() -> None:
    async with agent().run_stream(QUESTION, model_settings=SETTINGS) as events:
        pieces = [piece async for piece in events.stream_text(delta=True, debounce_by=None)]
    expect(len(pieces) > 1 and ANSWER in "".join(pieces), pieces)


async def tools() -> None:
    asked: list[str] = []

    async def get_order_status(order_id: str) -> dict[str, str]:
        """Look up the status of an order."""
        asked.append(order_id)
        return ORDER_STATUS

    answer = await agent(tools=[get_order_status]).run(ORDER_QUESTION, model_settings=SETTINGS)
    expect(asked == [ORDER] and ETA in answer.output, (asked, answer.output))


async def structured() -> None:
    """By a tool that must be called, and by a schema. A schema in the prompt asks too much of the model."""
    for form in (ToolOutput(Ticket), NativeOutput(Ticket)):
        answer = await agent(output_type=form).run(QUESTION, model_settings=SETTINGS)
        expect(isinstance(answer.output, Ticket), answer)


async def errors() -> None:
    missing = await expect_async_error(ModelHTTPError, agent("gpt-4o").run(QUESTION))
    expect(missing.status_code == 404 and missing.body["code"] == "model_not_found", missing)
    bad = await expect_async_error(ModelHTTPError, agent().run(QUESTION, model_settings={"temperature": 9}))
    expect(bad.status_code == 400 and bad.body["param"] == "temperature", bad)
    over = await expect_async_error(ModelHTTPError, agent().run(TOO_LONG))
    expect(over.body["code"] == "context_length_exceeded", over.body)


async def usage() -> None:
    settings = {"max_tokens": 8, "extra_headers": {"x-session-affinity": "pydantic-ai"}}
    for _ in range(2):
        answer = await agent().run("Please read this. " * 60, model_settings=settings)
    counted = answer.usage
    expect(counted.input_tokens > 64 and counted.output_tokens > 0, counted)
    expect(counted.cache_read_tokens > 0, counted)


run(
    "pydantic-ai-slim",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
    name="pydantic-ai",
)
