"""Which endpoints and transport sessions may be dialled."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from libs.common.cluster import address_book
from libs.common.cluster.address_book import AnnouncedAddresses, LoopbackAddresses, session_digest
from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker, decode_worker, encode_worker
from slipstream.errors import UnknownAddress

SESSION = "10.0.0.1:9100/00ff"
STORE = Worker(Role.KVSTORE, "kvstore-0", "10.0.0.1:9000", "run-1", session_digest=session_digest(SESSION))


def test_a_record_keeps_the_digest_of_the_session_and_not_the_session() -> None:
    encoded = encode_worker(STORE)
    assert decode_worker(STORE.key, encoded).worker == STORE
    assert b"00ff" not in encoded


async def test_what_discovery_announced_may_be_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "_LAG_S", 0.01)
    discovery = InMemoryDiscovery()
    async with Fleet(discovery) as fleet:
        book = AnnouncedAddresses(fleet)
        for check in (book.check_endpoint("10.0.0.1:9000"), book.check_session(SESSION)):
            with pytest.raises(UnknownAddress):
                await check
        discovery.announce(STORE)
        await fleet.wait_until(lambda seen: bool(seen.workers), timeout_s=60)
        await book.check_endpoint("10.0.0.1:9000")
        await book.check_session(SESSION)
        for wrong in ("10.0.0.1:9001", "", session_digest(SESSION)[:10]):
            assert not book.knows_endpoint(wrong)
        assert not book.knows_session("10.0.0.1:9100/00fe")
        await discovery.withdraw(STORE)
        await fleet.wait_until(lambda seen: not seen.workers, timeout_s=60)
        assert book.knows_endpoint("10.0.0.1:9000")  # it may serve without etcd


async def test_a_new_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "_LAG_S", 60.0)
    discovery = InMemoryDiscovery()
    async with Fleet(discovery) as fleet, asyncio.TaskGroup() as group:
        book = AnnouncedAddresses(fleet)
        check = group.create_task(book.check_endpoint(STORE.endpoint))
        await asyncio.sleep(0)
        assert not check.done()
        discovery.announce(STORE)


async def test_without_discovery_only_loopback_addresses_are_dialled() -> None:
    async with AsyncExitStack() as stack:
        book = await address_book.open_address_book(InMemoryDiscovery(), stack)
        assert isinstance(book, LoopbackAddresses)
        await book.check_endpoint("127.0.0.1:9000")
        await book.check_session("127.0.0.1:9000/00")
        for endpoint in ("10.0.0.1:9000", "169.254.169.254:80", "metadata:80", ""):
            with pytest.raises(UnknownAddress):
                await book.check_endpoint(endpoint)


async def test_an_empty_fleet_delays_no_start() -> None:
    async with Fleet(InMemoryDiscovery()) as fleet, asyncio.timeout(60):
        assert not (await fleet.wait_snapshot()).workers
