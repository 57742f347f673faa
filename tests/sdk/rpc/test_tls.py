"""Certificates that are replaced while a server runs."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common.rpc.serve import ServiceHost
from slipstream.async_client import AsyncClient
from slipstream.client import Client
from slipstream.endpoints import Endpoints
from slipstream.errors import Overloaded, SlipstreamError, Unavailable
from slipstream.rpc.credential_fault import credential_fault, lasting_fault
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import ServerCertificates, TlsFiles
from tests.support.tls.authority import Authority, install

ECHO = "/slipstream.v1.DrafterService/Draft"  # a peer may call it


class Echo(grpc.GenericRpcHandler):
    """A stream that answers each message with itself."""

    def service(self, details: Any) -> Any:
        async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


def name_served_at(endpoint: str, files: TlsFiles) -> str:
    """The common name of the certificate that a new connection gets."""
    import socket

    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    host, _, port = endpoint.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain) as secure,
    ):
        found: Any = secure.getpeercert()
    return str(dict(pair[0] for pair in found["subject"])["commonName"])


async def test_new_connections_get_the_new_certificate_while_an_old_stream_goes_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served, second, client = (authority.issue(name) for name in ("first", "second", "client"))
    host = ServiceHost("127.0.0.1:0", tls=served)
    host.server.add_generic_rpc_handlers((Echo(),))
    await host.start([])
    try:
        async with dial(host.endpoint, tls=client) as channel:
            stream: Any = channel.stream_stream(ECHO)()
            await stream.write(b"1")
            assert await stream.read() == b"1"
            assert await asyncio.to_thread(name_served_at, host.endpoint, client) == "first"
            install(second, served)
            assert await asyncio.to_thread(name_served_at, host.endpoint, client) == "second"
            await stream.write(b"2")  # on the connection of the first certificate
            assert await stream.read() == b"2"
            async with dial(host.endpoint, tls=client) as late:
                other: Any = late.stream_stream(ECHO)()
                await other.write(b"3")
                assert await other.read() == b"3"
                other.cancel()
            stream.cancel()
    finally:
        await host.stop(grace_s=0)


@pytest.mark.parametrize(("name", "is_refused"), [("slipstream", False), ("another", True)])
async def test_the_blocking_client_expects_the_name_that_it_is_given(
    tmp_path: Path, name: str, is_refused: bool
) -> None:
    """As through a forwarded port, where the certificate has the Service's name. No router serves here."""
    authority = Authority(tmp_path)
    served, files = authority.issue("served", "slipstream"), authority.issue("client")
    host = ServiceHost("127.0.0.1:0", tls=served)
    await host.start([])
    try:
        client = Client(host.endpoint, tls=replace(files, server_name=name), timeout_s=60)
        with client, pytest.raises(SlipstreamError) as found:
            await asyncio.to_thread(client.chat, [{"role": "user", "content": "hi"}])
        assert isinstance(found.value, Unavailable) is is_refused, found.value
    finally:
        await host.stop(grace_s=0)


async def test_a_client_without_tls_at_a_port_with_tls_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Calls of jobs look for another router, but not so long where each try would fail.
    monkeypatch.setattr("slipstream.calls.losses.LOST_S", math.inf)
    monkeypatch.setattr("slipstream.calls.losses.PAUSE_S", 0.0)
    host = ServiceHost("127.0.0.1:0", tls=Authority(tmp_path).issue("served"))
    await host.start([])
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    try:
        async with AsyncClient(host.endpoint, timeout_s=60) as client:
            for call in (client.chat(messages), client.models(), client.jobs.get("job-1")):
                with pytest.raises(Unavailable, match="the port may speak TLS: give --tls-ca"):
                    await call
        with Client(host.endpoint, timeout_s=60) as blocking:
            for use in (
                partial(blocking.chat, messages),
                blocking.models,
                partial(blocking.jobs.get, "job-1"),
            ):
                with pytest.raises(Unavailable, match="the port may speak TLS: give --tls-ca"):
                    await asyncio.to_thread(use)
    finally:
        await host.stop(grace_s=0)


def test_a_router_that_was_reached_is_not_suspected_of_tls() -> None:
    lost = Unavailable("Socket closed")
    for reach in (Endpoints.reached, Endpoints.answered):
        endpoints: Endpoints[Any] = Endpoints("127.0.0.1:1", str)
        assert "TLS" in endpoints.explained(lost).message
        reach(endpoints)
        assert endpoints.explained(lost) is lost
    refused = Overloaded("Socket closed")
    assert Endpoints("127.0.0.1:1", str).explained(refused) is refused


async def test_a_new_authority_counts_for_clients_too(tmp_path: Path) -> None:
    """The CA file is read again: clients of the old authority are refused, those of the new one accepted."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    served, old_client, new_client = old.issue("server"), old.issue("client"), new.issue("client")
    replacement = new.issue("server")
    host = ServiceHost("127.0.0.1:0", tls=served)
    host.server.add_generic_rpc_handlers((Echo(),))
    await host.start([])

    async def echo(files: TlsFiles) -> bytes:
        async with dial(host.endpoint, tls=files) as channel:
            stream: Any = channel.stream_stream(ECHO)(timeout=60)
            await stream.write(b"x")
            answer: bytes = await stream.read()
            return answer

    try:
        assert await echo(old_client) == b"x"
        install(replacement, served)
        assert await echo(new_client) == b"x"
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await echo(TlsFiles(new.ca, old_client.certificate, old_client.key))
    finally:
        await host.stop(grace_s=0)


def test_files_that_do_not_fit_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    served, second = authority.issue("first"), authority.issue("second")
    certificates = ServerCertificates(served)
    assert certificates.fetch() is None
    key, pem = served.key.read_bytes(), served.certificate.read_bytes()
    with caplog.at_level(logging.ERROR):
        served.certificate.write_bytes(second.certificate.read_bytes())  # the key is still the first one
        assert certificates.fetch() is None
        served.key.write_bytes(b"no key at all\n")
        assert certificates.fetch() is None
        served.key.unlink()
        for _ in range(3):
            assert certificates.fetch() is None
    assert len(caplog.records) == 3
    assert "BEGIN" not in caplog.text and all(record.exc_info is None for record in caplog.records)
    served.key.write_bytes(second.key.read_bytes())
    assert certificates.fetch() is not None
    assert certificates.fetch() is None
    served.key.write_bytes(key)
    served.certificate.write_bytes(pem)
    assert certificates.fetch() is not None


async def test_peers_are_dialled_at_any_address_by_the_name_that_they_share(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("peer")  # for 127.0.0.1 and localhost
    host = ServiceHost("127.0.0.2:0", tls=files)
    host.server.add_generic_rpc_handlers((Echo(),))
    await host.start([])
    try:
        for server_name, is_served in (("", False), ("another", False), ("localhost", True)):
            async with dial(host.endpoint, tls=replace(files, server_name=server_name)) as channel:
                begin: Any = channel.stream_stream(ECHO)
                call = begin(iter([b"hello"]), timeout=60)
                if is_served:
                    assert await call.read() == b"hello"
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as failed:
                        await call.read()
                    assert "--tls-server-name" in (credential_fault(failed.value) or "")
                    assert "--tls-server-name" in lasting_fault(failed.value)
    finally:
        await host.stop(grace_s=0)
