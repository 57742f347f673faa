"""Draft features on their way to a drafter: in messages, and by the KV transport.

    python -m bench.draft_rows [--sizes 512x256,9x7168] [--transport socket] [--delay-ms 0.1] [--json]

A drafter with a head that computes nothing runs in another process. Rows of a sequence go to it both ways in
turn, each time as a new sequence. Printed are medians for each size:

    answer_ms  from the packing of the rows to the answer, with nothing else on the stream
    cpu_ms     processor time of both processes meanwhile
    step_ms    the same of a step of another sequence whose row is ready then, and is sent after the rows

A ratio is that of the transport by that of the message: below 1 the transport is better. `--delay-ms` puts a
link between the processes, for sockets only: each byte arrives so much later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.command_line import bench_parser
from bench.delayed_link import delayed_links
from libs.common.checksum import KvChecksum
from libs.common.cluster.address_book import LoopbackAddresses
from libs.common.rpc.serve import ServiceHost
from libs.common.runtime.malloc import keep_freed_memory
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from libs.worker.engine.feature_memory import FeatureMemory, FeatureReader
from libs.worker.requests.messages import FEATURE_BYTES, Features, bfloat16_features
from services.decode.draft_exports import DraftExports
from services.decode.draft_state import DraftMessage
from services.decode.speculation import as_request
from services.drafter.batcher import Batcher
from services.drafter.service import DrafterService
from slipstream.rpc.dial import dial
from slipstream.v1 import drafter_pb2_grpc

WAYS = ("message", "transport")
# Rows of a step and of a prompt's end, at the widths of the shipped model and of Kimi-K2.5.
SIZES = "1x256,9x256,512x256,1x7168,9x7168,36x7168,73x7168,146x7168,512x7168"
_KEY = KvChecksum(b"bench.draft_rows")
_MOST_STEP_ROWS = 9  # an engine computes them; more are a prompt's, and come in bfloat16
_ALONE, _BESIDE = 5, 3  # sequences of a way in one round
_KEPT_HEAP_BYTES = 64 << 20  # as workers keep it


def feature_memory(transport: KvTransport, width: int, *, exports: bool) -> FeatureMemory:
    """The slots of one end."""
    slot_bytes = FEATURE_WINDOW_TOKENS * FEATURE_BYTES * width
    return FeatureMemory(transport, slot_bytes=slot_bytes, checksum=_KEY, n_slots=4, exports=exports)


def run_drafter(pipe: Connection, kind: str, width: int) -> None:
    """The drafter's process: serves until the pipe says so."""

    async def serve() -> None:
        transport = open_transport(kind, serves=False)
        head = FakeHead(feature_width=width)
        batcher = Batcher(lambda: head)
        await batcher.start()
        reader = FeatureReader(
            transport,
            feature_memory(transport, width, exports=False),
            LoopbackAddresses(),
            Counters(),
        )
        service = DrafterService(batcher, feature_width=width, reader=reader)
        host = ServiceHost("127.0.0.1:0")
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, host.server)
        await host.start([])
        pipe.send(host.endpoint)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await host.stop(grace_s=0)
        await batcher.stop()
        await transport.close()

    keep_freed_memory(_KEPT_HEAP_BYTES)
    asyncio.run(serve())


def cpu_s(pid: int) -> float:
    """The processor time that a process has taken, of all its threads."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid returns


@dataclass
class DecodeEnd:
    """One stream to the drafter, and the memory that it reads."""

    call: Any
    exports: DraftExports
    pid: int  # the drafter's
    numbers: Any = field(default_factory=itertools.count)

    def message(self, name: str, rows: Features) -> DraftMessage:
        tokens = np.ones(len(rows), "<u4")
        return DraftMessage((ContextRows(name, 0, tokens, rows),), ((),), (), draft_tokens=1)

    async def send(self, rows: Features, way: str, *, beside: Features | None = None) -> list[float]:
        """Milliseconds until the answer, and until that of a step that follows, if any."""
        name, other = (f"{kind}{next(self.numbers)}" for kind in ("rows", "step"))
        began_s = {name: time.perf_counter()}
        exports = self.exports if way == "transport" else None
        await self.call.write(as_request(self.message(name, rows), exports))
        if beside is not None:
            began_s[other] = began_s[name]
            await self.call.write(as_request(self.message(other, beside)))
        took_ms: dict[str, float] = {}
        while len(took_ms) < len(began_s):
            for proposal in (await self.call.read()).proposals:
                assert not proposal.unread
                self.exports.answered(proposal.seq_id, proposal.base_tokens, is_unread=False)
                took_ms[proposal.seq_id] = (time.perf_counter() - began_s[proposal.seq_id]) * 1e3
        closing = DraftMessage((), (), tuple(took_ms), draft_tokens=0)
        await self.call.write(as_request(closing))
        return [took_ms[seq_id] for seq_id in began_s]

    async def round(self, rows: Features, way: str) -> dict[str, float]:
        """One row of figures."""
        began_s = time.process_time() + cpu_s(self.pid)
        answers = [(await self.send(rows, way))[0] for _ in range(_ALONE)]
        taken_s = time.process_time() + cpu_s(self.pid) - began_s
        steps = [(await self.send(rows, way, beside=rows[:1]))[1] for _ in range(_BESIDE)]
        return {
            "answer_ms": statistics.median(answers),
            "cpu_ms": taken_s / _ALONE * 1e3,
            "step_ms": statistics.median(steps),
        }


@contextlib.asynccontextmanager
async def open_ends(kind: str, width: int, delay_ms: float) -> AsyncIterator[DecodeEnd]:
    """Both ends, at features of one width."""
    pipe, theirs = multiprocessing.Pipe()
    drafter = multiprocessing.get_context("spawn").Process(target=run_drafter, args=(theirs, kind, width))
    drafter.start()
    transport = open_transport(kind)
    try:
        endpoint = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        address, slash, secret = transport.session_id.partition("/")
        ports = [int(each.rpartition(":")[2]) for each in (endpoint, address)]
        with delayed_links(ports, delay_ms / 1e3) as (port, memory_port):
            if delay_ms:
                transport.session_id = f"127.0.0.1:{memory_port}{slash}{secret}"  # type: ignore[misc]
            memory = feature_memory(transport, width, exports=True)
            exports = DraftExports(memory, transport, Counters(), least_bytes=0)
            async with dial(f"127.0.0.1:{port}") as channel:
                call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
                greeting: Any = await call.read()
                exports.opened(greeting.transport)
                assert drafter.pid is not None
                yield DecodeEnd(call, exports, drafter.pid)
                call.cancel()
    finally:
        pipe.send(None)
        drafter.join(timeout=30)
        drafter.kill()
        await transport.close()


async def measure(
    sizes: Sequence[tuple[int, int]], kind: str, rounds: int, delay_ms: float
) -> list[dict[str, Any]]:
    """The medians of each size, and the ratios."""
    found = []
    for n_rows, width in sizes:
        rows: Features = np.random.default_rng(n_rows).random((n_rows, width), dtype=np.float32)
        if n_rows > _MOST_STEP_ROWS:
            rows = bfloat16_features(rows)
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        async with open_ends(kind, width, delay_ms) as ends:
            for number in range(rounds + 1):
                for way in WAYS:
                    figures = await ends.round(rows, way)
                    if number:  # round 0 opens connections and commits memory
                        taken[way].append(figures)
        sides = {
            way: {name: statistics.median(row[name] for row in each) for name in each[0]}
            for way, each in taken.items()
        }
        ratios = {
            name: round(sides["transport"][name] / sides["message"][name], 2) for name in sides["message"]
        }
        rounded = {
            way: {name: float(f"{value:.3g}") for name, value in side.items()} for way, side in sides.items()
        }
        n_bytes = n_rows * width * FEATURE_BYTES
        found.append({"size": f"{n_rows}x{width}", "n_bytes": n_bytes, **rounded, "ratio": ratios})
    return found


def main() -> int:
    """Measure and print."""
    parser = bench_parser("draft_rows", __doc__)
    parser.add_argument("--sizes", default=SIZES, help="ROWSxWIDTH[,..]")
    parser.add_argument("--transport", default="socket", choices=("socket", "mooncake"))
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the link, each way")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    sizes = []
    for size in options.sizes.split(","):
        n_rows, width = map(int, size.split("x"))
        sizes.append((n_rows, width))
    keep_freed_memory(_KEPT_HEAP_BYTES)
    found = asyncio.run(measure(sizes, options.transport, options.rounds, options.delay_ms))
    if options.json:
        print(json.dumps(found))
        return 0
    for row in found:
        print(f"{row['size']:9} {row['n_bytes']:>9} bytes")
        for side in (*WAYS, "ratio"):
            print(f"  {side:9}", "  ".join(f"{name} {value:g}" for name, value in row[side].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
