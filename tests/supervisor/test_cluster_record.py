"""What other processes read in the record of a cluster."""

from __future__ import annotations

from slipstream.cluster_record import ClusterRecord, ProcessRecord


def test_endpoints_are_those_of_our_own_services() -> None:
    roles = ("etcd", "pool-master", "router", "prefill", "decode", "kvstore", "drafter")
    processes = tuple(
        ProcessRecord(f"{role}-0", role, "ready", 1, 1, f"127.0.0.1:{port}", None, 0, "", None, port >= 2)
        for port, role in enumerate(roles)
    )
    record = ClusterRecord(1, 1, "now", ".run", "etcd", "grpc", "http", "m", None, processes)
    assert record.service_endpoints() == {
        f"{role}-0": f"127.0.0.1:{port}" for port, role in enumerate(roles) if port >= 2
    }
