"""The loop: asks a router what each removal costs, lists the pods, and writes the costs that are due."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from slipstream.enum_names import ROLES
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError
from slipstream.pod_costs.decision import CostWrite, cost_writes
from slipstream.pod_costs.kube_api import KubeAddress, KubeSession, kube_session
from slipstream.rpc.dial import OpenChannel
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc

log = logging.getLogger("slipstream.pod_costs")

_ASK_TIMEOUT_S = 10.0


async def wanted_costs(router: str, dial: OpenChannel) -> dict[tuple[str, str], int]:
    """The cost of each worker's removal by (tier, instance). Raises what the router answers."""
    async with dial(router) as channel:
        stub: autoscale_pb2_grpc.AutoscaleServiceAsyncStub = autoscale_pb2_grpc.AutoscaleServiceStub(channel)
        try:
            answer = await stub.GetRecommendations(
                autoscale_pb2.GetRecommendationsRequest(), timeout=_ASK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    return {(ROLES.name(loss.role), loss.instance): loss.deletion_cost for loss in answer.losses}


class PodCostWriter:
    """Writes costs in rounds. `ended_s` and `works` say how the last one ended, for probes."""

    def __init__(
        self,
        router: str,
        dial: OpenChannel,
        kube: KubeAddress,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router`: HOST:PORT of an admin port, or of a name of several."""
        self._router, self._dial, self._kube, self._clock_s = router, dial, kube, clock_s
        self._started_s = self.ended_s = clock_s()
        self._written_s: dict[str, float] = {}  # by uid, of the pods that are there
        self._before: dict[tuple[str, str], int] = {}  # what the last round wanted
        self._trouble = ""
        self.works = False

    async def run(self, stopped: asyncio.Event, *, every_s: float) -> None:
        """Write until `stopped`. A round that fails is logged once, and tried again."""
        while not stopped.is_set():
            try:
                await self.round(stopped)
                self._note("")
            except (SlipstreamError, OSError) as error:  # OSError: certificates that are being replaced
                self._note(str(error))
            self.ended_s = self._clock_s()
            try:
                await asyncio.wait_for(stopped.wait(), every_s)
            except TimeoutError:
                pass

    async def round(self, stopped: asyncio.Event) -> list[CostWrite]:
        """One round; returns what was written. Raises SlipstreamError where the router or the API server
        cannot be asked, or refuses."""
        wanted = await wanted_costs(self._router, self._dial)
        with kube_session(self._kube) as kube:
            pods = await asyncio.to_thread(kube.pods)
            uids = {pod.uid for pod in pods}
            self._written_s = {uid: at for uid, at in self._written_s.items() if uid in uids}
            now_s = self._clock_s()
            due = cost_writes(
                pods, wanted, self._before, self._written_s, started_s=self._started_s, now_s=now_s
            )
            self._before = wanted
            return [write for write in due if not stopped.is_set() and await self._write(kube, write)]

    async def _write(self, kube: KubeSession, write: CostWrite) -> bool:
        """Whether it was written: a pod that is gone or has changed is left for the next round."""
        # A call that fails may have written: it counts as a write.
        self._written_s[write.pod.uid] = self._clock_s()
        try:
            await asyncio.to_thread(kube.write, write)
        except (NotFound, FailedPrecondition) as error:
            log.info("%s is left out: %s", write.pod.name, error.message)
            return False
        log.info("%s: %s -> %d", write.pod.name, write.pod.cost, write.cost)
        return True

    def _note(self, trouble: str) -> None:
        """Log a trouble that is new, and its end."""
        if trouble and trouble != self._trouble:
            log.warning("no costs are written: %s", trouble)
        elif self._trouble and not trouble:
            log.warning("costs are written again")
        self._trouble, self.works = trouble, not trouble
