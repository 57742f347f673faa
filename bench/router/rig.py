"""A router and fake workers as real processes, with the CPU time and the loop lag of the router."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.progress import say
from libs.common.cluster.fingerprint import TEMPLATE, Fingerprint, tokenizer_digest
from libs.common.cluster.worker_record import Role
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig

CONTEXT_TOKENS = 1 << 18
BLOCK_TOKENS = 64


class RouterUnderTest:
    """A cluster of a router and fake workers of one pace, and its CPU time."""

    def __init__(self, cluster: ClusterSupervisor, model: Path) -> None:
        record = cluster.record()
        self.grpc, self.http = record.router_grpc, record.router_http
        self._admin_http = record.find("router-0").admin_http
        self.prefill = record.find("prefill-0").endpoint
        self.decode = record.find("decode-0").endpoint
        self.operator_dial = operator_dial(Path(record.run_dir))
        pid = record.find("router-0").pid
        assert pid is not None
        self._pids = [pid, *children(pid)]
        workers = [record.find(name).pid for name in ("prefill-0", "decode-0")]
        self._worker_pids = [pid for pid in workers if pid is not None]
        self.fingerprint = Fingerprint("bench", tokenizer_digest(model), TEMPLATE, "float32", BLOCK_TOKENS)

    def cpu_s(self) -> float:
        """CPU seconds that the router's processes have used so far."""
        return sum(cpu_seconds(pid) for pid in self._pids)

    def workers_cpu_s(self) -> float:
        """CPU seconds that the fake workers have used so far."""
        return sum(cpu_seconds(pid) for pid in self._worker_pids)

    async def loop_delay_ms(self) -> dict[str, float]:
        """The lag of the router's event loop in the last seconds; of several processes one answers."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{self._admin_http}/metrics") as answer,
        ):
            text = await answer.text()
        names = {"mean": "event_loop_delay_seconds", "max": "event_loop_delay_max_seconds"}
        found = {
            what: re.search(rf"^slipstream_{name} (.*)$", text, re.MULTILINE) for what, name in names.items()
        }
        return {what: float(match[1]) * 1e3 for what, match in found.items() if match}


def cpu_seconds(pid: int) -> float:
    """CPU seconds that another process has used so far."""
    # The kernel's clock id of another process's CPU time (clock_getcpuclockid).
    return time.clock_gettime((~pid << 3) | 2)


def children(pid: int) -> list[int]:
    """The ids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def under_test(
    arguments: argparse.Namespace,
    folder: Path,
    *,
    prefill_ms: float,
    step_ms: float,
    api_keys: Path | None = None,
) -> AsyncIterator[RouterUnderTest]:
    """Start a cluster with this pace."""
    pace, processes = FakePace(prefill_ms, step_ms), arguments.processes
    async with fake_cluster(
        folder, pace, max_requests=4096, processes=processes, api_keys=api_keys
    ) as cluster:
        yield RouterUnderTest(cluster, folder / "model")


@dataclass(frozen=True, slots=True)
class FakePace:
    """How long the fake workers take."""

    prefill_ms: float
    step_ms: float


@asynccontextmanager
async def fake_cluster(
    folder: Path, pace: FakePace, *, max_requests: int, processes: int = 1, api_keys: Path | None = None
) -> AsyncIterator[ClusterSupervisor]:
    """A router before a fake prefill and a fake decode worker, in `folder`."""
    model = make_model(folder / "model")
    of_workers = ["--prefill-ms", str(pace.prefill_ms), "--step-ms", str(pace.step_ms)]
    # The fake answer is text; by default a model reasons first.
    of_router = ["--max-requests", str(max_requests), "--thinking", "off"]
    if processes > 1:
        of_router += ["--processes", str(processes)]
    workers = (Role.PREFILL, Role.DECODE)
    config = ClusterConfig(
        run_dir=folder / "run",
        model=model,
        draft_model=None,
        prefill=1,
        decode=1,
        kvstores=0,
        drafters=0,
        modules={role: f"services.{role}" for role in Role} | dict.fromkeys(workers, "bench.fakes.worker"),
        log_level="warning",
        api_keys=api_keys,
        extra_arguments={**dict.fromkeys(workers, of_workers), Role.ROUTER: of_router},
    )
    async with ClusterSupervisor(config, say=say) as cluster:
        yield cluster


def make_model(folder: Path) -> Path:
    """Write the files that a router reads of a checkpoint: the shipped tokenizer, and a long context."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(DEFAULT_MODEL / name, folder / name)
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    config = config.get("text_config", config)
    shape = {"vocab_size": config["vocab_size"], "max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
