"""The clients of the chaos: half use the SDK with all routers, half plain HTTP with one router each."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from bench.chaos.outcome import HTTP, SDK, Outcome
from bench.chaos.prompts import ChaosPrompt
from slipstream import errors
from slipstream.async_client import AsyncClient

TIMEOUT_S = 120.0
# A client whose router refuses connections pauses, as any client that retries would.
_REFUSED_PAUSE_S = 0.25


async def ask_sdk(client: AsyncClient, prompts: Sequence[ChaosPrompt], number: int, session: str) -> Outcome:
    """One request over the SDK, to its end."""
    prompt, outcome = prompts[number], Outcome(SDK, number, time.monotonic())
    stream = client.stream_chat(
        list(prompt.messages), session=session, timeout_s=TIMEOUT_S, **prompt.sampling
    )
    try:
        async for event in stream:
            if event.text:
                outcome.arrivals_s.append(time.monotonic())
        outcome.text = stream.reply.text
    except errors.SlipstreamError as error:
        outcome.error = f"{type(error).__name__}: {error.message}"
    outcome.ended_s = time.monotonic()
    return outcome


async def ask_http(
    client: aiohttp.ClientSession, prompts: Sequence[ChaosPrompt], number: int, *, router: str, model: str
) -> Outcome:
    """One streamed request over HTTP to one router, to its end. A refusal with Retry-After is asked again."""
    prompt, outcome = prompts[number], Outcome(HTTP, number, time.monotonic(), router)
    body = {"model": model, "messages": prompt.messages, "stream": True, **prompt.sampling}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while (pause_s := await _post(client, body, outcome)) is not None:
                outcome.n_refused += 1
                await asyncio.sleep(pause_s)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        outcome.error, outcome.is_lost = type(error).__name__, not isinstance(error, TimeoutError)
    outcome.ended_s = time.monotonic()
    return outcome


async def _post(client: aiohttp.ClientSession, body: dict[str, Any], outcome: Outcome) -> float | None:
    """One try, whose end the outcome gets; or the seconds until the next one, where the router names them."""
    async with client.post("/v1/chat/completions", json=body) as response:
        if response.status == 503 and "Retry-After" in response.headers:
            return float(response.headers["Retry-After"])
        if response.status != 200:
            outcome.error = f"status {response.status}: {(await response.text())[:200]}"
        else:
            await _read_events(response, outcome)
    return None


async def _read_events(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    is_done, pieces = False, []
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            is_done = True
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            outcome.error = f"event: {event['error'].get('message', '')}"
            return
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                outcome.arrivals_s.append(time.monotonic())
                pieces.append(text)
    outcome.text = "".join(pieces)
    if not is_done:
        outcome.error, outcome.is_lost = "cut: the stream ended without [DONE]", True


class ClientLoad:
    """Runs the clients until it is closed, and keeps what came of each request."""

    def __init__(
        self,
        prompts: Sequence[ChaosPrompt],
        *,
        grpc: Sequence[str],
        http: dict[str, str],
        model: str,
        seed: int,
        pause_s: float = 0.0,
    ) -> None:
        """`http`: endpoint of each router by name. Each client waits for `pause_s` after an answer."""
        self.outcomes: list[Outcome] = []
        self._pause_s = pause_s
        self._prompts, self._grpc, self._http, self._model, self._seed = prompts, grpc, http, model, seed
        self._is_closing = False

    async def run(self, n_clients: int) -> None:
        """Returns when `close` was called and every request has ended."""
        names = itertools.cycle(self._http)
        async with asyncio.TaskGroup() as group:
            for number in range(n_clients):
                rng = random.Random(self._seed * 1_000 + number)
                if number % 2:
                    group.create_task(self._http_client(rng, next(names)))
                else:
                    group.create_task(self._sdk_client(rng, f"chaos-{number}"))

    def close(self) -> None:
        """Begin no more requests."""
        self._is_closing = True

    async def _sdk_client(self, rng: random.Random, session: str) -> None:
        async with AsyncClient(self._grpc, timeout_s=TIMEOUT_S) as client:
            while not self._is_closing:
                number = rng.randrange(len(self._prompts))
                self.outcomes.append(await ask_sdk(client, self._prompts, number, session))
                await asyncio.sleep(self._pause_s)

    async def _http_client(self, rng: random.Random, router: str) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(f"http://{self._http[router]}", timeout=timeout) as client:
            while not self._is_closing:
                number = rng.randrange(len(self._prompts))
                outcome = await ask_http(client, self._prompts, number, router=router, model=self._model)
                self.outcomes.append(outcome)
                await asyncio.sleep(max(self._pause_s, _REFUSED_PAUSE_S if outcome.error else 0.0))
