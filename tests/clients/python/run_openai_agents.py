"""openai-agents: by Chat Completions, and with the argument `responses` by its default, the Responses API."""

from __future__ import annotations

import json
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
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

BY_RESPONSES = sys.argv[1:] == ["responses"]
UNTRACED = RunConfig(tracing_disabled=True)


def agent(name: str = MODEL, *, temperature: float = 0, **options: object) -> Agent:
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    kind = OpenAIResponsesModel if BY_RESPONSES else OpenAIChatCompletionsModel
    settings = ModelSettings(
        temperature=temperature,
        max_tokens=500,
        include_usage=True,
        extra_headers={"x-session-affinity": f"agents-{BY_RESPONSES}"},
    )
    return Agent(
        name="desk", instructions=SYSTEM, model=kind(name, client), model_settings=settings, **options
    )


async def chat() -> None:
    answer = await Runner.run(agent(), QUESTION, run_config=UNTRACED)
    expect(ANSWER in answer.final_output, answer)


async def stream() -> None:
    running = Runner.run_streamed(agent(), QUESTION, run_config=UNTRACED)
    pieces = [
        event.data.delta
        async for event in running.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    expect(len(pieces) > 1 and "".join(pieces) == running.final_output, pieces)
    expect(ANSWER in running.final_output, running.final_output)


async def tools() -> None:
    asked: list[str] = []

    @function_tool(strict_mode=False)
    def get_order_status(order_id: str) -> str:
        """Look up the status of an order."""
        asked.append(order_id)
        return json.dumps(ORDER_STATUS)

    answer = await Runner.run(agent(tools=[get_order_status]), ORDER_QUESTION, run_config=UNTRACED)
    expect(asked == [ORDER] and ETA in answer.final_output, (asked, answer.final_output))


async def structured() -> None:
    answer = await Runner.run(agent(output_type=Ticket), QUESTION, run_config=UNTRACED)
    expect(isinstance(answer.final_output, Ticket), answer)


async def errors() -> None:
    await expect_async_error(openai.NotFoundError, Runner.run(agent("gpt-4o"), QUESTION, run_config=UNTRACED))
    bad = await expect_async_error(
        openai.BadRequestError, Runner.run(agent(temperature=9), QUESTION, run_config=UNTRACED)
    )
    expect(bad.param == "temperature", bad)
    over = await expect_async_error(
        openai.BadRequestError, Runner.run(agent(), TOO_LONG, run_config=UNTRACED)
    )
    expect(over.code == "context_length_exceeded", over)


async def usage() -> None:
    for _ in range(2):
        answer = await Runner.run(agent(), "Please read this. " * 60, run_config=UNTRACED)
    counted = answer.context_wrapper.usage
    expect(counted.input_tokens > 64 and counted.output_tokens > 0, counted)
    expect(counted.input_tokens_details.cached_tokens > 0, counted)


run(
    "openai-agents",
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "errors": errors,
        "usage": usage,
    },
    path="/v1/responses" if BY_RESPONSES else "/v1/chat/completions",
    name="openai-agents, Responses" if BY_RESPONSES else "openai-agents",
)
