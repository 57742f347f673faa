"""Webhooks: signed, retried, and only to allowed addresses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from libs.common.telemetry.counters import Counters
from libs.database.database import open_database
from services.router.jobs.decisions import share_deliveries
from services.router.jobs.types import Webhook
from services.router.jobs.webhooks.message import webhook_headers, webhook_retry_s
from services.router.jobs.webhooks.policy import first_allowed, parse_webhook_hosts
from services.router.jobs.webhooks.resolver import AllowedResolver
from services.router.jobs.webhooks.sender import WebhookSender
from slipstream.errors import InvalidArgument
from tests.router.jobs.stores import JobTables

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()


class Receiver:
    """A client's web server. `statuses` are its answers, the last one again and again."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.url = self.host = ""
        self.port = 0

    async def __aenter__(self) -> Receiver:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._receive)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        self.received.append((dict(request.headers), await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"location": self.url} if status == 302 else {})


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[JobTables]:
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    yield JobTables(database)
    await database.close()


async def _end_one(tables: JobTables, url: str) -> str:
    [job_id] = await tables.submit("a", reference="line 1", webhook=Webhook(url, SECRET))
    await tables.leases.register("r1")
    await tables.finish("r1", await tables.claim_one("r1"))
    return job_id


async def until_counted(counters: Counters, outcome: str, count: int = 1) -> None:
    name = f'slipstream_webhooks_total{{outcome="{outcome}"}}'
    async with asyncio.timeout(30):
        while counters.snapshot().get(name, 0) < count:
            await asyncio.sleep(0.01)


def sender_of(tables: JobTables, counters: Counters, hosts: str) -> WebhookSender:
    return WebhookSender(
        tables.database,
        parse_webhook_hosts(hosts),
        wall_clock_s=lambda: tables.now_s,
        counters=counters,
        tick_s=0.01,
    )


async def test_the_end_of_a_job_is_announced_and_signed(tables: JobTables) -> None:
    counters = Counters()
    async with Receiver(200) as receiver:
        job_id = await _end_one(tables, receiver.url)
        sender = sender_of(tables, counters, receiver.host)
        sender.start()
        await until_counted(counters, "delivered")
        await sender.close()
    [(headers, body)] = receiver.received
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    notice = json.loads(body)
    assert (notice["type"], notice["data"]["id"]) == ("job.succeeded", job_id)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", notice["timestamp"])
    assert await tables.database.read(lambda tx: tx.execute("SELECT id FROM job_notices")) == []


async def test_openai_accepts_the_signature() -> None:
    body = b'{"id": "evt_1", "object": "event", "type": "batch.completed", "created_at": 1, "data": {}}'
    headers = webhook_headers("msg_1", body, SECRET, now_s=time.time())
    OpenAI(api_key="x").webhooks.verify_signature(body.decode(), headers, secret=SECRET)
    with pytest.raises(Exception, match="signature"):
        OpenAI(api_key="x").webhooks.verify_signature(body.decode() + " ", headers, secret=SECRET)


class SlowReceiver(Receiver):
    """Answers nothing until the test lets it."""

    def __init__(self) -> None:
        super().__init__(200)
        self.answers = asyncio.Event()

    async def _receive(self, request: web.Request) -> web.Response:
        self.received.append((dict(request.headers), await request.read()))
        await self.answers.wait()
        return web.Response()


async def test_a_slow_receiver_delays_no_other_one(tables: JobTables) -> None:
    counters = Counters()
    slow = SlowReceiver()
    async with slow, Receiver(200) as quick:
        await tables.leases.register("r1")
        for tenant, url, n in (
            ("alice", slow.url, 60),
            ("bob", quick.url.replace("127.0.0.1", "localhost"), 3),
        ):
            prompts = [f"{tenant} {index}" for index in range(n)]
            await tables.submit(*prompts, tenant=tenant, webhook=Webhook(url, SECRET))
        for _ in range(63):
            await tables.finish("r1", await tables.claim_one("r1"))
        sender = sender_of(tables, counters, hosts=f"{slow.host},localhost:{quick.port}@127.0.0.0/8")
        sender.start()
        await until_counted(counters, "delivered", 3)
        assert 0 < len(slow.received) <= 4 and len(quick.received) == 3
        slow.answers.set()
        await until_counted(counters, "delivered", 63)
        await sender.close()


RECEIVERS = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))


@given(st.lists(RECEIVERS, unique=True), st.dictionaries(RECEIVERS, st.integers(0, 6)), st.integers(0, 40))
def test_deliveries_are_shared(
    due: list[tuple[str, str]], in_flight: dict[tuple[str, str], int], n: int
) -> None:
    shares = share_deliveries(due, in_flight, n, most_each=4)
    assert set(shares) <= set(due) and sum(shares.values()) <= n
    after = {each: in_flight.get(each, 0) + shares.get(each, 0) for each in due}
    assert all(after[each] <= 4 for each in shares)
    if sum(shares.values()) < n:
        assert all(count >= 4 for count in after.values())


async def test_a_failed_delivery_is_repeated_with_the_same_id(tables: JobTables) -> None:
    counters = Counters()
    async with Receiver(500, 302, 204) as receiver:
        await _end_one(tables, receiver.url)
        sender = sender_of(tables, counters, receiver.host)
        sender.start()
        for count in (1, 2):  # a redirect is a failure, too
            await until_counted(counters, "failed", count)
            tables.now_s += 100
        await until_counted(counters, "delivered")
        await sender.close()
    assert len(receiver.received) == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
    assert len({headers["webhook-timestamp"] for headers, _ in receiver.received}) == 3


async def test_nothing_is_sent_to_a_host_that_is_not_allowed_any_more(tables: JobTables) -> None:
    counters = Counters()
    async with Receiver(200) as receiver:
        await _end_one(tables, receiver.url)
        sender = sender_of(tables, counters, hosts="example.com")
        sender.start()
        await until_counted(counters, "given_up")
        await sender.close()
    assert receiver.received == []


async def test_a_name_that_resolves_to_a_private_address_is_not_dialled() -> None:
    resolver = AllowedResolver(parse_webhook_hosts("localhost"))
    with pytest.raises(OSError, match="not allowed"):
        await resolver.resolve("localhost", 80)
    allowed = AllowedResolver(parse_webhook_hosts("localhost@127.0.0.0/8,localhost@::1/128"))
    with pytest.raises(OSError):
        await allowed.resolve("otherhost.invalid", 80)


@pytest.mark.parametrize(
    ("host", "address", "allowed"),
    [
        ("hooks.example.com", "93.184.216.34", True),
        ("hooks.example.com", "10.0.0.1", False),
        ("hooks.example.com", "127.0.0.1", False),
        ("hooks.example.com", "169.254.169.254", False),
        ("hooks.example.com", "::ffff:93.184.216.34", False),
        ("hooks.example.com", "::ffff:169.254.169.254", False),
        ("hooks.example.com", "64:ff9b::5db8:d822", True),  # NAT64 of 93.184.216.34
        ("hooks.example.com", "64:ff9b::a00:1", False),  # of 10.0.0.1
        ("hooks.example.com", "64:ff9b::a9fe:a9fe", False),
        ("hooks.example.com", "64:ff9b:1::5db8:d822", False),
        ("hooks.example.com", "2002:a00:1::1", False),  # 6to4 of 10.0.0.1
        ("hooks.example.com", "2002:5db8:d822::1", False),
        ("hooks.example.com", "2001:0:5db8:d822::f5ff:fffe", False),  # Teredo
        ("hooks.example.com", "::10.0.0.1", False),
        ("hooks.example.com", "224.0.0.1", False),
        ("hooks.example.com", "ff0e::1", False),
        ("hooks.example.com", "2606:2800:220:1::1", True),
        ("inner.example.com", "64:ff9b::a01:203", False),
        ("inner.example.com", "10.1.2.3", True),
        ("inner.example.com", "::ffff:10.1.2.3", True),
        ("inner.example.com", "11.1.2.3", False),
        ("192.0.2.7", "192.0.2.7", True),
        ("other.example.com", "93.184.216.34", False),
    ],
)
def test_which_addresses_may_be_dialled(host: str, address: str, allowed: bool) -> None:
    hosts = parse_webhook_hosts("hooks.example.com,inner.example.com@10.0.0.0/8,192.0.2.7")
    assert hosts.allows((host, 443), address) is allowed
    rebound = ["93.184.216.34", address]
    assert (first_allowed(hosts, (host, 443), rebound) != "") is (allowed and host == "hooks.example.com")


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://evil.example.com/", SECRET),
        ("ftp://hooks.example.com/", SECRET),
        ("https://user:pw@hooks.example.com/", SECRET),
        ("https://hooks.example.com.evil.com/", SECRET),
        ("https://hooks.example.com:99999/", SECRET),
        ("http://hooks.example.com:6379/", SECRET),
        ("https://hooks.example.com:0/", SECRET),
        ("https://hooks.example.com/\n", SECRET),
        ("https://hooks.example.com/" + "x" * 3000, SECRET),
        ("https://hooks.example.com/", "whsec_short"),
        ("https://hooks.example.com/", "nothing"),
    ],
)
def test_what_is_refused_at_submission(url: str, secret: str) -> None:
    hosts = parse_webhook_hosts("hooks.example.com")
    hosts.check(Webhook("https://hooks.example.com/x?y=1", SECRET), "jobs[0].webhook")
    with pytest.raises(InvalidArgument) as refusal:
        hosts.check(Webhook(url, secret), "jobs[0].webhook")
    assert refusal.value.field == "jobs[0].webhook"


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        (
            "a.example",
            ["https://a.example/", "http://a.example/", "https://a.example:443/"],
            ["https://a.example:8443/"],
        ),
        ("a.example:8443", ["https://a.example:8443/"], ["https://a.example/", "http://a.example:80/"]),
        (
            "a.example,a.example:8443",
            ["https://a.example/", "https://a.example:8443/"],
            ["http://a.example:22/"],
        ),
        ("192.0.2.7:9000", ["http://192.0.2.7:9000/"], ["http://192.0.2.7/"]),
        ("2001:db8::1", ["https://[2001:db8::1]/"], ["https://[2001:db8::1]:8443/"]),
        ("[2001:db8::1]:8443", ["https://[2001:db8::1]:8443/"], ["https://[2001:db8::1]/"]),
    ],
)
def test_an_entry_allows_its_port_or_the_two_of_the_schemes(
    entry: str, allowed: list[str], refused: list[str]
) -> None:
    hosts = parse_webhook_hosts(entry)
    for url in allowed:
        hosts.check(Webhook(url, SECRET), "webhook")
    for url in refused:
        with pytest.raises(InvalidArgument, match="port"):
            hosts.check(Webhook(url, SECRET), "webhook")


def test_the_entries_of_a_target_add_up() -> None:
    hosts = parse_webhook_hosts("x.example:1@10.0.0.0/8,x.example:1@192.168.0.0/16,x.example:2")
    assert hosts.allows(("x.example", 1), "10.1.1.1") and hosts.allows(("x.example", 1), "192.168.1.1")
    assert not hosts.allows(("x.example", 1), "93.184.216.34")
    assert hosts.allows(("x.example", 2), "93.184.216.34")
    assert not hosts.allows(("x.example", 2), "10.1.1.1")


async def test_nothing_is_sent_to_another_port_of_an_allowed_host(tables: JobTables) -> None:
    counters = Counters()
    async with Receiver(200) as receiver:
        await _end_one(tables, receiver.url)
        sender = sender_of(tables, counters, hosts=f"127.0.0.1,127.0.0.1:{receiver.port % 65535 + 1}")
        sender.start()
        await until_counted(counters, "given_up")
        await sender.close()
    assert receiver.received == []


def test_pauses_between_tries_grow_to_an_hour() -> None:
    pauses = [webhook_retry_s(tries, 1.0) for tries in range(1, 12)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (5.0, 3600.0)


@pytest.mark.parametrize(
    "text", ["a b", "x@notanetwork", "http://x", "@10.0.0.0/8", "x:0", "x:65536", "x:", "x:y", ":443", "[::1"]
)
def test_a_wrong_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_webhook_hosts(text)
