"""What long streams that are hardly read cost another tenant: its time to the first token, without and with.

    python -m bench.router.unread                     # 120 streams, every way of not reading
    python -m bench.router.unread --ways silent --streams 120 --seconds 20 --json

A real cluster serves the shipped model. One tenant opens long streams over HTTP with small buffers, in one of
these ways; another sends short streamed requests, one after the other.

    read        the client reads all, which is the comparison: so many requests cost others in any case
    silent      the client reads nothing
    trickle     the client reads one byte a second
    alternate   the client reads nothing for 8 s and all that it can for 1 s, which suspends and resumes
    leave       the client closes its connection once its request is suspended, and opens another stream

`suspended` counts the requests that left their workers, `prefilled` the prompt tokens that workers computed:
a request that goes on is computed again as far as no cache has it. All ledgers must read zero in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.command_line import bench_parser
from bench.ledgers import statuses, wait_until_idle
from bench.progress import say
from services.router.request.model_card import load_model_card
from slipstream.credentials.api_key_file import add_key
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

_BUFFER_BYTES = 4096
_N_ALONE = 60
_PAUSE_S = 0.1
_UNREAD_S = 20.0  # that a client which leaves lets pass
_SUSPENDED = "slipstream_requests_suspended_total"
_PREFILLED = "slipstream_prefill_tokens_total"


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("router.unread", __doc__)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--streams", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way")
    parser.add_argument("--fill-s", type=float, default=20.0, help="until the buffers are full")
    return parser.parse_args(argv)


class UnreadStream:
    """A stream of the attacker on a socket that takes as little as it can."""

    def __init__(self, endpoint: str, key: str, number: int, stops: Sequence[int]) -> None:
        """`stops`: the tokens that would end the answer."""
        self._endpoint, self._key, self._number, self._stops = endpoint, key, number, stops
        self._socket = socket.socket()

    async def open(self) -> None:
        """Ask for an answer that is longer than all buffers on the way."""
        body = {
            "messages": [{"role": "user", "content": f"Tell me all about order {self._number}."}],
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 8000,
            "temperature": 1,
            "logit_bias": {str(token): -100 for token in self._stops},
            "seed": self._number,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._endpoint}\r\nx-api-key: {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.setblocking(False)
        host, _, port = self._endpoint.rpartition(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, (host, int(port)))
        await loop.sock_sendall(self._socket, head.encode() + data)

    async def read(self, n_bytes: int, *, timeout_s: float) -> bool:
        """Read at most so many. Returns False at the end of the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return bool(await asyncio.get_running_loop().sock_recv(self._socket, n_bytes))
        return True

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


async def _read(stream: UnreadStream) -> None:
    while await stream.read(1 << 16, timeout_s=60.0):
        pass


async def _silent(stream: UnreadStream) -> None:
    await asyncio.Event().wait()


async def _trickle(stream: UnreadStream) -> None:
    while await stream.read(1, timeout_s=1.0):
        await asyncio.sleep(1.0)


async def _alternate(stream: UnreadStream) -> None:
    while True:
        await asyncio.sleep(8.0)
        until_s = time.monotonic() + 1.0
        while (left_s := until_s - time.monotonic()) > 0:
            if not await stream.read(1 << 16, timeout_s=left_s):
                return


async def _leave(stream: UnreadStream) -> None:
    await asyncio.sleep(_UNREAD_S)


WAYS: dict[str, Callable[[UnreadStream], Awaitable[None]]] = {
    "read": _read,
    "silent": _silent,
    "trickle": _trickle,
    "alternate": _alternate,
    "leave": _leave,
}


async def _attack(make: Callable[[], UnreadStream], way: Callable[[UnreadStream], Awaitable[None]]) -> None:
    """One stream after the other, for ever."""
    while True:
        stream = make()
        try:
            await stream.open()
            await way(stream)
        except OSError:
            await asyncio.sleep(0.5)  # the router ended the connection
        finally:
            stream.close()


async def _first_token_ms(session: aiohttp.ClientSession, number: int) -> float:
    body = {"messages": [{"role": "user", "content": f"Where is order {number}?"}], "stream": True}
    began_s = time.monotonic()
    first_ms = float("nan")
    async with session.post("/v1/chat/completions", json={**body, "max_tokens": 16}) as response:
        response.raise_for_status()
        async for line in response.content:
            if first_ms != first_ms and b'"content":"' in line:
                first_ms = (time.monotonic() - began_s) * 1e3
    return first_ms


async def _healthy(session: aiohttp.ClientSession, *, count: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    """The times to the first token of a number of requests, or of those of a time."""
    times_ms: list[float] = []
    failed = number = 0
    until_s = time.monotonic() + seconds
    while number < count or time.monotonic() < until_s or len(times_ms) < 3:
        number += 1
        try:
            times_ms.append(await _first_token_ms(session, number))
        except (aiohttp.ClientError, TimeoutError):
            failed += 1
        await asyncio.sleep(_PAUSE_S)
    times_ms = sorted(time_ms for time_ms in times_ms if time_ms == time_ms)
    p99 = times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))]
    p50 = statistics.median(times_ms)
    return {"requests": number, "failed": failed, "p50_ms": round(p50, 1), "p99_ms": round(p99, 1)}


async def _counts(endpoints: dict[str, str], dial: Any) -> dict[str, float]:
    counts = {"suspended": 0.0, "prefilled": 0.0}
    for status in (await statuses(endpoints, dial)).values():
        counts["suspended"] += status.counters.get(_SUSPENDED, 0)
        counts["prefilled"] += status.counters.get(_PREFILLED, 0)
    return counts


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole run."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        attacker, healthy = (add_key(keys, name=name, tenant=name) for name in ("attacker", "healthy"))
        config = ClusterConfig(run_dir=Path(folder) / "run", api_keys=keys)
        async with ClusterSupervisor(config, say=say) as cluster:
            record = cluster.record()
            stops = load_model_card(Path(record.model)).stop_token_ids
            dial, endpoints = operator_dial(Path(record.run_dir)), record.service_endpoints()
            found: dict[str, Any] = {"streams": options.streams}
            async with aiohttp.ClientSession(
                f"http://{record.router_http}",
                headers={"x-api-key": healthy},
                timeout=aiohttp.ClientTimeout(total=120),
            ) as session:
                await _healthy(session, count=10)
                found["alone"] = await _healthy(session, count=_N_ALONE)
                for way in options.ways.split(","):
                    before = await _counts(endpoints, dial)
                    attacks = [
                        asyncio.create_task(
                            _attack(
                                partial(UnreadStream, record.router_http, attacker, number, stops), WAYS[way]
                            )
                        )
                        for number in range(options.streams)
                    ]
                    await asyncio.sleep(options.fill_s)
                    found[way] = await _healthy(session, seconds=options.seconds)
                    after = await _counts(endpoints, dial)
                    found[way] |= {name: round(after[name] - before[name]) for name in after}
                    for name in ("p50_ms", "p99_ms"):
                        found[way][f"ratio_{name[:3]}"] = round(found[way][name] / found["alone"][name], 2)
                    for attack in attacks:
                        attack.cancel()
                    await asyncio.gather(*attacks, return_exceptions=True)
                    problems: list[str] = []
                    found[way]["leaked"] = await wait_until_idle(endpoints, problems, dial, timeout_s=60.0)
                    found[way]["still_held"] = problems
    return found


def main() -> int:
    """Measure and print. Exit status 1: something is left on the workers."""
    options = parse_options()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, row in found.items():
            print(f"{name:10} {row}")
    rows = [row for row in found.values() if isinstance(row, dict)]
    return int(any(row.get("still_held") or row.get("leaked") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
