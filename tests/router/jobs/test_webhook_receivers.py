"""What the receivers of webhooks cannot do to a router, nor to the webhooks of others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from libs.common.telemetry.counters import Counters
from libs.database.database import open_database
from libs.database.transaction import SqlTransaction
from services.router.jobs.store import JobLimits
from services.router.jobs.types import Webhook
from services.router.jobs.webhooks import client as webhook_client
from services.router.jobs.webhooks import sender as webhook_sender
from services.router.jobs.webhooks.policy import parse_webhook_hosts
from services.router.jobs.webhooks.resolver import AllowedResolver
from slipstream.errors import Overloaded
from tests.router.jobs.stores import JobTables
from tests.router.jobs.test_webhooks import SECRET, Receiver, sender_of, until_counted
from tests.support.tls.authority import Authority


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[JobTables]:
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    yield JobTables(database, JobLimits(max_live=2))
    await database.close()


class CookieReceiver(Receiver):
    """Gives each delivery a long cookie for its whole host."""

    def __init__(self) -> None:
        super().__init__(200)

    async def _receive(self, request: web.Request) -> web.Response:
        response = await super()._receive(request)
        response.set_cookie(f"c{len(self.received)}", "x" * 1000)
        return response


async def end_two(tables: JobTables, url: str) -> None:
    """End as many jobs as the tenant may have."""
    for job_id in await tables.submit("a", "b", webhook=Webhook(url, SECRET)):
        await tables.store.cancel("alice", job_id)


async def test_a_receiver_leaves_no_cookie(tables: JobTables) -> None:
    counters = Counters()
    async with CookieReceiver() as receiver:
        url = receiver.url.replace("127.0.0.1", "localhost")  # an address would get no cookie anyway
        sender = sender_of(tables, counters, f"localhost:{receiver.port}@127.0.0.0/8")
        sender.start()
        for count in (2, 4):  # the later ones come after an answer with a cookie
            await end_two(tables, url)
            await until_counted(counters, "delivered", count)
        await sender.close()
    assert [headers.get("Cookie") for headers, _ in receiver.received] == [None] * 4


async def test_a_delivered_webhook_makes_room_for_a_job(tables: JobTables) -> None:
    counters = Counters()
    async with Receiver(200) as receiver:
        await end_two(tables, receiver.url)
        with pytest.raises(Overloaded):
            await tables.submit("c")
        sender = sender_of(tables, counters, receiver.host)
        sender.start()
        await until_counted(counters, "delivered", 2)
        await sender.close()
    await tables.submit("c", "d")


async def test_a_name_that_hangs_takes_one_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = list[str](), threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        assert answer.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolver = AllowedResolver(parse_webhook_hosts("slow.example@10.0.0.0/8"))
    lookups = [asyncio.create_task(resolver.resolve("slow.example", 443)) for _ in range(64)]
    async with asyncio.timeout(30):
        while not asked:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(lambda: "free") == "free"
        lookups[0].cancel()
        answer.set()
        found = await asyncio.gather(*lookups[1:])
    assert set(found) == {"10.0.0.1"}
    assert asked == ["slow.example"]
    resolver.close()


async def test_lookups_that_fail_are_made_again() -> None:
    resolver = AllowedResolver(parse_webhook_hosts("nowhere.invalid"))
    for _ in range(2):
        with pytest.raises(OSError):
            await resolver.resolve("nowhere.invalid", 443)
    resolver.close()


async def test_receivers_are_found_without_a_look_at_all_that_waits(tables: JobTables) -> None:
    def insert(tx: SqlTransaction) -> None:
        for number in range(300):
            tenant, host = f"t{number % 3}", f"h{number % 5}.example"
            row = (f"m{number}", "", "", b"", 0.0 if tenant != "t1" else 9e9, 0.0, tenant, host)
            tx.execute("INSERT INTO job_notices VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)", row)

    await tables.database.run(insert)
    sql = webhook_sender.DUE_RECEIVERS
    due = await tables.database.read(lambda tx: tx.execute(sql, (1.0,)))
    assert sorted(due) == [(tenant, f"h{n}.example") for tenant in ("t0", "t2") for n in range(5)]
    plan = await tables.database.read(lambda tx: tx.execute(f"EXPLAIN QUERY PLAN {sql}", (1.0,)))
    assert not [row for row in plan if "SCAN" in row[3] and "job_notices" in row[3]]


@asynccontextmanager
async def raw_receiver(answer: bytes) -> AsyncIterator[str]:
    """The URL of a server that sends these bytes to each request, whatever it is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"}}")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a b?c=d e"


INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\n", "delivered"),
        (b"HTTP/1.0 204\r\n\r\n", "delivered"),
        (INTERIM * 3 + b"HTTP/1.1 200 OK\r\n\r\n", "delivered"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9999, "delivered"),
        (INTERIM * 1000 + b"HTTP/1.1 200 OK\r\n\r\n", "failed"),  # no flood is read to its end
        (b"HTTP/1.1 103 " + b"x" * 99_999 + b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "failed"),
        (b"HTTP/1.1 301 Moved\r\nlocation: http://127.0.0.1/\r\n\r\n", "failed"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "failed"),
        (b"SSH-2.0-x\r\n", "failed"),
        (b"\x00" * 99_999, "failed"),
        (b"", "failed"),
        (b"HTTP/1.1 410 Gone\r\n\r\n", "given_up"),
    ],
)
async def test_an_answer_counts_by_its_first_bytes(tables: JobTables, answer: bytes, outcome: str) -> None:
    counters = Counters()
    async with raw_receiver(answer) as url:
        [job_id] = await tables.submit("a", webhook=Webhook(url, SECRET))
        await tables.store.cancel("alice", job_id)
        sender = sender_of(tables, counters, url.removeprefix("http://").partition("/")[0])
        sender.start()
        await until_counted(counters, outcome)
        await sender.close()


async def test_https_is_delivered_to_a_certificate_of_the_name_alone(
    tables: JobTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path).issue("hooks", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    answer = partial(_answer_at_once, b"HTTP/1.1 200 OK\r\n\r\n")
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def resolve(self: AllowedResolver, host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(AllowedResolver, "resolve", resolve)

    async def post(host: str) -> int:
        resolver = AllowedResolver(parse_webhook_hosts(""))
        url = f"https://{host}:{port}/"
        try:
            return await webhook_client.post_webhook(url, b"{}", {}, resolver=resolver, timeout_s=30)
        finally:
            resolver.close()

    async with server:
        with pytest.raises(webhook_client.WebhookUnanswered, match="SSLCertVerificationError"):
            await post("localhost")  # of an unknown authority
        trusting = ssl.create_default_context(cafile=str(files.ca))
        monkeypatch.setattr(webhook_client, "_tls", lambda: trusting)
        assert await post("localhost") == 200
        with pytest.raises(webhook_client.WebhookUnanswered, match="SSLCertVerificationError"):
            await post("other.example")


async def _answer_at_once(answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer)
    await writer.drain()
    writer.close()
