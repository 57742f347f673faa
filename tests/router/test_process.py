"""The router as a process, its options and mTLS."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import grpc
import pytest

from libs.common.cluster.worker_record import WORKERS_PREFIX
from libs.common.etcd.client import EtcdClient
from services.router.__main__ import _salts as make_salts
from services.router.__main__ import parse_options
from services.router.request.model_card import ModelCard, load_model_card
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import WAIT_S, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.launching import run_service
from tests.support.processes.process_checks import is_stopped

PEMS = Path(__file__).resolve().parents[1] / "support" / "tls"
TLS = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
ROOT = Path(__file__).resolve().parents[2]


_COMMAND = (sys.executable, "-m", "services.router", "--instance", "router-0")


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_COMMAND, *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


async def test_a_single_process_serves_and_ends_on_sigterm(model_dir: Path) -> None:
    process = await _start("--model", str(model_dir), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    try:
        assert process.stderr is not None
        async with asyncio.timeout(100):
            while b"HTTP on " not in (line := await process.stderr.readline()):
                assert line, "the router ended"
            http = line.decode().rsplit(" ", 1)[1].strip()
            async with aiohttp.ClientSession(f"http://{http}") as session:
                async with session.get("/healthz/live") as answer:
                    assert answer.status == 200
                async with session.get("/healthz/ready") as answer:
                    assert answer.status == 503
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_that_ends_leaves_no_record_in_etcd(model_dir: Path, tmp_path: Path) -> None:
    with EtcdProcess(tmp_path / "etcd") as etcd:
        client = EtcdClient([etcd.endpoint])
        arguments = ("--model", str(model_dir), "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint)
        process = await _start(*arguments, "--http", "127.0.0.1:0")
        try:
            async with asyncio.timeout(WAIT_S):
                while not (await client.get_prefix(WORKERS_PREFIX)).entries:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, said = await process.communicate()
            assert process.returncode == 0 and b"Traceback" not in said
            assert not (await client.get_prefix(WORKERS_PREFIX)).entries  # its lease lasts for 10 s
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await client.close()


def test_a_failed_start_gives_one_error_line(tmp_path: Path) -> None:
    code, said = run_service([*_COMMAND, "--model", str(tmp_path)])
    assert code == 1
    assert "config.json" in said.splitlines()[-1]
    assert "Traceback" not in said


async def test_a_second_sigterm_ends_several_router_processes_at_once(model_dir: Path) -> None:
    ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--processes", "2")
    process = await _start("--model", str(model_dir), *ports)
    assert process.stderr is not None
    pids: list[int] = []
    try:
        async with asyncio.timeout(100):
            for _ in range(2):
                await _word_after(process.stderr, "operators: gRPC at ")
            pids = _children(process.pid)
            assert len(pids) == 2
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # it cannot end by itself
            # A process that is not stopped yet takes SIGTERM first: the kernel delivers the lower number.
            while not all(is_stopped(pid) for pid in pids):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while not all(_has_pending_sigterm(pid) for pid in pids):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == -signal.SIGTERM
            assert b"ends at once" in await process.stderr.read()  # it ends when no child has it open
            pids.clear()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if process.returncode is None:
            process.kill()
            await process.wait()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _has_pending_sigterm(pid: int) -> bool:
    """Whether a stopped process has got SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


async def _word_after(lines: asyncio.StreamReader, words: str) -> str:
    """The word that a log has after these, without a comma."""
    while words not in (line := (await lines.readline()).decode()):
        assert line, "the router ended"
    return line.partition(words)[2].split()[0].rstrip(",")


def test_a_shared_prefix_without_a_text_ends_the_router(model_dir: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_bytes(b"\xff\xfe")
    options = ("--model", str(model_dir), "--shared-prefix", str(prefix), "--http", "127.0.0.1:0")
    code, said = run_service([*_COMMAND, *options])
    assert code == 1
    assert f"router-0 ends: --shared-prefix: {prefix}:1: is not UTF-8" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("data", [b"", b" \n\n", b"\xff\xfe"])
def test_a_shared_prefix_without_a_text_is_refused_by_name(
    card: ModelCard, tmp_path: Path, data: bytes
) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_bytes(data)
    options = parse_options(["--instance", "r", "--model", str(tmp_path), "--shared-prefix", str(prefix)])
    words = ":1: is not UTF-8" if data[:1] == b"\xff" else " is empty"
    with pytest.raises(errors.InvalidArgument, match=f"{re.escape(str(prefix))}{words}") as refused:
        make_salts(options, card)
    assert refused.value.field == "--shared-prefix"


def test_tls_options_are_required_together(tmp_path: Path) -> None:
    base = ["--instance", "r", "--model", str(tmp_path)]
    assert parse_options(base).tls() is None
    with pytest.raises(errors.InvalidArgument, match="go together"):
        parse_options([*base, "--tls-ca", str(TLS.ca)]).tls()


async def test_mtls_to_clients_and_workers(model: FakeModel, card: ModelCard) -> None:
    hello = [{"role": "user", "content": "hi"}]
    async with FakeCluster(model, tls=TLS) as cluster, open_router(cluster, card, tls=TLS) as router:
        async with AsyncClient(router.host.endpoint, tls=TLS) as client:
            assert (await client.chat(hello)).finish_reason == "stop"
        async with dial(router.host.endpoint) as plain:
            stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(plain)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListModels(router_pb2.ListModelsRequest(), timeout=60)


def test_a_checkpoint_that_does_not_fit_its_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 100}')
    with pytest.raises(ValueError, match="for a vocabulary of 10"):
        load_model_card(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    with pytest.raises(ValueError, match="max_position_embeddings"):
        load_model_card(tmp_path)


async def test_a_port_in_use_is_named_in_the_error(model: FakeModel, card: ModelCard) -> None:
    async with FakeCluster(model) as cluster, open_router(cluster, card) as router:
        with pytest.raises(errors.Unavailable, match="cannot listen"):
            open_router(cluster, card, http=router.http_endpoint)
