"""Probes failed KV sources in the background, so that no prompt has to wait for their time-outs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.telemetry.logs import log_no_request
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
        self.breaker = SourceBreaker()

    def may_ask(self, endpoint: str) -> bool:
        """See `SourceBreaker.may_ask`."""
        return self.breaker.may_ask(endpoint, now_s=self._clock())

    def record_failure(self, endpoint: str) -> None:
        """Open the breaker as `SourceBreaker.record_failure` does, and start probing."""
        self.breaker.record_failure(endpoint, now_s=self._clock())
        self._begin(endpoint)

    def record_timeout(self, endpoint: str) -> None:
        """Open the breaker as `SourceBreaker.record_timeout` does, and start probing."""
        self.breaker.record_timeout(endpoint, now_s=self._clock())
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
        log_no_request()
        try:
            await self._until_it_answers(endpoint)
        finally:
            del self._tasks[endpoint]  # at once, so that the next failure starts a new task

    async def _until_it_answers(self, endpoint: str) -> None:
        while (at_s := self.breaker.next_probe_s(endpoint, now_s=self._clock())) is not None:
            await asyncio.sleep(max(0.0, at_s - self._clock()))
            try:
                stub = health_pb2_grpc.HealthStub(self._peers.channel(endpoint))
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    await asyncio.sleep(PROBE_EVERY_S)
                    continue
            except Exception:  # a defect, or an unknown address: without probes no restore asks again
                log.exception("%s could not be probed", endpoint)
                await asyncio.sleep(PROBE_EVERY_S)
                continue
            self.breaker.record_probe(endpoint)
            log.info("%s answers again", endpoint)
