"""The time until every process has released a cancelled request, at every stage, on a real cluster.

    python -m bench.cancel [--rounds 10] [--json] [--only decode,restore] [--transport socket]

Router, prefill, decode, drafter and kvstore are separate processes and run the shipped model. A request is
cancelled, by closing its stream or by `Abort`, at one of these stages:

    queued    the request waits for KV pages behind another prompt
    prefill   a worker computes its prompt
    pull      decode has some of its blocks and waits for the rest
    decode    the request has tokens, and the drafter runs it
    restore   a worker has pinned its blocks in the kvstore and reads them

Printed are milliseconds from the cancel to the first status of each process without the request (`all`: of
the last process), and for `Abort` until the call returned (`acknowledged`). Blocks computed before the cancel
are still stored afterwards; the benchmark does not wait for that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.command_line import bench_parser
from bench.ledgers import wait_until_idle
from bench.progress import say
from bench.request_log import percentiles
from libs.common.cluster.worker_record import Role
from libs.common.runtime import heap
from libs.engine.kv.cache import CacheShape
from libs.engine.model_spec.config import load_config
from libs.text.tokenizer import Tokenizer
from slipstream.async_client import AsyncClient, AsyncStream
from slipstream.errors import SlipstreamError
from slipstream.operator_access import operator_dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig

STAGES = ("queued", "prefill", "pull", "decode", "restore")
WAYS = ("cancel", "abort")
PROMPT_WORDS = 2000
_LIMIT_S = 60.0
# Between two status calls to a process. Calls without a pause keep two cores busy, and a cancel then waits
# behind them for over 100 ms at times.
_PAUSE_S = 0.003
_TRIES = 8  # a stage that ends before a status shows it is tried again
_ENGINES = ("prefill-0", "decode-0")
# Ledger entries of one request. Blocks and reservations for storing its KV outlive it.
_OF_REQUEST = ("sequences", "handoffs", "pins", "streams")

Status = worker_pb2.GetStatusResponse


class Missed(Exception):
    """The stage ended before a status showed it."""


@dataclass(slots=True)
class Times:
    """Milliseconds from the cancel, of many rounds."""

    by_process: dict[str, list[float]] = field(default_factory=dict)
    acknowledged: list[float] = field(default_factory=list)

    def report(self) -> dict[str, dict[str, float]]:
        rows = dict(self.by_process)
        if not rows:
            return {}
        rows["all"] = [max(times) for times in zip(*self.by_process.values(), strict=True)]
        if self.acknowledged:
            rows["acknowledged"] = self.acknowledged
        return {name: percentiles(times) for name, times in rows.items()}


class ClusterProcesses:
    """The processes of the cluster, and calls to them."""

    def __init__(self, cluster: ClusterSupervisor) -> None:
        record = cluster.record()
        self.endpoints = record.service_endpoints()
        self.dial = operator_dial(Path(record.run_dir))
        self._channels = {name: self.dial(endpoint) for name, endpoint in self.endpoints.items()}
        self.client = AsyncClient(record.router_grpc)

    async def status(self, instance: str) -> Status:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
            self._channels[instance]
        )
        return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_LIMIT_S)

    async def all(self) -> dict[str, Status]:
        names = list(self.endpoints)
        return dict(zip(names, await asyncio.gather(*map(self.status, names)), strict=True))

    async def until(self, holds: Callable[[Mapping[str, Status]], bool], running: Running) -> None:
        """Poll until the condition holds. Raises Missed when the request ends before."""
        async with asyncio.timeout(_LIMIT_S):
            while not holds(await self.all()):
                if running.ended:
                    raise Missed(running.ended)
                await asyncio.sleep(_PAUSE_S)

    async def wait_idle(self) -> None:
        """Wait until every ledger is empty. Raises RuntimeError at the deadline."""
        problems: list[str] = []
        await wait_until_idle(self.endpoints, problems, self.dial, timeout_s=_LIMIT_S)
        if problems:
            raise RuntimeError("; ".join(problems))

    async def close(self) -> None:
        await self.client.close()
        for channel in self._channels.values():
            await channel.close()


class Running:
    """A request whose stream a task reads."""

    def __init__(self, request_id: str, stream: AsyncStream) -> None:
        self.request_id = request_id
        self.stream = stream
        self.tokens = 0
        self.ended = ""  # the reason that the client got

    async def read(self) -> None:
        """Read the stream to its end or its error."""
        try:
            async for event in self.stream:
                self.tokens = event.completion_tokens
            self.ended = f"finished after {self.tokens} tokens"
        except SlipstreamError as error:
            self.ended = str(error)


class Cancels:
    """Brings a request to a stage and ends it there."""

    def __init__(self, fleet: ClusterProcesses) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()

    async def measure(self, stage: str, way: str, rounds: int) -> Times:
        """Run all rounds of one stage and one way to cancel."""
        times = Times()
        reach = {
            "queued": self._queued,
            "prefill": self._in_prefill,
            "pull": self._in_pull,
            "decode": self._in_decode,
            "restore": self._in_restore,
        }[stage]
        for _ in range(rounds):
            for attempt in range(_TRIES):
                await self._fleet.wait_idle()
                gc.collect()
                try:
                    await reach(way, times)
                    break
                except Missed as missed:
                    if attempt + 1 == _TRIES:
                        say(f"no request was cancelled in stage {stage}: {missed}")
                        return times
        await self._fleet.wait_idle()
        return times

    # ---- stages

    async def _queued(self, way: str, times: Times) -> None:
        def waiting(each: Mapping[str, Status]) -> bool:
            """The request waits at a worker for pages, or at the router for capacity."""
            in_router = each["router-0"].counters.get("slipstream_requests_waiting", 0)
            return bool(in_router or any(status.load.requests_waiting for status in each.values()))

        async with self._running(self._words()) as first:
            await self._fleet.until(
                lambda each: any(each[name].ledger.blocks_held for name in _ENGINES), first
            )
            # The first request continues, so only the count of sequences shows the second one.
            await self._end_when(waiting, way, times, held=("sequences",), others=1)

    async def _in_prefill(self, way: str, times: Times) -> None:
        def computing(each: Mapping[str, Status]) -> bool:
            """A prefill worker computes, or decode where the router's placement prefers it."""
            return any(
                each[name].ledger.blocks_held and each[name].load.prefill_tokens_in_flight
                for name in _ENGINES
            )

        await self._end_when(computing, way, times)

    async def _in_pull(self, way: str, times: Times) -> None:
        before = await self._fleet.status("decode-0")
        counter = "slipstream_kv_bytes_pulled_total"

        def pulling(each: Mapping[str, Status]) -> bool:
            pulled = each["decode-0"].counters.get(counter, 0) > before.counters.get(counter, 0)
            return pulled and each["prefill-0"].load.prefill_tokens_in_flight > 0

        await self._end_when(pulling, way, times)

    async def _in_decode(self, way: str, times: Times) -> None:
        def drafting(each: Mapping[str, Status]) -> bool:
            return bool(each["drafter-0"].ledger.sequences and each["decode-0"].ledger.sequences)

        await self._end_when(drafting, way, times, prompt=self._words(40), tokens=5)

    async def _in_restore(self, way: str, times: Times) -> None:
        prompt = self._words()
        for other in (prompt, self._words()):  # the second prompt evicts the pages of the first
            await self._fleet.client.complete(other, max_tokens=1, temperature=0.0, timeout_s=_LIMIT_S)
            await self._fleet.wait_idle()
        await self._end_when(lambda each: each["kvstore-0"].ledger.pins > 0, way, times, prompt=prompt)

    # ---- a request and its end

    async def _end_when(
        self,
        reached: Callable[[Mapping[str, Status]], bool],
        way: str,
        times: Times,
        *,
        prompt: str = "",
        tokens: int = 0,
        held: Sequence[str] = _OF_REQUEST,
        others: int = 0,
    ) -> None:
        before = await self._fleet.all()
        async with self._running(prompt or self._words(), max_tokens=2000 if tokens else 64) as stream:
            async with asyncio.timeout(_LIMIT_S):
                while tokens and stream.tokens < tokens and not stream.ended:
                    await asyncio.sleep(0.001)
                await self._fleet.until(reached, stream)
                began_s = time.monotonic()
                ending = asyncio.create_task(self._end(way, stream, began_s))
                found = await asyncio.gather(
                    *(self._gone(name, before[name], began_s, held, others) for name in self._fleet.endpoints)
                )
                acknowledged_ms = await ending
        for name, elapsed_ms in zip(self._fleet.endpoints, found, strict=True):
            times.by_process.setdefault(name, []).append(elapsed_ms)
        if way == "abort":
            times.acknowledged.append(acknowledged_ms)

    async def _end(self, way: str, stream: Running, began_s: float) -> float:
        if way == "cancel":
            stream.stream.close()
        else:
            await self._fleet.client.abort(stream.request_id, timeout_s=_LIMIT_S)
        return (time.monotonic() - began_s) * 1e3

    async def _gone(
        self, instance: str, before: Status, began_s: float, held: Sequence[str], others: int
    ) -> float:
        """Milliseconds until the ledger is back at `before`, or at the entries of `others` requests."""
        while True:
            now = await self._fleet.status(instance)
            if all(getattr(now.ledger, name) <= max(getattr(before.ledger, name), others) for name in held):
                return (time.monotonic() - began_s) * 1e3
            await asyncio.sleep(_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _running(self, prompt: str, *, max_tokens: int = 64) -> AsyncIterator[Running]:
        request_id = f"cancel-{next(self._numbers)}-{time.time_ns()}"
        stream = self._fleet.client.stream_complete(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, request_id=request_id
        )
        running = Running(request_id, stream)
        reading = asyncio.create_task(running.read())
        try:
            yield running
        finally:
            stream.close()
            await asyncio.gather(reading, return_exceptions=True)

    def _words(self, count: int = PROMPT_WORDS) -> str:
        return words(next(self._numbers), count)


def words(number: int, count: int) -> str:
    """A prompt that shares no block with the prompt of another number."""
    return f"{number} {time.time_ns()} " + " ".join(f"order {number + i}" for i in range(count // 2))


def kv_memory_bytes() -> int:
    """The size of a cache with room for one of the prompts but not for two."""
    n_tokens = len(Tokenizer.from_dir(DEFAULT_MODEL).encode_text(words(10**4, PROMPT_WORDS)))
    config = load_config(DEFAULT_MODEL)
    page = CacheShape(1, config.n_layers, 64, config.latent_width, config.dtype)
    return int(1.5 * n_tokens / 64) * page.page_bytes


async def run(options: argparse.Namespace, run_dir: Path) -> dict[str, object]:
    """Start the cluster and measure the chosen stages."""
    memory = ["--kv-memory-bytes", str(kv_memory_bytes())]
    config = ClusterConfig(
        run_dir=run_dir,
        prefill=1,
        decode=1,
        drafters=1,
        drafts="on",
        transport=options.transport,
        extra_arguments={Role.PREFILL: memory, Role.DECODE: memory},
    )
    report: dict[str, object] = {"rounds": options.rounds, "transport": options.transport}
    heap.freeze_heap()
    gc.disable()  # `measure` collects between two rounds, so that no pause falls into a measurement
    async with ClusterSupervisor(config, say=say) as cluster:
        fleet = ClusterProcesses(cluster)
        try:
            cancels = Cancels(fleet)
            for stage in options.only:
                for way in WAYS:
                    say(f"{stage} {way}")
                    times = await cancels.measure(stage, way, options.rounds)
                    report[f"{stage} {way}"] = times.report()
        finally:
            await fleet.close()
    return report


def show(report: dict[str, object]) -> None:
    """Print one line per process."""
    for figure, rows in report.items():
        if not isinstance(rows, dict):
            print(f"{figure}: {rows}")
            continue
        print(figure)
        for name, values in rows.items():
            print(f"  {name:13} p50 {values['p50']:8.1f} ms   p99 {values['p99']:8.1f} ms")


def main() -> int:
    """Measure and print."""
    parser = bench_parser("cancel", __doc__)
    parser.add_argument("--rounds", type=int, default=10, help="for each stage and way")
    parser.add_argument("--only", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--transport", default="auto")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(STAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as run_dir:
        report = asyncio.run(run(options, Path(run_dir)))
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
