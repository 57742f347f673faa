"""What one tenant's streams cost another tenant: its time to the first token, alone and beside them.

    python -m bench.router.fair --json

Fake workers answer at a set pace behind a real router, so the router is what the tenants share. The heavy
tenant opens `--streams` long streams with the log probabilities of 20 tokens, and reads them all: a token of
those costs the router a hundred times as much as one without. The light tenant sends one short request after
the other. `places` repeats this where the router has places for half of the heavy tenant's streams.

`ratio_p50` and `ratio_p99` are beside / alone. The load of the heavy tenant is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.command_line import bench_parser, print_report
from bench.request_log import percentiles
from bench.router.rig import FakePace, fake_cluster
from slipstream.credentials.api_key_file import add_key

_PACE = FakePace(prefill_ms=10.0, step_ms=20.0)
_MOST_S = 20.0  # for the requests of the light tenant, alone or beside
PARTS = {"streams": 4.0, "places": 0.5}  # places of the router for each stream of the heavy tenant


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("router.fair", __doc__)
    parser.add_argument("--streams", type=int, default=120, help="of the heavy tenant")
    parser.add_argument("--requests", type=int, default=40, help="of the light tenant, alone and beside")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--fill-s", type=float, default=5.0, help="with all streams, before the measurement")
    parser.add_argument("--heavy", nargs=2, metavar=("ENDPOINT", "KEY"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _request(endpoint: str, key: str, body: dict[str, Any]) -> bytes:
    data = json.dumps({"messages": [{"role": "user", "content": "Where is it?"}], "stream": True, **body})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {endpoint}\r\nx-api-key: {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()


async def _heavy_stream(endpoint: str, key: str) -> None:
    """One long stream after the other, each read to its end."""
    host, _, port = endpoint.rpartition(":")
    body = {"max_tokens": 8000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            writer.write(_request(endpoint, key, body))
            while await reader.read(1 << 16):
                pass
        writer.close()


async def _heavy(endpoint: str, key: str, streams: int) -> None:
    await asyncio.gather(*(_heavy_stream(endpoint, key) for _ in range(streams)))


async def _first_token_ms(endpoint: str, key: str) -> float:
    host, _, port = endpoint.rpartition(":")
    began_s = time.monotonic()
    async with asyncio.timeout(120):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request(endpoint, key, {"max_tokens": 4, "ignore_eos": True}))
        await reader.readuntil(b'"content":"')
        first_ms = (time.monotonic() - began_s) * 1e3
        await reader.readuntil(b"[DONE]")
        writer.close()
    return first_ms


async def _light(endpoint: str, key: str, requests: int) -> dict[str, float]:
    times_ms: list[float] = []
    until_s = time.monotonic() + _MOST_S
    while len(times_ms) < requests and (time.monotonic() < until_s or len(times_ms) < 3):
        times_ms.append(await _first_token_ms(endpoint, key))
        await asyncio.sleep(0.05)
    return percentiles(times_ms)


async def _wait_running(admin: str | None, streams: int) -> None:
    """Return when the router runs so many requests."""
    async with aiohttp.ClientSession(f"http://{admin}") as session, asyncio.timeout(60):
        running = -1.0
        while running < streams:
            await asyncio.sleep(0.2)
            async with session.get("/metrics") as answer:
                text = await answer.text()
            match = re.search(r"^slipstream_requests_running (.*)$", text, re.MULTILINE)
            running = float(match[1]) if match else -1.0


async def measure(options: argparse.Namespace, *, max_requests: int) -> dict[str, Any]:
    """One cluster: the light tenant alone, then beside the heavy one."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as name:
        folder = Path(name)
        keys = folder / "keys.toml"
        heavy_key, light_key = (add_key(keys, name=tenant, tenant=tenant) for tenant in ("heavy", "light"))
        async with fake_cluster(folder, _PACE, max_requests=max_requests, api_keys=keys) as cluster:
            endpoint = cluster.record().router_http
            admin = cluster.record().find("router-0").admin_http
            await _light(endpoint, light_key, 5)
            alone = await _light(endpoint, light_key, options.requests)
            command = [sys.executable, "-m", "bench.router.fair", "--streams", str(options.streams)]
            heavy = await asyncio.create_subprocess_exec(*command, "--heavy", endpoint, heavy_key)
            try:
                await _wait_running(admin, min(options.streams, max_requests))
                await asyncio.sleep(options.fill_s)
                beside = await _light(endpoint, light_key, options.requests)
            finally:
                heavy.kill()
                await heavy.wait()
    return {"alone_ms": alone, "beside_ms": beside} | {
        f"ratio_{p}": round(beside[p] / alone[p], 2) for p in ("p50", "p99")
    }


async def measure_parts(options: argparse.Namespace) -> dict[str, Any]:
    """The chosen parts."""
    return {
        part: await measure(options, max_requests=int(PARTS[part] * options.streams))
        for part in options.parts
    }


def main() -> None:
    """Measure and print."""
    options = parse_options()
    if options.heavy:
        endpoint, key = options.heavy
        asyncio.run(_heavy(endpoint, key, options.streams))
        return
    print_report(asyncio.run(measure_parts(options)), as_json=options.json)


if __name__ == "__main__":
    main()
