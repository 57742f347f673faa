"""Answers in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.router.api.answers.answer_format import AnswerWriter, Json
from services.router.api.answers.exchange import Exchange
from services.router.api.choices import ChoiceRuns
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from slipstream import errors
from slipstream.v1 import router_pb2


async def run_to_end(manager: RequestManager, exchange: Exchange) -> Json:
    """Run a body's requests without a connection, and return the body of their answer.

    Raises what refuses or ends them: the typed errors of slipstream/errors.py. They end when the caller is
    cancelled.
    """
    requests = exchange.requests
    if len(requests) > 1:
        choices = ChoiceRuns(
            manager, requests, exchange.caller, n_bytes=exchange.n_bytes, wants_stats=False, is_streamed=False
        )
        try:
            await choices.start()
            return await whole_of_choices(manager, exchange, choices)
        finally:
            choices.end()
    run = await manager.begin(requests[0], exchange.caller, n_bytes=exchange.n_bytes)
    run.sink.holds_start = True
    try:
        return await whole_of(manager, exchange, run)
    finally:
        run.end()


async def whole_of(manager: RequestManager, exchange: Exchange, run: RunningRequest) -> Json:
    """The body of the answer of one running request. Its pieces take turns with those of other tenants."""
    salt = manager.context.salts.of_tenant(exchange.caller.tenant)
    opening, *events = await run.sink.next_events()
    answer = await exchange.writer(opening.started)
    while events:
        body = await manager.context.fleet.batcher.run(salt, partial(_fold, answer, events))
        if body is not None:
            await exchange.body.before_end()
            return body
        events = await run.sink.next_events()
    raise errors.Internal("the response has no end")


def _fold(answer: AnswerWriter, events: Sequence[router_pb2.GenerateEvent]) -> Json | None:
    """Add events to the answer; the whole body with the last one."""
    for event in events:
        if event.HasField("finished"):
            return answer.body(event.finished)
        answer.add(event.delta)
    return None


async def whole_of_choices(manager: RequestManager, exchange: Exchange, choices: ChoiceRuns) -> Json:
    """The body of the answer of several choices. Its pieces take turns with those of other tenants."""
    salt = manager.context.salts.of_tenant(exchange.caller.tenant)
    answer = exchange.body.choices_writer(exchange.context)
    while (item := await choices.next_events()) is not None:
        await exchange.body.before_writer(exchange.context, item[0])
        await manager.context.fleet.batcher.run(salt, partial(answer.add, *item))
    return await manager.context.fleet.batcher.run(salt, partial(answer.body, choices.leaders))
