"""Load by the Service: load_client.py HOST GRPC_PORT HTTP_PORT [EACH [POLLERS [PAUSE_S]]].

It runs in a pod, from a ConfigMap, with the SDK of an image. Requests go over the SDK and over plain HTTP,
side by side, EACH of a kind at a time (2) with pauses of PAUSE_S (0). HTTP retries a connection that is
refused, and nothing else.
POLLERS (0) ask for the list of models, which only routers answer. Each second a line of JSON has the counts.
SIGTERM ends the load; the last line comes after the last answer. API_KEY has the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.async_client import AsyncClient

HOST, GRPC_PORT, HTTP_PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
EACH = int(sys.argv[4]) if len(sys.argv) > 4 else 2
POLLERS = int(sys.argv[5]) if len(sys.argv) > 5 else 0
PAUSE_S = float(sys.argv[6]) if len(sys.argv) > 6 else 0.0
POLL_S = 0.01
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
            number += 2 * EACH
            await pause(stopping)


async def pause(stopping: asyncio.Event) -> None:
    """Between two requests, or until the end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), PAUSE_S)


def post(number: int) -> None:
    """One request over HTTP. Raises for anything but an answer."""
    body = json.dumps({"model": "slipstream-mini", "messages": messages(number), "max_tokens": MAX_TOKENS})
    if not ask("POST", "/v1/chat/completions", body)["choices"]:
        raise RuntimeError("the answer has no choice")


def ask(method: str, path: str, body: str | None = None) -> dict[str, Any]:
    """The answer to one request. Raises for anything but 200."""
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
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:200]!r}")
        return dict(json.loads(text))
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
        number += 2 * EACH
        await pause(stopping)


async def poll(counts: Counts, stopping: asyncio.Event) -> None:
    """Requests that cost a router's time and no worker's."""
    while not stopping.is_set():
        try:
            await asyncio.to_thread(ask, "GET", "/v1/models")
            counts.done += 1
        except Exception as error:
            counts.fail(error)
        await asyncio.sleep(POLL_S)


async def main() -> None:
    """Send until SIGTERM."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.set_default_executor(ThreadPoolExecutor(EACH + POLLERS))
    sdk, plain, polls = Counts(), Counts(), Counts()

    def show(*, ended: bool) -> None:
        counts = {"sdk": asdict(sdk), "http": asdict(plain)} | ({"polls": asdict(polls)} if POLLERS else {})
        print(json.dumps({**counts, "ended": ended}), flush=True)

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            show(ended=False)

    reporting = asyncio.create_task(report())
    async with asyncio.TaskGroup() as group:
        for worker in range(EACH):
            group.create_task(over_sdk(worker, sdk, stopping))
            group.create_task(over_http(EACH + worker, plain, stopping))
        for _ in range(POLLERS):
            group.create_task(poll(polls, stopping))
    reporting.cancel()
    show(ended=True)
    await asyncio.sleep(3.0)  # so that the line is read before the pod's log is gone


if __name__ == "__main__":
    asyncio.run(main())
