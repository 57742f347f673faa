"""A cluster that is only recorded: what commands read of it is there, and no process runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.cluster_record import ClusterRecord, ProcessRecord
from supervisor.run_directory import RunDirLock, write_record

NOWHERE = "127.0.0.1:1"


def recorded(
    name: str, state: str = "ready", *, pid: int | None = 1, endpoint: str = NOWHERE
) -> ProcessRecord:
    """A process of the tier in its name. A router's admin port is its endpoint."""
    role = name.rpartition("-")[0] or name
    admin = endpoint if role == "router" else None
    has_service = role != "etcd"
    return ProcessRecord(
        name, role, state, pid, 1, endpoint, None, 0, f"{name}.log", None, has_service, admin
    )


@contextmanager
def recorded_cluster(run_dir: Path, *processes: ProcessRecord, **others: Any) -> Iterator[None]:
    """The record of a cluster of these processes, as of a supervisor that runs inside the block.

    `others`: fields of the record.
    """
    lock = RunDirLock(run_dir)
    try:
        grpc = next((each.endpoint for each in processes if each.role == "router"), NOWHERE)
        record = ClusterRecord(
            1, 1, "2026-01-01T00:00:00Z", str(run_dir), NOWHERE, grpc, NOWHERE, "m", 1.0, processes, **others
        )
        write_record(run_dir, record)
        yield
    finally:
        lock.close()
