"""Real worker processes with the fake engine: start order, SIGKILL, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common import worker_bounds
from libs.common.block_hash import chain_hashes
from libs.common.cluster.worker_service import held
from libs.common.runtime.exit_codes import MODEL_UNUSABLE
from libs.engine.core.fake import build_fake_engine, expected_tokens
from libs.engine.step.types import SamplingParams
from slipstream.block_hashes import pack_hashes
from slipstream.errors import Draining
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_failure
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from supervisor.forking.launcher import RunningProcess
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.launching import run_service, start_service
from tests.support.stubs.remote_prompt import RemotePrompt
from tests.worker.nodes import WAIT_S, attempt, greedy, packed, prompt_tokens, unpacked

ROOT = Path(__file__).parents[3]
PEMS = ROOT / "tests" / "support" / "tls"
TLS = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
TLS_OPTIONS = ("--tls-ca", str(TLS.ca), "--tls-certificate", str(TLS.certificate), "--tls-key", str(TLS.key))
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Process:
    """One worker process and a channel to it."""

    process: RunningProcess
    endpoint: str
    channel: grpc.aio.Channel

    async def status(self) -> worker_pb2.GetStatusResponse:
        stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S)

    async def wait_idle(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while held((await self.status()).ledger):
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


class Processes:
    def __init__(self, stack: contextlib.AsyncExitStack, run_dir: Path, tls: TlsFiles | None) -> None:
        self._tls = tls
        self._stack = stack
        self._run_dir = run_dir

    async def start(self, role: str, *arguments: str) -> Process:
        if self._tls is not None:
            arguments = (*arguments, *TLS_OPTIONS)
        log = self._run_dir / f"{role}.log"
        command = [sys.executable, "-m", f"services.{role}", "--instance", f"{role}-0", "--engine", "fake"]
        command += ["--transport", "socket", "--run-dir", str(self._run_dir), *arguments]
        with log.open("wb") as output:
            process = await start_service(command, output)
        self._stack.push_async_callback(self._end, process)
        async with asyncio.timeout(WAIT_S):
            while " is ready at " not in (printed := log.read_text()):
                assert process.returncode is None, printed
                await asyncio.sleep(0.02)
        endpoint = printed.partition(" is ready at ")[2].split()[0]
        channel = dial(endpoint, tls=self._tls)
        self._stack.push_async_callback(channel.close)
        return Process(process, endpoint, channel)

    @staticmethod
    async def _end(process: RunningProcess) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


@contextlib.asynccontextmanager
async def processes(run_dir: Path, tls: TlsFiles | None = None) -> AsyncIterator[Processes]:
    async with contextlib.AsyncExitStack() as stack:
        yield Processes(stack, run_dir, tls)


def common_fields(status: worker_pb2.GetStatusResponse, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """Return the fields that Prefill and StartSequence share."""
    hashes = chain_hashes(tokens, root=status.fingerprint.digest, salt=b"", block_tokens=64)
    return {
        "attempt": attempt(),
        "fingerprint": status.fingerprint,
        "prompt": packed(tokens),
        "block_hashes": pack_hashes(hashes),
        "sampling": greedy(max_tokens),
    }


def expected(tokens: list[int], n: int) -> list[int]:
    return expected_tokens(build_fake_engine(n_pages=1), tokens, GREEDY, n=n)


async def read_sequence(call: Any) -> tuple[list[int], decode_pb2.SequenceDelta]:
    tokens: list[int] = []
    while (frame := await call.read()) is not grpc.aio.EOF:
        tokens += unpacked(frame.packed_tokens)
        for delta in frame.deltas:
            tokens += unpacked(delta.tokens)
            if delta.finish_reason:
                return tokens, delta
    raise AssertionError("the stream ended early")


async def test_a_handoff_between_processes_with_mtls_and_clean_exits(tmp_path: Path) -> None:
    tokens = prompt_tokens(300)
    async with processes(tmp_path, TLS) as start:
        prefill, decode, drafter = await asyncio.gather(
            start.start("prefill"), start.start("decode"), start.start("drafter")
        )
        status = await decode.status()
        assert (status.role, status.instance) == (common_pb2.WORKER_ROLE_DECODE, "decode-0")
        assert status.transport == common_pb2.TRANSPORT_SOCKET
        assert (await prefill.status()).fingerprint == status.fingerprint
        health = health_pb2_grpc.HealthStub(decode.channel)
        for service in ("", "liveness", "readiness"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        shared = common_fields(status, tokens, 8)
        call = RemotePrompt(prefill.channel, prefill_pb2.StartPrefill(**shared))
        events = [event async for event in call]
        stream = decode_pb2_grpc.DecodeServiceStub(decode.channel).Decode()
        start_sequence = decode_pb2.StartSequence(handle=1, ticket=events[0].opened.ticket, **shared)
        await stream.write(decode_pb2.DecodeRequest(starts=[start_sequence]))
        async with dial(prefill.endpoint) as stranger:
            with pytest.raises(grpc.aio.AioRpcError):
                await worker_pb2_grpc.WorkerServiceStub(stranger).GetStatus(
                    worker_pb2.GetStatusRequest(), timeout=5
                )
        answer_tokens, last = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        assert [events[-1].first_token.token_id, *answer_tokens] == expected(tokens, 8)
        assert last.stats.kv_bytes_pulled > 0
        for worker in (prefill, decode):
            await worker.wait_idle()
            ledger = (await worker.status()).ledger
            assert ledger.blocks_leaked == 0
        stream.cancel()
        for worker in (prefill, decode, drafter):
            worker.process.terminate()
        for worker in (prefill, decode, drafter):
            assert await asyncio.wait_for(worker.process.wait(), WAIT_S) == 0


async def test_a_second_sigterm_ends_a_draining_process_at_once(tmp_path: Path) -> None:
    tokens = prompt_tokens(300)
    async with processes(tmp_path) as start:
        prefill = await start.start("prefill", "--drain-s", str(10 * WAIT_S))
        shared = common_fields(await prefill.status(), tokens, 8)
        [e async for e in RemotePrompt(prefill.channel, prefill_pb2.StartPrefill(**shared))]
        prefill.process.terminate()
        async with asyncio.timeout(WAIT_S):
            while not (status := await prefill.status()).draining:
                await asyncio.sleep(0.02)
        assert status.ledger.handoffs == 1  # it waits for the handoff
        prefill.process.terminate()
        assert await asyncio.wait_for(prefill.process.wait(), WAIT_S) == -signal.SIGTERM
    assert "ends at once" in (tmp_path / "prefill.log").read_text()


async def test_a_worker_ends_before_it_is_killed_where_etcd_and_a_collector_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot leave discovery, end its lease, or send its last metrics."""
    collector = socket.create_server(("127.0.0.1", 0))  # it accepts, and never answers
    host, port = collector.getsockname()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{host}:{port}")
    with collector, EtcdProcess(tmp_path / "etcd") as etcd:
        async with processes(tmp_path) as start:
            drafter = await start.start("drafter", "--etcd", etcd.endpoint)
            etcd.suspend()
            drafter.process.send_signal(signal.SIGTERM)
            killed_s = worker_bounds.DEFAULT_DRAIN_S + worker_bounds.KILL_AFTER_S
            async with asyncio.timeout(killed_s):
                await drafter.process.wait()
            assert _has_called(collector), "no metrics were to send"
    log = (tmp_path / "drafter.log").read_text()
    assert "stays in the fleet until its lease expires" in log and "lease was not revoked" in log


def _has_called(collector: socket.socket) -> bool:
    return bool(select.select([collector], [], [], 0)[0])


async def test_a_draining_prefill_process_waits_for_its_handoffs(tmp_path: Path) -> None:
    """It refuses new requests, and a decode worker reads its KV after SIGTERM."""
    tokens = prompt_tokens(300)
    async with processes(tmp_path) as start:
        prefill, decode = await asyncio.gather(
            start.start("prefill", "--drain-s", str(WAIT_S)), start.start("decode")
        )
        shared = common_fields(await decode.status(), tokens, 8)
        events = [e async for e in RemotePrompt(prefill.channel, prefill_pb2.StartPrefill(**shared))]
        prefill.process.terminate()
        async with asyncio.timeout(WAIT_S):
            while not (status := await prefill.status()).draining:
                await asyncio.sleep(0.02)
        assert status.ledger.handoffs == 1
        assert status.counters["slipstream_draining"] == 1
        assert (await decode.status()).counters["slipstream_draining"] == 0
        with pytest.raises(Draining):
            async for _ in RemotePrompt(prefill.channel, prefill_pb2.StartPrefill(**shared)):
                pass
        stream = decode_pb2_grpc.DecodeServiceStub(decode.channel).Decode()
        begin = decode_pb2.StartSequence(handle=1, ticket=events[0].opened.ticket, **shared)
        await stream.write(decode_pb2.DecodeRequest(starts=[begin]))
        answer_tokens, last = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        assert [events[-1].first_token.token_id, *answer_tokens] == expected(tokens, 8)
        assert last.stats.kv_bytes_pulled > 0
        assert await asyncio.wait_for(prefill.process.wait(), WAIT_S) == 0
        stream.cancel()


async def test_killing_a_prefill_process_fails_only_its_sequence(tmp_path: Path) -> None:
    # Seconds of work at this pace: the kill certainly comes during the prefill.
    tokens, other = prompt_tokens(4000), prompt_tokens(100, seed=1)
    async with processes(tmp_path) as start:
        prefill, decode = await asyncio.gather(
            start.start("prefill", "--fake-pace-s", "0.005", "--step-tokens", "64"), start.start("decode")
        )
        status = await decode.status()
        shared = common_fields(status, tokens, 8)
        call = RemotePrompt(prefill.channel, prefill_pb2.StartPrefill(**shared))
        opened = await anext(aiter(call))
        stream = decode_pb2_grpc.DecodeServiceStub(decode.channel).Decode()
        start_sequence = decode_pb2.StartSequence(handle=1, ticket=opened.opened.ticket, **shared)
        await stream.write(decode_pb2.DecodeRequest(starts=[start_sequence]))
        async with asyncio.timeout(WAIT_S):
            while not (await decode.status()).counters.get("slipstream_kv_bytes_pulled_total"):
                await asyncio.sleep(0.01)
        await prefill.kill()
        answer, last = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        assert not answer
        assert from_failure(last.failure).code == "UNAVAILABLE"
        await decode.wait_idle()
        # The same stream and worker continue: the request is computed here instead.
        again = decode_pb2.StartSequence(handle=3, **{**shared, "attempt": attempt(number=2)})
        await stream.write(decode_pb2.DecodeRequest(starts=[again]))
        answer, _ = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        assert answer == expected(tokens, 8)
        another = common_fields(status, other, 4) | {"attempt": attempt("other")}
        start_another = decode_pb2.StartSequence(handle=2, **another)
        await stream.write(decode_pb2.DecodeRequest(starts=[start_another]))
        answer, _ = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        assert answer == expected(other, 4)
        await decode.wait_idle()
        stream.cancel()


async def has_drafts(decode: Process) -> bool:
    counters = (await decode.status()).counters
    return counters.get("slipstream_draft_tokens_proposed_total", 0) > 0


async def test_killing_a_drafter_changes_no_token(tmp_path: Path) -> None:
    tokens = prompt_tokens(40)
    async with processes(tmp_path) as start:
        drafter = await start.start("drafter")
        decode = await start.start(
            "decode", "--drafter", drafter.endpoint, "--draft-budget-ms", "200", "--fake-pace-s", "0.0005"
        )
        status = await decode.status()
        stream = decode_pb2_grpc.DecodeServiceStub(decode.channel).Decode()
        # Longer and longer prompts, until a kill comes during one.
        for number, n_tokens in enumerate((400, 1600, 6400), 1):
            start_sequence = decode_pb2.StartSequence(
                handle=number, **{**common_fields(status, tokens, n_tokens), "attempt": attempt(f"r{number}")}
            )
            await stream.write(decode_pb2.DecodeRequest(starts=[start_sequence]))
            reading = asyncio.create_task(read_sequence(stream))
            async with asyncio.timeout(WAIT_S):
                while not reading.done() and not await has_drafts(decode):
                    await asyncio.sleep(0.01)
            if not reading.done():
                break
            await reading
        assert not reading.done()
        await drafter.kill()
        answer, last = await asyncio.wait_for(reading, WAIT_S)
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert answer == expected(tokens, n_tokens)
        await decode.wait_idle()
        stream.cancel()


async def test_a_decode_process_ends_running_sequences_within_its_drain_time(tmp_path: Path) -> None:
    async with processes(tmp_path) as start:
        decode = await start.start("decode", "--fake-pace-s", "0.01", "--drain-s", "0.3")
        status = await decode.status()
        stream = decode_pb2_grpc.DecodeServiceStub(decode.channel).Decode()
        long = decode_pb2.StartSequence(handle=1, **common_fields(status, prompt_tokens(10), 5000))
        await stream.write(decode_pb2.DecodeRequest(starts=[long]))
        first = await asyncio.wait_for(stream.read(), WAIT_S)
        assert isinstance(first, decode_pb2.DecodeResponse) and first.deltas
        decode.process.send_signal(signal.SIGTERM)
        _, last = await asyncio.wait_for(read_sequence(stream), WAIT_S)
        # The finish is not an abort: the router resumes the request elsewhere.
        assert from_failure(last.failure).code == "UNAVAILABLE"
        assert await asyncio.wait_for(decode.process.wait(), WAIT_S) == 0


def stderr_of_a_failed_start(role: str, *arguments: str, exit_code: int = 1) -> list[str]:
    """Return the error lines of a worker that fails to start."""
    code, written = run_service([sys.executable, "-m", f"services.{role}", "--instance", "w", *arguments])
    assert code == exit_code
    assert "Traceback" not in written
    return written.splitlines()


def test_a_worker_that_cannot_listen_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        output = stderr_of_a_failed_start("prefill", "--engine", "fake", "--listen", address)
    assert address in output[-1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_without_its_model_names_the_missing_file(tmp_path: Path, role: str) -> None:
    arguments = ("--model", str(tmp_path), "--transport", "socket")
    output = stderr_of_a_failed_start(role, *arguments, exit_code=MODEL_UNUSABLE)
    assert f"w cannot start: --model: cannot read {tmp_path / 'config.json'}" in output[-1]


def test_a_worker_without_memory_for_its_kv_cache_names_the_setting() -> None:
    arguments = ("--engine", "fake", "--transport", "socket", "--kv-memory-bytes", str(1 << 50))
    output = stderr_of_a_failed_start("decode", *arguments, exit_code=MODEL_UNUSABLE)
    assert f"w cannot start: --kv-memory-bytes: {1 << 50} bytes cannot be allocated" in output[-1]
