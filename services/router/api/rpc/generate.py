"""Generate: a message becomes one request for each answer, whose events the call's stream writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import grpc

from libs.common import service_bounds
from libs.common.rpc.call_reset import ending_with_call
from libs.common.rpc.deadline_queue import DeadlineQueue
from libs.common.rpc.serve import metadata_of
from libs.common.rpc.single_request import with_trailing
from libs.common.telemetry import tracing
from services.router.api.access_log import AccessLog, AccessRecord
from services.router.api.choices import ChoiceRuns
from services.router.api.responses.rpc.history import AnswerKeeper
from services.router.api.rpc.call_answer import CallAnswer, prompt_text
from services.router.api.rpc.call_reader import CallReader
from services.router.api.rpc.call_record import note_failure, request_id_of, trailing_id
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.generate_message import ParsedCall
from services.router.api.rpc.write_watch import WriteWatch
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.placement.decision_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from services.router.request.token_texts import TokenTexts
from services.router.request.types import Caller
from services.router.request.validation import is_request_id
from slipstream import errors
from slipstream.rpc.rpc_errors import REQUEST_ID, to_status
from slipstream.v1 import router_pb2

# How long `started` waits for the first token, to share a response with it.
_MAX_START_WAIT_S = 1.0
_Keep = Callable[[Sequence[router_pb2.GenerateEvent]], Awaitable[None]]


class GenerateMethod:
    """The method. `write_stall_s`: how long a client may leave an answer unread."""

    def __init__(
        self,
        manager: RequestManager,
        callers: Callers,
        reader: CallReader,
        access_log: AccessLog,
        *,
        clock: Callable[[], float],
        write_stall_s: float = service_bounds.WRITE_STALL_S,
    ) -> None:
        self._manager = manager
        self._callers = callers
        self._reader = reader
        self._access_log = access_log
        self._clock = clock
        self._starts: DeadlineQueue[ResponseQueue] = DeadlineQueue(
            _MAX_START_WAIT_S, ResponseQueue.release_start
        )
        self._texts = TokenTexts(manager.context.card, manager.context.threads)
        self.write_stall_s = write_stall_s
        self.reset_s = service_bounds.GRPC_RESET_S  # how long it may then leave the status unread

    async def generate(self, data: bytes, context: Context) -> bytes:
        """Generate, and return the last response. The request's task outlives no end of this call.

        To gRPC's server it is a method of one response, which writes others before. Only such a method's last
        message shares a write with its status. On the wire both kinds are equal.
        """
        with self._access_log.call("grpc", "Generate") as record:
            record.request_id = request_id_of(context)
            record.trace_id = tracing.trace_id()
            try:
                response = await self._generate(data, context, record)
                record.status = "OK"
                return response
            except BaseException as error:
                note_failure(record, error)
                raise
            finally:
                del context  # see libs/common/rpc/serve.py

    async def _generate(self, data: bytes, context: Context, record: AccessRecord) -> bytes:
        arrived_s = self._clock()
        metadata = metadata_of(context)
        caller = self._callers.caller(metadata, context, endpoint="Generate")
        record.tenant, record.key_name = caller.tenant, self._callers.key_name_of(caller)
        choices: ChoiceRuns | None = None
        try:
            # An invalid id of the metadata is refused by name, not replaced.
            given = metadata.get(REQUEST_ID) or record.request_id
            call, n_bytes, keeper = await self._reader.generation(data, caller, request_id=given)
            self._note_id(call.requests[0].request_id, record, context)
            if len(call.requests) > 1:
                choices = ChoiceRuns(self._manager, call.requests, caller, n_bytes=n_bytes, wants_stats=True)
                await choices.start()
            else:
                run = await self._manager.begin(call.requests[0], caller, n_bytes=n_bytes)
        except errors.SlipstreamError as refusal:
            self._note_limits(caller, record, context)
            if not isinstance(refusal, errors.Overloaded):
                raise
            status = to_status(refusal)
            note_failure(record, refusal)
            tracing.failed(refusal)
        else:
            if choices is not None:
                record.answer = choices
                return await self._answer_choices(call, choices, caller, context)
            record.request_id, record.answer = run.request_id, run.sink
            wants_placement = metadata.get(DEBUG_HEADER) == "1"
            return await self._answer_run(call, run, caller, keeper, context, wants_placement=wants_placement)
        refused = context.abort_with_status(with_trailing(status, context))
        del context  # see libs/common/rpc/serve.py
        try:
            await refused
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:  # the client has left
            raise asyncio.CancelledError from None
        finally:  # it is written
            elapsed_s = self._clock() - arrived_s
            self._manager.context.counters.observe("slipstream_refusal_seconds", elapsed_s)
        raise AssertionError("an abort raises")

    @staticmethod
    def _note_id(request_id: str, record: AccessRecord, context: Context) -> None:
        """The id in the message goes before the metadata's."""
        if request_id != record.request_id and is_request_id(request_id):
            record.request_id = request_id
            context.set_trailing_metadata(trailing_id(request_id))

    def _note_limits(self, caller: Caller, record: AccessRecord, context: Context) -> None:
        """State a refused request's id and limits."""
        limits = self._limits(caller)
        context.set_trailing_metadata((*trailing_id(record.request_id), *limits.items()))

    async def _answer_run(
        self,
        call: ParsedCall,
        run: RunningRequest,
        caller: Caller,
        keeper: AnswerKeeper | None,
        context: Context,
        *,
        wants_placement: bool,
    ) -> bytes:
        """Write the events of the only answer, and end its request. Returns the last response."""
        answer = CallAnswer(call, response_id=keeper.response_id if keeper is not None else "")
        keep = None if keeper is None else partial(self._keep, keeper, caller.tenant)
        try:
            answer.prompt = await self._prompt_text(call, caller)
            return await self._answer(run, answer, self._limits(caller), context, keep)
        finally:
            decision = run.decision() if wants_placement else None
            placement = [] if decision is None else [(PLACEMENT_HEADER, header_text(decision))]
            limits = self._limits(caller)
            context.set_trailing_metadata(answer.metadata(run.request_id, limits, others=placement))
            run.end()

    async def _answer_choices(
        self, call: ParsedCall, choices: ChoiceRuns, caller: Caller, context: Context
    ) -> bytes:
        """Write the events of all answers, each with the index of its answer. Returns the last response."""
        answer, request_id = CallAnswer(call), choices.first.request_id
        watch = WriteWatch(context, choices, stall_s=self.write_stall_s, reset_s=self.reset_s)
        try:
            answer.prompt = await self._prompt_text(call, caller)
            with ending_with_call():
                await context.send_initial_metadata(answer.metadata(request_id, self._limits(caller)))
            while (item := await choices.next_events()) is not None:
                index, events = item
                response = answer.response(events, index)
                if choices.is_complete:
                    return response.SerializeToString()
                if response.events:
                    await watch.write(response.SerializeToString())
            raise errors.Internal("the answer has no end")
        finally:
            watch.cancel()
            context.set_trailing_metadata(answer.metadata(request_id, self._limits(caller)))
            choices.end()

    def _limits(self, caller: Caller) -> Mapping[str, str]:
        """What the limits of the caller's key and tenant leave; nothing where there are none."""
        metering = self._manager.context.metering
        return {} if metering is None else metering.limit_headers(caller.tenant, caller.key_sha256)

    async def _prompt_text(self, call: ParsedCall, caller: Caller) -> str:
        return await prompt_text(call, partial(self._texts.of_prompt, tenant=caller.tenant))

    async def _keep(
        self, keeper: AnswerKeeper, tenant: str, events: Sequence[router_pb2.GenerateEvent]
    ) -> None:
        """Add the events to the stored response; their end waits until it is stored.

        They take turns with those of other tenants, as those of whole answers over HTTP.
        """
        salt = self._manager.context.salts.of_tenant(tenant)
        await self._manager.context.fleet.batcher.run(salt, partial(keeper.add, events))
        if events[-1].HasField("finished"):
            await keeper.store()

    async def _answer(
        self,
        run: RunningRequest,
        answer: CallAnswer,
        limits: Mapping[str, str],
        context: Context,
        keep: _Keep | None,
    ) -> bytes:
        """Write the events, those that are ready together in one response. `keep` stores them before.

        Returns the last response.
        """
        # While a response waits for a client that does not read, this task stands still, and the request
        # ends without it.
        run.sink.holds_start = True
        self._starts.add(run.sink)
        watch = WriteWatch(context, run, stall_s=self.write_stall_s, reset_s=self.reset_s)
        try:
            with ending_with_call():
                await context.send_initial_metadata(answer.metadata(run.request_id, limits))
            while events := await run.sink.next_events():
                if keep is not None:
                    await keep(events)
                response = answer.response(events)
                if events[-1].HasField("finished"):
                    return response.SerializeToString()
                if response.events:
                    await watch.write(response.SerializeToString())
        finally:
            self._starts.remove(run.sink)
            watch.cancel()
        raise errors.Internal("the answer has no end")
