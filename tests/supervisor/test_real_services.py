"""Every real service starts with the arguments that the plan gives it, and ends when told to."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import grpc

from libs.common.worker_record import Role
from slipstream.supervisor.cluster import Cluster
from slipstream.supervisor.plan import DEFAULT_MODEL, ClusterConfig
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.ports import OwnPorts
from tests.support.processes import mentioning


async def role_at(endpoint: str) -> str:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)
        return f"{status.role} {status.instance}"


async def test_the_five_services_start_and_stop(tmp_path: Path) -> None:
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
        transport="socket",
        extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE, Role.DRAFTER), fake_engine),
        ready_timeout_s=300,
        grace_s=100,
    )
    said: list[str] = []
    async with Cluster(config, say=said.append, rng=OwnPorts()) as cluster:
        services = [process for process in cluster.record().processes if process.role != "etcd"]
        roles = await asyncio.gather(*(role_at(process.endpoint) for process in services))
        assert roles == [f"{process.role} {process.instance}" for process in services]
        assert said == []
        assert [process.role for process in services] == ["kvstore", "prefill", "decode", "drafter", "router"]
    assert said == []
    assert not mentioning(str(tmp_path / "run"))
