"""A worker without a model in SGLang's gRPC protocol, as SMG speaks it, at a set pace.

    /path/to/smg-environment/bin/python -m bench.fakes.smg_worker --tier decode --step-ms 20 --answer 17,4,35

It runs in SMG's environment, which has the messages (`smg-grpc-proto`) and `h2`, with this repository on the
path. It prints `listening PORT` and serves 127.0.0.1 until its standard input ends.

    prefill   after `--prefill-ms` the first token, as a chunk and the completion
    decode    the first token after `--prefill-ms` too (a router sends a request to both tiers at once), then
              a message with a token per sequence every `--step-ms`; 0 = as fast as the router takes them
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.fakes.http2_server import OK, UNIMPLEMENTED, Call, GrpcServerConnection
from bench.fakes.pace import ExactLoops, Pace

GENERATE = "Generate"
_CONTEXT_TOKENS = 1 << 18
_VOCABULARY_TOKENS = 1536


@dataclass(frozen=True, slots=True)
class Asked:
    """The fields of a request that the worker uses."""

    request_id: str
    prompt_tokens: int
    max_tokens: int


class Codec(Protocol):
    """The messages of a protocol."""

    unary: Mapping[str, bytes]  # the response to each other method, by its name

    def asked(self, data: bytes) -> Asked:
        """Parse a Generate request."""

    def chunk(self, asked: Asked, token: int, completion_tokens: int) -> bytes:
        """The message of one token, the `completion_tokens`th."""

    def complete(self, asked: Asked, tokens: Sequence[int]) -> bytes:
        """The last message."""


@dataclass(eq=False, slots=True)
class _Sequence:
    call: Call
    asked: Asked
    limit: int
    emitted: int = 0
    timer: asyncio.TimerHandle | None = None


class PacedScheduler:
    """A `bench.fakes.http2_server.Service`: first tokens when their prefill ends, all others in steps."""

    def __init__(self, pace: Pace, codec: Codec, answer: Sequence[int], *, tier: str) -> None:
        self._pace, self._codec, self._answer = pace, codec, answer
        self._decodes = tier != "prefill"
        self._requests: dict[Call, bytes] = {}  # calls whose client has not sent all
        self._sequences: dict[Call, _Sequence] = {}
        self._running: dict[Call, _Sequence] = {}  # sequences with a first token
        self._wake = asyncio.Event()

    @property
    def held(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._sequences)

    def opened(self, call: Call) -> None:
        self._requests[call] = b""

    def asked(self, call: Call, message: bytes) -> None:
        self._requests[call] = message

    def half_closed(self, call: Call) -> None:
        message = self._requests.pop(call)
        method = call.method.rpartition("/")[2]
        if method != GENERATE:
            response = self._codec.unary.get(method)
            if response is not None:
                call.send(response)
            call.finish(UNIMPLEMENTED if response is None else OK)
            return
        asked = self._codec.asked(message)
        sequence = _Sequence(call, asked, asked.max_tokens if self._decodes else 1)
        self._sequences[call] = sequence
        # Steps begin with the first sequence, also before its first token, as in bench/fakes/worker.py.
        self._wake.set()
        wait_s = self._pace.prefill_s(asked.prompt_tokens)
        if wait_s:
            sequence.timer = asyncio.get_running_loop().call_later(wait_s, self._first, sequence)
        else:
            self._first(sequence)

    def left(self, call: Call) -> None:
        self._requests.pop(call, None)
        sequence = self._sequences.pop(call, None)
        self._running.pop(call, None)
        if sequence is not None and sequence.timer is not None:
            sequence.timer.cancel()

    async def run(self) -> None:
        """Step until cancelled."""
        loop, step_s = asyncio.get_running_loop(), self._pace.step_ms / 1e3
        next_s = loop.time()
        while True:
            if not self._sequences:
                self._wake.clear()
                await self._wake.wait()
                next_s = loop.time()
            next_s = max(next_s + step_s, loop.time())
            await asyncio.sleep(next_s - loop.time() if step_s else 0)
            stepped = list(self._running.values())
            for sequence in stepped:
                self._emit(sequence)
            for connection in {sequence.call.connection for sequence in stepped}:
                connection.flush()

    def _first(self, sequence: _Sequence) -> None:
        sequence.timer = None
        self._running[sequence.call] = sequence
        self._emit(sequence)
        sequence.call.flush()

    def _emit(self, sequence: _Sequence) -> None:
        """Send one token, and the end after the last; nothing while the client's window is full."""
        call, asked, nth = sequence.call, sequence.asked, sequence.emitted + 1
        if call.blocked:
            return
        if nth <= sequence.limit:
            call.send(self._codec.chunk(asked, self._answer[sequence.emitted % len(self._answer)], nth))
            sequence.emitted = nth
        if sequence.emitted >= sequence.limit:
            tokens = [self._answer[index % len(self._answer)] for index in range(sequence.emitted)]
            call.send(self._codec.complete(asked, tokens))
            call.finish()
            self.left(call)


class SglangCodec:
    """`sglang.grpc.scheduler` of the package smg-grpc-proto."""

    def __init__(self, model: str, tier: str) -> None:
        pb: Any = importlib.import_module("smg_grpc_proto.generated.sglang_scheduler_pb2")
        self._request, self._response = pb.GenerateRequest, pb.GenerateResponse
        self._chunk, self._complete = pb.GenerateStreamChunk, pb.GenerateComplete
        info = pb.GetModelInfoResponse(
            model_path=model,
            tokenizer_path=model,
            served_model_name="bench",
            is_generation=True,
            max_context_length=_CONTEXT_TOKENS,
            max_req_input_len=_CONTEXT_TOKENS,
            vocab_size=_VOCABULARY_TOKENS,
            model_type="kimi_k2",
            architectures=["DeepseekV3ForCausalLM"],
        )
        server = pb.GetServerInfoResponse(server_type="grpc", max_total_num_tokens=1 << 24)
        server.server_args.update({"disaggregation_mode": "null" if tier == "both" else tier})
        load = pb.SchedulerLoad(max_total_num_tokens=1 << 24, max_running_requests=4096)
        messages = {
            "HealthCheck": pb.HealthCheckResponse(healthy=True, message="ok"),
            "Abort": pb.AbortResponse(success=True),
            "GetModelInfo": info,
            "GetServerInfo": server,
            "GetLoads": pb.GetLoadsResponse(dp_rank_count=1, loads=[load]),
        }
        self.unary: Mapping[str, bytes] = {
            **{name: message.SerializeToString() for name, message in messages.items()},
            "Check": b"\x08\x01",  # grpc.health.v1.HealthCheckResponse(status=SERVING)
        }

    def asked(self, data: bytes) -> Asked:
        request = self._request.FromString(data)
        return Asked(
            request.request_id, len(request.tokenized.input_ids), request.sampling_params.max_new_tokens or 16
        )

    def chunk(self, asked: Asked, token: int, completion_tokens: int) -> bytes:
        chunk = self._chunk(
            token_ids=[token], prompt_tokens=asked.prompt_tokens, completion_tokens=completion_tokens
        )
        data: bytes = self._response(request_id=asked.request_id, chunk=chunk).SerializeToString()
        return data

    def complete(self, asked: Asked, tokens: Sequence[int]) -> bytes:
        complete = self._complete(
            output_ids=tokens,
            finish_reason="length",
            prompt_tokens=asked.prompt_tokens,
            completion_tokens=len(tokens),
        )
        data: bytes = self._response(request_id=asked.request_id, complete=complete).SerializeToString()
        return data


async def serve(scheduler: PacedScheduler) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: GrpcServerConnection(scheduler), "127.0.0.1", 0)
    print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
    stepping = asyncio.create_task(scheduler.run())
    ended = loop.run_in_executor(None, sys.stdin.read)
    await asyncio.wait([stepping, ended], return_when=asyncio.FIRST_COMPLETED)
    stepping.cancel()
    server.close()
    if not ended.done():
        stepping.result()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.fakes.smg_worker")
    parser.add_argument("--tier", choices=["prefill", "decode", "both"], default="both")
    parser.add_argument("--prefill-ms", type=float, default=0.0)
    parser.add_argument("--prefill-us-per-token", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--model", required=True, help="folder with the tokenizer, as the router knows it")
    parser.add_argument("--answer", required=True, help="comma-separated token ids, repeated without end")
    options = parser.parse_args()
    pace = Pace(options.prefill_ms, options.prefill_us_per_token, options.step_ms)
    answer = [int(token) for token in options.answer.split(",")]

    async def run() -> None:
        codec = SglangCodec(options.model, options.tier)
        await serve(PacedScheduler(pace, codec, answer, tier=options.tier))

    asyncio.set_event_loop_policy(ExactLoops())
    asyncio.run(run())


if __name__ == "__main__":
    main()
