"""Subscribes to one worker's KV events and applies them to the prefix index."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from libs.common.fleet_bounds import BLOCK_EVENTS_SHARE
from libs.common.telemetry.paced_warnings import PacedWarnings
from services.router.prefix_index.index import PrefixIndex
from services.router.workers.stream_pace import StreamPace
from slipstream.errors import Unavailable
from slipstream.rpc.backoff import Backoff
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import kv_events_pb2_grpc

if TYPE_CHECKING:
    from services.router.workers.connection import WorkerConnection

log = logging.getLogger(__name__)

# A worker without KV events may be replaced, under the same name, by one that has them.
_UNSERVED_RETRY_S = 30.0


class KvEventSubscriber:
    """Keeps one WatchBlocks call open until `stop`. The connection's key names the holder in the index."""

    def __init__(
        self, connection: WorkerConnection, index: PrefixIndex, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._index = index
        self._clock = clock
        self._warnings = PacedWarnings(log)
        self._task = asyncio.create_task(self._follow(), name=f"blocks-{connection.worker.instance}")

    def stop(self) -> None:
        """End the call and drop the worker from the index."""
        self._task.cancel()
        self._index.drop(self._connection.key)

    async def wait_stopped(self) -> None:
        """Return when the call has ended."""
        await asyncio.gather(self._task, return_exceptions=True)

    def _warn_of_pace(self) -> None:
        instance = self._connection.worker.instance
        share = f"{BLOCK_EVENTS_SHARE:.0%} of this router's time"
        self._warnings.warn(instance, f"{instance} sends block events that take over {share}; they wait")

    async def _follow(self) -> None:
        stub: kv_events_pb2_grpc.KvEventServiceAsyncStub = kv_events_pb2_grpc.KvEventServiceStub(
            self._connection.channel
        )
        backoff, pace = Backoff(first_s=0.2), StreamPace(now_s=self._clock())
        while True:
            served = True
            view = self._index.view(self._connection.key)
            try:
                async for response in stub.WatchBlocks(view.resume()):
                    began_s = self._clock()
                    view.apply(received(response, sender=self._connection.worker.instance))
                    backoff.succeeded()
                    now_s = self._clock()
                    if (pause_s := pace.spent(now_s - began_s, now_s=now_s)) > 0:
                        self._index.event_pauses += 1
                        self._warn_of_pace()
                        await asyncio.sleep(pause_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    served = False
            except (Unavailable, ValueError) as error:
                log.info(
                    "%s: %s; requesting a new snapshot of its blocks", self._connection.worker.instance, error
                )
            await asyncio.sleep(backoff.pause_s() if served else _UNSERVED_RETRY_S)
