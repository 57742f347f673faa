"""A stream that loses its router goes on elsewhere: whatever is cut where, nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import errors
from slipstream.calls.resume import Resumption
from slipstream.client import Client
from slipstream.endpoints import Endpoints
from slipstream.replies import Event
from slipstream.rpc.rpc_errors import to_status
from slipstream.v1 import common_pb2, router_pb2

TEXT, REASONING, CALL, ARGUMENTS = range(4)


class Lost(grpc.RpcError):
    """As grpc raises it: with a router's word in it, or without."""

    def __init__(self, code: grpc.StatusCode, typed: errors.SlipstreamError | None = None) -> None:
        self._code = code
        self._status = to_status(typed) if typed is not None else None

    def code(self) -> grpc.StatusCode:
        return self._status.code if self._status is not None else self._code

    def details(self) -> str:
        return self._status.details if self._status is not None else "connection reset"

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata if self._status is not None else ()


GONE = Lost(grpc.StatusCode.UNAVAILABLE)


def resumption(*, resume_after: int = 0, echo: bool = False, **arguments: Any) -> Resumption:
    request = router_pb2.GenerateRequest(prompt="p", resume_after_tokens=resume_after, echo=echo)
    return Resumption(request, now_s=0.0, deadline_s=1000.0, **arguments)


def piece(delta: router_pb2.Delta, kinds: list[int], token: int) -> None:
    """What token number `token` of the answer adds."""
    kind = kinds[token]
    if kind == TEXT:
        delta.text += f"t{token} "
        delta.logprobs.add(token=f"t{token}", logprob=-float(token))
    elif kind == REASONING:
        delta.reasoning += f"r{token} "
    elif kind == CALL:
        delta.tool_calls.add(index=token, id=f"call-{token}", name=f"name-{token}")
    else:
        call = max((k for k in range(token) if kinds[k] == CALL), default=0)
        if not delta.tool_calls or delta.tool_calls[-1].index != call:
            delta.tool_calls.add(index=call)
        delta.tool_calls[-1].arguments += f"a{token} "


def router(kinds: list[int], *, after: int, widths: list[int]) -> Iterator[router_pb2.GenerateEvent]:
    """The answer after `after` tokens as a router sends it, in deltas of these widths, held-back end last."""
    yield router_pb2.GenerateEvent(started=router_pb2.Started(request_id="r", prompt_tokens=1))
    token, number = after, 0
    while token < len(kinds):
        delta = router_pb2.Delta()
        for _ in range(widths[number % len(widths)]):
            if token < len(kinds):
                piece(delta, kinds, token)
                token += 1
        delta.completion_tokens = token
        number += 1
        yield router_pb2.GenerateEvent(delta=delta)
    yield router_pb2.GenerateEvent(delta=router_pb2.Delta(text="held back", completion_tokens=len(kinds)))
    usage = router_pb2.Usage(completion_tokens=len(kinds))
    finished = router_pb2.Finished(finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage)
    yield router_pb2.GenerateEvent(finished=finished)


WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(
    kinds=st.lists(st.integers(0, 3), max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 12), WIDTHS), max_size=6),
    last=WIDTHS,
)
def test_nothing_is_lost_or_doubled(
    kinds: list[int], cuts: list[tuple[int, list[int]]], last: list[int]
) -> None:
    """Connections that end after so many responses, each router joining tokens in another way."""
    whole = resumption()
    for response in router(kinds, after=0, widths=[1]):
        whole.feed(response)
    stream = resumption()
    texts = []
    for responses, widths in cuts:
        after = stream.request().resume_after_tokens
        for _, response in zip(range(responses), router(kinds, after=after, widths=widths), strict=False):
            if (event := stream.feed(response)) is not None:
                texts.append(event.text)
        stream.lost(GONE, now_s=0.0)
    for response in router(kinds, after=stream.request().resume_after_tokens, widths=last):
        if (event := stream.feed(response)) is not None:
            texts.append(event.text)
    assert stream.reply == whole.reply
    assert "".join(texts) == whole.reply.text
    assert stream.attempt == len(cuts) + 1


@pytest.mark.parametrize("widths", [(1,), (3, 2), (9,)])
@pytest.mark.parametrize("cuts", [(0,), (2,), (5, 7), (9, 3)])
def test_rows_of_the_prompt_are_neither_lost_nor_doubled(
    cuts: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    """Each connection sends all rows again, and breaks after so many of them; the last one goes on."""
    stream, n_rows = resumption(), 9
    for number, cut in enumerate((*cuts, n_rows)):
        sent, index = 0, number
        while sent < cut:
            delta = router_pb2.Delta()
            for _ in range(min(widths[index % len(widths)], cut - sent)):
                delta.prompt_logprobs.add(token=f"p{sent}", rank=sent)
                sent += 1
            index += 1
            stream.feed(router_pb2.GenerateEvent(delta=delta))
        if number < len(cuts):
            stream.lost(GONE, now_s=0.0)
            assert stream.request().resume_after_tokens == 0
    stream.feed(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="a", completion_tokens=1)))
    assert [row.token for row in stream.reply.prompt_logprobs] == [f"p{i}" for i in range(n_rows)]
    assert stream.reply.text == "a"


@pytest.mark.parametrize("n_seen", [0, 1, 2, 3])
def test_an_echoed_prompt_is_neither_lost_nor_doubled(n_seen: int) -> None:
    """The connection breaks after so many deltas; a router sends the echo unless the call resumes."""
    stream = resumption(echo=True)
    deltas = [
        router_pb2.Delta(text="p"),
        router_pb2.Delta(text=" a", completion_tokens=1),
        router_pb2.Delta(text=" b", completion_tokens=2),
    ]
    for delta in deltas[:n_seen]:
        stream.feed(router_pb2.GenerateEvent(delta=delta))
    stream.lost(GONE, now_s=0.0)
    after = stream.request().resume_after_tokens
    for delta in deltas:
        if not after or delta.completion_tokens > after:
            stream.feed(router_pb2.GenerateEvent(delta=delta))
    assert stream.reply.text == "p a b"


def test_the_offset_moves_on_with_what_arrived() -> None:
    stream = resumption()
    responses = router([TEXT] * 10, after=0, widths=[3])
    for _ in range(3):  # started, 3 tokens, 6 tokens
        stream.feed(next(responses))
    stream.lost(GONE, now_s=0.0)
    assert stream.request().resume_after_tokens == 3
    assert stream.metadata["x-slipstream-attempt"] == "2"


def test_the_id_is_the_clients_so_that_the_seed_outlives_the_router() -> None:
    stream = resumption()
    first = stream.request().request_id
    assert first
    stream.lost(GONE, now_s=0.0)
    assert stream.request().request_id == first
    assert resumption(within_s=0.0).request().request_id == ""


@pytest.mark.parametrize("other", [{}, {"id": "other"}, {"name": "other"}])
def test_a_call_that_is_cut_twice_is_repeated_in_nothing(other: dict[str, str]) -> None:
    """The second connection ends amid what the first one showed; the third goes on, or has another call."""
    stream = resumption()

    def feed(arguments: str, **changes: str) -> Event | None:
        delta = router_pb2.Delta(completion_tokens=1)
        delta.tool_calls.add(index=0, arguments=arguments, **{"id": "call", "name": "name", **changes})
        return stream.feed(router_pb2.GenerateEvent(delta=delta))

    assert feed("ab") is not None
    pauses_s = [stream.lost(GONE, now_s=0.0)]
    assert feed("a") is None, "nothing is new"
    pauses_s.append(stream.lost(GONE, now_s=0.0))
    assert pauses_s == pytest.approx([0.05, 0.1])
    if other:
        with pytest.raises(errors.DataCorrupt):
            feed("abc", **other)
        return
    event = feed("abc")
    assert event is not None
    assert [each.arguments for each in (*event.tool_calls, *stream.reply.tool_calls)] == ["c", "abc"]


def test_another_answer_is_refused() -> None:
    stream = resumption()
    stream.feed(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="one", completion_tokens=1)))
    stream.lost(GONE, now_s=0.0)
    with pytest.raises(errors.DataCorrupt):
        stream.feed(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="two", completion_tokens=1)))


@pytest.mark.parametrize(
    "word",
    [
        errors.DataCorrupt("no"),
        errors.Overloaded("full"),
        errors.Quarantined("no"),
        errors.Internal("defect"),
        errors.Aborted("you did"),
        errors.InvalidArgument("seed", "is wrong"),
    ],
)
def test_a_routers_own_word_is_final(word: errors.SlipstreamError) -> None:
    with pytest.raises(type(word)):
        resumption(max_retries=0).lost(Lost(grpc.StatusCode.OK, word), now_s=0.0)


FULL = Lost(grpc.StatusCode.OK, errors.Overloaded("full", retry_after_ms=700))


@pytest.mark.parametrize("within_s", [0.0, 30.0])
def test_a_refused_request_is_sent_again_after_the_pause_that_the_router_names(within_s: float) -> None:
    stream = resumption(within_s=within_s, max_retries=2)
    for now_s in (0.0, 700.0):
        assert stream.lost(FULL, now_s=now_s, give_up=True) == pytest.approx(0.7)
    with pytest.raises(errors.Overloaded):
        stream.lost(FULL, now_s=800.0)


def test_a_pause_beyond_the_deadline_ends_the_request() -> None:
    with pytest.raises(errors.Overloaded):
        resumption().lost(FULL, now_s=999.5)


def test_a_request_that_would_not_wait_is_not_sent_again() -> None:
    request = router_pb2.GenerateRequest(prompt="p", reject_if_busy=True)
    with pytest.raises(errors.Overloaded):
        Resumption(request, now_s=0.0, deadline_s=1000.0).lost(FULL, now_s=0.0)


@pytest.mark.parametrize(
    "first", [router_pb2.Delta(text="a", completion_tokens=1), router_pb2.Delta(text="p")]
)
def test_an_answer_that_began_is_not_sent_again(first: router_pb2.Delta) -> None:
    """With its first token, or with the echo of its prompt."""
    stream = resumption(echo=not first.completion_tokens)
    stream.feed(router_pb2.GenerateEvent(delta=first))
    with pytest.raises(errors.Overloaded):
        stream.lost(FULL, now_s=0.0)


@pytest.mark.parametrize("fields", [{"n": 2}, {"store": True}], ids=["several", "stored"])
def test_several_answers_and_stored_ones_are_not_resumed(fields: dict[str, Any]) -> None:
    request = router_pb2.GenerateRequest(prompt="p", **fields)
    stream = Resumption(request, now_s=0.0, deadline_s=1000.0)
    assert not stream.metadata and not stream.request().request_id
    with pytest.raises(errors.Unavailable):
        stream.lost(GONE, now_s=0.0)


@pytest.mark.parametrize("word", [errors.Draining("restarts"), errors.Unavailable("no worker is ready")])
def test_a_router_that_drains_or_lacks_a_worker_is_left(word: errors.SlipstreamError) -> None:
    stream = resumption(within_s=5.0)
    stream.lost(Lost(grpc.StatusCode.OK, word), now_s=0.0)
    assert stream.attempt == 2
    with pytest.raises(type(word)):
        stream.lost(Lost(grpc.StatusCode.OK, word), now_s=5.0)


def test_a_stream_that_no_router_takes_over_ends_with_the_word_of_the_one_that_drained() -> None:
    stream = resumption(within_s=5.0)
    drained = Lost(grpc.StatusCode.OK, errors.Draining("this router is draining"))
    stream.lost(drained, now_s=0.0)
    stream.lost(GONE, now_s=1.0)
    with pytest.raises(errors.Draining) as ended:
        stream.lost(GONE, now_s=5.0)
    words = "this router is draining, and no router goes on with the request: connection reset"
    assert ended.value.message == words


def test_a_router_that_went_on_and_is_lost_did_not_drain() -> None:
    stream = resumption(within_s=5.0)
    stream.lost(Lost(grpc.StatusCode.OK, errors.Draining("this router is draining")), now_s=0.0)
    stream.feed(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="a", completion_tokens=1)))
    stream.lost(GONE, now_s=1.0)
    with pytest.raises(errors.Unavailable) as ended:
        stream.lost(GONE, now_s=6.0)
    assert (type(ended.value), ended.value.message) == (errors.Unavailable, "connection reset")


def test_a_stream_under_way_waits_for_a_full_router() -> None:
    stream = resumption()
    stream.lost(GONE, now_s=0.0)
    full = Lost(grpc.StatusCode.OK, errors.Overloaded("full", retry_after_ms=700))
    assert stream.lost(full, now_s=0.0) == pytest.approx(0.7)


def test_trying_ends_after_a_time_without_anything_new() -> None:
    stream = resumption(within_s=5.0)
    pauses = [stream.lost(GONE, now_s=0.5 * n) for n in range(10)]
    assert pauses == sorted(pauses) and (pauses[0], pauses[-1]) == (0.05, 1.0)
    stream.feed(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="new", completion_tokens=1)))
    assert stream.lost(GONE, now_s=20.0) < 0.1
    stream.lost(GONE, now_s=24.9)
    with pytest.raises(errors.Unavailable):
        stream.lost(GONE, now_s=25.0)


def test_the_deadline_is_the_requests() -> None:
    stream = resumption(within_s=5000.0)
    assert stream.left_s(999.0) == 1.0
    with pytest.raises(errors.DeadlineExceeded):
        stream.lost(GONE, now_s=1000.0)


def test_without_resuming_it_fails_at_once() -> None:
    stream = resumption(within_s=0.0)
    assert "x-slipstream-attempt" not in stream.metadata
    with pytest.raises(errors.Unavailable):
        stream.lost(GONE, now_s=0.0)


def test_endpoints_take_turns() -> None:
    opened: list[str] = []

    def dialled(name: str) -> str:
        opened.append(name)
        return name

    endpoints = Endpoints("a:1, b:2", dialled)
    assert endpoints.current(str) == ("a:1", "a:1")
    endpoints.lost("a:1")
    endpoints.lost("a:1")  # another stream reports it, too
    assert endpoints.current(str)[0] == "b:2"
    endpoints.lost("b:2")
    assert endpoints.current(str)[0] == "a:1"
    assert opened == ["a:1", "b:2"]
    assert not endpoints.should_give_up(2) and endpoints.should_give_up(3)
    endpoints.answered()
    assert not endpoints.should_give_up(3)
    assert endpoints.close() == ["a:1", "b:2"] and endpoints.should_give_up(1)


def test_an_endpoint_without_a_port_is_refused_at_once() -> None:
    for wrong, why in (("nohost", "must be HOST:PORT, not 'nohost'"), (" , ", "at least one endpoint")):
        with pytest.raises(errors.InvalidArgument, match=why) as refused:
            Client(wrong)
        assert refused.value.field == "endpoint"
    for named in ("dns:///router:7000", "unix:/run/router.sock", "[::1]:7000"):
        Client(named).close()
