"""The state of workers that load reports lack: the counters of kvstore nodes, and workers that drain.

A worker that drains has no link to the router any more. Workers are asked only while someone reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.load_report import keep_plausible
from libs.common.cluster.worker_record import Role, Worker
from slipstream.errors import Unavailable
from slipstream.rpc.dial import Dial
from slipstream.rpc.names import is_name
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
_ANSWER_S = 1.0
_AT_ONCE = 16

Status = worker_pb2.GetStatusResponse


class WorkerStatuses:
    """Use as: await refresh(); status(worker); ...; await close()."""

    def __init__(self, members: Fleet, *, dial: Dial, clock: Callable[[], float]) -> None:
        self._members = members
        self._dial = dial
        self._clock = clock
        self._answers: dict[str, Status] = {}  # the last answer of each incarnation
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._channels: dict[str, grpc.aio.Channel] = {}  # by endpoint
        self._unreachable: set[str] = set()  # names that did not answer in this round

    async def close(self) -> None:
        """End all calls."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    @property
    def leaving(self) -> Sequence[Worker]:
        """The workers that drain: they run on, and operators may undrain them."""
        return [worker for worker in self._members.current.leaving if worker.role is not Role.ROUTER]

    def status(self, worker: Worker) -> Status | None:
        """The last answer of this incarnation, if any."""
        return self._answers.get(_run_of(worker))

    async def refresh(self) -> None:
        """Ask the workers whose answers the console shows, unless that was done a moment ago.

        Callers at the same time share one round. Never raises.
        """
        if self._asking is None and self._clock() - self._asked_s >= ASK_EVERY_S:
            self._asking = asyncio.create_task(self._ask_all(), name="console-statuses")
        if self._asking is not None:
            await asyncio.shield(self._asking)

    # ---- questions

    async def _ask_all(self) -> None:
        stores = self._members.current.with_role(Role.KVSTORE)
        workers = list({worker.key: worker for worker in (*self.leaving, *stores)}.values())
        try:
            await asyncio.gather(*(self._ask(worker) for worker in workers))
            runs = {_run_of(worker) for worker in workers}
            self._answers = {run: answer for run, answer in self._answers.items() if run in runs}
            await self._close_unused({worker.endpoint for worker in workers})
        except Exception:
            log.exception("the workers could not be asked for their status")
        finally:
            self._asked_s = self._clock()
            self._asking = None

    async def _ask(self, worker: Worker) -> None:
        async with self._room:
            try:
                stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
                    self._channel(worker.endpoint)
                )
                given = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ANSWER_S)
                answer = received(given, sender=worker.instance)
            except grpc.aio.AioRpcError as error:
                log.debug("%s: %s", worker.instance, error.details())
                self._answers.pop(_run_of(worker), None)
                if error.code() is grpc.StatusCode.UNAVAILABLE and is_name(worker.endpoint):
                    self._unreachable.add(worker.endpoint)
                return
            except Unavailable as error:
                log.debug("%s", error)
                self._answers.pop(_run_of(worker), None)
                return
        if answer.incarnation == worker.incarnation:
            keep_plausible(answer.load)
            self._answers[_run_of(worker)] = answer

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self._dial(endpoint)
        return channel

    async def _close_unused(self, used: set[str]) -> None:
        """Close channels that no worker has, and those of names that did not answer.

        The next question dials such a name again, because gRPC's pauses for names grow to two minutes. No
        call is under way here: the end of its channel would cancel it.
        """
        closing = [endpoint for endpoint in self._channels if endpoint not in used - self._unreachable]
        self._unreachable.clear()
        for endpoint in closing:
            await self._channels.pop(endpoint).close()


def _run_of(worker: Worker) -> str:
    return f"{worker.key}/{worker.incarnation}"
