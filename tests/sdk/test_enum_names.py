"""The names of the contract's enums, also of values that a later contract adds."""

from __future__ import annotations

import pytest
from google.protobuf.internal import enum_type_wrapper

import slipstream.enum_names as names
from slipstream.enum_names import EnumNames, value_name
from slipstream.errors import InvalidArgument
from slipstream.jobs.messages import state_value, submitted_job
from slipstream.replies import ReplyBuilder
from slipstream.v1 import batches_pb2, common_pb2, jobs_pb2, router_pb2

_LATER = 1_000_000
_TABLES = {name: table for name, table in vars(names).items() if isinstance(table, EnumNames)}


@pytest.mark.parametrize("table", _TABLES.values(), ids=_TABLES)
def test_each_name_stands_for_one_value(table: EnumNames[int]) -> None:
    assert table.values
    for name, value in table.values.items():
        assert table.value(name) == value and table.name(value) == name == table.find(value)
    assert table.find(_LATER) is None and table.name(_LATER) in ("unknown", "INTERNAL", "")
    with pytest.raises(KeyError):
        table.value("no such name")


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (common_pb2.FinishReason, names.FINISH_REASONS),
        (common_pb2.CacheTier, names.CACHE_TIERS),
        (common_pb2.WorkerRole, names.ROLES),
        (common_pb2.Transport, names.TRANSPORTS),
    ],
)
def test_a_table_has_every_value_of_its_enum(
    kind: enum_type_wrapper._EnumTypeWrapper[int], table: EnumNames[int]
) -> None:
    assert sorted(table.values.values()) == sorted(kind.values())


def test_the_unspecified_value_has_the_name_that_its_table_gives() -> None:
    assert names.FINISH_REASONS.name(0) == value_name(batches_pb2.FilePurpose, 0) == "unspecified"
    assert EnumNames.of(batches_pb2.FilePurpose, unspecified="").value("") == 0
    assert names.PRIORITIES.find(router_pb2.PRIORITY_UNSPECIFIED) is None
    assert names.MESSAGE_ROLES.name(router_pb2.MESSAGE_ROLE_UNSPECIFIED) == ""


@pytest.mark.parametrize("value", [0, _LATER])
def test_an_answer_calls_an_unspecified_reason_or_tier_unknown(value: int) -> None:
    cached = [common_pb2.CachedTokens(tier=value, tokens=5)]  # type: ignore[arg-type]
    finished = router_pb2.Finished(finish_reason=value, usage=router_pb2.Usage(cached=cached))  # type: ignore[arg-type]
    builder = ReplyBuilder()
    builder.feed(router_pb2.GenerateEvent(finished=finished))
    assert builder.reply.finish_reason == "unknown"
    assert builder.reply.usage and builder.reply.usage.cached_by_tier == {"unknown": 5}


@pytest.mark.parametrize(("state", "name"), [(0, "unspecified"), (_LATER, "unknown")])
def test_a_job_in_a_state_without_a_name(state: int, name: str) -> None:
    job = jobs_pb2.Job(id="job-1", state=state)  # type: ignore[arg-type]
    assert submitted_job(jobs_pb2.Job.FromString(job.SerializeToString())).state == name
    assert state_value("") == jobs_pb2.JOB_STATE_UNSPECIFIED
    with pytest.raises(InvalidArgument):
        state_value(name)
