"""DrafterService over real gRPC: proposals, isolation of streams, nothing kept after the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.worker_service import held
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import ContextRows, HeadRows
from libs.worker.process.settings import WorkerSettings
from services.drafter.app import DrafterApp
from services.drafter.batcher import MAX_FAILED_BATCHES_IN_ROW, DraftWork, Proposal
from slipstream.errors import Draining, InvalidArgument
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc
from tests.drafter.nodes import DrafterNode, running_drafter
from tests.worker.nodes import eventually, packed, unpacked


def head() -> FakeHead:
    return FakeHead(guess=lambda token: token + 1)


def extend(seq_id: str, start: int, tokens: list[int], **fields: Any) -> drafter_pb2.ExtendContext:
    values: dict[str, Any] = {
        "seq_id": seq_id,
        "start_position": start,
        "next_tokens": packed(tokens),
        "width": 8,
        "features": np.zeros((len(tokens), 8), "<u2").tobytes(),
        "draft_tokens": 3,
        **fields,
    }
    return drafter_pb2.ExtendContext(**values)


def open_stream(node: DrafterNode) -> Any:
    return drafter_pb2_grpc.DrafterServiceStub(node.channel).Draft(timeout=60)


async def test_proposals_name_their_base() -> None:
    async with running_drafter(head()) as node:
        call = open_stream(node)
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [5, 6]), extend("b", 9, [7])]))
        response = await call.read()
        assert [(p.seq_id, p.base_tokens, unpacked(p.tokens)) for p in response.proposals] == [
            ("a", 3, [7, 8, 9]),
            ("b", 11, [8, 9, 10]),
        ]
        await call.write(drafter_pb2.DraftRequest(closed=["a"]))
        await eventually(lambda: node.batcher.sequences == 1)
        assert held(node.service.ledger())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await eventually(lambda: held(node.service.ledger()) == 0)


async def test_streams_do_not_share_sequences() -> None:
    async with running_drafter(head()) as node:
        one, two = open_stream(node), open_stream(node)
        await one.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [5])]))
        await two.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [50])]))
        assert unpacked((await one.read()).proposals[0].tokens) == [6, 7, 8]
        assert unpacked((await two.read()).proposals[0].tokens) == [51, 52, 53]
        assert node.batcher.sequences == 2
        one.cancel()
        await eventually(lambda: node.batcher.sequences == 1)
        await two.write(drafter_pb2.DraftRequest(extends=[extend("a", 1, [60])]))
        assert unpacked((await two.read()).proposals[0].tokens) == [61, 62, 63]
        two.cancel()
        await eventually(lambda: held(node.service.ledger()) == 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"width": 4}, "width"),
        ({"features": b"abc"}, "features"),
        ({"next_tokens": packed([1, 2])}, "features"),
        ({"next_tokens": b"abc"}, "next_tokens"),
        ({"next_tokens": b"", "features": b""}, "features"),
        ({"seq_id": ""}, "seq_id"),
    ],
)
async def test_malformed_rows_end_the_stream_by_name(fields: dict[str, Any], field: str) -> None:
    fields = {"seq_id": "a", **fields}
    async with running_drafter(head()) as node:
        call = open_stream(node)
        await call.write(drafter_pb2.DraftRequest(extends=[extend("good", 0, [1])]))
        await call.read()
        await call.write(drafter_pb2.DraftRequest(extends=[extend(start=0, tokens=[1], **fields)]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == field
        await eventually(lambda: held(node.service.ledger()) == 0)


async def test_drain_ends_streams_and_refuses_new_ones() -> None:
    async with running_drafter(head()) as node:
        call = open_stream(node)
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [1])]))
        await call.read()
        await node.service.drain()
        assert await call.read() is grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open_stream(node).read()
        assert isinstance(from_rpc_error(caught.value), Draining)
        await eventually(lambda: held(node.service.ledger()) == 0)


class Faulty(FakeHead):
    """Fails in the middle of a batch, `faults` times."""

    faults = 0

    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        super().extend_batch(rows)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("out of memory")


async def test_a_batch_that_fails_is_answered_without_drafts_and_closed() -> None:
    faulty = Faulty(guess=lambda token: token + 1)
    async with running_drafter(faulty) as node:
        call = open_stream(node)
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 0, [5, 6])]))
        assert unpacked((await call.read()).proposals[0].tokens) == [7, 8, 9]
        # More failures than may come in a row, but never in a row.
        for round_ in range(MAX_FAILED_BATCHES_IN_ROW + 1):
            faulty.faults = 1
            await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 2, [7])]))
            (proposal,) = (await call.read()).proposals
            assert (proposal.seq_id, proposal.base_tokens, proposal.tokens) == ("a", 4, b"")
            assert node.batcher.sequences == 0
            await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 3, [round_])]))
            assert unpacked((await call.read()).proposals[0].tokens) == [round_ + 1, round_ + 2, round_ + 3]
        call.cancel()
        await eventually(lambda: held(node.service.ledger()) == 0)


async def test_a_head_that_fails_again_and_again_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty()
    monkeypatch.setattr("services.drafter.app.FakeHead", lambda: faulty)
    app = DrafterApp(WorkerSettings(instance="drafter-0", engine="fake"))
    stops: list[bool] = []
    await app.open("127.0.0.1:0", InMemoryDiscovery(), lambda: stops.append(app.broken))
    faulty.faults = 100
    answers: list[list[Proposal]] = []
    for seen in range(1, MAX_FAILED_BATCHES_IN_ROW):
        row = ContextRows("a", 0, np.array([5], "<u4"), np.zeros((1, 8), "<f4"))
        app._batcher.submit(DraftWork([row], (), [3], answers.append))
        await eventually(lambda seen=seen: len(answers) == seen)  # type: ignore[misc]
    assert not stops
    app._batcher.submit(DraftWork([row], (), [3], answers.append))
    await eventually(lambda: stops == [True])
    assert app.ledger().sequences == 0
    await app.close()
