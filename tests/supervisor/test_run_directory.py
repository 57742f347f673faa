"""The directory of a local cluster."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from slipstream.cluster_record import ClusterRecord, ProcessRecord
from supervisor.run_directory import SCRAPE_FILE, RunDirLock, remove_record, write_record


def test_a_new_run_directory_is_open_to_its_owner_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    RunDirLock(run_dir).close()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_prometheus_finds_the_processes_that_are_meant_to_run(tmp_path: Path) -> None:
    def process(name: str, state: str, admin_http: str | None) -> ProcessRecord:
        role = name.partition("-")[0]
        return ProcessRecord(name, role, state, 1, 1, "127.0.0.1:1", None, 0, "", admin_http=admin_http)

    processes = (
        process("etcd", "ready", None),
        process("router-0", "ready", "127.0.0.1:7"),
        process("decode-0", "restarting", "127.0.0.1:8"),
        process("decode-1", "drained", "127.0.0.1:9"),
    )
    write_record(tmp_path, ClusterRecord(1, 1, "now", ".run", "etcd", "grpc", "http", "m", None, processes))
    assert json.loads((tmp_path / SCRAPE_FILE).read_text()) == [
        {"targets": ["127.0.0.1:7"], "labels": {"component": "router", "process": "router-0"}},
        {"targets": ["127.0.0.1:8"], "labels": {"component": "decode", "process": "decode-0"}},
    ]
    remove_record(tmp_path)
    assert not list(tmp_path.iterdir())
