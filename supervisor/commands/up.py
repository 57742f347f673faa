"""`slipstream up`: the cluster in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from supervisor.cluster import ClusterSupervisor
from supervisor.plan import ClusterConfig


def say(line: str) -> None:
    """Print progress and problems to stderr, so that output can be piped. The cluster runs on when stderr is
    closed or full."""
    with contextlib.suppress(OSError):
        print(f"slipstream: {line}", file=sys.stderr, flush=True)


async def run_cluster(config: ClusterConfig) -> int:
    """Run until SIGINT or SIGTERM; a second one kills at once. Returns the exit code."""
    cluster = ClusterSupervisor(config, say=say)
    running = asyncio.create_task(_run(cluster))

    def on_signal() -> None:
        if running.cancelling():
            say("killing everything")
            cluster.kill_now()
        else:
            say("stopping; once more to kill at once")
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        say("stopped")
    return 0


async def _run(cluster: ClusterSupervisor) -> None:
    async with cluster:
        record = cluster.record()
        memory_mb = cluster.rss_bytes() / 1e6
        say(f"ready in {cluster.ready_s:.1f} s, {memory_mb:.0f} MB; logs in {record.run_dir}/logs")
        say(f"gRPC {record.router_grpc}, HTTP {record.http_url}; Ctrl-C stops")
        await asyncio.Event().wait()
