"""The draft features of a handoff: as many rows as its reader needs, in bfloat16, by the KV transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.worker_bounds import MAX_PROMPT_FEATURES
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.worker.engine.feature_memory import ExportedFeatures
from libs.worker.requests.messages import FEATURE_BYTES, parse_features
from services.prefill.feature_demand import MAX_WORKERS, READERS, FeatureDemand
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import (
    WAIT_S,
    Gate,
    Node,
    PrefillCall,
    eventually,
    prefill_request,
    prompt_tokens,
    running_nodes,
)

# Of the protobuf form, whatever the prompt: four numbers, an address and a checksum.
MOST_STATE_BYTES = 48


async def handoff(
    node: Node, *, draft_rows: int, request_id: str = "r", decode_instance: str = ""
) -> tuple[prefill_pb2.HandoffTicket, prefill_pb2.HandoffComplete]:
    """The ticket and the end of the handoff of 50 tokens, to a reader of so many rows."""
    attempt = common_pb2.Attempt(request_id=request_id, attempt=1)
    call = PrefillCall(
        node, prefill_request(node, prompt_tokens(50), attempt=attempt, decode_instance=decode_instance)
    )
    ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
    request = prefill_pb2.WatchHandoffRequest(
        handoff_id=ticket.handoff_id, attempt=ticket.attempt, draft_rows=draft_rows
    )
    watch = prefill_pb2_grpc.PrefillServiceStub(node.channel).WatchHandoff(request, timeout=WAIT_S)
    events = [event async for event in watch]
    return ticket, events[-1].complete


async def release(node: Node, handoff_id: str) -> None:
    stub = prefill_pb2_grpc.PrefillServiceStub(node.channel)
    await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id))
    await node.wait_idle()


@pytest.mark.parametrize("draft_rows", [0, 3, 512])
async def test_a_reader_gets_the_newest_rows_that_it_needs(draft_rows: int) -> None:
    async with running_nodes() as nodes:
        node, reader = await nodes.prefill(), await nodes.decode()
        ticket, complete = await handoff(node, draft_rows=draft_rows)
        state = complete.draft_features
        assert complete.HasField("draft_features") == bool(draft_rows)
        n_rows = min(draft_rows, 50)
        assert state.rows == n_rows
        assert state.ByteSize() <= MOST_STATE_BYTES
        if n_rows:
            assert state.start_position == 50 - n_rows
            n_bytes = n_rows * state.width * FEATURE_BYTES
            exported = ExportedFeatures(state.address, state.checksum)
            packed = await reader.core.features.read(ticket.transport_session, exported, n_bytes)
            assert packed is not None
            assert parse_features(packed, state.width, "features").shape == (n_rows, state.width)
            assert node.core.features.held_bytes == node.core.features.slot_bytes
        await release(node, ticket.handoff_id)


class StepFeatures:
    """Whether each step of a worker computed features, oldest first."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[bool] = []
        model = node.engine.model
        run = model.run

        def recording(batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
            self.found.append(batch.want_features)
            return run(batch, rows, stop)

        monkeypatch.setattr(model, "run", recording)

    def pop(self) -> list[bool]:
        found, self.found = self.found, []
        return found


async def test_steps_have_features_while_the_readers_of_their_prompts_want_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers that want none leave those of another decode worker their features, and get none with them."""
    async with running_nodes() as nodes:
        node, numbers = await nodes.prefill(), count()
        steps = StepFeatures(node, monkeypatch)

        async def has_rows(decode_instance: str, draft_rows: int) -> bool:
            ticket, complete = await handoff(
                node, draft_rows=draft_rows, request_id=f"r-{next(numbers)}", decode_instance=decode_instance
            )
            await release(node, ticket.handoff_id)
            return complete.HasField("draft_features")

        for _ in range(READERS):
            assert await has_rows("drafting", 3)
            assert not await has_rows("plain", 0)
        steps.pop()
        for _ in range(3):
            assert not await has_rows("plain", 0)
            assert steps.pop() == [False]
            assert await has_rows("drafting", 3)
            assert steps.pop() == [True]
        await has_rows("plain", 3)  # its prompt may be computed before the reader asks
        assert await has_rows("plain", 3)


@pytest.mark.parametrize("draft_rows", [0, 3])
async def test_a_reader_that_has_asked_decides_for_its_prompt(
    monkeypatch: pytest.MonkeyPatch, draft_rows: int
) -> None:
    async with running_nodes() as nodes:
        gate = Gate()
        node = await nodes.prefill(sleep=gate, step_tokens=32)
        steps = StepFeatures(node, monkeypatch)
        call = PrefillCall(node, prefill_request(node, prompt_tokens(50), decode_instance="d"))
        ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
        await eventually(lambda: gate.arrived == 1)
        request = prefill_pb2.WatchHandoffRequest(
            handoff_id=ticket.handoff_id, attempt=ticket.attempt, draft_rows=draft_rows
        )
        watch = prefill_pb2_grpc.PrefillServiceStub(node.channel).WatchHandoff(request, timeout=WAIT_S)
        [sequence] = node.engine.sequences()
        await eventually(lambda: node.ledger.streams == 2)
        await eventually(lambda: sequence.wants_features == bool(draft_rows))
        gate.open()
        events = [event async for event in watch]
        assert steps.pop() == [True, draft_rows > 0]
        assert events[-1].complete.HasField("draft_features") == bool(draft_rows)
        await release(node, ticket.handoff_id)


async def test_a_watch_that_is_refused_says_nothing_of_what_readers_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        steps = StepFeatures(node, monkeypatch)
        ticket, _ = await handoff(node, draft_rows=3)
        stub = prefill_pb2_grpc.PrefillServiceStub(node.channel)
        other = common_pb2.Attempt(request_id="other", attempt=1)
        for handoff_id, attempt, code in (
            (ticket.handoff_id, other, grpc.StatusCode.FAILED_PRECONDITION),
            ("none", ticket.attempt, grpc.StatusCode.NOT_FOUND),
        ):
            request = prefill_pb2.WatchHandoffRequest(handoff_id=handoff_id, attempt=attempt)
            for _ in range(READERS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.WatchHandoff(request, timeout=WAIT_S).read()
                assert refused.value.code() is code
        await release(node, ticket.handoff_id)
        steps.pop()
        ticket, complete = await handoff(node, draft_rows=3, request_id="next")
        assert complete.HasField("draft_features") and steps.pop() == [True]
        await release(node, ticket.handoff_id)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 0, 0, 3])), max_size=60))
def test_features_end_after_some_readers_of_a_worker_in_turn_want_none(asked: list[tuple[str, int]]) -> None:
    demand = FeatureDemand()
    wanted: dict[str, list[int]] = {"a": [], "b": []}
    assert demand.predict("a") and demand.predict("b")
    for worker, draft_rows in asked:
        demand.record(worker, draft_rows)
        wanted[worker].append(draft_rows)
        for name, all_rows in wanted.items():
            assert demand.predict(name) == (len(all_rows) < READERS or any(all_rows[-READERS:]))


def test_the_worker_that_read_nothing_for_the_longest_time_is_forgotten() -> None:
    demand = FeatureDemand()
    names = [f"d{n}" for n in range(MAX_WORKERS + 1)]
    for _ in range(READERS):
        for name in names[:-1]:
            demand.record(name, 0)
    demand.record(names[0], 0)
    assert not any(map(demand.predict, names[:-1]))
    demand.record(names[-1], 0)
    assert [name for name in names if demand.predict(name)] == [names[1], names[-1]]


async def test_a_worker_without_room_for_features_hands_off_without_them() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        taken = [node.core.features.export(b"features") for _ in range(MAX_PROMPT_FEATURES)]
        assert all(taken) and node.core.features.export(b"features") is None
        ticket, complete = await handoff(node, draft_rows=3)
        assert not complete.HasField("draft_features") and not complete.finish_reason
        for exported in taken:
            assert exported is not None
            node.core.features.release(exported)
        await release(node, ticket.handoff_id)
