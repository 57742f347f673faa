"""Generate: a message becomes one request for each answer, whose events the call's stream writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import grpc

from libs.common import service_bounds
from libs.common.rpc.serve import metadata_of
from libs.common.rpc.single_request import with_trailing
from libs.common.telemetry import tracing
from services.router.api.access_log import AccessLog, AccessRecord
from services.router.api.choices import ChoiceRuns
from services.router.api.rpc.call_record import note_failure, request_id_of, trailing_id
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.generate_message import parse_request
from services.router.api.rpc.write_watch import WriteWatch
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.placement.decision_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from services.router.request.types import Caller, GenerationRequest
from services.router.request.validation import is_request_id
from slipstream import errors
from slipstream.rpc.rpc_errors import REQUEST_ID, to_status
from slipstream.v1 import router_pb2

# How long `started` waits for the first token, to share a response with it.
_MAX_START_WAIT_S = 1.0


class GenerateMethod:
    """The method. `write_stall_s`: how long a client may leave an answer unread.

    `reset_s`: how long it may then leave the status unread.
    """

    def __init__(
        self,
        runs: RequestManager,
        callers: Callers,
        access_log: AccessLog,
        *,
        clock: Callable[[], float],
        write_stall_s: float = service_bounds.WRITE_STALL_S,
        reset_s: float = service_bounds.GRPC_RESET_S,
    ) -> None:
        self._runs = runs
        self._callers = callers
        self._access_log = access_log
        self._clock = clock
        self.write_stall_s = write_stall_s
        self.reset_s = reset_s

    async def generate(self, data: bytes, context: Context) -> None:
        """Generate. The request's task outlives no end of this call, however the call ends."""
        with self._access_log.call("grpc", "Generate") as record:
            record.request_id = request_id_of(context)
            record.trace_id = tracing.trace_id()
            try:
                await self._generate(data, context, record)
                record.status = "OK"
            except BaseException as error:
                note_failure(record, error)
                raise
            finally:
                del context  # see libs/common/rpc/serve.py

    async def _generate(self, data: bytes, context: Context, record: AccessRecord) -> None:
        arrived_s = self._clock()
        metadata = metadata_of(context)
        caller = self._callers.caller(metadata, context, endpoint="Generate")
        record.tenant = caller.tenant
        status = None
        try:
            # An invalid id of the metadata is refused by name, not replaced.
            given = metadata.get(REQUEST_ID) or record.request_id
            requests = await self._read(data, caller, request_id=given)
            request = requests[0]
            if request.request_id != record.request_id and is_request_id(request.request_id):
                record.request_id = request.request_id  # the one in the message goes before the metadata
                context.set_trailing_metadata(trailing_id(request.request_id))
            if len(requests) > 1:
                choices = ChoiceRuns(self._runs, requests, caller, n_bytes=len(data), wants_stats=True)
                record.answer = choices
                return await self._answer_choices(choices, context)
            run = await self._runs.begin(request, caller, n_bytes=len(data))
            record.request_id, record.answer = run.request_id, run.sink
        except errors.Overloaded as refusal:
            status = to_status(refusal)
            note_failure(record, refusal)
            tracing.failed(refusal)
        if status is not None:
            refused = context.abort_with_status(with_trailing(status, context))
            del context  # see libs/common/rpc/serve.py
            try:
                await refused
            finally:  # it is written
                elapsed_s = self._clock() - arrived_s
                self._runs.context.counters.observe("slipstream_refusal_seconds", elapsed_s)
        try:
            await self._answer(run, context)
        finally:
            decision = run.decision() if metadata.get(DEBUG_HEADER) == "1" else None
            if decision is not None:
                placement = (PLACEMENT_HEADER, header_text(decision))
                context.set_trailing_metadata((*trailing_id(run.request_id), placement))
            run.end()

    async def _answer_choices(self, choices: ChoiceRuns, context: Context) -> None:
        """Write the events of all answers, each with the index of its answer."""
        try:
            await choices.start()
            while (item := await choices.next_events()) is not None:
                index, events = item
                response = router_pb2.GenerateResponse()
                for event in events:
                    added = response.events.add()
                    added.CopyFrom(event)
                    kind = event.WhichOneof("kind")
                    assert kind is not None
                    getattr(added, kind).index = index
                watch = WriteWatch(choices, stall_s=self.write_stall_s, reset_s=self.reset_s)
                try:
                    with _ending_with_call():
                        await context.write(response)
                finally:
                    watch.cancel()
        finally:
            choices.end()

    async def _read(self, data: bytes, caller: Caller, *, request_id: str) -> Sequence[GenerationRequest]:
        parse = partial(parse_request, data, request_id)
        try:
            return await self._runs.read(caller, parse, n_bytes=len(data))
        except errors.InvalidArgument:
            self._runs.context.counters.add("slipstream_requests_refused_total")
            raise

    async def _answer(self, run: RunningRequest, context: Context) -> None:
        """Write the events, those that are ready together in one response."""
        # While a response waits for a client that does not read, this task stands still, and the request
        # ends without it.
        run.sink.holds_start = True
        release = asyncio.get_running_loop().call_later(_MAX_START_WAIT_S, run.sink.release_start)
        try:
            with _ending_with_call():
                await context.send_initial_metadata(trailing_id(run.request_id))
            while events := await run.sink.next_events():
                response = router_pb2.GenerateResponse()
                for event in events:
                    response.events.add().CopyFrom(event)  # `append` takes several times as long
                watch = WriteWatch(run, stall_s=self.write_stall_s, reset_s=self.reset_s)
                try:
                    with _ending_with_call():
                        await context.write(response)
                finally:
                    watch.cancel()
                if events[-1].HasField("finished"):
                    return
        finally:
            release.cancel()
        raise errors.Internal("the answer has no end")


@contextlib.contextmanager
def _ending_with_call() -> Iterator[None]:
    """What gRPC raises inside means that the call is over, and this task is about to be cancelled for it."""
    try:
        yield
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None
