"""Every real service starts with the arguments that the plan gives it, and ends at SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest

from libs.common.cluster.exit_reports import EtcdExitReports, WorkerExit, run_name
from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import INCARNATION_VARIABLE
from libs.common.etcd.client import EtcdClient
from slipstream.cluster_record import ProcessRecord
from slipstream.enum_names import ROLES
from slipstream.operator_access import operator_dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig
from supervisor.forking.starts import STARTS
from tests.support.network.ports import OwnPorts
from tests.support.processes.process_checks import mentioning


async def status_of(cluster: ClusterSupervisor, instance: str) -> worker_pb2.GetStatusResponse:
    record = cluster.record()
    async with operator_dial(Path(record.run_dir))(record.service_endpoints()[instance]) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)


async def reported_end_by_hand(cluster: ClusterSupervisor, instance: str) -> WorkerExit:
    """SIGTERM from another process than the supervisor, which reports the run that ended, and how."""
    process = cluster.record().find(instance)
    status = await status_of(cluster, instance)
    client = EtcdClient([cluster.record().etcd], timeout_s=60)
    try:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        run = run_name(Role(process.role), instance, status.incarnation)
        return await EtcdExitReports(client, wait_s=200).exit_of(run)
    finally:
        await client.close()


@pytest.mark.parametrize("start", STARTS)
async def test_the_five_services_start_and_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setenv(INCARNATION_VARIABLE, "ours")  # no other process has it
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, model)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "vocab_size": 4096}))
    fake_engine = ("--engine", "fake")
    config = ClusterConfig(
        run_dir=tmp_path / "run",
        model=model,
        draft_model=None,
        prefill=1,
        decode=1,
        drafters=1,
        transport="socket",
        extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE, Role.DRAFTER), fake_engine),
        ready_timeout_s=300,
        grace_s=100,
        log_format="json",
        start=start,
    )
    said: list[str] = []
    async with ClusterSupervisor(config, say=said.append, rng=OwnPorts()) as cluster:
        services = [process for process in cluster.record().processes if process.role != "etcd"]
        found = await asyncio.gather(*(status_of(cluster, process.instance) for process in services))
        assert [(ROLES.name(s.role), s.instance) for s in found] == [(p.role, p.instance) for p in services]
        assert len({s.incarnation for s in found} | {"ours"}) == len(found) + 1
        starting = said.pop(0)
        assert starting == "starting etcd, 1 kvstore, 1 prefill, 1 decode, 1 drafter, 1 router"
        assert not said
        assert [process.role for process in services] == ["kvstore", "prefill", "decode", "drafter", "router"]
        assert await reported_end_by_hand(cluster, "decode-0") is WorkerExit.KILLED
        async with asyncio.timeout(60):
            while not said or cluster.record().find("decode-0").state != "ready":
                await asyncio.sleep(0.02)
    assert said == ["decode-0 ended; starting it again"]
    assert not mentioning(str(tmp_path / "run"))
    for process in services:
        _assert_json_log(process)


def _assert_json_log(process: ProcessRecord) -> None:
    """Every line of the process is JSON, and names the process."""
    text = Path(process.log).read_text()
    assert text and all(line.startswith("{") for line in text.splitlines()), text
    for line in map(json.loads, text.splitlines()):
        assert (line["service"], line["instance"]) == (process.role, process.instance)
        assert {"time", "level", "logger", "message"} <= set(line)
        assert line["time"].endswith("Z") and datetime.fromisoformat(line["time"]).tzinfo is not None
