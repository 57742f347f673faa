"""`slipstream up` with fake services: python -m tests.support.clusters.fake_cluster RUN_DIR MODEL."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from libs.common.cluster.worker_record import Role
from supervisor.cluster import ClusterSupervisor
from supervisor.commands import up
from supervisor.configuration.plan import ClusterConfig
from tests.support.network.ports import OwnPorts


def fake_config(run_dir: Path, model: Path) -> ClusterConfig:
    """A router, a prefill and a decode worker, all fakes, on a real etcd."""
    return ClusterConfig(
        run_dir=run_dir,
        model=model,
        draft_model=None,
        prefill=1,
        decode=1,
        kvstores=0,
        drafters=0,
        ready_timeout_s=100,
        grace_s=60,
        file_drain_s=dict.fromkeys(Role, 0.0),  # fakes have nothing to drain
        drain_s=0.0,
        extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE, Role.DRAFTER), ("--engine", "fake")),
        modules=dict.fromkeys(Role, "tests.support.clusters.fake_service"),
    )


if __name__ == "__main__":
    vars(up)["ClusterSupervisor"] = partial(ClusterSupervisor, rng=OwnPorts())
    raise SystemExit(asyncio.run(up.run_cluster(fake_config(Path(sys.argv[1]), Path(sys.argv[2])))))
