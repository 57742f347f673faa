"""How the masters of the Mooncake Store pool are found and started: on loopback, elected through etcd.

The leader's log of changes (oplog) is in etcd too. So a master that takes over, or is started again, knows
every value that the nodes hold. Without etcd a master forgets everything when it ends.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from libs.common.cluster.worker_record import Role
from slipstream.errors import FailedPrecondition
from supervisor.configuration.plan import ClusterConfig, ProcessPlan

POOL_MASTER = "pool-master"
# A node that is silent for so long has left the pool, with what it held.
CLIENT_TTL_S = 5
# Reads take 1.5 s at most; a value is not evicted while one may run.
LEASE_MS = 5000
RPC_THREADS = 2
# Between etcd, which they need, and the kvstores, which end before them.
_WAVE = -1


def master_binary() -> Path:
    """The master of the mooncake package. `FailedPrecondition` if there is none."""
    # The package's own console script is a Python process that execs it; it is skipped.
    package = importlib.util.find_spec("mooncake")
    for folder in package.submodule_search_locations or () if package else ():
        candidate = Path(folder) / "mooncake_master"
        if os.access(candidate, os.X_OK):
            return candidate
    raise FailedPrecondition(
        "no mooncake_master: install mooncake-transfer-engine-non-cuda, as in slipstream-server[local]"
    )


def master_command(
    binary: Path, *, port: int, metrics_port: int, etcd: str | None, client_ttl_s: int = CLIENT_TTL_S
) -> list[str]:
    """The command line of one master. `etcd`: HOST:PORT[,HOST:PORT..], where it stands for election."""
    command = [
        str(binary),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        f"--rpc_thread_num={RPC_THREADS}",
        f"--client_ttl={client_ttl_s}",
        f"--default_kv_lease_ttl={LEASE_MS}",
        "--enable_metric_reporting=false",
        "--logtostderr",
        "--minloglevel=2",
    ]
    if etcd is not None:
        command += [
            "--enable_ha=true",
            "--ha_backend_type=etcd",
            f"--ha_backend_connstring={etcd.replace(',', ';')}",
            "--enable_oplog=true",
        ]
    return command


def pool_ports_needed(config: ClusterConfig) -> int:
    """How many free ports `plan_masters` takes."""
    return 2 * config.pool_masters if config.pool is not None else 0


def plan_masters(config: ClusterConfig, *, etcd: str, ports: Sequence[int]) -> list[ProcessPlan]:
    """The masters of the pool, none without one. A new leader takes 6 s to be elected, which nothing
    waits for: until then the kvstores go on without the pool."""
    if config.pool is None:
        return []
    binary = master_binary()
    plans = []
    for number in range(config.pool_masters):
        port, metrics_port = ports[2 * number : 2 * number + 2]
        command = master_command(binary, port=port, metrics_port=metrics_port, etcd=etcd)
        plans.append(
            ProcessPlan(
                f"{POOL_MASTER}-{number}",
                POOL_MASTER,
                _WAVE,
                tuple(command),
                f"127.0.0.1:{metrics_port}",
                awaited=False,
            )
        )
    return plans


def with_masters(config: ClusterConfig, masters: Sequence[ProcessPlan]) -> ClusterConfig:
    """The configuration whose kvstores know the admin endpoint of each pool master."""
    if not masters:
        return config
    admin = ["--pool-admin", ",".join(master.endpoint for master in masters)]
    extra = dict(config.extra_arguments)
    extra[Role.KVSTORE] = [*admin, *extra.get(Role.KVSTORE, ())]
    return replace(config, extra_arguments=extra)
