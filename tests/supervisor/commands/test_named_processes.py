"""Commands of one process of the local cluster: how it is named, and what they say of its state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.errors import SlipstreamError
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.drain_marks import drained_by, set_drained
from supervisor.process_stats import start_ticks
from tests.support.clusters.recorded import recorded, recorded_cluster
from tests.support.stubs.partial_servicer import partial_servicer


def invoke(run_dir: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--run-dir", str(run_dir)])


def words(run_dir: Path, *arguments: str) -> str:
    """The refusal of a command."""
    error = invoke(run_dir, *arguments).exception
    assert isinstance(error, SlipstreamError), error
    return error.message


@pytest.mark.parametrize("name", ["decode-0", "decode/decode-0"])
def test_a_process_is_named_with_its_tier_or_without(tmp_path: Path, name: str) -> None:
    with recorded_cluster(tmp_path, recorded("router-0"), recorded("decode-0", "drained", pid=None)):
        set_drained(tmp_path, "decode-0", by="ann")
        assert invoke(tmp_path, "drain", name).output == "decode-0 is drained already\n"
        assert words(tmp_path, "kill", name) == "decode-0 is not running at the moment (drained)"
        assert words(tmp_path, "status", name).startswith("decode-0 is drained: ann asked for it")
        for command in ("undrain", "restart"):
            set_drained(tmp_path, "decode-0", by="ann")
            late = words(tmp_path, command, name, "--timeout-s", "0.1")
            assert late == "decode-0 is not back after 0.1 s"
            assert not drained_by(tmp_path, "decode-0")
        assert words(tmp_path, "kill", "prefill/decode-0").startswith("no process 'prefill/decode-0'; there")


class DrainedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that takes no work and runs on, as after a drain over gRPC."""

    def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        ledger = worker_pb2.Ledger(sequences=2)
        return worker_pb2.GetStatusResponse(instance="decode-0", draining=True, uptime_ms=9000, ledger=ledger)


@pytest.fixture
def worker() -> Iterator[str]:
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(partial_servicer(DrainedWorker), server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield endpoint
    server.stop(0).wait(5)


NO_ROUTER = "router-0 is drained (`slipstream undrain router-0` starts it)"


def test_a_worker_has_a_status_while_no_router_serves(tmp_path: Path, worker: str) -> None:
    router = recorded("router-0", "drained", pid=None)
    with recorded_cluster(tmp_path, router, recorded("decode-0", endpoint=worker)):
        shown = invoke(tmp_path, "status", "decode-0")
        assert shown.exit_code == 0, shown.exception
        assert "requests hold 2 sequences" in shown.stdout and "draining" in shown.stdout
        assert shown.stderr == (
            f"slipstream: no router serves in {tmp_path}: {NO_ROUTER}; decode-0 answers itself\n"
        )
        (found,) = json.loads(invoke(tmp_path, "status", "decode-0", "--json").stdout)["workers"]
        assert (found["endpoint"], found["status"]["instance"]) == (worker, "decode-0")


def test_a_worker_that_no_one_reaches_is_known_by_the_record(tmp_path: Path) -> None:
    router = recorded("router-0", "drained", pid=None)
    with recorded_cluster(tmp_path, router, recorded("decode-0", pid=77)):
        said = words(tmp_path, "status", "decode-0")
        assert said.startswith("decode-0 (pid 77) at 127.0.0.1:1 does not answer: ")
        assert said.endswith(f"see decode-0.log; no router serves in {tmp_path}: {NO_ROUTER}")
        assert words(tmp_path, "status", "decode-9") == f"no router serves in {tmp_path}: {NO_ROUTER}"


def test_etcd_has_no_status_and_is_known_by_the_record(tmp_path: Path) -> None:
    with recorded_cluster(tmp_path, recorded("router-0"), recorded("etcd", pid=78)):
        said = words(tmp_path, "status", "etcd")
    assert said == "etcd is ready at 127.0.0.1:1 (pid 78), and answers no status; see etcd.log"


def test_a_worker_that_starts_is_not_undrained(tmp_path: Path) -> None:
    starting = replace(
        recorded("decode-0", "starting", pid=os.getpid()), start_ticks=start_ticks(os.getpid())
    )
    with recorded_cluster(tmp_path, recorded("router-0"), starting):
        said = words(tmp_path, "undrain", "decode-0")
    assert said == "decode-0 is starting: once it is ready it takes work"


def test_a_rolling_restart_leaves_drained_processes_as_they_are(tmp_path: Path, worker: str) -> None:
    """One that has ended by its mark, and one that runs on after a drain over gRPC."""
    router = recorded("router-0", "drained", pid=None)
    with recorded_cluster(tmp_path, router, recorded("decode-0", endpoint=worker)):
        set_drained(tmp_path, "router-0", by="ann")
        done = invoke(tmp_path, "restart", "--rolling", "--timeout-s", "0.1")
        assert done.exit_code == 0, done.exception
        assert [line.split(":")[0] for line in done.output.splitlines()] == [
            "skipped router-0",
            "skipped decode-0",
        ]
        assert drained_by(tmp_path, "router-0") == "ann"
