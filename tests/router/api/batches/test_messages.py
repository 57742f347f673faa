"""What is wrong with the lines of a batch, from the router's record to the SDK."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.router.api.batches.batch_store import decode_batch
from services.router.api.batches.lines import DefectCode, LineDefect
from services.router.api.batches.records import RequestBatch, batch_object
from services.router.api.batches.rpc.messages import batch_message
from services.router.api.batches.states import BatchState
from slipstream.batches.messages import submitted_batch
from slipstream.v1 import batches_pb2
from tests.router.api.batches.conftest import CHAT


def failed_batch() -> RequestBatch:
    """A batch with a defect of every code."""
    return RequestBatch(
        id="batch_1",
        tenant="alice",
        endpoint=CHAT,
        input_file="file_1",
        window="24h",
        state=BatchState.FAILED,
        created_unix_s=1.0,
        expires_unix_s=2.0,
        output_ttl_s=1,
        defects=[LineDefect(code, "is wrong", 3) for code in DefectCode],
    )


def test_every_defect_has_a_code_of_the_contract_and_its_name_in_the_sdk() -> None:
    record = msgspec.json.encode(failed_batch()).decode()  # as the database has it
    message = batch_message(decode_batch(record))
    sent = [error.code for error in message.errors]
    assert sorted(sent) == sorted(filter(None, batches_pb2.LineErrorCode.values()))
    assert [fault.code for fault in submitted_batch(message).errors] == [code.value for code in DefectCode]


def test_a_fault_of_a_later_contract_is_shown_as_unknown() -> None:
    sent = batches_pb2.Batch(errors=[batches_pb2.LineError(code=99, line=2)])  # type: ignore[arg-type]
    [fault] = submitted_batch(batches_pb2.Batch.FromString(sent.SerializeToString())).errors
    assert (fault.code, fault.line) == ("unknown", 2)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"state": "paused"}, BatchState.IN_PROGRESS),
        ({"state": "completed_in_part", "ended_unix_s": 3.0}, BatchState.FAILED),
    ],
)
def test_a_batch_of_a_later_router_is_read(changes: dict[str, Any], state: BatchState) -> None:
    """Routers of two versions share a database during a rollout."""
    record = msgspec.to_builtins(failed_batch()) | {"reason": "of a later version"} | changes
    record["defects"] = [{"code": "line_too_odd", "message": "is odd", "line": 7, "hint": "later"}]
    batch = decode_batch(msgspec.json.encode(record).decode())
    assert batch.state is state and batch_object(batch)["status"] == state.value
    [error] = batch_message(batch).errors
    assert (error.code, error.message, error.line) == (
        batches_pb2.LINE_ERROR_CODE_INVALID_REQUEST,
        "is odd",
        7,
    )
