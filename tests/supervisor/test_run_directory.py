"""The directory of a local cluster."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

from libs.common.cluster.worker_record import Role, Worker
from slipstream.cluster_record import ClusterRecord, ProcessRecord
from supervisor.run_directory import SCRAPE_FILE, RunDirLock, remove_record, write_record
from supervisor.scrape_targets import scrape_targets


def test_a_new_run_directory_is_open_to_its_owner_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lock = RunDirLock(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    lock.close()


def test_a_refused_start_leaves_no_empty_run_directory(tmp_path: Path) -> None:
    made, used = tmp_path / "made", tmp_path / "used"
    RunDirLock(made).close()
    assert not made.exists()
    used.mkdir()
    RunDirLock(used).close()
    assert used.is_dir(), "it was there before"
    lock = RunDirLock(made)
    (made / "logs").mkdir()
    lock.close()
    RunDirLock(made).close()
    assert (made / "logs").is_dir()


def process(name: str, state: str, admin_http: str | None) -> ProcessRecord:
    role = name.partition("-")[0]
    return ProcessRecord(name, role, state, 1, 1, "127.0.0.1:1", None, 0, "", admin_http=admin_http)


def record(*processes: ProcessRecord) -> ClusterRecord:
    return ClusterRecord(1, 1, "now", ".run", "etcd", "grpc", "http", "m", None, processes)


def test_prometheus_finds_the_processes_that_are_meant_to_run(tmp_path: Path) -> None:
    processes = (
        process("etcd", "ready", None),
        process("router-0", "ready", "127.0.0.1:7"),
        process("decode-0", "restarting", "127.0.0.1:8"),
        process("decode-1", "drained", "127.0.0.1:9"),
    )
    write_record(tmp_path, record(*processes))
    assert json.loads((tmp_path / SCRAPE_FILE).read_text()) == [
        {"targets": ["127.0.0.1:7"], "labels": {"component": "router", "process": "router-0"}},
        {"targets": ["127.0.0.1:8"], "labels": {"component": "decode", "process": "decode-0"}},
    ]
    write_record(tmp_path, replace(record(*processes), tls={"ca": "ca.pem"}))
    labels = [each["labels"] for each in json.loads((tmp_path / SCRAPE_FILE).read_text())]
    assert [each["__scheme__"] for each in labels] == ["https", "https"]
    plain_router = replace(record(*processes), tls={"ca": "ca.pem"}, plain_http=("router",))
    write_record(tmp_path, plain_router)
    labels = [each["labels"] for each in json.loads((tmp_path / SCRAPE_FILE).read_text())]
    assert [each.get("__scheme__") for each in labels] == [None, "https"]
    assert plain_router.http_url == "http://http/v1"
    remove_record(tmp_path)
    assert not list(tmp_path.iterdir())


def test_prometheus_finds_every_process_of_a_router() -> None:
    def announced(name: str, admin_http: str) -> Worker:
        return Worker(Role.ROUTER, name, "127.0.0.1:1", "i", admin_http=admin_http)

    ready = (process("router-1", "ready", "127.0.0.1:11"), process("router-10", "ready", "127.0.0.1:100"))
    routers = [
        announced("router-1", "127.0.0.1:11"),
        announced("router-1.1", "127.0.0.1:12"),
        announced("router-1.2", "router.example:13"),  # its advertised name
        announced("router-10", "127.0.0.1:100"),
        announced("router-10.1", "127.0.0.1:101"),
        announced("router-2.1", "127.0.0.1:14"),  # of a drained router
        announced("elsewhere", "10.0.0.1:9090"),
        announced("router-10.2", "10.0.0.1:102"),  # a false record, to which Prometheus would send its token
    ]
    targets = scrape_targets(record(*ready, process("router-2", "drained", "127.0.0.1:2")), routers)
    assert [(each["targets"], each["labels"]) for each in targets] == [
        ([f"127.0.0.1:{port}"], {"component": "router", "process": name})
        for name, port in {
            **{"router-1": 11, "router-1.1": 12, "router-1.2": 13},
            **{"router-10": 100, "router-10.1": 101, "router-10.2": 102},
        }.items()
    ]
