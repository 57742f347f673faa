"""TLS of real processes under attack: HTTPS and gRPC of clients, and mutual TLS of peers and operators."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common.cluster.worker_record import Role
from slipstream.client import Client
from slipstream.credentials.api_key_file import add_key, revoke_key
from slipstream.rpc.tls import TlsFiles
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.tls.authority import Authority, install

HI = [{"role": "user", "content": "Where is my order?"}]
# The fake engine's tokens follow from the seed. By a seed of each request, the first one may be part of a
# character, which a held stream does not show, and any of them a stop token.
TO_THE_END: Any = {"ignore_eos": True, "seed": 1}
CHAT = "/v1/chat/completions"
# The record of a ClientHello that announces 512 bytes and has two.
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00"
PLAINTEXT = (
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 4096,
)
# Of HTTP/2's frame that a server sends first: its type, no flags, stream 0.
SETTINGS = b"\x04\x00\x00\x00\x00\x00"
MANY = 40


@dataclass(frozen=True)
class Trusted:
    """A cluster with mutual TLS, whose clients have another authority than its peers."""

    cluster: LocalCluster
    authority: Authority  # of the peers
    served: TlsFiles
    peer: TlsFiles
    client: TlsFiles
    keys: Path
    key: str

    def ports(self) -> dict[str, str]:
        """Every port with TLS."""
        record = self.cluster.supervisor.record()
        router = record.find("router-0")
        assert router.admin is not None
        https = {f"{each.instance} https": each.admin_http for each in record.processes if each.admin_http}
        return {
            "https": self.cluster.http,
            "grpc": self.cluster.grpc,
            "admin": router.admin,
            "decode": self.cluster.workers["decode-0"],
            "prefill": self.cluster.workers["prefill-0"],
            **https,
        }

    def sdk(self, key: str = "") -> Client:
        return Client(self.cluster.grpc, api_key=key or self.key, tls=self.client, timeout_s=60)

    def https(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self.served.ca)
        host, port = address(self.cluster.http)
        return http.client.HTTPSConnection(host, port, context=context, timeout=REQUEST_S)

    def stream(self, key: str) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        """A stream over HTTPS, after its first event."""
        connection = self.https()
        body = json.dumps({"messages": HI, "stream": True, "max_tokens": 12, **TO_THE_END})
        headers = {"Content-Type": "application/json", "x-api-key": key}
        connection.request("POST", CHAT, body, headers)
        answer = connection.getresponse()
        assert answer.status == 200
        while not (line := answer.readline()).startswith(b"data: "):
            assert line.strip() in (b"", b": keep-alive")
        return connection, answer

    def check(self) -> None:
        """Both APIs serve."""
        with self.sdk() as sdk:
            assert sdk.chat(HI, max_tokens=3, **TO_THE_END).finish_reason == "length"
        with contextlib.closing(self.https()) as connection:
            connection.request("GET", "/v1/models", headers={"x-api-key": self.key})
            assert connection.getresponse().status == 200


def plain_status(host: str, port: int) -> int:
    """The status of a request without TLS."""
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=REQUEST_S)) as plain:
        plain.request("GET", "/metrics")
        return plain.getresponse().status


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def trusted(request: pytest.FixtureRequest) -> Iterator[Trusted]:
    with lasting_dir(request, "trusted") as run_dir:
        peers, clients = Authority(run_dir / "peers"), Authority(run_dir / "clients")
        served, client = peers.issue("cluster"), clients.issue("anna")
        keys = run_dir / "keys.toml"
        key = add_key(keys, name="anna-laptop", tenant="anna")
        counts: Any = {"prefill": 1, "decode": 1, "kvstores": 0, "drafters": 0, "routers": 1}
        config = fake_engine_config(run_dir / "run", pace_s=0.0003, **counts)
        extra = {**config.extra_arguments, Role.ROUTER: ["--api-keys", str(keys)]}
        tls: Any = {"tls": served, "tls_client_ca": clients.ca}
        secured = fake_engine_config(run_dir / "run", pace_s=0.0003, **counts, **tls, extra_arguments=extra)
        with LocalCluster(secured) as running:
            # A client has the certificate of its authority and trusts that of the peers.
            yield Trusted(
                running, peers, served, peers.issue("laptop"), replace(client, ca=peers.ca), keys, key
            )


@pytest.fixture
def held(trusted: Trusted) -> Iterator[Any]:
    """Streams stand still after their fourth token, until the gate opens."""
    with trusted.cluster.gate.held("decode-0", from_token=4) as gate:
        yield gate


def test_every_process_serves_its_metrics_over_https(trusted: Trusted) -> None:
    context = ssl.create_default_context(cafile=trusted.served.ca)
    ports = [port for name, port in trusted.ports().items() if name.endswith("-0 https")]
    assert len(ports) == 3  # router, prefill, decode
    for port in ports:
        host, number = address(port)
        secured = http.client.HTTPSConnection(host, number, context=context, timeout=REQUEST_S)
        with contextlib.closing(secured) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.status == 200 and b"slipstream_build_info" in answer.read()
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain_status(host, number)


def test_half_handshakes_and_plaintext_hold_up_no_one_and_end(trusted: Trusted) -> None:
    silent: list[socket.socket] = []
    for endpoint in trusted.ports().values():
        for data in (b"", HALF_HELLO, *PLAINTEXT):
            for _ in range(MANY // 4):
                connection = socket.create_connection(address(endpoint), timeout=REQUEST_S)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(data)
                silent.append(connection)
    trusted.check()
    for connection in silent:  # each is closed by the server, the silent ones after the bound of a handshake
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 12):
                pass
        connection.close()
    trusted.check()


@pytest.mark.parametrize("port", ["https", "grpc", "decode"])
def test_a_client_cannot_negotiate_again(trusted: Trusted, port: str) -> None:
    """R asks for a new handshake of TLS 1.2, which costs the server a signature."""
    tls = trusted.peer if port == "decode" else trusted.client
    protocol = "http/1.1" if port == "https" else "h2"
    files = ["-alpn", protocol, "-CAfile", f"{tls.ca}", "-cert", f"{tls.certificate}", "-key", f"{tls.key}"]
    openssl = shutil.which("openssl")
    assert openssl is not None
    with subprocess.Popen(
        [openssl, "s_client", "-connect", trusted.ports()[port], "-tls1_2", *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdin is not None and isinstance(process.stdout, io.BufferedReader)
        said = b""
        while b"Verify return code" not in said:
            said += (line := process.stdout.readline())
            assert line, said.decode()
        assert b"TLSv1.2" in said
        # A record of the server amid the new handshake would be an error of openssl's own.
        while protocol == "h2" and SETTINGS not in said:
            said += (more := process.stdout.read1())
            assert more, said.decode(errors="replace")
        with contextlib.suppress(BrokenPipeError):
            for _ in range(3):
                process.stdin.write(b"R\n")
                process.stdin.flush()
        rest, _ = process.communicate(timeout=60)
    assert b"RENEGOTIATING" in rest
    refusals = (b"no renegotiation", b"handshake failure", b"unexpected eof")  # gRPC closes the connection
    assert any(refusal in rest for refusal in refusals), rest.decode(errors="replace")
    trusted.check()


def test_streams_go_on_while_certificates_are_replaced(trusted: Trusted, held: Any) -> None:
    connection, answer = trusted.stream(trusted.key)
    before = certificate(trusted, "https")
    install(trusted.authority.issue("renewed"), trusted.served)
    for port in ("https", "grpc", "decode"):
        until(partial(presents_another, trusted, port, before), what=f"the new one at {port}")
    held.open()
    rest = answer.read()
    connection.close()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
    trusted.check()


def presents_another(trusted: Trusted, port: str, before: bytes | None) -> bool:
    return certificate(trusted, port) != before


def certificate(trusted: Trusted, port: str) -> bytes | None:
    """What the port presents to a new connection."""
    tls = trusted.peer if port == "decode" else trusted.client
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    if port != "https":
        context.set_alpn_protocols(["h2"])
    host, number = address(trusted.ports()[port])
    with (
        socket.create_connection((host, number), timeout=REQUEST_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def test_a_clients_certificate_opens_no_port_of_peers_and_operators(trusted: Trusted) -> None:
    method = "/slipstream.v1.WorkerService/GetStatus"
    foreign = Authority(trusted.keys.parent / "foreign").issue("nobody")
    for port in ("decode", "prefill", "admin"):
        for tls in (trusted.client, replace(foreign, ca=trusted.peer.ca)):
            assert status(trusted.ports()[port], method, tls) is grpc.StatusCode.UNAVAILABLE
        assert status(trusted.ports()[port], method, trusted.peer) is grpc.StatusCode.OK
    models = "/slipstream.v1.RouterService/ListModels"
    assert status(trusted.cluster.grpc, models, trusted.peer) is grpc.StatusCode.UNAVAILABLE
    assert status(trusted.cluster.grpc, models, trusted.client) is grpc.StatusCode.UNAUTHENTICATED


def status(endpoint: str, method: str, tls: TlsFiles) -> grpc.StatusCode:
    with grpc.secure_channel(endpoint, tls.channel_credentials()) as channel:
        call: Any = channel.unary_unary(method)
        try:
            call(b"", timeout=REQUEST_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


def test_a_revoked_key_ends_its_streams_and_no_others(trusted: Trusted, held: Any) -> None:
    lost = add_key(trusted.keys, name="lost", tenant="anna")
    with contextlib.closing(trusted.https()) as connection:

        def knows() -> bool:
            connection.request("GET", "/v1/models", headers={"x-api-key": lost})
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200

        until(knows, what="the new key")
    kept_connection, kept = trusted.stream(trusted.key)
    lost_connection, ended = trusted.stream(lost)
    revoke_key(trusted.keys, "lost")
    assert b"was revoked" in ended.read()
    held.open()
    assert b'"finish_reason":"length"' in kept.read()
    kept_connection.close()
    lost_connection.close()
