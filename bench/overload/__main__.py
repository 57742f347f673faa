"""Goodput and refusal times of a cluster that gets ten times as many requests as it can serve.

    python -m bench.overload --json

A real local cluster (router, two prefill and two decode workers, kvstore, etcd) runs the fake engine at a set
pace. A closed loop measures its rate; then open loops at 0.7, 1, 1.5 and 10 times that rate follow in turn,
`--rounds` times. A request is good when it has all its tokens before its deadline. Printed:

    goodput      good tokens a second by load; the peak over loads up to 1.5; the ratio at 10
    refusals     p50 and p99 in milliseconds from the complete request to its refusal, as the router measures
                 it, and as a probe in a separate process sees it (network and scheduling included): with
                 all places taken and no other load, for short prompts, prompts of 32k tokens and 20 new
                 tools; and at 10 times the rate
    router CPU   milliseconds per request, refused ones included
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from bench.command_line import bench_parser, print_report
from bench.ledgers import wait_until_idle
from bench.overload.load import Outcomes, OverloadClient, RequestShape, check_grpc_refusal, refusal_quantiles
from bench.progress import say
from bench.request_log import percentiles
from bench.router.load import generate_request
from bench.router.rig import cpu_seconds, make_model
from libs.common.cluster.worker_record import Role
from slipstream.operator_access import operator_dial
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

Report = dict[str, Any]
LOADS = (0.7, 1.0, 1.5, 10.0)
_MAX_BATCH = 8
_MAX_CONTEXT_TOKENS = 65_536  # a prompt of 32k must be refused for want of room, not for its length
# Requests running at once: a quarter more than both decode workers' batches, as the router's forecast allows.
PLACES = int(2 * _MAX_BATCH * 1.25)
_LONG_WORDS = 16_000
KINDS = ("short", "32k", "20 new tools")  # of refused requests
# The router admits some probes under overload; rare probes take no capacity from the load.
_PROBE_EVERY_S, _RARE_PROBE_EVERY_S = 0.02, 0.2


def overload_config(run_dir: Path, *, decode_pace_s: float, model: Path | None = None) -> ClusterConfig:
    """A cluster whose capacity the pace of the fake engine bounds, not the machine."""
    engine = ["--engine", "fake", "--max-batch", str(_MAX_BATCH), "--kv-memory-bytes", str(256 << 20)]
    engine += ["--max-context-tokens", str(_MAX_CONTEXT_TOKENS)]
    more: Report = {} if model is None else {"model": model}
    return ClusterConfig(
        run_dir=run_dir,
        draft_model=None,
        drafters=0,
        transport="socket",
        log_level="warning",
        extra_arguments={
            Role.PREFILL: [*engine, "--fake-pace-s", str(decode_pace_s / 20)],
            Role.DECODE: [*engine, "--fake-pace-s", str(decode_pace_s)],
            Role.ROUTER: ["--max-requests", str(PLACES)],
            Role.KVSTORE: ["--dram-bytes", str(64 << 20), "--disk-bytes", "0"],
        },
        **more,
    )


class Overload:
    """The cluster under test, and its load."""

    def __init__(
        self, cluster: ClusterSupervisor, client: OverloadClient, options: argparse.Namespace
    ) -> None:
        self._cluster, self._client, self._options = cluster, client, options
        self._shape = RequestShape(options.deadline_s, options.output_tokens)
        record = cluster.record()
        self.grpc, self.http = record.router_grpc, record.router_http
        self._admin_http = record.find("router-0").admin_http
        self._operator_dial = operator_dial(Path(record.run_dir))
        self._pid = record.find("router-0").pid or 0
        self._seed = 0

    async def report(self) -> Report:
        """Measure refusals at an idle cluster, its rate, and all windows."""
        options = self._options
        idle = {kind: await self._idle_refusals(kind) for kind in KINDS}
        calibration = await self._window(1.0, rate_per_s=None)
        rate = calibration["good_per_s"]
        rounds: dict[float, list[Report]] = {load: [] for load in LOADS}
        for _ in range(options.rounds):
            for load in LOADS:
                rounds[load].append(await self._window(load, rate_per_s=rate * load))
        goodput = {load: statistics.median(r["good_tokens_per_s"] for r in rounds[load]) for load in LOADS}
        peak = max(goodput[load] for load in LOADS if load < 10)
        problems = [p for reports in rounds.values() for r in reports for p in r.pop("problems")]
        endpoints = self._cluster.record().service_endpoints()
        await wait_until_idle(endpoints, problems, self._operator_dial, timeout_s=30)
        return {
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "capacity_requests_per_s": rate,
            "goodput_tokens_per_s": goodput,
            "goodput_at_10_over_peak": round(goodput[10.0] / peak, 4),
            "refusals_ms": {"idle": idle, "at_10": [r["refusals_ms"] for r in rounds[10.0]]},
            "windows": rounds,
            "problems": problems,
        }

    async def _window(self, load: float, *, rate_per_s: float | None) -> Report:
        """Measure one window; without a rate a closed loop of as many streams as run at once."""
        options, self._seed = self._options, self._seed + 1
        before, cpu_s, began_s = await self._metrics(), self._cpu_s(), time.monotonic()
        probes: list[asyncio.Task[Report]] = []
        if rate_per_s is None:
            streams = int(2 * _MAX_BATCH)
            outcomes = await self._client.closed(
                self._shape, streams=streams, requests=8 * streams, seed=self._seed
            )
        else:
            if load >= 10:
                probes = [asyncio.create_task(self._probe(KINDS[0], every_s=_RARE_PROBE_EVERY_S))]
            outcomes = await self._client.window(
                self._shape,
                rate_per_s=rate_per_s,
                requests=max(int(rate_per_s * options.seconds), 1),
                seed=self._seed,
            )
        # Requests run on after the last arrival of a window: the rate counts that time too.
        wall_s = time.monotonic() - began_s
        seen = {kind: await probe for kind, probe in zip(KINDS, probes, strict=False)}
        refusals = refusal_quantiles(before, await self._metrics())
        return _window_report(outcomes, wall_s, self._cpu_s() - cpu_s) | {
            "refusals_ms": {"router": refusals, "probe": seen}
        }

    async def _idle_refusals(self, kind: str) -> Report:
        """Fill all places with long streams; then measure refusals one after another."""
        record = self._cluster.record()
        async with dial(record.router_grpc) as channel:
            generate: Any = channel.unary_stream("/slipstream.v1.RouterService/Generate")
            holding = generate_request([{"role": "user", "content": "hold on"}], 4000)
            held = [generate(holding) for _ in range(PLACES)]
            try:
                for call in held:
                    await call.read()
                before, cpu_s = await self._metrics(), self._cpu_s()
                seen = await self._probe(kind)
                refusals = refusal_quantiles(before, await self._metrics())
            finally:
                for call in held:
                    call.cancel()
        problems: list[str] = []
        endpoints = record.service_endpoints()
        await wait_until_idle(endpoints, problems, self._operator_dial, timeout_s=30)
        if problems:
            raise RuntimeError("; ".join(problems))
        cpu_ms = (self._cpu_s() - cpu_s) * 1e3 / max(seen["sent"], 1)
        return {"router": refusals, "probe": seen, "router_cpu_ms_per_probe_and_streams": round(cpu_ms, 2)}

    async def _probe(self, kind: str, *, every_s: float = _PROBE_EVERY_S) -> Report:
        """Measure refusals from a separate process."""
        arguments = ["--probe", self.grpc, "--probe-kind", kind, "--probe-every-s", str(every_s)]
        arguments += ["--seconds", str(self._options.seconds)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.overload", *arguments, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        report: Report = json.loads(printed)
        return report

    async def _metrics(self) -> str:
        async with (
            aiohttp.ClientSession(f"http://{self._admin_http}") as http,
            http.get("/metrics") as answer,
        ):
            return await answer.text()

    def _cpu_s(self) -> float:
        return cpu_seconds(self._pid)


def _window_report(outcomes: Outcomes, wall_s: float, cpu_s: float) -> Report:
    return {
        "offered": outcomes.offered,
        "good": outcomes.good,
        "refused": outcomes.refused,
        "late": outcomes.late,
        "wall_s": round(wall_s, 2),
        "good_per_s": round(outcomes.good / wall_s, 3),
        "good_tokens_per_s": round(outcomes.good_tokens / wall_s, 2),
        "router_cpu_ms_per_request": round(cpu_s * 1e3 / max(outcomes.offered, 1), 3),
        "router_cpu_share": round(cpu_s / wall_s, 3),
        "problems": outcomes.problems,
    }


def _tools(count: int, number: int) -> bytes:
    """Wire bytes that append tools to a serialised request; protobuf merges the two."""
    request = router_pb2.GenerateRequest()
    for index in range(count):
        properties = {f"p{i}-{number}": {"type": "string", "description": "a parameter"} for i in range(6)}
        request.chat.tools.add(
            name=f"tool_{index}",
            description="Does things.",
            parameters=json.dumps({"type": "object", "properties": properties}),
        )
    return request.SerializeToString()


async def probe(endpoint: str, kind: str, *, seconds: float, every_s: float) -> Report:
    """Send requests with `reject_if_busy` one at a time; admitted ones are cancelled at once."""
    words = " ".join(["order"] * (_LONG_WORDS if kind == "32k" else 8))
    data = generate_request([{"role": "user", "content": words}], 16, reject_if_busy=True)
    tools = iter(range(10**9))  # each request has other tools
    refused_ms: list[float] = []
    sent, end_s = 0, time.monotonic() + seconds
    async with dial(endpoint) as channel:
        generate: Any = channel.unary_stream("/slipstream.v1.RouterService/Generate")
        while time.monotonic() < end_s:
            more = _tools(20, next(tools)) if kind == "20 new tools" else b""
            sent, sent_s = sent + 1, time.monotonic()
            call = generate(data + more, timeout=30)
            try:
                await call.read()
                call.cancel()
            except grpc.aio.AioRpcError as error:
                check_grpc_refusal(error)
                refused_ms.append((time.monotonic() - sent_s) * 1e3)
            await asyncio.sleep(every_s)
    return {"sent": sent, "refused": len(refused_ms), "round_trip_ms": percentiles(refused_ms)}


async def run(options: argparse.Namespace) -> Report:
    """Start the cluster and measure."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        config = overload_config(
            Path(folder) / "run", decode_pace_s=options.decode_pace_ms / 1e3, model=model
        )
        async with ClusterSupervisor(config, say=say) as cluster:
            record = cluster.record()
            async with OverloadClient(record.router_grpc, record.router_http) as client:
                return await Overload(cluster, client, options).report()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("overload", __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=8.0, help="arrivals of each window")
    add("--rounds", type=int, default=2, help="windows of each load")
    add("--deadline-s", type=float, default=3.0, help="of each request")
    add("--output-tokens", type=int, default=24, help="of each request")
    add("--decode-pace-ms", type=float, default=4.0, help="of each token on a decode worker")
    add("--probe", default="", help=argparse.SUPPRESS)
    add("--probe-kind", default="short", help=argparse.SUPPRESS)
    add("--probe-every-s", type=float, default=_PROBE_EVERY_S, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a refusal was not typed or a ledger is not empty afterwards."""
    options = parse(argv)
    if options.probe:
        seen = probe(
            options.probe, options.probe_kind, seconds=options.seconds, every_s=options.probe_every_s
        )
        print(json.dumps(asyncio.run(seen)))
        return 0
    report = asyncio.run(run(options))
    print_report(report, as_json=options.json)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
