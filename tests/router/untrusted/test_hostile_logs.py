"""What clients without a key send to a live router's ports: its log stays JSON, short, and few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc

from slipstream.credentials.api_key_file import add_key
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import router_pb2, router_pb2_grpc

PEMS = Path(__file__).resolve().parents[2] / "support" / "tls"
TLS = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
ROOT = Path(__file__).resolve().parents[3]
MAX_LINE_BYTES = 8192
N_HANDSHAKES = 40
_HUGE = "x" * 6000
HEADERS = [
    b"x-request-id: a\x0bb",
    b"x-request-id: \xff\xfe\xed\xa0\x80",
    b"x-request-id: " + _HUGE.encode(),
    b'x-request-id: "}\\n{"level":"error"',
    b"x-api-key: \xed\xa0\x80\x1b[2J",
    b"Authorization: Bearer " + _HUGE.encode(),
    b"Host: \x1b]0;evil\x07",
    b"traceparent: 00-\xff-\x00-01",
    b"X\x00Y: 1",
]
TARGETS = [
    b"/v1/models",
    b"/%0a%0d%00%ff",
    b"/\xff\xfe",
    b"/v1/models/" + _HUGE.encode(),
    b"http://[::1]evil/",
]
METADATA: list[tuple[str, str | bytes]] = [
    ("x-slipstream-token", "peer:prefill-0\x1b[2J:0:0::x"[:14] + _HUGE),
    ("x-request-id", '"}{"level":"error"'),
    ("x-api-key", "\\u000a" * 500),
    ("x-session-affinity-bin", b"\xff\x00\n"),
]


async def send(endpoint: str, data: bytes) -> None:
    """Send to a port, and read its answer if there is one soon."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        await asyncio.wait_for(reader.read(1 << 16), 5)
    writer.close()


async def attack(http: str, rpc: str) -> None:
    for target in TARGETS:
        for header in HEADERS:
            await send(http, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
    async with dial(rpc, tls=TLS) as channel:
        for method in ("/slipstream.v1.RouterService/Generate", "/x\\n\x7e/" + _HUGE, "/a/b"):
            for pair in METADATA:
                begin: Any = channel.unary_unary(method)
                with contextlib.suppress(grpc.RpcError):
                    await begin(b"\xff\xff", metadata=(pair,), timeout=20)
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        with contextlib.suppress(grpc.RpcError):
            await stub.ListModels(router_pb2.ListModelsRequest(), metadata=(("x-api-key", _HUGE),))
    for _ in range(N_HANDSHAKES):
        await send(rpc, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + os.urandom(600))


async def test_each_line_of_a_live_router_is_one_short_json_object(model_dir: Path, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.toml", name="only", tenant="anna")
    arguments = (
        *("--model", model_dir, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--no-http-tls"),
        *("--api-keys", tmp_path / "keys.toml", "--log-format", "json", "--instance", "router-0"),
        *("--tls-ca", TLS.ca, "--tls-certificate", TLS.certificate, "--tls-key", TLS.key),
    )
    log = tmp_path / "router.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.router", *map(str, arguments), cwd=ROOT, stderr=stderr
        )
    try:
        async with asyncio.timeout(100):
            while "HTTP on " not in (text := log.read_text()):
                assert process.returncode is None, text
                await asyncio.sleep(0.05)
            started = next(line for line in text.splitlines() if "HTTP on " in line)
            rpc, http = json.loads(started)["message"].removeprefix("gRPC on ").split(", HTTP on ")
            await attack(http, rpc)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = log.read_bytes().splitlines()
    for line in lines:
        assert len(line) <= MAX_LINE_BYTES
        assert {"time", "level", "service", "message"} <= json.loads(line).keys()
    # A line for each refused request, and none for each handshake.
    n_requests = len(TARGETS) * len(HEADERS) + 3 * len(METADATA) + 1
    assert len(lines) < n_requests + 25
