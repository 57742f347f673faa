"""The supervisor of a cluster in a test."""

from __future__ import annotations

from collections.abc import Callable

from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig
from supervisor.forking.launcher import ProcessLauncher
from tests.support.network.ports import OwnPorts
from tests.support.processes.launching import session_launcher


def supervised(
    config: ClusterConfig,
    *,
    say: Callable[[str], None] = lambda line: None,
    launcher: ProcessLauncher | None = None,
) -> ClusterSupervisor:
    """A cluster on ports of this process; by default its services are forks of this process's fork server."""
    return ClusterSupervisor(config, say=say, rng=OwnPorts(), launcher=launcher or session_launcher())
