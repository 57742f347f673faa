"""PrefillService: admits prompts and serves their handoffs. Contract: protos/slipstream/v1/prefill.proto."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from libs.common.rpc.prefill_server import PrefillServer
from libs.worker.process.core import WorkerCore
from libs.worker.requests.attempts import AttemptKey, AttemptRegistry
from libs.worker.requests.clock import deadline_after
from services.prefill.feature_demand import FeatureDemand
from services.prefill.handoff_registry import HandoffRegistry
from services.prefill.job import PrefillJob
from services.prefill.plan import PrefillPlan, plan_prefill
from slipstream.errors import Draining
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Admits requests, follows jobs, serves handoffs."""

    def __init__(self, core: WorkerCore, *, endpoint: str) -> None:
        self._core = core
        self._endpoint = endpoint
        self._attempts = AttemptRegistry()
        self._jobs: dict[AttemptKey, PrefillJob] = {}
        self._demand = FeatureDemand()
        self._handoffs = HandoffRegistry(core.counters, now_ms=lambda: time.monotonic() * 1e3)
        self._router_streams = PrefillServer(self._follow)
        self._streams = 0
        self._draining = False

    def start(self) -> None:
        """Begin to watch leases."""
        self._handoffs.start()

    async def drain(self) -> None:
        """Refuse new prompts and stop lending; running prompts and exports go on."""
        self._draining = True
        self._core.lender.stop()

    def undrain(self) -> None:
        """Accept new prompts and lend again."""
        self._draining = False
        self._core.lender.resume()

    async def close(self) -> None:
        """End everything."""
        self._draining = True
        for job in list(self._jobs.values()):
            job.end(Draining("this worker stops"))
        await asyncio.gather(*(job.wait_ended() for job in list(self._jobs.values())))
        self._router_streams.close()
        await self._handoffs.close()

    # ---- rpcs

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: _Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(self._router_streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def _follow(
        self, request: prefill_pb2.StartPrefill
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """One prompt's events; closing the generator early cancels the prompt."""
        job = self._admit(request)
        held = ""
        self._streams += 1
        try:
            while (event := await job.events.get()) is not None:
                # While the generator is open the router needs the blocks.
                if event.HasField("opened") and self._handoffs.hold(job.handoff_id):
                    held = job.handoff_id
                yield event
            if job.error is not None:
                raise job.error
        finally:
            self._streams -= 1
            if held:
                self._handoffs.unhold(held)
            else:
                job.end()

    async def WatchHandoff(
        self, request: prefill_pb2.WatchHandoffRequest, context: _Context
    ) -> AsyncIterator[prefill_pb2.WatchHandoffResponse]:
        key = AttemptKey(request.attempt.request_id, request.attempt.attempt)
        events = self._handoffs.watch(request.handoff_id, key, request.first_block, request.draft_rows)
        self._streams += 1
        try:
            async for event in events:
                yield event
        finally:
            self._streams -= 1
            await events.aclose()

    async def RenewHandoff(
        self, request: prefill_pb2.RenewHandoffRequest, context: _Context
    ) -> prefill_pb2.RenewHandoffResponse:
        self._handoffs.renew(request.handoff_id, request.lease_ms, request.read_blocks)
        return prefill_pb2.RenewHandoffResponse()

    async def ReleaseHandoff(
        self, request: prefill_pb2.ReleaseHandoffRequest, context: _Context
    ) -> prefill_pb2.ReleaseHandoffResponse:
        self._handoffs.release(request.handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    async def AbortPrefill(
        self, request: prefill_pb2.AbortPrefillRequest, context: _Context
    ) -> prefill_pb2.AbortPrefillResponse:
        keys = self._attempts.abort(request.attempt.request_id, request.attempt.attempt)
        jobs = [self._end(key) for key in keys]
        await asyncio.gather(*(job.wait_ended() for job in jobs))
        return prefill_pb2.AbortPrefillResponse()

    # ---- what is held

    def ledger(self) -> worker_pb2.Ledger:
        """This worker's holdings for requests."""
        ledger = self._core.ledger()
        ledger.sequences = max(ledger.sequences, self._attempts.running)
        ledger.handoffs = self._handoffs.live
        ledger.streams = self._streams
        return ledger

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it; tokens of prompts that wait for pages or blocks count too."""
        load = self._core.load()
        load.prefill_tokens_in_flight = sum(job.tokens_left for job in self._jobs.values())
        load.handoffs = self._handoffs.live
        return load

    # ---- admission and end

    def _admit(self, request: prefill_pb2.StartPrefill) -> PrefillJob:
        if self._draining:
            raise Draining("this worker is draining")
        deadline_s = deadline_after(request.deadline_ms)
        core = self._core
        plan = plan_prefill(request, core.fingerprint, core.info, memory=core.prompts, deadline_s=deadline_s)
        attempt = request.attempt
        superseded = self._attempts.admit(attempt.request_id, attempt.attempt, attempt.epoch)
        job = self._start(plan)
        for key in superseded:
            self._end(key)
        return job

    def _start(self, plan: PrefillPlan) -> PrefillJob:
        job = PrefillJob(self._core, self._handoffs, self._demand, plan, endpoint=self._endpoint)
        self._jobs[plan.key] = job
        job.start().add_done_callback(lambda _: self._remove(plan.key))
        self._core.counters.add("slipstream_requests_total")
        self._core.load_changed()
        return job

    def _end(self, key: AttemptKey) -> PrefillJob:
        """Stop a running attempt and end its handoff. Its job holds nothing once it is awaited."""
        job = self._jobs[key]
        self._handoffs.cancel(key)
        job.end()
        return job

    def _remove(self, key: AttemptKey) -> None:
        self._jobs.pop(key, None)
        self._attempts.end(key)
        self._core.load_changed()
