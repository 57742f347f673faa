"""The gap in a stream whose decode worker dies or stops, and the time until the router detects it.

    python -m bench.failover --json                    # the shipped model: kill -9, then SIGSTOP
    python -m bench.failover --engine fake --streams 50

Each round runs the same streams on a real local cluster and signals one decode worker in the middle. Gap:
the longest time without a token at the client, of a stream that was moved. Detection: from the signal to
the first failed attempt in the router's log. Every answer is compared with that of a run without signals.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bench.command_line import bench_parser, print_report
from bench.faults.fault_load import (
    Answer,
    FaultRequest,
    FaultRun,
    answer_of,
    longest_gap_s,
    mixed_requests,
    run_streams,
    wrong,
)
from bench.ledgers import wait_until_idle
from bench.progress import say
from bench.request_log import percentiles
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import WorkerSizes
from supervisor.configuration.plan import ClusterConfig

_FAKE = ["--engine", "fake", "--fake-pace-s", "0.0003", "--kv-memory-bytes", str(64 << 20)]
_FAILED_ATTEMPT = re.compile(r"^(\S+) WARNING \S+ services\.router\.[\w.]+: \S+ attempt \d+: ")
_BACK_S = 60.0


@dataclass(slots=True)
class Round:
    """Measurements after one signal."""

    gaps_ms: list[float] = field(default_factory=list)
    detection_ms: float | None = None
    problems: list[str] = field(default_factory=list)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("failover", __doc__)
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5, help="for each signal")
    return parser.parse_args()


def config_of(options: argparse.Namespace, run_dir: Path) -> ClusterConfig:
    """Two of each worker; with the fake engine on sockets."""
    if options.engine == "torch":
        # Texts are compared. With products in bf16 a near tie may fall otherwise after a failover (ADR 0004).
        return ClusterConfig(run_dir=run_dir, sizes=WorkerSizes(compute_dtype="float32"))
    extra = {Role.PREFILL: _FAKE, Role.DECODE: _FAKE, Role.DRAFTER: ["--engine", "fake"]}
    return ClusterConfig(
        run_dir=run_dir, drafters=1, draft_model=None, transport="socket", extra_arguments=extra
    )


async def run_round(
    cluster: ClusterSupervisor,
    client: AsyncClient,
    load: list[FaultRequest],
    expected: list[Answer],
    number: signal.Signals,
) -> Round:
    """Signal `decode-0` when a third of all tokens have arrived, and measure until it is ready again."""
    outcome = Round()
    seen, trigger = 0, sum(int(request.arguments["max_tokens"]) for request in load) // 3
    signalled_s, signalled_at, pid = 0.0, 0.0, 0

    def on_event(tokens: int) -> None:
        nonlocal seen, signalled_s, signalled_at, pid
        seen += tokens
        if not pid and seen >= trigger:
            pid = cluster.record().find("decode-0").pid or 0
            signalled_s, signalled_at = time.monotonic(), time.time()
            os.kill(pid, number)

    try:
        runs = await run_streams(client, load, on_event=on_event)
    finally:
        if pid and number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    outcome.problems = wrong(runs, expected)
    outcome.gaps_ms = [longest_gap_s(run, after_s=signalled_s) * 1e3 for run in runs if _was_moved(run)]
    log = Path(cluster.record().find("router-0").log)
    outcome.detection_ms = _detected_after_ms(log, signalled_at)
    await _until_ready(cluster, "decode-0")
    return outcome


def _was_moved(run: FaultRun) -> bool:
    return run.reply.stats is not None and run.reply.stats.attempts > 1


def _detected_after_ms(log: Path, signalled_at: float) -> float | None:
    for line in log.read_text(errors="replace").splitlines():
        if found := _FAILED_ATTEMPT.match(line):
            logged_at = datetime.fromisoformat(found[1]).timestamp()
            if logged_at >= signalled_at - 0.001:
                return max((logged_at - signalled_at) * 1e3, 0.0)
    return None


async def _until_ready(cluster: ClusterSupervisor, instance: str) -> None:
    async with asyncio.timeout(_BACK_S):
        await asyncio.sleep(0.5)
        while cluster.record().find(instance).state != "ready":
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # for the router to connect to it


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run all rounds of both signals."""
    load = mixed_requests(options.streams, tokens=options.tokens)
    report: dict[str, object] = {
        "engine": options.engine,
        "streams": options.streams,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
    }
    with tempfile.TemporaryDirectory() as run_dir:
        config = config_of(options, Path(run_dir))
        async with ClusterSupervisor(config, say=say) as cluster:
            async with AsyncClient(cluster.record().router_grpc) as client:
                expected = [answer_of(run) for run in await run_streams(client, load)]
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    rounds = [
                        await run_round(cluster, client, load, expected, number)
                        for _ in range(options.rounds)
                    ]
                    report[number.name] = _summary(rounds)
            problems: list[str] = []
            record = cluster.record()
            endpoints, dial = record.service_endpoints(), operator_dial(Path(record.run_dir))
            report["leaked_blocks"] = await wait_until_idle(endpoints, problems, dial, timeout_s=30)
            report["still_held"] = problems
    return report


def _summary(rounds: list[Round]) -> dict[str, object]:
    gaps = [gap for outcome in rounds for gap in outcome.gaps_ms]
    detections = [o.detection_ms for o in rounds if o.detection_ms is not None]
    return {
        "streams_moved": len(gaps),
        "wrong_or_failed": [problem for outcome in rounds for problem in outcome.problems],
        "gap_ms": percentiles(gaps) | ({"max": round(max(gaps), 2)} if gaps else {}),
        "detection_ms": percentiles(detections),
    }


def main() -> int:
    """Measure and print; 1 when an answer was wrong or a request failed."""
    options = parse_options()
    report = asyncio.run(measure(options))
    print_report(report, as_json=options.json)
    bad = report["still_held"] or any(report[name]["wrong_or_failed"] for name in ("SIGKILL", "SIGSTOP"))  # type: ignore[index]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
