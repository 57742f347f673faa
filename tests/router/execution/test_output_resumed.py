"""The SDK's answer is whole when a stream breaks anywhere and resumes at another router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.execution.event_queue import join
from services.router.request.model_card import ModelCard
from slipstream.calls.resume import Resumption
from slipstream.v1 import common_pb2, router_pb2
from tests.router.execution.test_output_processor import make_processor, whole_answer
from tests.support.examples import examples


class ConnectionLost(grpc.RpcError):
    """The error of a broken connection."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "gone"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def stream() -> Resumption:
    return Resumption(router_pb2.GenerateRequest(prompt="p"), now_s=0.0, deadline_s=1.0)


def answer(
    card: ModelCard,
    *,
    after: int,
    frames: Sequence[int],
    joins: Sequence[bool],
    logprobs: bool,
    stop: tuple[str, ...],
) -> Iterator[router_pb2.GenerateEvent]:
    """Return a router's deltas for frames of these sizes, some of them joined as for a slow client."""
    tokens = whole_answer(card)
    positions = [
        common_pb2.PositionLogprobs(logprob=-n, top=[common_pb2.TokenLogprob(token_id=5, logprob=-n)])
        for n in range(len(tokens))
    ]
    output = make_processor(card, resume_after=after, logprobs=logprobs, stop=stop)
    deltas: list[router_pb2.Delta] = []
    at = number = 0
    while at < len(tokens):
        end = at + frames[number % len(frames)]
        number += 1
        fresh = output.push(tokens[at:end], positions[at:end] if logprobs else ())
        deltas += [event.delta for event in fresh]
        at = end
    deltas += [event.delta for event in output.finish()]
    shown: list[router_pb2.Delta] = []
    for number, delta in enumerate(deltas):
        if not (shown and joins[number % len(joins)] and join(shown[-1], delta)):
            shown.append(delta)
    for delta in shown:
        yield router_pb2.GenerateEvent(delta=delta)


SHAPE = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.booleans(), min_size=1, max_size=4)
)


@given(
    cuts=st.lists(st.tuples(st.integers(0, 15), SHAPE), max_size=5),
    last=SHAPE,
    logprobs=st.booleans(),
    stop=st.sampled_from([(), ("zzz", "s w")]),
)
@settings(max_examples=examples(12), deadline=None)
def test_an_answer_over_several_routers_is_the_answer_of_one(
    card: ModelCard,
    cuts: list[tuple[int, tuple[list[int], list[bool]]]],
    last: tuple[list[int], list[bool]],
    logprobs: bool,
    stop: tuple[str, ...],
) -> None:
    whole = stream()
    for response in answer(card, after=0, frames=[1], joins=[False], logprobs=logprobs, stop=stop):
        whole.feed(response)
    assert whole.reply.text
    resumed = stream()
    for events, (frames, joins) in cuts:
        after = resumed.request().resume_after_tokens
        responses = answer(card, after=after, frames=frames, joins=joins, logprobs=logprobs, stop=stop)
        for _, response in zip(range(events), responses, strict=False):
            resumed.feed(response)
        resumed.lost(ConnectionLost(), now_s=0.0)
    after = resumed.request().resume_after_tokens
    for response in answer(card, after=after, frames=last[0], joins=last[1], logprobs=logprobs, stop=stop):
        resumed.feed(response)
    assert resumed.reply.as_message() == whole.reply.as_message()
    assert resumed.reply.logprobs == whole.reply.logprobs
