"""An open loop of requests at a given rate, with the outcome of each: finished in time, refused, late.

Requests arrive as a Poisson process, however slow the answers are. Every request carries its deadline; a good
one has all its tokens before that. The type of each refusal is checked: RESOURCE_EXHAUSTED with RetryInfo
over gRPC, 429 with code 3040 over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from slipstream.requests import chat_request
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2

_GENERATE = "/slipstream.v1.RouterService/Generate"
_BUSY_CODE = "3040"
# The client waits this long after a request's deadline before the request counts as lost.
_LOST_S = 20.0


@dataclass(slots=True)
class Outcomes:
    """Counts of one window. `good_tokens` counts requests that ended before their deadline, `attempts` those
    of them over gRPC; `good_order` has the priorities of the good ones in the order of their ends."""

    offered: int = 0
    good: int = 0
    good_tokens: int = 0
    tokens: int = 0
    refused: int = 0
    late: int = 0
    attempts: int = 0
    good_order: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    priorities: Counter[str] = field(default_factory=Counter)  # of the good requests
    refused_after_ms: list[float] = field(default_factory=list)  # at the client


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The shape of each request. Every `http_every`-th request goes over HTTP; 0 = none."""

    deadline_s: float
    output_tokens: int
    prompt_words: int = 8
    http_every: int = 8
    priorities: Sequence[str] = ("",)


class OverloadClient:
    """Connections to one router. `async with`."""

    def __init__(self, grpc_endpoint: str, http_endpoint: str) -> None:
        self._grpc_endpoint, self._http_url = grpc_endpoint, f"http://{http_endpoint}"

    async def __aenter__(self) -> OverloadClient:
        self._channel = dial(self._grpc_endpoint)
        self._generate: Any = self._channel.unary_stream(_GENERATE)
        self._http = aiohttp.ClientSession(self._http_url, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._channel.close()

    async def window(self, shape: RequestShape, *, rate_per_s: float, requests: int, seed: int) -> Outcomes:
        """Run `requests` arrivals at this rate; returns when the last request has ended."""
        outcomes, rng = Outcomes(offered=requests), random.Random(seed)
        due_s, tasks = time.monotonic(), []
        for number in range(requests):
            due_s += rng.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(shape, seed, number, outcomes)))
        await asyncio.gather(*tasks)
        return outcomes

    async def closed(self, shape: RequestShape, *, streams: int, requests: int, seed: int) -> Outcomes:
        """Run `requests` in all, `streams` at a time: the cluster's full rate without overload."""
        outcomes, numbers = Outcomes(offered=requests), iter(range(requests))

        async def stream() -> None:
            for number in numbers:
                await self._one(shape, seed, number, outcomes)

        await asyncio.gather(*(stream() for _ in range(streams)))
        return outcomes

    async def _one(self, shape: RequestShape, seed: int, number: int, outcomes: Outcomes) -> None:
        words = " ".join(f"item {seed}-{number}-{i}" for i in range(shape.prompt_words))
        priority = shape.priorities[number % len(shape.priorities)]
        over_http = shape.http_every and number % shape.http_every == 0
        send = self._over_http if over_http else self._over_grpc
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(shape.deadline_s + _LOST_S):
                tokens, attempts = await send(words, shape, priority)
        except _Refused:
            outcomes.refused += 1
            outcomes.refused_after_ms.append((time.monotonic() - sent_s) * 1e3)
        except _Late:
            outcomes.late += 1
        except (_Untyped, TimeoutError, aiohttp.ClientError) as error:
            outcomes.problems.append(f"request {seed}-{number}: {type(error).__name__} {error}")
        else:
            outcomes.tokens += tokens
            if time.monotonic() - sent_s <= shape.deadline_s:
                outcomes.good += 1
                outcomes.good_tokens += tokens
                outcomes.attempts += attempts
                outcomes.priorities[priority] += 1
                outcomes.good_order.append(priority)
            else:
                outcomes.late += 1

    async def _over_grpc(self, words: str, shape: RequestShape, priority: str) -> tuple[int, int]:
        """(tokens, attempts)"""
        request = chat_request([{"role": "user", "content": words}], {"priority": priority or "default"})
        request.sampling.max_tokens, request.sampling.ignore_eos = shape.output_tokens, True
        last = b""
        try:
            async for data in self._generate(request.SerializeToString(), timeout=shape.deadline_s):
                last = data
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _Late from None
            check_grpc_refusal(error)
            raise _Refused from None
        finished = router_pb2.GenerateResponse.FromString(last).events[-1].finished
        return finished.usage.completion_tokens, finished.stats.attempts

    async def refused_over_http(self) -> None:
        """Send one request with `rejectIfBusy` of the lowest class; a higher class could evict a queued
        request. Raises unless the refusal has the right type."""
        body = {"messages": [{"role": "user", "content": "now!"}], "options": {"rejectIfBusy": True}}
        headers = {"x-slipstream-priority": "bulk"}
        async with self._http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            check_http_refusal(answer.status, answer.headers, await answer.json())

    async def _over_http(self, words: str, shape: RequestShape, priority: str) -> tuple[int, int]:
        """(tokens, 0): the HTTP response has no number of attempts."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "ignore_eos": True}
        body["max_tokens"] = shape.output_tokens
        headers = {"x-request-timeout-ms": str(int(shape.deadline_s * 1e3))}
        if priority:
            headers["x-slipstream-priority"] = priority
        async with self._http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            body = await answer.json()
            if answer.status == 504:
                raise _Late
            if answer.status != 200:
                check_http_refusal(answer.status, answer.headers, body)
                raise _Refused
            return int(body["usage"]["completion_tokens"]), 0


class _Refused(Exception):
    """A refusal of the right type."""


class _Late(Exception):
    """The deadline passed before the last token."""


class _Untyped(Exception):
    """A response that is neither tokens nor a refusal of the right type."""


def check_grpc_refusal(error: grpc.aio.AioRpcError) -> None:
    """Raise unless the error is RESOURCE_EXHAUSTED with a retry delay."""
    status, retry = rpc_status.from_call(error), error_details_pb2.RetryInfo()
    typed = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and status is not None
    if not (typed and any(detail.Unpack(retry) for detail in status.details)):
        raise _Untyped(f"{error.code().name}: {error.details()}")
    if retry.retry_delay.ToMilliseconds() <= 0:
        raise _Untyped("a refusal without a retry delay")


def check_http_refusal(status: int, headers: Any, body: Any) -> None:
    """Raise unless the response is 429 with code 3040 and Retry-After."""
    if status != 429 or body["error"]["code"] != _BUSY_CODE or "Retry-After" not in headers:
        raise _Untyped(f"HTTP {status}: {json.dumps(body)[:200]}")


def refusal_quantiles(before: str, after: str) -> dict[str, float]:
    """p50 and p99 (upper ends of their buckets' interpolation), count and share within 5 ms, of the refusals
    between two texts of /metrics."""
    counts = [(end, n - dict(_buckets(before)).get(end, 0.0)) for end, n in _buckets(after)]
    total = counts[-1][1] if counts else 0.0
    if not total:
        return {"count": 0}
    within = next(n for end, n in counts if end == 5.0)
    quantiles = {f"p{q}": round(_quantile(counts, q / 100 * total), 3) for q in (50, 99)}
    return {"count": int(total), **quantiles, "share_within_5_ms": round(within / total, 4)}


def _buckets(text: str) -> list[tuple[float, float]]:
    rows = [line for line in text.splitlines() if line.startswith("slipstream_refusal_seconds_bucket")]
    found: Counter[float] = Counter()
    for row in rows:
        labels, _, count = row.rpartition(" ")
        end_ms = round(float(labels.split('le="')[1].split('"')[0]) * 1e3, 6)
        found[end_ms] += float(count)  # type: ignore[assignment]
    return sorted(found.items())


def _quantile(cumulative: Sequence[tuple[float, float]], rank: float) -> float:
    low, below = 0.0, 0.0
    for end, count in cumulative:
        if count >= rank:
            if end == float("inf"):
                return low
            return low + (end - low) * (rank - below) / max(count - below, 1e-9)
        low, below = end, count
    return low
