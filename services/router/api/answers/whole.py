"""Answers in one piece."""

from __future__ import annotations

from services.router.api.answers.answer_format import Json
from services.router.api.answers.exchange import Exchange
from services.router.api.choices import ChoiceRuns
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from slipstream import errors


async def run_to_end(manager: RequestManager, exchange: Exchange) -> Json:
    """Run a body's requests without a connection, and return the body of their answer.

    Raises what refuses or ends them: the typed errors of slipstream/errors.py. They end when the caller is
    cancelled.
    """
    requests = exchange.body.requests
    if len(requests) > 1:
        choices = ChoiceRuns(
            manager, requests, exchange.caller, n_bytes=exchange.n_bytes, wants_stats=False, is_streamed=False
        )
        try:
            await choices.start()
            return await whole_of_choices(exchange, choices)
        finally:
            choices.end()
    run = await manager.begin(requests[0], exchange.caller, n_bytes=exchange.n_bytes)
    run.sink.holds_start = True
    try:
        return await whole_of(exchange, run)
    finally:
        run.end()


async def whole_of(exchange: Exchange, run: RunningRequest) -> Json:
    """The body of the answer of one running request."""
    opening, *events = await run.sink.next_events()
    answer = await exchange.writer(opening.started)
    while events:
        for event in events:
            if event.HasField("finished"):
                body = answer.body(event.finished)
                await exchange.body.before_end()
                return body
            answer.add(event.delta)
        events = await run.sink.next_events()
    raise errors.Internal("the response has no end")


async def whole_of_choices(exchange: Exchange, choices: ChoiceRuns) -> Json:
    """The body of the answer of several choices."""
    answer = exchange.body.choices_writer(exchange.context)
    while (item := await choices.next_events()) is not None:
        await exchange.body.before_writer(exchange.context, item[0])
        answer.add(*item)
    return answer.body(choices.leaders)
