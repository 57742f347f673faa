"""Load from inside the cluster, through the Service: load_client.py HOST GRPC_PORT HTTP_PORT.

It runs in a pod, from a ConfigMap, with the SDK of an image. Requests go over the SDK and over plain HTTP,
side by side. HTTP retries a connection that is refused, and nothing else. Each second a line of JSON has the
counts. SIGTERM ends the load; the last line comes after the last answer. API_KEY has the key.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.async_client import AsyncClient

HOST, GRPC_PORT, HTTP_PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
MAX_TOKENS = 48
CONNECT_TRIES_S = 30.0
REQUEST_S = 300.0


@dataclass
class Counts:
    """What became of the requests of one kind."""

    done: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Count a failure; the first few are shown."""
        self.failed += 1
        if len(self.errors) < 5:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])


def messages(number: int) -> list[dict[str, Any]]:
    """A conversation of a session, so that caches and placements take part."""
    return [
        {"role": "user", "content": f"Hello, this is customer {number}. Where is my order {1000 + number}?"}
    ]


async def over_sdk(worker: int, counts: Counts, stopping: asyncio.Event) -> None:
    """Streams that continue at another router when theirs goes."""
    async with AsyncClient(f"{HOST}:{GRPC_PORT}", api_key=os.environ["API_KEY"]) as client:
        number = worker
        while not stopping.is_set():
            try:
                await client.chat(
                    messages(number), session=f"load-{worker}", max_tokens=MAX_TOKENS, timeout_s=REQUEST_S
                )
                counts.done += 1
            except Exception as error:
                counts.fail(error)
            number += 10


def post(number: int) -> None:
    """One request over HTTP. Raises for anything but 200 with an answer."""
    body = json.dumps({"model": "slipstream-mini", "messages": messages(number), "max_tokens": MAX_TOKENS})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['API_KEY']}"}
    deadline_s = time.monotonic() + CONNECT_TRIES_S
    connection = http.client.HTTPConnection(HOST, HTTP_PORT, timeout=REQUEST_S)
    while True:
        try:
            connection.connect()
            break
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
    try:
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200 or not json.loads(text)["choices"]:
            raise RuntimeError(f"{answer.status}: {text[:200]!r}")
    finally:
        connection.close()


async def over_http(worker: int, counts: Counts, stopping: asyncio.Event) -> None:
    """Plain requests, as any OpenAI client sends them."""
    number = worker
    while not stopping.is_set():
        try:
            await asyncio.to_thread(post, number)
            counts.done += 1
        except Exception as error:
            counts.fail(error)
        number += 10


async def main() -> None:
    """Send until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    sdk, plain = Counts(), Counts()

    def show(*, ended: bool) -> None:
        print(json.dumps({"sdk": asdict(sdk), "http": asdict(plain), "ended": ended}), flush=True)

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            show(ended=False)

    reporting = asyncio.create_task(report())
    async with asyncio.TaskGroup() as group:
        for worker in range(2):
            group.create_task(over_sdk(worker, sdk, stopping))
            group.create_task(over_http(5 + worker, plain, stopping))
    reporting.cancel()
    show(ended=True)
    await asyncio.sleep(3.0)  # so that the line is read before the pod's log is gone


if __name__ == "__main__":
    asyncio.run(main())
