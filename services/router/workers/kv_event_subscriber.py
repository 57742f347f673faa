"""Follows what one worker holds, into the prefix index."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from services.router.prefix_index.index import PrefixIndex
from slipstream.backoff import Backoff
from slipstream.block_view import EventMissed
from slipstream.v1 import kv_events_pb2_grpc

if TYPE_CHECKING:
    from services.router.workers.connection import WorkerConnection

log = logging.getLogger(__name__)

# A worker that does not serve events now may be replaced by one that does, under the same name.
_UNSERVED_RETRY_S = 30.0


class KvEventSubscriber:
    """One WatchBlocks call, opened again until `stop`. The holder's name is the link's key."""

    def __init__(self, link: WorkerConnection, index: PrefixIndex) -> None:
        self._link = link
        self._index = index
        self._task = asyncio.create_task(self._follow(), name=f"blocks-{link.worker.instance}")

    def stop(self) -> None:
        """End the call and forget what the worker holds."""
        self._task.cancel()
        self._index.drop(self._link.key)

    async def wait_stopped(self) -> None:
        """Return when the call has ended."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        stub: kv_events_pb2_grpc.KvEventServiceAsyncStub = kv_events_pb2_grpc.KvEventServiceStub(
            self._link.channel
        )
        backoff = Backoff(first_s=0.2)
        while True:
            served = True
            view = self._index.view(self._link.key)
            try:
                async for response in stub.WatchBlocks(view.resume()):
                    view.apply(response)
                    backoff.succeeded()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    served = False
            except (EventMissed, ValueError) as error:
                log.info("%s: %s; its blocks are asked for again", self._link.worker.instance, error)
            await asyncio.sleep(backoff.pause_s() if served else _UNSERVED_RETRY_S)
