"""instructor: structured answers by tools and by a schema, whole and streamed."""

from __future__ import annotations

import instructor
import openai
from harness import BASE_URL, MESSAGES, MODEL, TOO_LONG, Ticket, expect, expect_error, run
from instructor.core import InstructorRetryException


def client(mode: instructor.Mode = instructor.Mode.TOOLS) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode)


def create(mode: instructor.Mode = instructor.Mode.TOOLS, **options: object) -> Ticket:
    settings = {"model": MODEL, "messages": MESSAGES, "max_tokens": 500, "temperature": 0, **options}
    return client(mode).chat.completions.create(response_model=Ticket, max_retries=0, **settings)


def stream() -> None:
    pieces = list(
        client().chat.completions.create_partial(
            model=MODEL,
            messages=MESSAGES,
            response_model=Ticket,
            max_tokens=500,
            max_retries=0,
            temperature=0,
        )
    )
    expect(len(pieces) > 1, pieces)
    Ticket.model_validate(pieces[-1].model_dump())


def tools() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        expect(isinstance(create(mode), Ticket), mode)


def structured() -> None:
    """By a schema. The modes JSON and MD_JSON only state it in the prompt: too much for a small model."""
    expect(isinstance(create(instructor.Mode.JSON_SCHEMA), Ticket), "no ticket")


def errors() -> None:
    for options, text in (
        ({"model": "gpt-4o"}, "not served here"),
        ({"temperature": 9}, "temperature"),
        ({"messages": [{"role": "user", "content": TOO_LONG}]}, "maximum context length"),
    ):
        error = expect_error(InstructorRetryException, lambda options=options: create(**options))
        expect(text in str(error), error)


def usage() -> None:
    made, completion = client().chat.completions.create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=Ticket, max_tokens=500, max_retries=0, temperature=0
    )
    expect(isinstance(made, Ticket) and completion.usage.completion_tokens > 0, completion)


run(
    "instructor",
    {"stream": stream, "tools": tools, "structured": structured, "errors": errors, "usage": usage},
)
