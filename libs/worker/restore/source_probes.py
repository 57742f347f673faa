"""Probe KV sources that fell silent, so that no prompt waits for them before they answer again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.worker.pins.peers import Peers
from libs.worker.restore.source_breaker import SourceBreaker
from slipstream.rpc.backoff import ANSWER_S

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = ANSWER_S


class SourceProbes:
    """A `SourceBreaker` and the background probes that update it. Event loop only."""

    def __init__(self, peers: Peers, *, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.health = SourceBreaker()

    def may_ask(self, endpoint: str) -> bool:
        """As `SourceBreaker.may_ask`."""
        return self.health.may_ask(endpoint, now_s=self._clock())

    def failed(self, endpoint: str) -> None:
        """As `SourceBreaker.failed`, and start probing."""
        self.health.failed(endpoint, now_s=self._clock())
        self._begin(endpoint)

    def unanswered(self, endpoint: str) -> None:
        """As `SourceBreaker.unanswered`, and start probing."""
        self.health.unanswered(endpoint, now_s=self._clock())
        self._begin(endpoint)

    def _begin(self, endpoint: str) -> None:
        if endpoint not in self._tasks:
            self._tasks[endpoint] = asyncio.create_task(self._probe(endpoint), name=f"probe {endpoint}")

    async def close(self) -> None:
        """End the probes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, endpoint: str) -> None:
        try:
            await self._until_it_answers(endpoint)
        finally:
            del self._tasks[endpoint]  # at once: a failure in the next moment begins another one

    async def _until_it_answers(self, endpoint: str) -> None:
        while (at_s := self.health.probe_at_s(endpoint, now_s=self._clock())) is not None:
            await asyncio.sleep(max(0.0, at_s - self._clock()))
            stub = health_pb2_grpc.HealthStub(self._peers.channel(endpoint))
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    await asyncio.sleep(PROBE_EVERY_S)
                    continue
            except (
                Exception
            ):  # a defect, or a closed channel: without more probes the source would stay unused
                log.exception("%s could not be probed", endpoint)
                await asyncio.sleep(PROBE_EVERY_S)
                continue
            self.health.answered(endpoint)
            log.info("%s answers again", endpoint)
