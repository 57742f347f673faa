"""The longest gap in a healthy stream while the router gets the most expensive requests.

    python -m bench.worst_requests [--json] [--rounds 3] [--at-once 1] [--only tools]

A real router with fake workers streams one answer, a token every few milliseconds. Beside it the router gets
from another tenant the worst request of each kind within the bounds (bodies.py over HTTP, messages.py over
gRPC, stored.py over both), some with the longest of answers. Printed are the size of the body, its status,
the time to its end and the longest gap between two tokens of the stream, of all rounds.
"idle" is the gap without another request. Aim: gaps below 100 ms. Condition: below 500 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.command_line import bench_parser
from bench.router.rig import RouterUnderTest, under_test
from bench.worst_requests import bodies, messages, stored
from bench.worst_requests.healthy_stream import HealthyStream, longest_gap_ms
from slipstream.credentials.api_key_file import KEY_PREFIX, add_key
from slipstream.rpc.dial import MAX_MESSAGE_BYTES

AIM_MS, CONDITION_MS = 100.0, 500.0
_STEP_MS = 5.0
_AFTER_S = 0.3  # what a request leaves behind shows in the stream after its answer
_LIMIT_S = 120.0

# The keys of two tenants, who share a router.
HEALTHY, ATTACKER = (f"{KEY_PREFIX}{name}" for name in ("healthy", "attacker"))
Row = dict[str, Any]


class Attack(NamedTuple):
    """One kind of request; `send` blocks until its answer and returns its status.

    `n_bytes` 0: several requests, or none. `clean` deletes what they stored.
    """

    n_bytes: int
    send: Callable[[], str]
    clean: Callable[[], None] = lambda: None


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("worst_requests", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="equal requests at the same time")
    parser.add_argument("--only", default="", help="kinds whose name has this text")
    options = parser.parse_args()
    options.processes = 1
    return options


def write_keys(path: Path) -> Path:
    """Write the file of both keys."""
    for key in (HEALTHY, ATTACKER):
        name = key.removeprefix(KEY_PREFIX)
        add_key(path, name=name, tenant=name, key=key)
    return path


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def over_http(endpoint: str, request: bodies.HttpRequest) -> str:
    """Send a body from this thread."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_LIMIT_S)
    headers = {"Content-Type": "application/json", **_headers(ATTACKER)}
    if request.encoding:
        headers["Content-Encoding"] = request.encoding
    if request.is_chunked:
        headers["Transfer-Encoding"] = "chunked"
    try:
        connection.request("POST", request.path, request.body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except (BrokenPipeError, ConnectionResetError):  # the router refuses a body before it has all of it
        return "closed"
    finally:
        connection.close()


def over_grpc(endpoint: str, request: messages.GrpcRequest) -> str:
    """Send a message from this thread."""
    with grpc.insecure_channel(endpoint, [("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]) as channel:
        call: Any = channel.unary_stream(request.method)  # also of a method with one response
        try:
            metadata = tuple(_headers(ATTACKER).items())
            for _ in call(request.message, timeout=_LIMIT_S, metadata=metadata):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def over_both(send: Callable[[], str]) -> str:
    """The status of requests over HTTP and gRPC."""
    try:
        return send()
    except grpc.RpcError as error:
        return str(error.code().name)
    except (BrokenPipeError, ConnectionResetError):
        return "closed"


def attacks(router: RouterUnderTest) -> dict[str, Callable[[], Attack]]:
    """All kinds. Each is made when it is due, and freed after it."""
    tenant = stored.StoringTenant(router.http, router.grpc, _headers(ATTACKER))

    def of_http(name: str) -> Attack:
        request = bodies.KINDS[name]()
        return Attack(len(request.body), lambda: over_http(router.http, request))

    def of_grpc(name: str) -> Attack:
        request = messages.KINDS[name]()
        return Attack(len(request.message), lambda: over_grpc(router.grpc, request))

    def of_stored(name: str) -> Attack:
        return Attack(0, partial(over_both, stored.KINDS[name](tenant)), tenant.clean)

    return {
        "idle": partial(Attack, 0, lambda: "-"),
        **{f"HTTP {name}": partial(of_http, name) for name in bodies.KINDS},
        **{f"gRPC {name}": partial(of_grpc, name) for name in messages.KINDS},
        **{f"stored: {name}": partial(of_stored, name) for name in stored.KINDS},
    }


def measure(router: RouterUnderTest, name: str, make: Callable[[], Attack], *, at_once: int) -> Row:
    """Send one kind beside the stream, so many equal requests at the same time."""
    attack = make()
    with HealthyStream(router.http, _headers(HEALTHY)) as stream, ThreadPoolExecutor(at_once) as threads:
        began_s = time.monotonic()
        statuses = [sending.result() for sending in [threads.submit(attack.send) for _ in range(at_once)]]
        took_s = time.monotonic() - began_s
        time.sleep(_AFTER_S)
        ended_s = time.monotonic()
    attack.clean()
    gap_ms = longest_gap_ms(stream.arrivals, began_s, ended_s)
    if stream.error:
        raise RuntimeError(f"the stream ended amid {name}: {stream.error}")
    return {
        "kind": name,
        "bytes": attack.n_bytes,
        "status": "/".join(sorted(set(statuses))),
        "time_ms": round(took_s * 1e3, 1),
        "gap_ms": round(gap_ms, 1),
    }


def worst_of(rounds: list[Row]) -> Row:
    """The longest time and gap of all rounds of one kind."""
    worst = {name: max(row[name] for row in rounds) for name in ("time_ms", "gap_ms")}
    statuses = {status for row in rounds for status in row["status"].split("/")}
    return {**rounds[0], **worst, "status": "/".join(sorted(statuses))}


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all kinds against one router."""
    rows: list[Row] = []
    keys = write_keys(folder / "keys.toml")
    async with under_test(options, folder, prefill_ms=5.0, step_ms=_STEP_MS, api_keys=keys) as router:
        for name, make in attacks(router).items():
            if options.only not in name:
                continue
            measured = partial(measure, router, name, make, at_once=options.at_once)
            rows.append(worst_of([await asyncio.to_thread(measured) for _ in range(options.rounds)]))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    gaps_ms = [row["gap_ms"] for row in rows]
    return {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "at_once": options.at_once,
        "kinds": rows,
        "longest_gap_ms": max(gaps_ms, default=0.0),
        "above_aim": [row["kind"] for row in rows if row["gap_ms"] > AIM_MS],
        "above_condition": [row["kind"] for row in rows if row["gap_ms"] > CONDITION_MS],
    }


def _line(row: Row) -> str:
    size, status = f"{row['bytes']:,}", row["status"]
    times = f"{row['time_ms']:9.1f} ms, gap {row['gap_ms']:7.1f} ms"
    return f"{row['kind']:44} {size:>10} bytes {status:>18} {times}"


def main() -> int:
    """Entry point."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="worst-requests-") as folder:
        report = asyncio.run(run(options, Path(folder)))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"longest gap {report['longest_gap_ms']:.0f} ms, above 500 ms: {report['above_condition']}")
    return 1 if report["above_condition"] else 0


if __name__ == "__main__":
    sys.exit(main())
