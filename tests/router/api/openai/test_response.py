"""Events written from ready text are what `json.dumps` would write, whatever characters they carry."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.router.api.openai.response import DONE, ResponseShape, ResponseWriter, stats_object
from slipstream.v1 import common_pb2, router_pb2

# Protobuf refuses lone surrogates; quotes, control characters and U+2028 are to come often.
AWKWARD = st.sampled_from('"\\/\b\f\n\r\t\x00\x1f\x7f\x85\u2028\u2029\ufeff\uffff\U0001f600')
TEXT = st.text(st.one_of(AWKWARD, st.characters(exclude_categories=["Cs"])))
COUNT = st.integers(0, 2**31 - 1)


def events_of(data: bytes) -> list[bytes]:
    """The data of each event; nothing in it may end its line."""
    assert data.endswith(b"\n\n")
    events = data.removesuffix(b"\n\n").split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events)
    assert not any(byte < 0x20 for event in events for byte in event)
    return [event.removeprefix(b"data: ") for event in events]


def written(data: bytes) -> list[Any]:
    """What the events say. Each is as `json.dumps` would write what it says."""
    said = []
    for event in events_of(data):
        said.append(json.loads(event))
        assert event == json.dumps(said[-1], ensure_ascii=False, separators=(",", ":")).encode()
    return said


def answer(
    started: router_pb2.Started, *, chat: bool, usage: bool, with_stats: bool = False
) -> ResponseWriter:
    shape = ResponseShape(chat=chat, include_usage=usage, with_stats=with_stats)
    return ResponseWriter(started, shape)


def head(started: router_pb2.Started, *, chat: bool) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{started.request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": started.created_unix_s,
        "model": started.model,
        "system_fingerprint": None,
    }


STARTED = st.builds(router_pb2.Started, request_id=TEXT, model=TEXT, created_unix_s=COUNT)
DELTA = st.builds(
    router_pb2.Delta,
    text=TEXT,
    reasoning=st.one_of(st.just(""), TEXT),
    tool_calls=st.lists(
        st.builds(router_pb2.ToolCallDelta, index=st.integers(0, 3), id=TEXT, name=TEXT, arguments=TEXT),
        max_size=2,
    ),
)


@given(STARTED, DELTA, st.booleans(), st.booleans())
def test_a_piece(started: router_pb2.Started, delta: router_pb2.Delta, chat: bool, usage: bool) -> None:
    stream = answer(started, chat=chat, usage=usage)
    said = written(stream.opening() + stream.delta_event(delta))
    around = head(started, chat=chat) | ({"usage": None} if usage else {})
    choices = [event.pop("choices")[0] for event in said]
    assert said == [around] * (2 if chat else 1)
    if chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        piece = choices[1]["delta"]
        assert (piece.get("content", ""), piece.get("reasoning_content", "")) == (delta.text, delta.reasoning)
        calls = [call["function"]["arguments"] for call in piece.get("tool_calls", [])]
        assert calls == [call.arguments for call in delta.tool_calls]
    else:
        assert choices[0]["text"] == delta.reasoning + delta.text
    assert all(
        (each["index"], each["finish_reason"], each["logprobs"]) == (0, None, None) for each in choices
    )


@given(
    STARTED,
    st.sampled_from(common_pb2.FinishReason.values()),
    st.lists(COUNT, min_size=4, max_size=4),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    TEXT,
)
def test_the_end(
    started: router_pb2.Started,
    reason: common_pb2.FinishReason.ValueType,
    counts: list[int],
    asked: tuple[bool, bool, bool],
    worker: str,
) -> None:
    """The usage comes in a separate event, the stats in the last one, the end mark after it."""
    chat, usage, stats = asked
    prompt, completion, cached, reasoning = counts
    finished = router_pb2.Finished(finish_reason=reason)
    finished.usage.prompt_tokens, finished.usage.completion_tokens = prompt, completion
    finished.usage.cached_tokens, finished.usage.reasoning_tokens = cached, reasoning
    finished.stats.prefill_worker = worker
    data = b"".join(answer(started, chat=chat, usage=usage, with_stats=stats).closing(finished))
    assert data.endswith(DONE)
    said = written(data.removesuffix(DONE))
    assert len(said) == 1 + usage
    assert ("slipstream" in said[-1]) is stats and (not stats or "slipstream" not in said[:-1])
    if stats:
        assert said[-1].pop("slipstream")["prefill_worker"] == worker
    whole = answer(started, chat=chat, usage=usage).body(finished)
    if usage:
        assert said[0].pop("usage") is None
        assert said[1] == head(started, chat=chat) | {"choices": [], "usage": whole["usage"]}
    (choice,) = said[0].pop("choices")
    assert said[0] == head(started, chat=chat)
    piece: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    finish = whole["choices"][0]["finish_reason"]
    assert choice == {"index": 0, "finish_reason": finish, **piece, "logprobs": None}


def test_statistics_call_an_unspecified_tier_unknown() -> None:
    tiers = (common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_UNSPECIFIED)
    cached = [common_pb2.CachedTokens(tier=tier, tokens=5) for tier in tiers]
    said = stats_object(router_pb2.Finished(usage=router_pb2.Usage(cached=cached)))
    assert said["cached_tokens_by_tier"] == {"dram": 5, "unknown": 5}


def test_a_whole_chat_encodes_its_log_probabilities_piece_by_piece() -> None:
    """The end of an answer of thousands of positions encodes none of them on the event loop."""
    started = router_pb2.Started(request_id="r", model="m", created_unix_s=1)
    writer = answer(started, chat=True, usage=False)
    top = [router_pb2.TextLogprob(token="\u2028", token_bytes=b"\xe2", logprob=-0.5 - i) for i in range(20)]
    position = router_pb2.TextLogprob(token="a", token_bytes=b"a", logprob=-0.25, top=top)
    for _ in range(3):
        writer.add(router_pb2.Delta(text="a", logprobs=[position] * 2))
    (choice,) = writer.body(router_pb2.Finished())["choices"]
    assert type(choice["logprobs"]["content"]) is msgspec.Raw
    said = msgspec.json.decode(msgspec.json.encode(choice))["logprobs"]["content"]
    tops = [{"token": "\u2028", "logprob": -0.5 - i, "bytes": [0xE2]} for i in range(20)]
    assert said == [{"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": tops}] * 6
