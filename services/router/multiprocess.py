"""Several router processes on one set of ports: the kernel spreads connections over them (SO_REUSEPORT).

A Python process runs on one core; a router that needs more cores runs as several processes, each a complete
router with a name (`router-0`, `router-0.1`, ..). They share sessions through etcd, as routers on different
machines do. `Abort` must use the connection of its request, as every gRPC client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from libs.common.http.listening import listen_tcp
from libs.common.runtime.signals import stop_on_signals
from services.router.settings import RouterSettings

log = logging.getLogger(__name__)

_RESTART_S = 1.0


async def run_processes(arguments: Sequence[str], options: RouterSettings) -> int:
    """Run the routers of these arguments, which state `options`, until SIGTERM or SIGINT. One that ends is
    started again.

    All processes share the addresses but --admin-http, which is the first one's: metrics are those of one
    process. The others take any free port, which discovery has, on the host of --admin-http-advertise where
    that is given. Returns the exit status.
    """
    instance = options.instance
    addresses = {
        "--listen": options.listen,
        "--http": options.http,
        "--admin": options.admin,
        "--admin-http": options.admin_http,
    }
    # Bound, never listened on: they keep the ports for the children, also while one restarts.
    holders = {
        flag: listen_tcp(endpoint, share_port=True, accept=False) for flag, endpoint in addresses.items()
    }
    stopping = asyncio.Event()
    children: set[asyncio.subprocess.Process] = set()
    stop_on_signals(stopping.set, before_exit=lambda: _kill_all(children))
    names = [instance if index == 0 else f"{instance}.{index}" for index in range(options.processes)]
    # argparse takes the last of repeated options.
    common = [*arguments, "--processes", "1", "--child-of", str(os.getpid())]
    for flag, holder in holders.items():
        common += [flag, "{}:{}".format(*holder.getsockname()[:2])]
    try:
        async with asyncio.TaskGroup() as group:
            for name in names:
                own = ["--instance", name]
                if name != instance:
                    own += ["--admin-http", _any_port(options.admin_http)]
                    if options.admin_http_advertise:
                        own += ["--admin-http-advertise", _any_port(options.admin_http_advertise)]
                group.create_task(_keep([*common, *own], stopping, children, grace_s=options.drain_s))
    finally:
        for holder in holders.values():
            holder.close()
    return 0


def _any_port(endpoint: str) -> str:
    return f"{endpoint.rpartition(':')[0]}:0"


def _kill_all(children: set[asyncio.subprocess.Process]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()


async def _keep(
    arguments: Sequence[str],
    stopping: asyncio.Event,
    children: set[asyncio.subprocess.Process],
    *,
    grace_s: float,
) -> None:
    """Run one child and restart it when it ends, until `stopping` is set. `children` has it while it runs."""
    while not stopping.is_set():
        child = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.router", *arguments)
        children.add(child)
        ended, stop = asyncio.create_task(child.wait()), asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.is_set():
                log.warning(
                    "router process %d ended with %s; another is started", child.pid, child.returncode
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RESTART_S):
                        await stopping.wait()
        finally:
            stop.cancel()
            if not ended.done():
                child.terminate()
                try:
                    async with asyncio.timeout(grace_s + 5.0):
                        await asyncio.shield(ended)
                except TimeoutError:
                    child.kill()
                    await ended
            children.discard(child)
