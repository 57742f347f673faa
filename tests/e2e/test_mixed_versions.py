"""Processes of two versions of the wire contract in one cluster, under load: they understand each other.

The older ones run with stubs of the contract's first version (tests/support/older_stubs.py), so every
field, method and service that came later is unknown to them and missing in what they send.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from bench.faults.fault_load import Answer, FaultRun, answer_of, mixed_requests, run_streams, wrong
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.cli.drain import restart_processes
from slipstream.v1 import kv_events_pb2, kv_events_pb2_grpc
from tests.support.disturbance import assert_undisturbed, disturbed_in_flight
from tests.support.fake_engines import fake_engine_config
from tests.support.lasting import lasting_dir
from tests.support.local_cluster import REQUEST_S, LocalCluster
from tests.support.older_stubs import build_older_stubs

OLDER = ("router-0", "prefill-0", "decode-0", "kvstore-0", "drafter-0")
LOAD = mixed_requests(21, tokens=48)
WAIT_S = 180.0
NAMED = "slipstream_prompts_by_reference_total"


class Site:
    def __init__(self, cluster: LocalCluster, run_dir: Path, stubs: Path, moved: list[str]) -> None:
        self.cluster, self.run_dir, self.stubs, self.moved = cluster, run_dir, stubs, moved

    def runs(self, router: str) -> list[FaultRun]:
        """The load through one router; nothing failed, whoever took part."""

        async def load() -> list[FaultRun]:
            async with AsyncClient(self.cluster.workers[router]) as client:
                return await run_streams(client, LOAD, stagger_s=0.01)

        runs: list[FaultRun] = self.cluster.call(load(), timeout_s=2 * REQUEST_S)
        assert not [run.error for run in runs if run.error]
        self.cluster.assert_idle()
        return runs

    def restart(self, older: Sequence[str], *names: str) -> None:
        """Start processes again, the named `older` ones with the older contract."""
        write_bent(self.run_dir, self.stubs, older)
        for name in names:
            restart_processes(self.run_dir, name, rolling=False, timeout_s=WAIT_S)


def write_bent(run_dir: Path, stubs: Path, older: Sequence[str]) -> None:
    (run_dir / "bent.json").write_text(json.dumps({name: {"stubs": str(stubs)} for name in older}))


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with lasting_dir(request, "mixed") as run_dir, lasting_dir(request, "older") as stubs:
        moved = build_older_stubs(stubs)
        write_bent(run_dir, stubs, OLDER)
        modules = dict.fromkeys(Role, "tests.support.bent_service")
        config = fake_engine_config(run_dir, pace_s=0.0003, routers=2, kvstores=2, modules=modules)
        with LocalCluster(config) as cluster:
            yield Site(cluster, run_dir, stubs, moved)


def is_older(site: Site, instance: str) -> bool:
    """It does not know the service of KV events."""
    with grpc.insecure_channel(site.cluster.workers[instance]) as channel:
        stub = kv_events_pb2_grpc.KvEventServiceStub(channel)
        call = stub.WatchBlocks(kv_events_pb2.WatchBlocksRequest(), timeout=60)
        try:
            next(iter(call))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        finally:
            call.cancel()
        return False


def test_the_older_contract_lacks_what_came_later(site: Site) -> None:
    for name in ("StartSequence.handle", "DecodeResponse.packed_tokens", "LoadReport.draining"):
        assert f"slipstream.v1.{name}" in site.moved
    assert "slipstream.v1.KvEventService" in site.moved
    assert is_older(site, "prefill-0")
    assert not is_older(site, "prefill-1")


def test_each_version_of_router_works_with_each_version_of_worker(site: Site) -> None:
    answers: list[list[Answer]] = []

    def met(router: str) -> bool:
        """All of them took part, and none needed a second attempt: at once, not after a failure."""
        runs = site.runs(router)
        answers.append([answer_of(run) for run in runs])
        trails = [run.reply.trail for run in runs if run.reply.trail is not None]
        all_took_part = {trail.decode_worker for trail in trails} == {"decode-0", "decode-1"} and {
            trail.prefill_worker for trail in trails
        } >= {"prefill-0", "prefill-1"}
        return all_took_part and {trail.attempts for trail in trails} == {1}

    for router in ("router-0", "router-1"):
        # Which worker a request runs on, and whether a slow prefill is asked of a second one, is not given.
        assert any(met(router) for _ in range(8)), router
    assert all(answer == answers[0] for answer in answers)


def test_prompts_are_named_only_between_processes_that_know_names(site: Site) -> None:
    def named(version: int) -> list[float]:
        workers = (f"prefill-{version}", f"decode-{version}")
        return [site.cluster.status(name).counters.get(NAMED, 0.0) for name in workers]

    def both_were() -> bool:
        site.runs("router-1")
        return all(now > then for now, then in zip(named(1), before_1, strict=True))

    before_0, before_1 = named(0), named(1)
    # Which worker a request runs on is not given.
    assert any(both_were() for _ in range(8))
    assert named(0) == before_0
    # Two older ones have later fields in the same places, and name prompts to each other.
    before_1 = named(1)
    site.runs("router-0")
    assert named(1) == before_1


def test_streams_go_on_at_a_worker_of_the_other_version(site: Site) -> None:
    expected = [answer_of(run) for run in site.runs("router-1")]
    pid, ran_there = site.cluster.pid("decode-1"), []

    def kill() -> None:
        ran_there.append(site.cluster.sequences("decode-1"))
        os.kill(pid, signal.SIGKILL)

    runs = disturbed_in_flight(site.cluster, LOAD, expected, disturb=kill)
    moved = [run.reply.trail for run in runs if run.reply.trail is not None and run.reply.trail.attempts > 1]
    assert len(moved) >= ran_there[0] > 0
    assert "decode-0" in {trail.decode_worker for trail in moved}
    site.cluster.until_running("decode-1", but=pid)
    site.cluster.assert_idle()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_upgrade_and_its_way_back_under_load(site: Site) -> None:
    """One process after the other, all to the new version, then half of them back; 0 failed, 0 wrong."""
    expected = [answer_of(run) for run in site.runs("router-1")]
    rounds = 0
    for older in ((), OLDER):
        failed: list[BaseException] = []

        def move(older: Sequence[str] = older, failed: list[BaseException] = failed) -> None:
            try:
                site.restart(older, *OLDER)
            except BaseException as error:
                failed.append(error)

        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        while mover.is_alive():
            assert_undisturbed(site.cluster, LOAD, expected, disturb=lambda: None, after_tokens=1)
            rounds += 1
        assert failed == []
        assert is_older(site, "prefill-0") == bool(older)
    assert not wrong(site.runs("router-0"), expected)
    print(f"{rounds} rounds of {len(LOAD)} streams")
