"""Workers of every tier as processes with the fake engine, a router in this process, and fault proxies.

Every link has a proxy, also the links that carry KV bytes. A gate can hold the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults.fault_load import Answer
from bench.ledgers import held
from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.placements import InMemoryPlacements
from libs.common.cluster.worker_record import Role
from services.router.options import RouterOptions
from services.router.request.model_card import load_model_card
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.v1 import worker_pb2
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.clusters.engine_gate import Gate
from tests.support.clusters.worker_processes import WorkerProcess
from tests.support.network.fault_proxy import FaultProxy
from tests.support.network.kv_link import KvLink
from tests.support.network.ports import own_ports

# Ends a test that hangs; the machine may be slow.
WAIT_S = 180.0
PAGE_BYTES = 64 * 64  # of the fake engine
# Readers of KV: decode and kvstore read from prefill, workers from the kvstore, the kvstore from decode.
KV_LINKS = ("prefill-bytes", "kvstore-bytes", "decode-bytes")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The shape of a mesh. `workers`: the number of prefill and of decode workers; the first of each is
    behind the proxies. A second prefill worker dials the first one by a separate link, to read its cache.
    """

    workers: int = 2
    kvstore: bool = True
    transport: str = "socket"
    prefill: tuple[str, ...] = ()  # arguments
    decode: tuple[str, ...] = ()


@dataclass
class Mesh:
    """The running processes, and the links by name."""

    client: AsyncClient
    router: RouterServer
    workers: dict[str, WorkerProcess]
    links: dict[str, FaultProxy]
    kv_links: dict[str, KvLink]
    gate: Gate
    expected: list[Answer] = field(default_factory=list)

    def set_fault(self, link: str, fault: Callable[[FaultProxy], None]) -> None:
        """Call a fault, or `restore`, on the proxies of a link."""
        if link in self.kv_links:
            self.kv_links[link].each(fault)
        else:
            fault(self.links[link])

    def ports(self, link: str) -> set[int]:
        """The ports that peers dial for the link."""
        if link in self.kv_links:
            return self.kv_links[link].ports
        return {int(self.links[link].endpoint.rpartition(":")[2])}

    def struck(self, link: str) -> int:
        """How often a fault of the link affected a connection."""
        return (self.kv_links[link] if link in self.kv_links else self.links[link]).struck

    async def status(self, instance: str) -> worker_pb2.GetStatusResponse:
        """GetStatus of a worker."""
        return await self.workers[instance].status()

    async def until(
        self, holds: Callable[[dict[str, worker_pb2.GetStatusResponse]], object], what: str
    ) -> None:
        """Poll all workers until the condition holds; AssertionError with `what` at the deadline."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds(now := {name: await w.status() for name, w in self.workers.items()}):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            ledgers = {name: str(status.ledger).split() for name, status in now.items()}
            raise AssertionError(f"not within {WAIT_S} s: {what}; {ledgers}") from None

    async def idle(self) -> None:
        """Wait until router and workers are idle. Raises TimeoutError at the deadline."""
        async with asyncio.timeout(WAIT_S):
            while self.router.manager.held or self.router.fleet.tokens_in_flight or await self._held():
                await asyncio.sleep(0.1)

    async def _held(self) -> list[str]:
        return [name for name, worker in self.workers.items() if held(await worker.status())]

    async def all_ready(self) -> None:
        """Wait until the router is connected to every worker. Raises TimeoutError at the deadline."""
        async with asyncio.timeout(WAIT_S):
            while sum(link.ready for link in self.router.fleet.links()) < len(self.workers):
                await asyncio.sleep(0.05)


@asynccontextmanager
async def open_mesh(run_dir: Path, shape: MeshShape) -> AsyncIterator[Mesh]:
    """A mesh whose processes are ready inside the block, and have ended after it."""
    async with AsyncExitStack() as stack:
        opening = _Opening(run_dir, shape, stack)
        drafter = await opening.start(Role.DRAFTER, "drafter-0", "--engine", "fake")
        drafts = await opening.proxy("decode-drafter", drafter.endpoint)
        await opening.announce(drafter, None)
        if shape.kvstore:
            no_disk = ("--disk-bytes", "0")
            store = await opening.start(Role.KVSTORE, "kvstore-0", *no_disk, kv_link="kvstore-bytes")
            await opening.announce(store, "workers-kvstore")
        for number in range(shape.workers):
            # The first prefill worker is behind the proxies.
            await opening.start_prefill(number, proxied=number == 0)
        for number in range(shape.workers):
            decode = await opening.start(
                Role.DECODE,
                f"decode-{number}",
                "--drafter",
                drafts,
                *shape.decode,
                kv_link=None if number else "decode-bytes",
            )
            await opening.announce(decode, None if number else "router-decode")
        options = RouterOptions(instance="router-0", recovery_wait_s=WAIT_S, allow_requested_prefill=True)
        card = load_model_card(DEFAULT_MODEL)
        router = RouterServer(card, opening.discovery, InMemoryPlacements(), options)
        await router.start()
        stack.push_async_callback(router.stop, grace_s=1.0)
        endpoint = await opening.proxy("client-router", router.host.endpoint)
        client = AsyncClient(endpoint, resume_within_s=WAIT_S)
        stack.push_async_callback(client.close)
        gate = Gate(run_dir)
        mesh = Mesh(client, router, opening.workers, opening.links, opening.kv_links, gate)
        await mesh.all_ready()
        yield mesh


class _Opening:
    """Starts the parts of a mesh."""

    def __init__(self, run_dir: Path, shape: MeshShape, stack: AsyncExitStack) -> None:
        self.discovery = InMemoryDiscovery()
        self.workers: dict[str, WorkerProcess] = {}
        self.links: dict[str, FaultProxy] = {}
        self.kv_links: dict[str, KvLink] = {}
        self._run_dir, self._shape, self._stack = run_dir, shape, stack
        self._ports = iter(own_ports(2 + 2 * shape.workers))

    async def proxy(self, name: str, target: str) -> str:
        """Start a fault proxy to `target`; returns its endpoint."""
        self.links[name] = await self._stack.enter_async_context(FaultProxy(target))
        return self.links[name].endpoint

    async def start(
        self, role: Role, instance: str, *arguments: str, kv_link: str | None = None, port: int | None = None
    ) -> WorkerProcess:
        launcher = ["-m", "tests.support.clusters.altered_service"]
        if kv_link is not None:
            link = await self._stack.enter_async_context(KvLink(self._shape.transport))
            self.kv_links[kv_link] = link
            launcher = link.launcher(role, self._run_dir)
        transport = ("--transport", self._shape.transport)
        worker = WorkerProcess(
            role,
            instance,
            port or next(self._ports),
            self._run_dir,
            *transport,
            *arguments,
            launcher=launcher,
        )
        self.workers[instance] = await self._stack.enter_async_context(worker)
        if kv_link is not None:
            self.kv_links[kv_link].aim()
        return worker

    async def start_prefill(self, number: int, *, proxied: bool) -> None:
        port = next(self._ports)
        instance = f"prefill-{number}"
        if not proxied:
            lender = self.workers["prefill-0"].endpoint
            redirect = {self.links["router-prefill"].endpoint: await self.proxy("prefill-prefill", lender)}
            (self._run_dir / "altered.json").write_text(json.dumps({instance: {"redirect": redirect}}))
            worker = await self.start(Role.PREFILL, instance, *self._shape.prefill, port=port)
            await self.announce(worker, None)
            return
        exports = await self.proxy("decode-prefill", f"127.0.0.1:{port}")
        arguments = ("--advertise", exports, *self._shape.prefill)
        worker = await self.start(Role.PREFILL, instance, *arguments, kv_link="prefill-bytes", port=port)
        await self.announce(worker, "router-prefill")

    async def announce(self, worker: WorkerProcess, link: str | None) -> None:
        """Announce a worker to the router, behind a proxy named `link` if given."""
        endpoint = await self.proxy(link, worker.endpoint) if link else worker.endpoint
        self.discovery.announce(worker.record(endpoint))
