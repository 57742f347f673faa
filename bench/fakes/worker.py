"""A worker without a model that answers at a set pace: `bench.router` runs two of them behind a router.

It takes the command line of the real workers and speaks their contract at little CPU, so that on a small
machine the router is what is measured. Tokens are a fixed text, and no KV moves.

    prefill   opens the handoff at once, then `--prefill-ms` (+ `--prefill-us-per-token`) to the first token
    decode    one token a sequence every `--step-ms`; 0 = as fast as the router takes them
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.fakes.pace import ANSWER, ExactLoops, Pace
from bench.fakes.paced_settings import PacedSettings
from bench.fakes.rpc_server import RpcServer
from libs.common.block_hash import SharedPrefix, TokenArray
from libs.common.cluster.discovery import Discovery
from libs.common.cluster.fingerprint import TEMPLATE, Fingerprint, tokenizer_digest
from libs.common.cluster.worker_record import Role
from libs.common.rpc.prefill_server import PrefillServer
from libs.common.runtime.loading import load_settings
from libs.text.tokenizer import Tokenizer
from libs.worker.process.app import WorkerApp
from libs.worker.process.process import run_worker
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import parse_prompt
from slipstream.errors import PrefixUnknown
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)

BLOCK_TOKENS = 64


class Prompts:
    """Parses, checks and caches prompts as real workers do."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._memory = PromptCache(block_tokens=BLOCK_TOKENS)

    def take(
        self, request: prefill_pb2.StartPrefill | decode_pb2.StartSequence
    ) -> tuple[TokenArray, Sequence[bytes]]:
        """Ids and block hashes. Raises PrefixUnknown."""
        return parse_prompt(
            request.prompt,
            request.block_hashes,
            request.prefix,
            root=self._root,
            salt=request.salt,
            memory=self._memory,
            block_tokens=BLOCK_TOKENS,
            shared=SharedPrefix(request.shared_salt, request.shared_blocks),
        )


class PacedPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Prefill without a model; it reports the blocks that an earlier prompt had as cached."""

    def __init__(self, pace: Pace, answer: Sequence[int], prompts: Prompts) -> None:
        self._pace = pace
        self._answer = answer
        self._prompts = prompts
        self._seen: set[bytes] = set()
        self.endpoint = ""
        self.held = 0

    async def Prefill(
        self,
        request_iterator: AsyncIterator[prefill_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(PrefillServer(self._follow).serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def _follow(
        self, request: prefill_pb2.StartPrefill
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        ids, hashes = self._prompts.take(request)
        tokens = len(ids)
        cached = self._cached_blocks(hashes) * BLOCK_TOKENS
        wait_s = self._pace.prefill_s(tokens - min(cached, tokens))
        ready_ns = time.monotonic_ns() + int(wait_s * 1e9)
        tiers = [common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_WORKER, tokens=cached)] if cached else []
        ticket = prefill_pb2.HandoffTicket(
            handoff_id=str(ready_ns), control_endpoint=self.endpoint, prompt_tokens=tokens
        )
        self.held += 1
        try:
            yield prefill_pb2.PrefillEvent(
                opened=prefill_pb2.HandoffOpened(ticket=ticket.SerializeToString(), cached=tiers)
            )
            if wait_s:
                await asyncio.sleep(wait_s)
            first = prefill_pb2.FirstToken(token_id=self._answer[0], cached=tiers)
            if request.sampling.HasField("top_logprobs"):
                first.logprobs.CopyFrom(position_logprobs(first.token_id, request.sampling.top_logprobs))
            if request.sampling.max_tokens - request.emitted_tokens <= 1:
                first.finish_reason = common_pb2.FINISH_REASON_LENGTH
            yield prefill_pb2.PrefillEvent(first_token=first)
        finally:
            self.held -= 1

    async def AbortPrefill(
        self, request: prefill_pb2.AbortPrefillRequest, context: Any
    ) -> prefill_pb2.AbortPrefillResponse:
        return prefill_pb2.AbortPrefillResponse()

    def _cached_blocks(self, blocks: Sequence[bytes]) -> int:
        known = next((i for i, block in enumerate(blocks) if block not in self._seen), len(blocks))
        self._seen.update(blocks[known:])
        return known


@functools.cache
def position_logprobs(token: int, n_top: int) -> common_pb2.PositionLogprobs:
    """Log probabilities of a token and of those after it in the vocabulary."""
    top = [common_pb2.TokenLogprob(token_id=token + i, logprob=-0.5 - i) for i in range(n_top)]
    return common_pb2.PositionLogprobs(logprob=-0.5, top=top)


@dataclass(eq=False, slots=True)
class _Sequence:
    start: decode_pb2.StartSequence
    ready_ns: int
    limit: int
    emitted: int
    is_announced: bool = False  # a frame has said that it runs


class _Frame:
    """A frame that fills: tokens of a sequence with a delta go into the delta, all others are packed."""

    def __init__(self) -> None:
        self._deltas: dict[int, decode_pb2.SequenceDelta] = {}
        self._handles = array("I")
        self._tokens = array("I")

    def __bool__(self) -> bool:
        return bool(self._deltas) or bool(self._handles)

    def delta(self, start: decode_pb2.StartSequence) -> decode_pb2.SequenceDelta:
        """The delta of the sequence; created at first use."""
        return self._deltas.setdefault(start.handle, decode_pb2.SequenceDelta(handle=start.handle))

    def add(self, start: decode_pb2.StartSequence, token: int) -> None:
        """Add one token of a sequence."""
        if start.sampling.HasField("top_logprobs"):
            self.delta(start).logprobs.append(position_logprobs(token, start.sampling.top_logprobs))
        if start.handle not in self._deltas:
            self._handles.append(start.handle)
            self._tokens.append(token)
        else:
            self.delta(start).tokens += array("I", [token]).tobytes()

    def message(self) -> decode_pb2.DecodeResponse:
        """The frame as a message."""
        return decode_pb2.DecodeResponse(
            deltas=self._deltas.values(),
            packed_handles=self._handles.tobytes(),
            packed_tokens=self._tokens.tobytes(),
        )


@dataclass(eq=False, slots=True)
class _Stream:
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[_Sequence] = field(default_factory=list)
    frame: _Frame = field(default_factory=_Frame)
    interval_s: float = 0.0  # between frames, as the router asks


class PacedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Decode without a model: one frame a step, for all sequences of a stream."""

    def __init__(self, pace: Pace, answer: Sequence[int], prompts: Prompts) -> None:
        self._prompts = prompts
        self._step_s = pace.step_ms / 1e3
        self._answer = list(answer)
        self._streams: set[_Stream] = set()

    @property
    def held(self) -> int:
        """The number of running sequences."""
        return sum(len(stream.sequences) for stream in self._streams)

    async def Decode(
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        stream = _Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        loop, step = asyncio.get_running_loop(), 0
        next_s = sent_s = loop.time()
        try:
            while not reader.done() or stream.sequences or stream.frame:
                self._step(stream)
                if stream.frame and loop.time() >= sent_s + stream.interval_s:
                    step += 1
                    frame, stream.frame, sent_s = stream.frame.message(), _Frame(), loop.time()
                    frame.step = step
                    yield frame
                if not stream.sequences and not stream.frame:
                    stream.wake.clear()
                    await stream.wake.wait()
                    next_s = loop.time()
                next_s = max(next_s + self._step_s, loop.time())
                await asyncio.sleep(next_s - loop.time() if self._step_s else 0)
        finally:
            self._streams.discard(stream)
            reader.cancel()

    async def _read(self, requests: AsyncIterator[decode_pb2.DecodeRequest], stream: _Stream) -> None:
        try:
            async for request in requests:
                for start in request.starts:
                    self._start(start, stream)
                for handle in request.aborts:
                    self._abort(stream, handle)
                if request.HasField("frame_interval_ms"):
                    stream.interval_s = request.frame_interval_ms / 1e3
                stream.wake.set()
        finally:
            stream.wake.set()

    def _start(self, start: decode_pb2.StartSequence, stream: _Stream) -> None:
        try:
            self._prompts.take(start)
        except PrefixUnknown as error:
            delta = stream.frame.delta(start)
            delta.finish_reason = common_pb2.FINISH_REASON_ERROR
            delta.failure.CopyFrom(to_failure(error))
            return
        stream.sequences[start.handle] = self._sequence(start)

    def _sequence(self, start: decode_pb2.StartSequence) -> _Sequence:
        ready_ns, emitted = 0, len(start.emitted) // 4
        if start.ticket:
            ready_ns = int(prefill_pb2.HandoffTicket.FromString(start.ticket).handoff_id)
            emitted += 1
        return _Sequence(start, ready_ns, start.sampling.max_tokens, emitted)

    def _abort(self, stream: _Stream, handle: int) -> None:
        sequence = stream.sequences.pop(handle, None)
        if sequence is not None:
            stream.aborted.append(sequence)

    def _step(self, stream: _Stream) -> None:
        """One token for every sequence that is ready."""
        frame, now_ns, answer = stream.frame, time.monotonic_ns(), self._answer
        for sequence in stream.aborted:
            delta = frame.delta(sequence.start)
            delta.finish_reason = common_pb2.FINISH_REASON_ABORTED
            delta.stats.SetInParent()
        stream.aborted.clear()
        for handle, sequence in list(stream.sequences.items()):
            if sequence.ready_ns > now_ns:
                continue
            token = answer[sequence.emitted % len(answer)]
            sequence.emitted += 1
            if not sequence.is_announced:
                sequence.is_announced = frame.delta(sequence.start).running = True
            frame.add(sequence.start, token)
            if sequence.emitted >= sequence.limit:
                delta = frame.delta(sequence.start)
                delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
                delta.stats.generated_tokens = sequence.emitted - 1
                delta.stats.decode_steps = sequence.emitted - 1
                del stream.sequences[handle]

    async def AbortDecode(
        self, request: decode_pb2.AbortDecodeRequest, context: Any
    ) -> decode_pb2.AbortDecodeResponse:
        for stream in self._streams:
            for handle, sequence in list(stream.sequences.items()):
                if sequence.start.attempt.request_id == request.attempt.request_id:
                    self._abort(stream, handle)
            stream.wake.set()
        return decode_pb2.AbortDecodeResponse()


class PacedApp(WorkerApp):
    """A fake worker of either tier."""

    def __init__(self, role: Role, options: PacedSettings) -> None:
        super().__init__(options)
        self.transport_kind = "socket"
        assert options.model is not None
        tokenizer = Tokenizer.from_dir(options.model)
        answer = tokenizer.encode_text(ANSWER)
        pace = Pace(options.prefill_ms, options.prefill_us_per_token, options.step_ms)
        self.service_name = f"slipstream.v1.{role.capitalize()}Service"
        self.fingerprint = Fingerprint(
            "bench", tokenizer_digest(options.model), TEMPLATE, "float32", BLOCK_TOKENS
        )
        self.record_fingerprint = self.fingerprint.digest
        self._pace = pace
        # The router calls no other RPC of a prefill worker: no fake decode worker pulls KV.
        prompts = Prompts(self.record_fingerprint)
        self._prefill = PacedPrefill(pace, answer, prompts) if role is Role.PREFILL else None  # type: ignore[abstract]
        self._decode = PacedDecode(pace, answer, prompts)

    async def open(self, endpoint: str, discovery: Discovery, stop: Callable[[], None]) -> None:
        if self._prefill is not None:
            self._prefill.endpoint = endpoint

    def register(self, server: grpc.aio.Server, load_changed: Callable[[], None]) -> None:
        if self._prefill is not None:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._prefill, server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(self._decode, server)

    def load(self) -> worker_pb2.LoadReport:
        report = worker_pb2.LoadReport(requests_running=self._held, blocks_free=1 << 20)
        report.decode_step_ms = self._pace.step_ms
        return report

    def ledger(self) -> worker_pb2.Ledger:
        return worker_pb2.Ledger(sequences=self._held)

    def measure(self) -> Mapping[str, float]:
        return {}

    def undrain(self) -> None:
        pass

    async def drain(self) -> None:
        """Return at once: the load of a benchmark ends before its workers."""

    async def close(self) -> None:
        """The app holds nothing open."""

    @property
    def _held(self) -> int:
        return self._prefill.held if self._prefill is not None else self._decode.held


def main() -> int:
    """Parse the command line and serve; the instance's name has the role."""
    options = load_settings(
        PacedSettings,
        section=Role.DECODE,
        program="python -m bench.fakes.worker",
        description="A worker without a model that answers at a set pace.",
    )
    role = Role(options.instance.rpartition("-")[0])
    asyncio.set_event_loop_policy(ExactLoops())
    return run_worker(role, options, lambda: PacedApp(role, options), make_server=RpcServer)


if __name__ == "__main__":
    sys.exit(main())
