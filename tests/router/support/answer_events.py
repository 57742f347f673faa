"""Events of an answer as a router makes them, and the server-sent events of a writer as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from slipstream.v1 import common_pb2, router_pb2

Delta = router_pb2.Delta
STARTED = router_pb2.Started(request_id="req-1", model="mini", created_unix_s=1700000000, prompt_tokens=40)

# Protobuf refuses lone surrogates; quotes, control characters and line ends of other standards come often.
_AWKWARD = st.sampled_from('"\\/\b\n\r\t\x00\x1f\x7f\x85\u2028\U0001f600')
_CONTROLS = bytes(range(0x20))
_TEXT = st.text(st.one_of(_AWKWARD, st.characters(exclude_categories=["Cs"])), min_size=1, max_size=8)


def call(index: int, arguments: str, *, call_id: str = "", name: str = "") -> Delta:
    """A piece of a tool call."""
    return Delta(
        tool_calls=[router_pb2.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)]
    )


def finished(reason: str = "STOP", **fields: Any) -> router_pb2.Finished:
    """The end of an answer."""
    usage = router_pb2.Usage(prompt_tokens=40, completion_tokens=9, reasoning_tokens=3, cached_tokens=32)
    value = common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    return router_pb2.Finished(**{"finish_reason": value, "usage": usage, **fields})


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """An answer in random pieces: reasoning, text and calls, several of them in one delta or one in many."""
    deltas: list[Delta] = []
    if draw(st.booleans()):
        deltas += [Delta(reasoning=text) for text in draw(st.lists(_TEXT, max_size=4))]
    if draw(st.booleans()):
        deltas += [Delta(text=text) for text in draw(st.lists(_TEXT, max_size=4))]
    for index in range(draw(st.integers(0, 3))):
        deltas.append(call(index, "", call_id=f"functions.look:{index}", name="look"))
        deltas += [call(index, text) for text in draw(st.lists(_TEXT, max_size=3))]
    joined: list[Delta] = []
    for delta in deltas:  # as the queue joins deltas for a slow client
        last = joined[-1] if joined else None
        in_order = last is not None and not (last.tool_calls and not delta.tool_calls)
        if last is not None and in_order and not (last.text and delta.reasoning) and draw(st.booleans()):
            last.MergeFrom(
                Delta(
                    reasoning=last.reasoning + delta.reasoning,
                    text=last.text + delta.text,
                    tool_calls=delta.tool_calls,
                )
            )
        else:
            joined.append(delta)
    return joined


def parts_of(deltas: Sequence[Delta]) -> tuple[str, str, list[str]]:
    """The whole reasoning, the whole text, and the arguments of each call."""
    calls: dict[int, str] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            calls[piece.index] = calls.get(piece.index, "") + piece.arguments
    reasoning, text = "".join([d.reasoning for d in deltas]), "".join([d.text for d in deltas])
    return reasoning, text, [calls[index] for index in sorted(calls)]


def sse_objects(data: bytes) -> list[Mapping[str, Any]]:
    """The data of each event, whose name must be the type of its data."""
    assert data.endswith(b"\n\n")
    found = []
    for block in data.removesuffix(b"\n\n").split(b"\n\n"):
        name, line = block.split(b"\n")
        assert line.translate(None, _CONTROLS) == line
        found.append(json.loads(line.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found
