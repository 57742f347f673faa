"""Prefill and decode workers in this process over real gRPC, with a scripted model.

They track what they hold like real ones: requests and handoffs must be released, and every
request is checked (fingerprint, hashes, emitted tokens). Attributes switch faults on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from libs.common.block_hash import SharedPrefix
from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import (
    WorkerIdentity,
)
from libs.common.rpc.prefill_server import PrefillServer
from libs.common.rpc.serve import ServiceHost
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import parse_prompt
from slipstream import errors
from slipstream.rpc.rpc_errors import to_failure
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.router.support.context_bound import ContextBound
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_process import FakeProcess, MutableWorkerService
from tests.router.support.prompt_pieces import prompt_pieces

BLOCK_TOKENS = 16
FINGERPRINT = Fingerprint("model", "", "", "float32", BLOCK_TOKENS)
TOKENS_A_FRAME = 3


class FakeWorker(ContextBound):
    """A worker with WorkerService and one other service, registered in discovery."""

    def __init__(
        self,
        role: Role,
        instance: str,
        discovery: InMemoryDiscovery,
        fingerprint: Fingerprint = FINGERPRINT,
        tls: TlsFiles | None = None,
    ) -> None:
        self.role, self.instance = role, instance
        self.host = ServiceHost("127.0.0.1:0", tls=tls)
        self.held: set[str] = set()  # names of held sequences and handoffs
        identity = WorkerIdentity(
            role,
            instance,
            fingerprint=fingerprint.to_proto(),
            transport="socket",
        )
        self.report = worker_pb2.LoadReport()
        self.prompts = PromptCache(block_tokens=BLOCK_TOKENS)
        self.process = FakeProcess(self.held)
        self.service = MutableWorkerService(identity, self.process)
        self.service.load_gate = asyncio.Event()
        self.service.load_gate.set()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.service, self.host.server)
        self.worker = Worker(role, instance, self.host.endpoint, identity.incarnation, fingerprint.digest)
        self._discovery = discovery
        self.announced = False
        self._chatter: asyncio.Task[None] | None = None

    def take(
        self, request: prefill_pb2.StartPrefill | decode_pb2.StartSequence
    ) -> tuple[list[int], tuple[bytes, ...]]:
        """Check and parse a prompt and its block hashes like real workers."""
        if request.fingerprint != FINGERPRINT.to_proto():
            raise errors.FingerprintMismatch("not the fake workers' model")
        prompt, hashes = parse_prompt(
            request.prompt,
            request.block_hashes,
            request.prefix,
            root=FINGERPRINT.digest,
            salt=request.salt,
            memory=self.prompts,
            block_tokens=BLOCK_TOKENS,
            shared=SharedPrefix(request.shared_salt, request.shared_blocks),
        )
        return prompt.tolist(), hashes

    async def start(self) -> None:
        await self.host.start(["slipstream.v1.WorkerService"])
        self._discovery.announce(self.worker)
        self.announced = True

    def report_load_often(self) -> None:
        """Report the load every 50 ms from now on, like a busy worker."""

        async def report() -> None:
            while True:
                self.service.load_changed()
                await asyncio.sleep(0.05)

        self._chatter = asyncio.create_task(report())

    async def kill(self) -> None:
        """Simulate SIGKILL: connections break, and discovery does not know it yet."""
        await self.host.server.stop(None)
        self.held.clear()

    async def stop(self) -> None:
        if self._chatter is not None:
            self._chatter.cancel()
        await self._discovery.withdraw(self.worker)
        await self.host.stop(grace_s=0)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self, instance: str, discovery: InMemoryDiscovery, model: FakeModel, tls: TlsFiles | None = None
    ) -> None:
        super().__init__(Role.PREFILL, instance, discovery, tls=tls)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.host.server)
        self.model = model
        self.requests: list[prefill_pb2.StartPrefill] = []
        self.aborted: list[str] = []
        self.fail_before_ticket: errors.SlipstreamError | None = None
        self.fail_before_token: errors.SlipstreamError | None = None
        self.fail_at_position: int | None = None  # of the prompt's rows
        self.computes: int | None = None  # prompt tokens computed before the gate; None: all
        self.tells_progress = True
        self.gate = asyncio.Event()  # while cleared, the first token waits
        self.gate.set()
        self.abort_gate = asyncio.Event()  # while cleared, an abort waits
        self.abort_gate.set()

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(PrefillServer(self._follow).serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def _follow(
        self, request: prefill_pb2.StartPrefill
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        self.requests.append(request)
        prompt, hashes = self.take(request)
        self.check_context(len(prompt))
        if self.fail_before_ticket is not None:
            raise self.fail_before_ticket
        handoff = f"{request.attempt.request_id}#{request.attempt.attempt}"
        if handoff in self.aborted:  # by a call that overtook the stream
            raise errors.Aborted(f"{handoff} was aborted")
        self.held.add(handoff)
        try:
            cached = self._cached(hashes, len(prompt))
            ticket = prefill_pb2.HandoffTicket(
                handoff_id=handoff, control_endpoint=self.host.endpoint, prompt_tokens=len(prompt)
            )
            opened = prefill_pb2.HandoffOpened(ticket=ticket.SerializeToString(), cached=cached)
            yield prefill_pb2.PrefillEvent(opened=opened)
            if self.tells_progress:
                computed = prefill_pb2.PrefillProgress(computed_tokens=self.computes or len(prompt))
                yield prefill_pb2.PrefillEvent(progress=computed)
            n_prompt = len(prompt) - request.emitted_tokens
            for piece in prompt_pieces(prompt[:n_prompt], request.sampling):
                if self.fail_at_position is not None and piece.first_position >= self.fail_at_position:
                    raise errors.Unavailable("gone amid the rows")
                yield prefill_pb2.PrefillEvent(prompt_logprobs=piece)
            await self.gate.wait()
            if self.fail_before_token is not None:
                raise self.fail_before_token
            n = request.emitted_tokens
            token = self.model.token(prompt[: len(prompt) - n], n, request.sampling)
            finish = self.finish(self.model.finish(token, n + 1, request.sampling), len(prompt) + 1)
            first = prefill_pb2.FirstToken(token_id=token, finish_reason=finish, cached=cached)
            if request.sampling.HasField("top_logprobs"):
                first.logprobs.CopyFrom(_logprobs(token, request.sampling.top_logprobs))
            yield prefill_pb2.PrefillEvent(first_token=first)
        except BaseException:
            self.held.discard(handoff)
            raise

    async def ReleaseHandoff(
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        self.held.discard(request.handoff_id)
        return prefill_pb2.ReleaseHandoffResponse()

    async def AbortPrefill(
        self, request: prefill_pb2.AbortPrefillRequest, context: Any
    ) -> prefill_pb2.AbortPrefillResponse:
        name = f"{request.attempt.request_id}#{request.attempt.attempt}"
        self.aborted.append(name)
        await self.abort_gate.wait()
        self.held.discard(name)
        return prefill_pb2.AbortPrefillResponse()

    def _cached(self, hashes: Sequence[bytes], n_tokens: int) -> list[common_pb2.CachedTokens]:
        blocks = 0
        while blocks < len(hashes) and hashes[blocks] in self.model.stored:
            blocks += 1
        self.model.stored.update(hashes)
        tokens = min(blocks * BLOCK_TOKENS, n_tokens - 1)
        if not tokens:
            return []
        return [common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_DRAM, tokens=tokens)]


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        instance: str,
        discovery: InMemoryDiscovery,
        model: FakeModel,
        prefills: list[FakePrefill],
        fingerprint: Fingerprint = FINGERPRINT,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(Role.DECODE, instance, discovery, fingerprint, tls)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.host.server)
        self.model = model
        self.prefills = prefills
        self.starts: list[decode_pb2.StartSequence] = []
        self.aborted: list[str] = []
        self.refuse: errors.SlipstreamError | None = None
        self.prompt_start = decode_pb2.PromptStart()  # of prompts that come without a ticket
        self.fail_after_tokens: int | None = None  # tokens of a sequence before it fails
        self.reads_no_kv = False  # no KV of any prefill worker
        self.break_after_tokens: int | None = None  # tokens of a sequence before the stream breaks
        self.ends_aborted = True  # whether an aborted sequence sends its last delta
        self.gate = asyncio.Event()  # while cleared, only the first frame is sent
        self.gate.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams = 0

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self._streams += 1
        out: asyncio.Queue[list[decode_pb2.SequenceDelta] | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, out))
        step = 0
        try:
            while (deltas := await out.get()) is not None:
                step += 1
                yield decode_pb2.DecodeResponse(step=step, deltas=deltas)
            raise errors.Unavailable("the stream broke")
        finally:
            self._streams -= 1
            reader.cancel()
            for task in list(self._tasks.values()):
                task.cancel()

    async def _read(self, requests: AsyncIterator[decode_pb2.DecodeRequest], out: Any) -> None:
        attempts: dict[int, common_pb2.Attempt] = {}
        async for request in requests:
            for start in request.starts:
                self._start(start, out)
                attempts[start.handle] = start.attempt
            for handle in request.aborts:
                self._abort(attempts[handle])

    def _start(self, start: decode_pb2.StartSequence, out: Any) -> None:
        self.starts.append(start)
        name = f"{start.attempt.request_id}#{start.attempt.attempt}"
        if self.refuse is not None:
            out.put_nowait([_ended(start, failure=to_failure(self.refuse))])
            return
        if self.reads_no_kv and start.ticket:
            unread = errors.Unavailable("the peer does not answer")
            out.put_nowait([_ended(start, failure=to_failure(unread))])
            return
        try:
            prompt, _ = self.take(start)
            self.check_context(len(prompt) + len(_tokens(start.emitted)))
        except errors.SlipstreamError as error:
            out.put_nowait([_ended(start, failure=to_failure(error))])
            return
        self.held.add(name)
        task = self._tasks[name] = asyncio.create_task(self._run(start, prompt, name, out))

        def end(task: asyncio.Task[None]) -> None:
            self.held.discard(name)
            self._tasks.pop(name, None)
            if task.cancelled():  # before its first step
                self._end_aborted(start, decode_pb2.SequenceStats(), out)

        task.add_done_callback(end)

    def _end_aborted(self, start: decode_pb2.StartSequence, stats: Any, out: Any) -> None:
        if self.ends_aborted:
            out.put_nowait([_ended(start, finish=common_pb2.FINISH_REASON_ABORTED, stats=stats)])

    async def _run(self, start: decode_pb2.StartSequence, prompt: list[int], name: str, out: Any) -> None:
        stats = decode_pb2.SequenceStats(kv_bytes_pulled=1000)
        try:
            emitted = _tokens(start.emitted)
            n = len(emitted)
            if start.ticket:
                ticket = prefill_pb2.HandoffTicket.FromString(start.ticket)
                assert ticket.prompt_tokens == len(prompt) + len(emitted)
                for prefill in self.prefills:
                    if prefill.host.endpoint == ticket.control_endpoint:
                        await prefill.gate.wait()
                        prefill.held.discard(name)
                first = self.model.token(prompt, n, start.sampling)
                n += 1
                if finish := self.model.finish(first, n, start.sampling):
                    out.put_nowait([_ended(start, finish=finish, stats=stats)])
                    return
            begun = None if start.ticket else self.prompt_start
            out.put_nowait([_delta(start, running=True, prompt_start=begun)])
            for piece in prompt_pieces(prompt, start.sampling):
                out.put_nowait([_delta(start, prompt_logprobs=[piece])])
            await self._generate(start, prompt, n, stats, out)
        except asyncio.CancelledError:
            self._end_aborted(start, stats, out)
        except AssertionError as error:
            failure = to_failure(errors.InvalidArgument("start", f"fake worker: {error!r}"))
            out.put_nowait([_ended(start, failure=failure)])

    async def _generate(
        self, start: decode_pb2.StartSequence, prompt: list[int], n: int, stats: Any, out: Any
    ) -> None:
        finish, began = 0, n
        while not finish:
            frame: list[int] = []
            while len(frame) < TOKENS_A_FRAME and not finish:
                frame.append(self.model.token(prompt, n, start.sampling))
                n += 1
                finish = self.finish(self.model.finish(frame[-1], n, start.sampling), len(prompt) + n)
            stats.decode_steps += 1
            stats.generated_tokens += len(frame)
            delta = _delta(start, tokens=np.asarray(frame, "<u4").tobytes())
            if start.sampling.HasField("top_logprobs"):
                delta.logprobs.extend(_logprobs(t, start.sampling.top_logprobs) for t in frame)
            if finish:
                delta.finish_reason = finish
                delta.stats.CopyFrom(stats)
            out.put_nowait([delta])
            if self.break_after_tokens is not None and n - began >= self.break_after_tokens:
                out.put_nowait(None)
                await asyncio.Event().wait()
            if self.fail_after_tokens is not None and n - began >= self.fail_after_tokens and not finish:
                failure = to_failure(errors.DataCorrupt("a block's checksum did not match"))
                out.put_nowait([_ended(start, failure=failure)])
                return
            await asyncio.sleep(0)
            await self.gate.wait()

    async def AbortDecode(
        self, request: decode_pb2.AbortDecodeRequest, context: Any
    ) -> decode_pb2.AbortDecodeResponse:
        task = self._abort(request.attempt)
        if task is not None:
            await asyncio.wait([task])
        return decode_pb2.AbortDecodeResponse()

    def _abort(self, attempt: common_pb2.Attempt) -> asyncio.Task[None] | None:
        name = f"{attempt.request_id}#{attempt.attempt}"
        self.aborted.append(name)
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()
        return task


def _tokens(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, "<u4").tolist()
    return tokens


def _delta(start: decode_pb2.StartSequence, **fields: Any) -> decode_pb2.SequenceDelta:
    return decode_pb2.SequenceDelta(handle=start.handle, **fields)


def _ended(
    start: decode_pb2.StartSequence,
    *,
    finish: Any = common_pb2.FINISH_REASON_ERROR,
    failure: common_pb2.Failure | None = None,
    stats: decode_pb2.SequenceStats | None = None,
) -> decode_pb2.SequenceDelta:
    return _delta(start, finish_reason=finish, failure=failure, stats=stats or decode_pb2.SequenceStats())


def _logprobs(token: int, n: int) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token + i, logprob=-0.5 - i) for i in range(n)]
    return common_pb2.PositionLogprobs(logprob=-0.5, top=top)
