"""python -m services.router: the front door."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from libs.common.cluster.discovery import Discovery, EtcdDiscovery, InMemoryDiscovery
from libs.common.cluster.exit_reports import EtcdExitReports, ExitReports, NoExitReports
from libs.common.cluster.placements import EtcdPlacements, InMemoryPlacements, Placements
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.rpc.telemetry import configure_logging
from libs.common.rpc.tracing import configure_tracing
from libs.common.runtime import heap
from libs.common.runtime.grpc_loop import GrpcLoop
from libs.common.runtime.malloc import keep_freed_memory, use_large_pages
from libs.common.runtime.process_options import tls_files
from libs.common.service_bounds import MAX_RUNNING_REQUESTS
from services.router.api.api_keys import ApiKeys
from services.router.multiprocess import die_with, run_processes
from services.router.request.model_card import load_model_card
from services.router.server import RouterOptions, RouterServer
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

DEFAULT_GRACE_S = 5.0
# Messages of long prompts are made, copied and freed all the time.
_KEPT_HEAP_BYTES = 64 << 20


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m services.router", description="The front door.")
    add = parser.add_argument
    add("--instance", required=True, help="name of this process in the cluster, unique in its role")
    add("--listen", default="127.0.0.1:7000", help="address of the gRPC face; port 0 = any free one")
    add("--http", default="127.0.0.1:8000", help="address of the HTTP face; port 0 = any free one")
    add("--etcd", default="", help="HOST:PORT[,HOST:PORT..] of etcd")
    add("--run-dir", type=Path, default=Path(".run"), help="directory for files of this run")
    add("--model", type=Path, required=True, help="checkpoint directory: tokenizer, config, name")
    add("--served-model-name", help="name clients use; default: the directory's")
    add("--region-ms", default="", help="NAME=MS[,NAME=MS..]: the way to each region; others are 0 away")
    add("--max-requests", type=int, default=MAX_RUNNING_REQUESTS, help="requests running at once")
    add("--api-keys", type=Path, help="file with lines `key tenant`; without it nobody needs a key")
    add("--processes", type=int, default=1, help="router processes that share the ports")
    add("--child-of", type=int, default=0, help=argparse.SUPPRESS)
    add("--allow-pinning", action="store_true", help="honour x-slipstream-prefill: for demonstrations")
    add("--tls-ca", type=Path, help="PEM; with the two below: mTLS on gRPC, towards workers too")
    add("--tls-certificate", type=Path, help="PEM")
    add("--tls-key", type=Path, help="PEM")
    add("--log-level", default="info", help="debug, info, warning or error")
    add("--drain-s", type=float, default=DEFAULT_GRACE_S, help="how long SIGTERM waits for requests")
    return parser.parse_args(arguments)


def parse_region_ms(text: str) -> dict[str, float]:
    """`eu=0,us=80` by region. ValueError, saying why, for anything else."""
    distances: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, equals, ms = item.partition("=")
        if not name or not equals or not 0.0 <= float(ms) < 1e6:
            raise ValueError(f"--region-ms: {item!r} is not NAME=MS")
        distances[name] = float(ms)
    return distances


async def serve(options: argparse.Namespace) -> None:
    """Serve until told to stop."""
    card = await asyncio.to_thread(load_model_card, options.model, name=options.served_model_name)
    router_options = RouterOptions(
        instance=options.instance,
        region_ms=parse_region_ms(options.region_ms),
        listen=options.listen,
        http=options.http,
        tls=tls_files(options),
        tenants=ApiKeys.from_file(options.api_keys) if options.api_keys else ApiKeys(),
        max_requests=options.max_requests,
        allow_pinning=options.allow_pinning,
        share_ports=bool(options.child_of),
    )
    async with contextlib.AsyncExitStack() as stack:
        discovery: Discovery = InMemoryDiscovery()
        placements: Placements = InMemoryPlacements()
        deaths: ExitReports = NoExitReports()
        if options.etcd:
            client = EtcdClient(options.etcd.split(","))
            stack.push_async_callback(client.close)
            etcd_placements = EtcdPlacements(client)
            await etcd_placements.start()
            stack.push_async_callback(etcd_placements.close)
            discovery, placements, deaths = EtcdDiscovery(client), etcd_placements, EtcdExitReports(client)
        router = RouterServer(card, discovery, placements, router_options, deaths=deaths)
        await router.start()
        heap.settle()
        use_large_pages()
        stack.push_async_callback(router.stop, grace_s=options.drain_s)
        await router.host.wait_for_stop()
        log.info("%s stops", options.instance)


def main() -> int:
    """Parse the command line and serve."""
    options = parse_options()
    configure_logging(options.instance, options.log_level)
    configure_tracing(Role.ROUTER, options.instance)
    try:
        keep_freed_memory(_KEPT_HEAP_BYTES)
        if options.child_of:
            die_with(options.child_of)
        if options.processes > 1:
            return asyncio.run(
                run_processes(
                    sys.argv[1:],
                    instance=options.instance,
                    listen=options.listen,
                    http=options.http,
                    count=options.processes,
                    grace_s=options.drain_s,
                )
            )
        with asyncio.Runner(loop_factory=GrpcLoop) as runner:
            runner.run(serve(options))
    except (OSError, ValueError, SlipstreamError) as error:
        print(f"{options.instance}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
