"""Features that drafters read from decode workers, between real processes that end or stop in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from bench.faults.fault_load import Answer, mixed_requests
from tests.support.clusters.disturbance import (
    DECODERS,
    assert_undisturbed,
    disturbed_in_flight,
    undisturbed,
)
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

DRAFTER = "drafter-0"
PULLED = "slipstream_feature_bytes_pulled_total"
UNREAD = "slipstream_draft_rows_unread_total"
FAILURES = "slipstream_kv_checksum_failures_total"
BY_TRANSPORT = 'slipstream_draft_feature_bytes_total{way="transport"}'
STAGED = "slipstream_kv_staged_bytes"
LOAD = mixed_requests(7, tokens=24)  # one of each kind
# Reads, and the end of the process that is read, differ by transport. The end and the stop of a drafter do
# not, so they are part of `make soak` with Mooncake.
BY_EACH = pytest.mark.parametrize("drafting", ["socket", "mooncake"], indirect=True, scope="module")
BY_SOCKET = pytest.mark.parametrize(
    "drafting",
    ["socket", pytest.param("mooncake", marks=pytest.mark.soak)],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def drafting(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Decode workers that export the rows of each prompt and step."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine")
    with lasting_dir(request, f"rows-{request.param}") as run_dir:
        config = fake_engine_config(
            run_dir,
            pace_s=0.0003,
            transport=request.param,
            kvstores=0,
            drafts="on",
            instance_arguments={name: ("--draft-export-bytes", "1") for name in DECODERS},
        )
        with LocalCluster(config) as running:
            yield running


@pytest.fixture(scope="module")
def answers(drafting: LocalCluster) -> list[Answer]:
    """Those of a run without drafts."""
    drafting.call(drafting.supervisor.hold(DRAFTER))
    try:
        return undisturbed(drafting, LOAD)
    finally:
        drafting.call(drafting.supervisor.release(DRAFTER))


@pytest.fixture(autouse=True)
def _nothing_is_left(drafting: LocalCluster) -> Iterator[None]:
    yield
    drafting.assert_idle()
    until(lambda: not any(counted(drafting, name, STAGED) for name in DECODERS), what="no slot is held")


def counted(cluster: LocalCluster, name: str, counter: str) -> float:
    return cluster.status(name).counters.get(counter, 0.0)


def until_read(cluster: LocalCluster, answers: list[Answer]) -> None:
    """Streams run until the drafter has read their features; all answers are right."""
    before = counted(cluster, DRAFTER, PULLED)

    def is_read() -> bool:
        assert_undisturbed(cluster, LOAD, answers, disturb=lambda: None, after_tokens=1)
        return counted(cluster, DRAFTER, PULLED) > before

    until(is_read, what="features that the drafter reads")


@BY_EACH
def test_features_travel_by_the_transport(drafting: LocalCluster, answers: list[Answer]) -> None:
    until_read(drafting, answers)
    assert any(counted(drafting, name, BY_TRANSPORT) for name in DECODERS)
    assert not counted(drafting, DRAFTER, UNREAD)


@BY_SOCKET
def test_a_drafter_killed_in_the_middle_costs_drafts_only(
    drafting: LocalCluster, answers: list[Answer]
) -> None:
    until_read(drafting, answers)
    pid = drafting.pid(DRAFTER)
    disturbed_in_flight(drafting, LOAD, answers, disturb=partial(os.kill, pid, signal.SIGKILL))
    drafting.until_running(DRAFTER, but=pid)
    until_read(drafting, answers)


@BY_EACH
def test_a_decode_worker_killed_in_the_middle_leaves_nothing_at_the_drafter(
    drafting: LocalCluster, answers: list[Answer]
) -> None:
    until_read(drafting, answers)
    pid = drafting.pid(DECODERS[0])
    disturbed_in_flight(drafting, LOAD, answers, disturb=partial(os.kill, pid, signal.SIGKILL))
    drafting.until_running(DECODERS[0], but=pid)
    until_read(drafting, answers)
    assert not counted(drafting, DRAFTER, FAILURES)


@BY_SOCKET
def test_a_drafter_that_stops_holds_slots_for_a_while_only(
    drafting: LocalCluster, answers: list[Answer]
) -> None:
    until_read(drafting, answers)
    pid = drafting.pid(DRAFTER)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert_undisturbed(drafting, LOAD, answers, disturb=lambda: None, after_tokens=1)
        until(lambda: not any(counted(drafting, name, STAGED) for name in DECODERS), what="slots in time")
    finally:
        with contextlib.suppress(ProcessLookupError):  # the supervisor may have replaced it
            os.kill(pid, signal.SIGCONT)
    drafting.until_running(DRAFTER)
    until_read(drafting, answers)
