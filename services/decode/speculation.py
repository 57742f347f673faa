"""Drafts for the running sequences: one stream to one drafter, kept open in the background.

The engine's thread calls `drafts` before a step and `stepped` after it; everything else happens on the
event loop. Both share the DraftState (draft_state.py) under one lock. Losing the drafter costs speed only:
no step waits for one that is gone or silent.

The stream is not a MultiplexedClient. It has no handles, and a message is made only when the last one was
written, of all rows that wait by then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import grpc
import numpy as np

from libs.common.telemetry.tracing import trace_metadata
from libs.engine.step.device_rows import host_rows
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import StepOutput
from libs.worker.requests.messages import Features, pack_features
from libs.worker.requests.request_spec import pack_tokens
from services.decode.draft_control import DraftControl
from services.decode.draft_exports import DraftExports
from services.decode.draft_gate import DraftGate, DraftMode
from services.decode.draft_state import DraftLimits, DraftMessage, DraftState
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_POLL_S = 0.05  # while discovery has none: a look-up is local
_CONNECT_S = 1.0

# The endpoint of a drafter with this worker's fingerprint; None without one.
FindDrafter = Callable[[], Awaitable[str | None]]
DraftCall = grpc.aio.StreamStreamCall[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]


class Speculation(Protocol):
    """Drafts for a decode worker, from wherever they come; an `engine_thread.DraftSource`, too.

    `start`, `close`, `open` and `end` are called on the event loop.
    """

    drafts_due: int  # so far, over all steps and sequences
    drafts_missed: int

    @property
    def wants_features(self) -> bool: ...

    def start(self) -> None:
        """Begin to look for drafts."""
        ...

    async def close(self) -> None:
        """End the stream to the drafter, or the local head."""
        ...

    def prompt_rows(self, context_tokens: int) -> int:
        """How many rows of its prompt a sequence of so many tokens needs, if it opens soon."""
        ...

    def open(self, seq_id: str, rows: ContextRows[Features] | None = None) -> None:
        """The sequence needs drafts; the rows, if any, are the end of its prompt."""
        ...

    def end(self, seq_id: str) -> int:
        """The sequence ended; returns how many of its steps went on without an answer in time."""
        ...

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """See `engine_thread.DraftSource`."""
        ...

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """See `engine_thread.DraftSource`."""
        ...


class RemoteSpeculation:
    """Implements `Speculation` with a drafter's service."""

    def __init__(
        self,
        find_drafter: FindDrafter,
        limits: DraftLimits,
        *,
        gate: DraftGate | None = None,
        dial: Dial = PLAIN_DIAL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._find_drafter = find_drafter
        self.exports: DraftExports | None = None  # set before `start`; without it all rows are in messages
        self._dial = dial
        self._clock = clock
        self._state = DraftState(limits)
        self._control = DraftControl(gate, lambda: clock() * 1e3)
        self._changed = threading.Condition()
        self._missed: Counter[str] = Counter()
        self.drafts_due = self.drafts_missed = 0  # so far, over all steps and sequences
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_send = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for a drafter from now on."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="speculation")

    async def close(self) -> None:
        """End the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def connected(self) -> bool:
        """Whether a drafter is connected."""
        return self._state.connected

    def prompt_rows(self, context_tokens: int) -> int:
        """See `Speculation`."""
        with self._changed:
            return self._control.prompt_rows(context_tokens) if self._state.connected else 0

    def open(self, seq_id: str, rows: ContextRows[Features] | None = None) -> None:
        """The sequence needs drafts; the rows, if any, are the end of its prompt. The drafter's span for it
        is below the current one."""
        with self._changed:
            self._state.open(seq_id, trace=trace_metadata())
            n_rows, end = (0, 0) if rows is None else (len(rows.next_tokens), rows.end_position)
            self._control.open(seq_id, n_rows=n_rows, context_tokens=end)
            if rows is not None:
                self._state.extend(seq_id, rows.start_position, rows.next_tokens, rows.features)
            self._wake_writer()

    def end(self, seq_id: str) -> int:
        """The sequence ended; returns how many of its steps went on without an answer in time."""
        with self._changed:
            self._state.close(seq_id)
            self._control.close(seq_id)
            missed = self._missed.pop(seq_id, 0)
            self._changed.notify_all()
            self._wake_writer()
        return missed

    def _wake_writer(self) -> None:
        """Under the lock, on the event loop. Closed, no sequence costs the drafter or this loop anything."""
        if self._state.has_message:
            self._to_send.set()

    # ---- on the engine's thread

    @property
    def wants_features(self) -> bool:
        """Whether the next step's rows will be sent."""
        return self._control.mode is not DraftMode.OFF

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Proposals for the next step; waits a bounded moment for those on their way."""
        with self._changed:
            if self._control.is_resting:
                return {}
            mode = self._control.begin(available=self._state.connected)
            was_paused = self._state.paused
            self._state.pause(mode is not DraftMode.ON)
            if mode is not DraftMode.ON:
                return {}
            self._state.min_confidence = self._control.least_confidence()
            if was_paused:
                self._wake_writer_from_engine()
            wait_ms = self._state.wait_ms(self._clock() * 1e3)
            if wait_ms:
                self._changed.wait_for(lambda: self._state.complete, wait_ms / 1e3)
            drafts, missed = self._state.step_drafts()
            self._missed.update(missed)
            self.drafts_due += len(drafts) + len(missed)
            self.drafts_missed += len(missed)
            return drafts

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """Send the drafter what was committed."""
        with self._changed:
            if self._control.rests_on():
                return
            has_ends = self._control.end(outputs, self._control.count_drafts(outputs))
            if self._control.mode is DraftMode.OFF and not has_ends and self._state.is_idle:
                self._control.rest()
                return
            for output in outputs:
                if output.finish is not None or output.failure is not None:
                    self._state.close(output.seq_id)
                    self._control.close(output.seq_id)
                elif output.features is not None and output.feature_tokens is not None:
                    self._state.extend(
                        output.seq_id, output.feature_start, output.feature_tokens, host_rows(output.features)
                    )
                elif output.tokens:
                    self._state.skip(output.seq_id)
            self._wake_writer_from_engine()

    def _wake_writer_from_engine(self) -> None:
        """Under the lock. A step that neither sends nor ends anything leaves the event loop alone."""
        if self._loop is not None and self._state.has_message:
            try:
                self._loop.call_soon_threadsafe(self._to_send.set)
            except RuntimeError:  # the loop is closed: the process ends
                log.debug("event loop closed before the engine thread ended")

    # ---- on the event loop

    async def _run(self) -> None:
        endpoint: str | None = None
        while True:
            try:
                endpoint = await self._find_drafter()
                if endpoint is not None:
                    await self._serve(endpoint)
            except grpc.aio.AioRpcError as error:
                log.warning("the drafter is gone: %s", error.code().name)
            except TimeoutError:
                log.info("no drafter answers at %s", endpoint)
            except Exception:
                log.exception("speculation failed")
            await asyncio.sleep(_POLL_S if endpoint is None else _RETRY_S)

    async def _serve(self, endpoint: str) -> None:
        """One stream, until it breaks."""
        async with self._dial(endpoint) as channel:
            async with asyncio.timeout(_CONNECT_S):
                await channel.channel_ready()
            call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
            with self._changed:
                self._state.connect()
            log.info("drafts come from %s", endpoint)
            reader = asyncio.create_task(self._read(call), name="speculation reader")
            writer = asyncio.create_task(self._write(call), name="speculation writer")
            try:
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                await (writer if writer.done() and not call.done() else reader)  # its error says why it ended
            finally:
                with self._changed:
                    self._state.disconnect()
                    self._changed.notify_all()
                call.cancel()
                reader.cancel()
                writer.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
                if self.exports is not None:
                    self.exports.close()

    async def _read(self, call: DraftCall) -> None:
        async for response in call:
            self._receive(response)

    async def _write(self, call: DraftCall) -> None:
        while True:
            self._to_send.clear()
            with self._changed:
                message = self._state.pop_message(self._clock() * 1e3)
            if message is None:
                await self._to_send.wait()
            else:
                await call.write(as_request(message, self.exports))

    def _receive(self, response: drafter_pb2.DraftResponse) -> None:
        now_ms = self._clock() * 1e3
        if self.exports is not None:
            if response.transport:
                self.exports.opened(response.transport)
            for proposal in response.proposals:
                self.exports.answered(proposal.seq_id, proposal.base_tokens, is_unread=proposal.unread)
        with self._changed:
            for proposal in response.proposals:
                tokens = np.frombuffer(proposal.tokens, dtype="<u4").tolist()
                self._state.answer(proposal.seq_id, proposal.base_tokens, tokens, now_ms)
            self._changed.notify_all()
        self._to_send.set()  # there may be room for another request


def as_request(message: DraftMessage, exports: DraftExports | None = None) -> drafter_pb2.DraftRequest:
    """The message as it travels. `exports` takes large pieces, until their answers."""
    request = drafter_pb2.DraftRequest(closed=message.closed, min_confidence=message.min_confidence)
    for rows, trace in zip(message.rows, message.traces, strict=True):
        extend = request.extends.add(
            seq_id=rows.seq_id,
            start_position=rows.start_position,
            next_tokens=pack_tokens(rows.next_tokens),
            width=rows.features.shape[1],
            draft_tokens=message.draft_tokens,
        )
        packed = pack_features(rows.features)
        if exports is None:
            extend.features = packed
        elif exports.fill(extend, packed, base_tokens=rows.base_tokens):
            request.transport_session = exports.session_id
        if trace:  # a map is touched only for what it holds: an empty one costs as much as all the rest
            extend.trace.update(trace)
    return request
