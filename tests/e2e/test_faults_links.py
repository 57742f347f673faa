"""A link between two tiers is cut, reset, swallowed, slowed or throttled while streams run, and heals.

The workers are processes of their own (fake engine); the router is this process's; every link passes
through a proxy that can misbehave. Nothing may fail or differ, and afterwards all is as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from bench.fault_load import Answer, answer_of, mixed_requests, run_streams, wrong
from bench.ledgers import held
from libs.common.discovery import InMemoryDiscovery
from libs.common.placements import InMemoryPlacements
from libs.common.worker_record import Role
from services.router.model_card import load_model_card
from services.router.service import RouterOptions, RouterServer
from slipstream.async_client import AsyncClient
from slipstream.supervisor.plan import DEFAULT_MODEL
from slipstream.supervisor.ports import free_ports
from tests.support.fault_proxy import FaultProxy
from tests.support.worker_processes import WorkerProcess

LINKS = (
    "router-decode",
    "router-prefill",
    "decode-prefill",
    "workers-kvstore",
    "decode-drafter",
    "client-router",
)
FAULT_S = 3.0
WAIT_S = 60.0
FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "cut": FaultProxy.cut,
    "reset": FaultProxy.reset,
    "blackhole": FaultProxy.blackhole,
    "delay": lambda proxy: proxy.delay(0.1),
    "trickle": lambda proxy: proxy.trickle(20_000),
}
LOAD = mixed_requests(14, tokens=64)
# One of each, spread over the links; `make soak` runs every pair.
PAIRS = tuple(zip(LINKS, ("blackhole", "blackhole", "cut", "trickle", "blackhole", "reset"), strict=True))


@dataclass
class Mesh:
    """Two prefill and two decode workers, a kvstore, a drafter and a router, with a proxy on every link."""

    client: AsyncClient
    router: RouterServer
    workers: list[WorkerProcess]
    links: dict[str, FaultProxy]
    expected: list[Answer]

    async def idle(self) -> None:
        """Every ledger reads zero within the deadline."""
        async with asyncio.timeout(WAIT_S):
            while self.router.runs.held or self.router.fleet.tokens_in_flight or await self._held():
                await asyncio.sleep(0.1)

    async def _held(self) -> list[str]:
        return [worker.instance for worker in self.workers if held(await worker.status())]

    async def all_ready(self) -> None:
        """The router sees every worker within the deadline."""
        async with asyncio.timeout(WAIT_S):
            while sum(link.ready for link in self.router.fleet.links()) < len(self.workers):
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    run_dir: Path = tmp_path_factory.mktemp("mesh")
    ports = iter(free_ports(6, rng=Random(7)))
    discovery = InMemoryDiscovery()
    links: dict[str, FaultProxy] = {}
    workers: list[WorkerProcess] = []
    async with AsyncExitStack() as stack:

        async def proxy(name: str, target: str) -> str:
            links[name] = await stack.enter_async_context(FaultProxy(target))
            return links[name].endpoint

        async def start(role: Role, instance: str, port: int, *arguments: str) -> WorkerProcess:
            worker = WorkerProcess(role, instance, port, run_dir, *arguments)
            workers.append(await stack.enter_async_context(worker))
            return worker

        async def announce(worker: WorkerProcess, link: str | None) -> None:
            discovery.announce(worker.record(await proxy(link, worker.endpoint) if link else worker.endpoint))

        drafter = await start(Role.DRAFTER, "drafter-0", next(ports), "--engine", "fake")
        drafts = await proxy("decode-drafter", drafter.endpoint)
        store = await start(Role.KVSTORE, "kvstore-0", next(ports), "--disk-bytes", "0")
        await announce(drafter, None)
        await announce(store, "workers-kvstore")
        # The first of each is behind the proxies: there is always another one.
        port = next(ports)
        exports = await proxy("decode-prefill", f"127.0.0.1:{port}")
        await announce(await start(Role.PREFILL, "prefill-0", port, "--advertise", exports), "router-prefill")
        await announce(await start(Role.PREFILL, "prefill-1", next(ports)), None)
        for number, link in enumerate(("router-decode", None)):
            decode = await start(Role.DECODE, f"decode-{number}", next(ports), "--drafter", drafts)
            await announce(decode, link)
        card = load_model_card(DEFAULT_MODEL)
        router = RouterServer(card, discovery, InMemoryPlacements(), RouterOptions(instance="router-0"))
        await router.start()
        stack.push_async_callback(router.stop, grace_s=1.0)
        client = AsyncClient(await proxy("client-router", router.host.endpoint))
        stack.push_async_callback(client.close)
        mesh = Mesh(client, router, workers, links, [])
        await mesh.all_ready()
        runs = await run_streams(client, LOAD)
        assert not [run.error for run in runs if run.error]
        mesh.expected += [answer_of(run) for run in runs]
        yield mesh


async def run_with_fault(mesh: Mesh, link: str, fault: str) -> None:
    proxy, struck = mesh.links[link], asyncio.Event()

    async def misbehave() -> None:
        await struck.wait()
        FAULTS[fault](proxy)
        await asyncio.sleep(FAULT_S)
        proxy.restore()

    faulty = asyncio.create_task(misbehave())
    seen = 0

    def on_event(tokens: int) -> None:
        nonlocal seen
        seen += tokens
        if seen > 30:
            struck.set()

    # Released is what the proxy held back too, before the ids are used again.
    await mesh.idle()
    async with asyncio.timeout(2 * WAIT_S):
        runs = await run_streams(mesh.client, LOAD, on_event=on_event, stagger_s=0.05)
        await faulty
    problems = wrong(runs, mesh.expected)
    assert not problems, "\n".join(problems)
    await mesh.all_ready()
    await mesh.idle()
    async with asyncio.timeout(WAIT_S):
        assert wrong(await run_streams(mesh.client, LOAD[:4]), mesh.expected[:4]) == []
    await mesh.idle()


@pytest.mark.parametrize(("link", "fault"), PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_link_that_misbehaves_harms_nothing(mesh: Mesh, link: str, fault: str) -> None:
    await run_with_fault(mesh, link, fault)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_fault_on_every_link(mesh: Mesh) -> None:
    for link in LINKS:
        for fault in FAULTS:
            await run_with_fault(mesh, link, fault)
