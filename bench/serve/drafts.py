"""The same load with drafts off, on and by the gate: clusters side by side, which take turns.

A way is `off`, `on` or `auto`, with `:local` for a draft head in the decode worker and `:remote` for the
drafter's service. All clusters are up during the whole run, so a round measures each way within seconds of
the others. `ms_per_token` counts from a request's first token to its last one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.progress import say
from bench.request_log import RequestLog
from bench.serve.workloads import held_out_turns, run_turns
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.cluster_record import ClusterRecord
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import DEFAULT_DRAFT_MODEL
from supervisor.configuration.plan import DRAFTERS, DRAFTS, REMOTE, ClusterConfig

_WARM_TURNS = 4


@dataclass(frozen=True, slots=True)
class DraftsWay:
    """How one cluster drafts."""

    drafts: str
    drafter: str

    @classmethod
    def parse(cls, text: str) -> DraftsWay:
        """Parse `auto` or `auto:local`. Raises ValueError."""
        drafts, _, drafter = text.partition(":")
        if drafts not in DRAFTS or drafter not in ("", *DRAFTERS):
            raise ValueError(f"{text!r} is none of {', '.join(DRAFTS)}, with :local or :remote")
        return cls(drafts, drafter)

    @property
    def name(self) -> str:
        return f"{self.drafts}:{self.drafter}" if self.drafter else self.drafts


@dataclass(frozen=True, slots=True)
class DraftRuns:
    """What is compared: each of `streams` with each way, `rounds` times in turn."""

    ways: Sequence[DraftsWay]
    streams: Sequence[int]
    rounds: int = 3
    turns: int = 24  # for one stream; more streams take more, see `turns_of`
    output_tokens: int = 160
    pace_ms: float = 0.0  # least duration of a decode worker's step

    def turns_of(self, streams: int) -> int:
        """Turns of one round: every stream has at least three."""
        return max(self.turns, 3 * streams)


def cluster_config(run_dir: Path, way: DraftsWay, pace_ms: float) -> ClusterConfig:
    """One prefill and one decode worker of the shipped model."""
    return ClusterConfig(
        run_dir=run_dir,
        prefill=1,
        decode=1,
        drafts=way.drafts,
        drafts_from=way.drafter or REMOTE,
        draft_model=None if way.drafts == "off" else DEFAULT_DRAFT_MODEL,
        drafters=0 if way.drafts == "off" else None,
        extra_arguments={Role.DECODE: ["--bench-step-ms", f"{pace_ms:g}"]} if pace_ms else {},
    )


async def compare_drafts(runs: DraftRuns, folder: Path) -> list[dict[str, Any]]:
    """Run all ways in turn; one report for each number of streams and way."""
    async with contextlib.AsyncExitStack() as stack:
        records: list[ClusterRecord] = []
        for number, way in enumerate(runs.ways):
            config = cluster_config(folder / str(number), way, runs.pace_ms)
            cluster = await stack.enter_async_context(ClusterSupervisor(config, say=say))
            records.append(cluster.record())
        clients = [await stack.enter_async_context(AsyncClient(record.router_grpc)) for record in records]
        for client in clients:
            await _turns(client, runs, streams=max(runs.streams), first=0, n_turns=_WARM_TURNS)
        reports = []
        for streams in runs.streams:
            samples: list[list[Mapping[str, float]]] = [[] for _ in runs.ways]
            for round_ in range(runs.rounds):
                first = _WARM_TURNS + round_ * runs.turns_of(streams)
                # Rounds begin with another way each, so that none always follows the same one.
                for i in _rotated(range(len(runs.ways)), round_):
                    samples[i].append(await _sample(clients[i], records[i], runs, streams, first))
                    rounded = {name: round(value, 3) for name, value in samples[i][-1].items()}
                    say(f"{streams} streams, {runs.ways[i].name}: {rounded}")
            reports += _reports(runs, streams, samples)
        return reports


async def _turns(
    client: AsyncClient, runs: DraftRuns, *, streams: int, first: int, n_turns: int
) -> list[RequestLog]:
    turns = held_out_turns(n_turns, first=first)
    return await run_turns(client, turns, streams=streams, output_tokens=runs.output_tokens)


async def _sample(
    client: AsyncClient, record: ClusterRecord, runs: DraftRuns, streams: int, first: int
) -> Mapping[str, float]:
    """One round of one way."""
    pids = [process.pid for process in record.processes if process.pid is not None]
    cpu_s, began_s = sum(map(process_cpu_s, pids)), time.perf_counter()
    logs = await _turns(client, runs, streams=streams, first=first, n_turns=runs.turns_of(streams))
    wall_s = time.perf_counter() - began_s
    cpu_s = sum(map(process_cpu_s, pids)) - cpu_s
    return sample_of(logs, wall_s=wall_s, cpu_s=cpu_s)


def sample_of(logs: Sequence[RequestLog], *, wall_s: float, cpu_s: float) -> dict[str, float]:
    """The figures of one round. Time counts from a request's first token, which is that of prefill."""
    done = [log for log in logs if not log.error and len(log.arrivals) > 1]
    after_first = sum(log.arrivals[-1][1] - log.arrivals[0][1] for log in done)
    decode_s = sum(log.arrivals[-1][0] - log.arrivals[0][0] for log in done)
    steps = sum(log.decode_steps for log in done)
    decoded = sum(log.completion_tokens - 1 for log in done)  # the first token is that of prefill
    tokens = sum(log.completion_tokens for log in logs)
    return {
        "ms_per_token": decode_s * 1e3 / max(after_first, 1),
        "tokens_per_s": tokens / wall_s,
        "cpu_ms_per_token": cpu_s * 1e3 / max(tokens, 1),
        "tokens_per_step": decoded / max(steps, 1),
        "failed": float(sum(bool(log.error) for log in logs)),
    }


def _reports(
    runs: DraftRuns, streams: int, samples: Sequence[Sequence[Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """Medians of each way, and the medians of its ratios to the first way in the same round."""
    rows: list[dict[str, Any]] = []
    for way, own in zip(runs.ways, samples, strict=True):
        row: dict[str, Any] = {"workload": "drafts", "streams": streams, "drafts": way.name}
        row |= {name: round(statistics.median(s[name] for s in own), 3) for name in own[0]}
        row["failed"] = int(sum(s["failed"] for s in own))
        row["speed_ratio"] = speed_ratio(own, samples[0])
        row["cpu_ratio"] = round(
            statistics.median(
                s["cpu_ms_per_token"] / max(f["cpu_ms_per_token"], 1e-9)
                for s, f in zip(own, samples[0], strict=True)
            ),
            3,
        )
        rows.append(row)
    return rows


def speed_ratio(own: Sequence[Mapping[str, float]], first: Sequence[Mapping[str, float]]) -> float:
    """How much faster a token comes than in the first way: the median over rounds."""
    ratios = [f["ms_per_token"] / max(s["ms_per_token"], 1e-9) for s, f in zip(own, first, strict=True)]
    return round(statistics.median(ratios), 3)


def process_cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    ticks = stat.rpartition(b")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _rotated(items: range, by: int) -> list[int]:
    shift = by % len(items)
    return [*items[shift:], *items[:shift]]
