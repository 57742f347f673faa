"""Memory that clients without an API key take from a router, which refuses all they send.

    python -m bench.keyless                          # 1,000 connections, gRPC, then HTTP
    python -m bench.keyless --connections 40 --message-bytes 31000000 --json

Starts a router process with API keys and no workers. Each connection sends one message of the largest
size that the router takes, as far as flow control and the sockets allow, and stays open. Prints the peak of
memory over the idle router, and when all connections are closed, at most 10 s after the last refusal, memory
over idle and what is still open. Exit status 1: memory grew by more than 200 MB, or something was open then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.command_line import bench_parser
from bench.keyless.client import KeylessClient, KeylessGrpcClient, KeylessHttpClient
from slipstream import bounds
from slipstream.credentials.api_key_file import add_key
from supervisor.configuration.cluster_options import DEFAULT_MODEL

APIS: dict[str, type[KeylessClient]] = {"grpc": KeylessGrpcClient, "http": KeylessHttpClient}
# A router has taken its memory when its start is over.
_SETTLE_S = 1.0
_SAMPLE_S = 0.01
_ANSWER_S = 60.0
_MAX_MB = 200.0


@dataclass(frozen=True, slots=True)
class KeylessResult:
    """Figures of one API. `refused` and `closed` count connections by how their message ended."""

    api: str
    connections: int
    message_bytes: int
    refused: int
    closed: int
    seconds: float
    peak_mb: float
    gone_s: float
    later_mb: float
    later_connections: int

    @property
    def holds(self) -> bool:
        """Whether the router keeps its bounds."""
        return self.peak_mb <= _MAX_MB and self.later_connections == 0


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running router."""

    pid: int
    ports: dict[str, int]

    def resident_mb(self) -> float:
        """The resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


@contextlib.asynccontextmanager
async def keyed_router(model: Path) -> AsyncIterator[RouterProcess]:
    """A router process with one API key, without workers."""
    with tempfile.TemporaryDirectory(prefix="slipstream-keys-") as folder:
        keys = Path(folder) / "keys.toml"
        add_key(keys, name="bench", tenant="bench")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.router", "--instance", "router-0", "--model", str(model)),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--api-keys", str(keys)),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                while b"HTTP on " not in (line := await process.stderr.readline()):
                    if not line:
                        raise RuntimeError("the router ended at its start")
            named = line.decode().replace(",", " ").split()
            addresses = {"grpc": named[named.index("gRPC") + 2], "http": named[named.index("HTTP") + 2]}
            ports = {api: int(address.rsplit(":", 1)[1]) for api, address in addresses.items()}
            reader = asyncio.create_task(process.stderr.read())  # a full pipe would stop the router
            yield RouterProcess(process.pid, ports)
            reader.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def measure(
    router: RouterProcess, api: str, *, connections: int, message_bytes: int, later_s: float = 10.0
) -> KeylessResult:
    """Send all messages, wait for their ends, and measure again when all connections are closed, or later."""
    await asyncio.sleep(_SETTLE_S)
    idle_mb = peak_mb = router.resident_mb()
    clients = [APIS[api](router.ports[api], message_bytes) for _ in range(connections)]
    began_s = time.perf_counter()
    sending = asyncio.gather(*(client.send() for client in clients))
    try:
        async with asyncio.timeout(_ANSWER_S):
            while not sending.done():
                peak_mb = max(peak_mb, router.resident_mb())
                await asyncio.sleep(_SAMPLE_S)
        seconds = time.perf_counter() - began_s
        await sending
        ended_s = time.perf_counter()
        while any(client.is_open for client in clients) and time.perf_counter() - ended_s < later_s:
            peak_mb = max(peak_mb, router.resident_mb())
            await asyncio.sleep(_SAMPLE_S)
        return KeylessResult(
            api=api,
            connections=connections,
            message_bytes=message_bytes,
            refused=sum(client.ended == "refused" for client in clients),
            closed=sum(client.ended == "closed" for client in clients),
            seconds=round(seconds, 2),
            peak_mb=round(peak_mb - idle_mb, 1),
            gone_s=round(time.perf_counter() - ended_s, 2),
            later_mb=round(router.resident_mb() - idle_mb, 1),
            later_connections=sum(client.is_open for client in clients),
        )
    finally:
        sending.cancel()
        for client in clients:
            client.close()


async def run(arguments: argparse.Namespace) -> list[KeylessResult]:
    """The figures of each API, each with a new router."""
    results = []
    for api in arguments.api or APIS:
        async with keyed_router(arguments.model) as router:
            sizes = {"connections": arguments.connections, "message_bytes": arguments.message_bytes}
            results.append(await measure(router, api, **sizes))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = bench_parser("keyless", __doc__)
    parser.add_argument("--connections", type=int, default=1000, help="at once (default: %(default)s)")
    parser.add_argument(
        "--message-bytes",
        type=int,
        default=bounds.MAX_BODY_BYTES,
        help="size of each message (default: %(default)s)",
    )
    parser.add_argument("--api", choices=list(APIS), action="append", help="only this one")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="checkpoint directory")
    arguments = parser.parse_args(argv)
    results = asyncio.run(run(arguments))
    rows = [asdict(result) | {"holds": result.holds} for result in results]
    if arguments.json:
        print(json.dumps({"runs": rows}))
    else:
        print("\n".join("  ".join(f"{name} {value}" for name, value in row.items()) for row in rows))
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
