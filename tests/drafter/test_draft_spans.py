"""What a sequence got from its drafter is one span of its request's trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.core.fake_head import FakeHead
from services.drafter.batcher import Proposal
from services.drafter.draft_spans import DraftSpans
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc
from tests.drafter.nodes import running_drafter
from tests.support.processes.process_checks import eventually
from tests.support.recorded_spans import PARENT, KeptSpans, kept_spans, parts, said
from tests.worker.nodes import packed, unpacked


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    with kept_spans() as kept:
        yield kept


def extend(seq_id: str, start: int, tokens: list[int], *, traced: bool = True) -> drafter_pb2.ExtendContext:
    return drafter_pb2.ExtendContext(
        seq_id=seq_id,
        start_position=start,
        next_tokens=packed(tokens),
        width=8,
        features=np.zeros((len(tokens), 8), "<u2").tobytes(),
        draft_tokens=3,
        trace={"traceparent": PARENT} if traced else {},
    )


async def test_a_sequence_is_one_span_from_its_first_rows_to_its_end(kept: KeptSpans) -> None:
    async with running_drafter(FakeHead(guess=lambda token: token + 1)) as node:
        call: Any = drafter_pb2_grpc.DrafterServiceStub(node.channel).Draft(timeout=60)
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [5, 6]), extend("b", 9, [7])]))
        first = await call.read()
        assert [unpacked(proposal.tokens) for proposal in first.proposals] == [[7, 8, 9], [8, 9, 10]]
        await call.write(
            drafter_pb2.DraftRequest(extends=[extend("a", 2, [7, 8, 1]), extend("c", 0, [1], traced=False)])
        )
        await call.read()
        assert kept.names == []
        await call.write(drafter_pb2.DraftRequest(closed=["a", "c", "never there"]))
        await eventually(lambda: kept.names == ["drafts"])
        assert parts(kept.last()) == (int("a" * 32, 16), int("b" * 16, 16))
        assert said(kept.last()) == {
            "rows": 5,
            "proposals": 2,
            "proposed_drafts": 6,
            "matched_drafts": 2,
        }
        await call.done_writing()  # and that of the other one ends with the stream
        assert await call.read() is grpc.aio.EOF
        await eventually(lambda: kept.names == ["drafts", "drafts"])
        assert said(kept.last())["matched_drafts"] == 0


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(steps=st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 3), max_size=3), st.booleans()), max_size=8))
def test_drafts_match_as_far_as_the_sequence_went_on_with_them(
    steps: list[tuple[list[int], list[int], bool]],
) -> None:
    """Rows follow one another; a proposal comes before the next rows, or too late."""
    with kept_spans() as kept:
        spans, position, expected = DraftSpans(), 0, 0
        proposed: list[int] = []
        for tokens, drafts, late in steps:
            while proposed and tokens[: len(proposed)] != proposed:
                proposed.pop()
            expected += len(proposed)
            spans.extended("a", extend("a", position, tokens), np.array(tokens, "<u4"))
            position += len(tokens)
            base = position if late else position + 1
            spans.proposed(Proposal("a", base, tuple(drafts)))
            proposed = [] if late else list(drafts)
        spans.closed("a")
        assert kept.names == ["drafts"] * bool(steps)
        if steps:
            assert said(kept.last())["matched_drafts"] == expected
