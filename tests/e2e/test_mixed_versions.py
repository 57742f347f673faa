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

from bench.fault_load import FaultRun, answer_of, mixed_requests, run_streams, wrong
from libs.common.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.cli.drain import restart_processes
from slipstream.v1 import kv_events_pb2, kv_events_pb2_grpc
from tests.support.disturbance import assert_undisturbed
from tests.support.fake_engines import fake_engine_config
from tests.support.local_cluster import LocalCluster, until
from tests.support.older_stubs import build_older_stubs

OLDER = ("router-0", "prefill-0", "decode-0", "kvstore-0", "drafter-0")
LOAD = mixed_requests(21, tokens=48)
WAIT_S = 90.0


class Site:
    def __init__(self, cluster: LocalCluster, run_dir: Path, stubs: Path, moved: list[str]) -> None:
        self.cluster, self.run_dir, self.stubs, self.moved = cluster, run_dir, stubs, moved

    def runs(self, router: str) -> list[FaultRun]:
        """The load through one router; nothing failed, whoever took part."""

        async def load() -> list[FaultRun]:
            async with AsyncClient(self.cluster.workers[router]) as client:
                return await run_streams(client, LOAD, stagger_s=0.01)

        runs: list[FaultRun] = self.cluster.call(load(), timeout_s=200)
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    run_dir, stubs = tmp_path_factory.mktemp("mixed"), tmp_path_factory.mktemp("older")
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
        call = stub.WatchBlocks(kv_events_pb2.WatchBlocksRequest(), timeout=10)
        try:
            next(iter(call))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined, no-any-return]
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
    answers = {}
    for router in ("router-0", "router-1"):
        runs = site.runs(router)
        answers[router] = [answer_of(run) for run in runs]
        trails = [run.reply.trail for run in runs if run.reply.trail is not None]
        assert {trail.attempts for trail in trails} == {1}  # at once, not after a failure
        assert {trail.decode_worker for trail in trails} == {"decode-0", "decode-1"}
        assert {trail.prefill_worker for trail in trails} >= {"prefill-0", "prefill-1"}
    assert answers["router-0"] == answers["router-1"]


def test_streams_go_on_at_a_worker_of_the_other_version(site: Site) -> None:
    expected = [answer_of(run) for run in site.runs("router-1")]
    pid = site.cluster.pid("decode-1")
    runs = assert_undisturbed(
        site.cluster,
        LOAD,
        expected,
        disturb=lambda: os.kill(pid, signal.SIGKILL),
        after_tokens=len(LOAD) * 10,
    )
    moved = [run.reply.trail for run in runs if run.reply.trail is not None and run.reply.trail.attempts > 1]
    assert moved and {trail.decode_worker for trail in moved} == {"decode-0"}
    until(
        lambda: site.cluster.state("decode-1") == "ready" and site.cluster.pid("decode-1") != pid,
        timeout_s=60,
        what="decode-1 is back",
    )
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
